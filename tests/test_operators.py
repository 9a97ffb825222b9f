"""The kernels as torch operators: the reference's bits, sound registrations, whole under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_kernels import FORMATS, NOISE, REFERENCE, empty_records, needs_the_library

import zpp
from zpp import operators
from zpp.format import BlockFormat, Code, Noise, Rounding

INT8, BFLOAT16 = BlockFormat(Code.INT8, block=512), BlockFormat(Code.BFLOAT16)
ROTATED = BlockFormat(Code.INT4, block=128, rotate=True)
NOISY = BlockFormat(Code.INT4, block=64, rotate=True, rounding=Rounding.STOCHASTIC)
LAST = Noise(seed=2**64 - 1, stream=2**63, offset=2**64 - 32, pitch=2**63 + 32)


def values(count: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("noise", [NOISE, LAST], ids=["noise", "most noise"])
def test_operators_equal_the_reference(fmt: BlockFormat, noise: Noise) -> None:
    src = values(4, 1000, torch.bfloat16)
    want = empty_records(fmt, 1000, 4)
    REFERENCE.encode(src, fmt, want, rows=2, noise=noise)
    record = operators.encode(src, fmt, rows=2, noise=noise)
    assert torch.equal(record, want)
    for dtype in (torch.float32, torch.float16):
        out = torch.empty(4, 1000, dtype=dtype)
        REFERENCE.decode(record, fmt, out, rows=2)
        assert torch.equal(operators.decode(record, fmt, 1000, dtype=dtype, rows=2), out)
    peers, total = (record, record.flip(0)), torch.empty(4, 1000)
    REFERENCE.decode_reduce(peers, fmt, total, factor=0.3)
    assert torch.equal(operators.decode_reduce(peers, fmt, 1000, factor=0.3), total)
    made = empty_records(NOISY, 1000, 4)
    REFERENCE.decode_reduce_encode(peers, fmt, NOISY, made, 1000, noise=noise)
    assert torch.equal(operators.decode_reduce_encode(peers, fmt, NOISY, 1000, noise=noise), made)


def calls(fmt: BlockFormat, numel: int) -> list[tuple[Any, tuple[Any, ...]]]:
    """Every operator and its arguments."""
    five, words, src = operators._numbers(fmt), operators._words(LAST), values(2, numel)
    record = operators.encode(src, fmt, noise=LAST)
    other = operators._numbers(INT8)
    return [
        (torch.ops.zpp.encode.default, (src, five, 2, words)),
        (torch.ops.zpp.decode.default, (record, five, numel, torch.bfloat16, 1)),
        (torch.ops.zpp.decode_reduce.default, ([record, record], five, numel, torch.float32, 0.5)),
        (torch.ops.zpp.decode_reduce_encode.default, ([record] * 3, five, other, numel, None)),
    ]


@pytest.mark.parametrize("fmt", [INT8, NOISY, BFLOAT16], ids=str)
@pytest.mark.parametrize("numel", [0, 333])
def test_registrations_are_sound(fmt: BlockFormat, numel: int) -> None:
    for operator, arguments in calls(fmt, numel):
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def round_trip(x: torch.Tensor) -> torch.Tensor:
    record = operators.encode(x * 2, INT8)
    sums = operators.decode_reduce([record, record], INT8, x.shape[1])
    made = operators.decode_reduce_encode([record], INT8, NOISY, x.shape[1], noise=NOISE)
    return sums + operators.decode(made, NOISY, x.shape[1]).relu()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_functions_hold_the_operators_whole(dynamic: bool) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def seen(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(round_trip, fullgraph=True, dynamic=dynamic, backend=seen)
    through_autograd = torch.compile(round_trip, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for numel in (500, 1100):
        x = values(3, numel)
        assert torch.equal(compiled(x), round_trip(x))
        assert torch.equal(through_autograd(x), round_trip(x))
    assert len(graphs) == (1 if dynamic else 2)
    called = [str(node.target) for node in graphs[0].graph.nodes if "zpp" in str(node.target)]
    assert called == ["zpp.encode", "zpp.decode_reduce", "zpp.decode_reduce_encode", "zpp.decode"]


@needs_the_library  # whoever builds without a C++ compiler has none for torch either
def test_the_default_compiler_takes_them() -> None:
    torch._dynamo.reset()
    x = values(2, 700)
    assert torch.equal(torch.compile(round_trip, fullgraph=True)(x), round_trip(x))


def test_shapes_are_known_without_values() -> None:
    meta = torch.empty(6, 1000, device="meta", dtype=torch.float16)
    record = zpp.operators.encode(meta, ROTATED)
    assert (record.shape, record.dtype) == ((6, ROTATED.record_nbytes(1000)), torch.uint8)
    out = zpp.operators.decode(record, ROTATED, 1000, dtype=torch.float16)
    assert (out.shape, out.dtype, out.device) == (meta.shape, meta.dtype, meta.device)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"src must have two dimensions, not the shape \(5,\)"):
        operators.encode(torch.ones(5), INT8)
    with pytest.raises(ValueError, match="there are no records to sum"):
        operators.decode_reduce([], INT8, 5)
    with pytest.raises(ValueError, match="records must be of shape"):
        operators.decode(operators.encode(torch.ones(1, 32), INT8), INT8, 33)
    with pytest.raises(ValueError, match="EXACT format has no size"):
        operators.encode(torch.ones(1, 32), BlockFormat(Code.EXACT))
    with pytest.raises(ValueError, match="stochastic rounding needs a Noise"):
        operators.encode(torch.ones(1, 32), NOISY)
