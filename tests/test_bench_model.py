"""The benchmark's GPT: its attention is torch's own, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from collectives_bench.case import ModelShape
from collectives_bench.model import GPT, VOCABULARY, Block

SHAPE = ModelShape(layers=2, width=48, heads=3, context=11)


def fused(block: Block, x: Tensor) -> Tensor:
    """What a block computes, by torch's fused attention."""
    batch, time, width = x.shape
    heads = block.qkv(block.attention_norm(x)).view(batch, time, 3, SHAPE.heads, width // SHAPE.heads)
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + block.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
    result: Tensor = x + block.mlp_out(F.gelu(block.mlp_in(block.mlp_norm(x)), approximate="tanh"))
    return result


def test_blocks_equal_those_with_fused_attention() -> None:
    torch.manual_seed(0)
    block = Block(SHAPE)
    x = torch.randn(2, SHAPE.context, SHAPE.width)
    torch.testing.assert_close(block(x), fused(block, x))


def test_no_prediction_sees_a_later_byte() -> None:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    tokens = torch.randint(VOCABULARY, (1, SHAPE.context))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7] != after[:, 7]).any()
