"""A byte-level GPT: pre-norm blocks, learned positions, an output layer of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collectives_bench.case import ModelShape

VOCABULARY = 256  # one token per byte


class Block(nn.Module):
    """Causal self-attention and an MLP, each on a normalised copy of its input and added to it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.scale = shape.heads, (width // shape.heads) ** -0.5
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).flatten(1, 2)
        # Written out: torch's fused attention takes three times as long over sequences as short as these.
        later = torch.full((time, time), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        weights = torch.baddbmm(later, query, key.transpose(1, 2), alpha=self.scale).softmax(-1)
        mixed = torch.bmm(weights, value).view(batch, self.heads, time, -1)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        result: Tensor = x + self.mlp_out(hidden)
        return result


class GPT(nn.Module):
    """Maps (batch, time) byte values to (batch, time, 256) logits; `blocks` are the units to shard."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self._initialise(shape.layers)

    def _initialise(self, layers: int) -> None:
        """Normal(0, 0.02), and less where a layer adds to the residual stream, as in GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next byte at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
