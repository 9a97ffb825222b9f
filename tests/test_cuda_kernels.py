"""The CUDA kernels against the reference, bit for bit, run by the emulation on the CPU."""

from __future__ import annotations

from typing import Any

import emulation
import expected
import pytest
import torch
from emulation import Emulator
from test_kernels import FORMATS as HOST_FORMATS
from test_kernels import NOISE, empty_records, peer_records, sources

from zpp.format import BlockFormat, Code, Noise, Rounding, ScaleType
from zpp.kernels.cuda import CudaKernels
from zpp.kernels.numpy_backend import ReferenceKernels

pytestmark = pytest.mark.skipif(emulation.compiler() is None, reason="no C++ compiler is here")

REFERENCE = ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 33, 4097, 4096 + 1024]
FORMATS = [
    *HOST_FORMATS,
    BlockFormat(Code.INT8, block=1024, rotate=True, rounding=Rounding.STOCHASTIC),
    BlockFormat(Code.INT4, block=256, scale=ScaleType.FLOAT32, rounding=Rounding.STOCHASTIC),
    BlockFormat(Code.INT4, block=4096),
]
READ = [fmt for fmt in FORMATS if fmt.rounding is Rounding.NEAREST]
"""How a record was rounded does not show in it."""


class Checked:
    """Runs an operation of the reference and of the emulated kernels, in the next order of the threads."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator, self._kernels = emulator, CudaKernels(emulator)

    def __call__(self, case: str, out: torch.Tensor, operation: str, *operands: Any, **options: Any) -> None:
        self._emulator.schedule = (self._emulator.schedule + 1) % len(emulation.SCHEDULES)
        getattr(REFERENCE, operation)(*operands, out=out, **options)
        got = torch.empty_like(out)
        expected.bits(got).fill_(emulation.GUARD)  # what a kernel leaves unwritten shows
        getattr(self._kernels, operation)(*operands, out=got, **options)
        wrong = (expected.bits(got) != expected.bits(out)).nonzero()
        if len(wrong):
            where = f"{len(wrong)} of {out.nbytes} bytes differ, the first at {int(wrong[0])}"
            pytest.fail(f"{operation}, schedule {self._emulator.schedule}: {case}: {where}")


@pytest.fixture
def check(emulator: Emulator) -> Checked:
    return Checked(emulator)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encode_and_decode(check: Checked, fmt: BlockFormat, dtype: torch.dtype) -> None:
    for numel in SIZES:
        for source, src in enumerate(sources(numel, dtype)):
            case, record = f"{numel} values of source {source}", empty_records(fmt, numel, 4)
            check(case, record, "encode", src, fmt, rows=2, noise=NOISE)
            # A record does not tell what it was made from: one source type meets all types of output.
            for out_dtype in DTYPES if dtype is torch.float32 else []:
                out = torch.empty(4, numel, dtype=out_dtype)
                check(f"{case} to {out_dtype}", out, "decode", record, fmt, rows=2)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("peers", "numel"), [(3, 0), (3, 1), (1, 33), (3, 33), (9, 33), (5, 4097), (2, 8192)]
)
def test_decode_reduce(check: Checked, fmt: BlockFormat, peers: int, numel: int) -> None:
    for source, records in enumerate(peer_records(fmt, numel, peers)):
        for dtype, factor in zip(DTYPES, (1 / 3, 3.5, -1.0), strict=True):
            case, out = f"source {source} to {dtype}, factor {factor}", torch.empty(4, numel, dtype=dtype)
            check(case, out, "decode_reduce", records, fmt, factor=factor)


# The inner loop is that over out_fmt: `peer_records` keeps the last formats' records.
@pytest.mark.parametrize("out_fmt", FORMATS, ids=str)
@pytest.mark.parametrize("fmt", READ, ids=str)
def test_decode_reduce_encode(check: Checked, fmt: BlockFormat, out_fmt: BlockFormat) -> None:
    for peers, numel in [(3, 0), (5, 33), (2, 4097)]:
        cases = list(enumerate(peer_records(fmt, numel, peers)))
        for source, records in cases if numel < 4096 else cases[-4:]:
            case, out = f"{peers} x {numel} values of source {source}", empty_records(out_fmt, numel, 4)
            check(case, out, "decode_reduce_encode", records, fmt, out_fmt, numel=numel, noise=NOISE)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("out_fmt", [FORMATS[1], FORMATS[5], FORMATS[8]], ids=str)
def test_what_stands_behind_the_last_value_of_a_record_is_no_value(
    check: Checked, fmt: BlockFormat, out_fmt: BlockFormat
) -> None:
    """Encoders write zeros there; a record from elsewhere may hold anything."""
    numel = 33
    records = empty_records(fmt, numel, 2, 1).unbind()
    for record in records:
        REFERENCE.encode(torch.ones(1, numel), fmt, record, noise=NOISE)
        if fmt.quantized:
            record[:, 33 if fmt.code is Code.INT8 else 17 : fmt.payload_nbytes(numel)] = 0x77
    out = empty_records(out_fmt, numel, 1)
    check("garbage", out, "decode_reduce_encode", records, fmt, out_fmt, numel=numel, noise=NOISE)


@pytest.mark.parametrize("fmt", FORMATS[:6], ids=str)
def test_many_short_chunks(check: Checked, fmt: BlockFormat) -> None:
    """The table is not square, so that its two sides cannot be mistaken."""
    src = sources(33 * 105, torch.float32)[0].view(420, 33)
    record = empty_records(fmt, 33, 420)
    check("6 rows", record, "encode", src, fmt, rows=6, noise=NOISE)
    check("6 rows", torch.empty(420, 33), "decode", record, fmt, rows=6)
    check("2 peers", torch.empty(210, 33), "decode_reduce", record.view(2, 210, -1).unbind(), fmt, factor=0.5)


def test_noise_beyond_the_last_element(check: Checked) -> None:
    """Elements are counted modulo 2**64."""
    fmt = BlockFormat(Code.INT8, block=64, rounding=Rounding.STOCHASTIC)
    noise = Noise(seed=2**64 - 1, stream=2**64 - 1, offset=2**64 - 64, pitch=2**63)
    check("the end", empty_records(fmt, 128, 4), "encode", torch.randn(4, 128), fmt, noise=noise)


@pytest.mark.parametrize("numel", [0, 99, 4096 * 3])
def test_bytes_travel_verbatim(check: Checked, numel: int) -> None:
    fmt = BlockFormat(Code.BYTE)
    src = torch.arange(4 * numel, dtype=torch.int64).to(torch.uint8).view(4, numel)
    record = empty_records(fmt, numel, 4)
    check("bytes", record, "encode", src, fmt, rows=2)
    check("bytes", torch.empty_like(src), "decode", record, fmt, rows=2)


def test_wrong_operands_are_refused_before_anything_is_started(emulator: Emulator) -> None:
    fmt, made, before = BlockFormat(Code.INT8), CudaKernels(emulator), emulator.launches
    src, out = torch.zeros(4, 64), empty_records(fmt, 64, 4)
    with pytest.raises(ValueError, match=r"out must be of shape \(4, 80\) for 64 values .* not \(4, 79\)"):
        made.encode(src, fmt, out[:, :79].contiguous())
    with pytest.raises(ValueError, match="4 chunks do not form a table of 3 rows"):
        made.decode(out, fmt, src, rows=3)
    with pytest.raises(ValueError, match="out must start on a 16-byte boundary, not 1 bytes behind one"):
        made.encode(src, fmt, torch.empty(321, dtype=torch.uint8)[1:].view(4, 80))
    with pytest.raises(ValueError, match="out is on meta, src on cpu"):
        made.encode(src, fmt, out.to("meta"))
    with pytest.raises(ValueError, match="needs a Noise"):
        made.encode(src, BlockFormat(Code.INT8, rounding=Rounding.STOCHASTIC), out)
    with pytest.raises(ValueError, match="bytes have no sum"):
        made.decode_reduce([out], BlockFormat(Code.BYTE), torch.zeros(4, 80, dtype=torch.uint8))
    assert emulator.launches == before
