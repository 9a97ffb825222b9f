"""A small model with awkward sizes, and data that it can learn: what the ZeRO-3 tests train."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Odd widths, so that nothing divides by the world."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor, *, gain: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out if gain is None else out * gain


class Net(nn.Module):
    def __init__(self, width: int = 37, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 11)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x) if i % 2 else block(x, gain=torch.ones_like(x))
        logits: torch.Tensor = self.head(x).float()
        return logits


with torch.random.fork_rng():
    torch.manual_seed(1)
    _NET = Net()


def net() -> Net:
    """The same initial weights on every rank; ranks are threads, which share torch's generator."""
    return copy.deepcopy(_NET)


def batch(step: int, rank: int) -> torch.Tensor:
    """Text of a Markov chain: three times in four the next token follows from the last."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 11, (8, 16), generator=generator)
    follows = torch.rand(8, 16, generator=generator) < 0.75
    for i in range(1, 16):
        tokens[:, i] = torch.where(follows[:, i], (3 * tokens[:, i - 1] + 1) % 11, tokens[:, i])
    return tokens


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
