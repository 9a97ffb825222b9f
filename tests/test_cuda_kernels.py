"""The CUDA kernels against the reference, bit for bit, run by the emulation on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulation
import expected
import pytest
import torch
from emulation import Emulator, guarded
from test_kernels import FORMATS as HOST_FORMATS
from test_kernels import NOISE, empty_records, peer_records, sources

from zpp.format import BlockFormat, Code, Rounding, ScaleType, ValueType
from zpp.kernels.cuda import CudaKernels
from zpp.kernels.numpy_backend import ReferenceKernels

pytestmark = pytest.mark.skipif(emulation.compiler() is None, reason="no C++ compiler is here")

REFERENCE = ReferenceKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = dict(zip(DTYPES, emulation.TYPES, strict=True))
SIZES = [0, 1, 31, 33, 1000, 4096 + 1024, 4097, 8192]
FORMATS = [
    *HOST_FORMATS,
    BlockFormat(Code.INT8, block=1024, rotate=True, rounding=Rounding.STOCHASTIC),
    BlockFormat(Code.INT4, block=256, scale=ScaleType.FLOAT32, rounding=Rounding.STOCHASTIC),
    BlockFormat(Code.INT4, block=4096),
]
GUARD = 0xA5


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    kernels = emulation.distinct(emulation.every_kernel())
    return emulation.build(kernels, tmp_path_factory.mktemp("emulation"), units=2)


class Checked:
    """Runs an operation of the reference and of the emulated kernels, in the next order of the threads."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator, self._kernels = emulator, CudaKernels(emulator)

    def __call__(self, case: str, out: torch.Tensor, operation: str, *operands: Any, **options: Any) -> None:
        self._emulator.schedule = (self._emulator.schedule + 1) % len(emulation.SCHEDULES)
        getattr(REFERENCE, operation)(*operands, out=out, **options)
        got = torch.empty_like(out)
        expected.bits(got).fill_(GUARD)  # what a kernel leaves unwritten shows
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
@pytest.mark.parametrize(("peers", "numel"), [(3, 0), (3, 1), (1, 33), (3, 33), (9, 33), (5, 4097), (2, 8192)])
def test_decode_reduce(check: Checked, fmt: BlockFormat, peers: int, numel: int) -> None:
    for source, records in enumerate(peer_records(fmt, numel, peers)):
        for dtype, factor in zip(DTYPES, (1 / 3, 3.5, -1.0), strict=True):
            case, out = f"source {source} to {dtype}, factor {factor}", torch.empty(4, numel, dtype=dtype)
            check(case, out, "decode_reduce", records, fmt, factor=factor)


@pytest.mark.parametrize("out_fmt", FORMATS, ids=str)  # the inner loop: `peer_records` keeps one format's
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_decode_reduce_encode(check: Checked, fmt: BlockFormat, out_fmt: BlockFormat) -> None:
    for peers, numel in [(3, 0), (3, 1), (5, 33), (2, 4097)]:
        for source, records in enumerate(peer_records(fmt, numel, peers)):
            case, out = f"{peers} x {numel} values of source {source}", empty_records(out_fmt, numel, 4)
            check(case, out, "decode_reduce_encode", records, fmt, out_fmt, numel=numel, noise=NOISE)
