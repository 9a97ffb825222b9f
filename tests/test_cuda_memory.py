"""Which memory the CUDA kernels touch: any stride and alignment, ends of buffers, parts of tensors."""

from __future__ import annotations

import emulation
import pytest
import torch
from emulation import Emulator, guarded
from test_cuda_kernels import DTYPES, REFERENCE
from test_kernels import NOISE, empty_records, joined, pieces, same, sources

from zpp.format import BlockFormat, Code, Rounding
from zpp.kernels import launch
from zpp.kernels.cuda import CudaKernels
from zpp.kernels.operands import VALUE_TYPES

pytestmark = pytest.mark.skipif(emulation.compiler() is None, reason="no C++ compiler is here")

FORMATS = [
    BlockFormat(Code.INT8, block=512),
    BlockFormat(Code.INT8, block=4096, rounding=Rounding.STOCHASTIC),
    BlockFormat(Code.INT4, block=128, rotate=True),
    BlockFormat(Code.BFLOAT16),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("start", "stride", "first", "numel"),
    [(1, 1003, 3, 497), (0, 4160, 64, 4096), (0, 8192, 0, 5000), (1, 8192, 0, 4096)],
    ids=["nothing aligned", "a tile at a time", "a part of a tile", "whole tiles, unaligned"],
)
def test_rows_at_any_stride(
    emulator: Emulator, fmt: BlockFormat, dtype: torch.dtype, start: int, stride: int, first: int, numel: int
) -> None:
    kernels, columns = CudaKernels(emulator), slice(first, first + numel)
    src = sources(4 * stride + start, dtype)[0][0][start:].view(4, stride)[:, columns]
    want, record = empty_records(fmt, numel, 4), empty_records(fmt, numel, 4)
    REFERENCE.encode(src, fmt, want, noise=NOISE)
    plain = torch.empty(4, numel, dtype=dtype)
    for emulator.schedule in emulation.SCHEDULES:
        kernels.encode(src, fmt, record, noise=NOISE)
        assert torch.equal(record, want)
        for factor in (None, 0.5):
            around = torch.zeros(4 * stride + start, dtype=dtype)
            table = around[start:].view(4, stride)
            if factor is None:
                REFERENCE.decode(record, fmt, plain)
                kernels.decode(record, fmt, table[:, columns])
            else:
                REFERENCE.decode_reduce([record], fmt, plain, factor=factor)
                kernels.decode_reduce([record], fmt, table[:, columns], factor=factor)
            assert same(table[:, columns], plain)
            table[:, columns] = 0
            assert not around.any()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 33, 1024, 4095, 4096, 5152])
def test_nothing_is_touched_beyond_the_ends(
    emulator: Emulator, fmt: BlockFormat, dtype: torch.dtype, numel: int
) -> None:
    kernels, values = CudaKernels(emulator), torch.randn(2, numel).to(dtype)
    for slack in (0, 12):
        src = guarded(emulator, (2, numel), dtype, slack)
        out = guarded(emulator, (2, numel), dtype, slack)
        records = guarded(emulator, (2, 1, fmt.record_nbytes(numel)), torch.uint8)
        record = guarded(emulator, (1, fmt.record_nbytes(numel)), torch.uint8)
        src.tensor.copy_(values)
        kernels.encode(src.tensor, fmt, records.tensor[:, 0], noise=NOISE)
        kernels.decode(records.tensor[:, 0], fmt, out.tensor)
        kernels.decode_reduce(records.tensor.unbind(), fmt, out.tensor[:1])
        kernels.decode_reduce_encode(records.tensor.unbind(), fmt, fmt, record.tensor, numel, noise=NOISE)
        assert all(buffer.intact() for buffer in (src, out, records, record))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1056, 4096, 5000])
def test_parts_are_as_good_as_a_copy_of_them(
    emulator: Emulator, fmt: BlockFormat, dtype: torch.dtype, numel: int
) -> None:
    kernels, kind, parts = CudaKernels(emulator), VALUE_TYPES[dtype], pieces(4 * numel, dtype)
    want, got = empty_records(fmt, numel, 4), empty_records(fmt, numel, 4)
    REFERENCE.encode(joined(parts, 4, numel, dtype), fmt, want, rows=2, noise=NOISE)
    before = emulator.launches
    kernels.encode_parts(parts, kind, fmt, got, numel, rows=2, noise=NOISE)
    assert emulator.launches == before + 1
    assert torch.equal(got, want)

    decoded = torch.empty(4, numel, dtype=dtype)
    REFERENCE.decode(got, fmt, decoded, rows=2)
    outs = [(start, guarded(emulator, tensor.shape, dtype)) for start, tensor in parts if tensor.numel()]
    kernels.decode_parts(got, fmt, [(start, out.tensor) for start, out in outs], kind, numel, rows=2)
    for start, out in outs:
        assert same(out.tensor, decoded.flatten()[start : start + out.tensor.numel()])
        assert out.intact()


def test_more_parts_than_one_launch_takes(emulator: Emulator) -> None:
    fmt, numel = BlockFormat(Code.INT8, block=4096), 5000
    values = torch.randn(4 * numel)
    parts = [(start, values[start : start + 40]) for start in range(0, 4 * numel, 50)]
    want, got = empty_records(fmt, numel, 4), empty_records(fmt, numel, 4)
    REFERENCE.encode(joined(parts, 4, numel, torch.float32), fmt, want)
    before = emulator.launches
    CudaKernels(emulator).encode_parts(parts, VALUE_TYPES[torch.float32], fmt, got, numel)
    assert emulator.launches - before == 4
    assert torch.equal(got, want)


def test_wrong_parts_are_refused(emulator: Emulator) -> None:
    fmt, kernels, kind = BlockFormat(Code.INT8), CudaKernels(emulator), VALUE_TYPES[torch.float32]
    out, part = empty_records(fmt, 64, 2), torch.zeros(64)
    for parts in ([(0, part), (63, part)], [(65, part)], [(64, part), (0, part)], [(-1, part)]):
        with pytest.raises(ValueError, match=r"part \[.*\) does not lie between"):
            kernels.encode_parts(parts, kind, fmt, out, 64)
    with pytest.raises(
        TypeError, match="the part at 0 of torch.float16 cannot be encoded from float32 as int8"
    ):
        kernels.encode_parts([(0, part.half())], kind, fmt, out, 64)
    with pytest.raises(ValueError, match="the part at 0 must be contiguous"):
        kernels.encode_parts([(0, torch.zeros(64, 2)[:, 0])], kind, fmt, out, 64)
    many = [(2 * i, torch.zeros(1)) for i in range(launch.MAX_SEGMENTS + 1)]
    with pytest.raises(ValueError, match="more than 160 segments lie in the 4096 values of tile 0"):
        kernels.encode_parts(many, kind, fmt, empty_records(fmt, 4096, 1), 4096)
