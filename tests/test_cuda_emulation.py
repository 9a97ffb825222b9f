"""The emulation must be able to fail: kernels with a planted mistake do."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import emulation
import pytest
import torch
from emulation import EmulationError, Emulator, guarded
from test_kernels import NOISE, empty_records

from zpp.format import BlockFormat, Code
from zpp.kernels.cuda import CudaKernels
from zpp.kernels.numpy_backend import ReferenceKernels

pytestmark = pytest.mark.skipif(emulation.compiler() is None, reason="no C++ compiler is here")

FMT = BlockFormat(Code.INT8, block=4096)
NUMEL = 4096 + 36


def wrong(emulator: Emulator) -> list[str]:
    """The operations that give something else than the reference in some order of the threads."""
    reference, kernels, found = ReferenceKernels(), CudaKernels(emulator), []
    peers = torch.randn(3, 1, NUMEL, generator=torch.Generator().manual_seed(1))
    want = empty_records(FMT, NUMEL, 3, 1)
    sums, recoded = torch.empty(1, NUMEL), empty_records(FMT, NUMEL, 1)
    for src, record in zip(peers, want, strict=True):
        reference.encode(src, FMT, record)
    reference.decode_reduce(want.unbind(), FMT, sums)
    reference.decode_reduce_encode(want.unbind(), FMT, FMT, recoded, NUMEL)
    out = guarded(emulator, (1, NUMEL), torch.float32)
    src = guarded(emulator, (1, NUMEL), torch.float32)
    record = guarded(emulator, (1, FMT.record_nbytes(NUMEL)), torch.uint8)
    source = guarded(emulator, (3, 1, FMT.record_nbytes(NUMEL)), torch.uint8)
    src.tensor.copy_(peers[0])
    source.tensor.copy_(want)
    received = source.tensor.unbind()
    for emulator.schedule in emulation.SCHEDULES:
        for operation in ("encode", "decode_reduce", "decode_reduce_encode"):
            record.tensor.fill_(emulation.GUARD)
            out.tensor.fill_(7)
            try:
                if operation == "encode":
                    kernels.encode(src.tensor, FMT, record.tensor, noise=NOISE)
                    equal = torch.equal(record.tensor, want[0])
                elif operation == "decode_reduce":
                    kernels.decode_reduce(received, FMT, out.tensor)
                    equal = torch.equal(out.tensor, sums)
                else:
                    kernels.decode_reduce_encode(received, FMT, FMT, record.tensor, NUMEL)
                    equal = torch.equal(record.tensor, recoded)
            except EmulationError as error:
                found.append(f"{operation}: {error}")
                continue
            if not (equal and record.intact() and out.intact()):
                found.append(f"{operation}: wrong result")
    return found


def build(folder: Path, file: str, text: str) -> Emulator:
    """The kernels of this test, with `text` for one of their files."""
    sources = folder / "cuda"
    shutil.copytree(emulation.CUDA, sources)
    (sources / file).write_text(text)
    names = ("encode.cu", "decode_reduce.cu", "decode_reduce_encode.cu")
    wanted = {"ZPP_VIEW": "Rows", "ZPP_TYPE": "0", "ZPP_CODE": "4", "ZPP_OUT_CODE": "4"}
    flags = dict.fromkeys(("ZPP_ROTATE", "ZPP_ROTATED", "ZPP_STOCHASTIC"), "false")
    kernels = [
        kernel
        for kernel in emulation.distinct(emulation.every_kernel())
        if kernel.source in names and all((wanted | flags)[name] == value for name, value in kernel.macros)
    ]
    assert len(kernels) == len(names)
    return emulation.build(kernels, folder, sources)


BARRIERS = [
    (file, match.start())
    for file in ("tile.cuh", "record.cuh")
    for match in re.finditer(r"__sync(warp|threads)\(\);", (emulation.CUDA / file).read_text())
]


def test_there_are_barriers_to_leave_out() -> None:
    assert len(BARRIERS) >= 6


@pytest.mark.parametrize(
    ("file", "at"), BARRIERS, ids=[f"{file} {n}" for n, (file, _) in enumerate(BARRIERS)]
)
def test_every_barrier_is_missed_when_it_is_left_out(tmp_path: Path, file: str, at: int) -> None:
    text = (emulation.CUDA / file).read_text()
    emulator = build(tmp_path, file, text[:at] + text[at:].partition(";")[2])
    if "__syncthreads" in text[at : at + 20]:
        assert wrong(emulator)
    elif not wrong(emulator):
        pytest.fail(f"without the barrier at character {at} of {file} nothing changes")


@pytest.mark.parametrize(
    ("file", "right", "planted", "complaint"),
    [
        ("tile.cuh", "return i < numel ? (T*)data", "return i <= numel ? (T*)data", "memory out of bounds"),
        ("tile.cuh", "if (p < existing) to[p]", "if (p <= existing) to[p]", "wrong result"),
        ("tile.cuh", "return i + TILE <= numel && is", "return is", "memory out of bounds"),
        ("record.cuh", "(int)threadIdx.x < r.nbytes", "(int)threadIdx.x <= r.nbytes", "memory out of bounds"),
        ("record.cuh", "lanes < WARP && lanes", "lanes < WARP / 2 && lanes", "wrong result"),
        ("record.cuh", "if (TILE < 1 <<", "if (lane_index() && TILE < 1 <<", "wait for different things"),
    ],
    ids=[
        "a value too many",
        "a piece too many",
        "a tile too long",
        "a byte too many",
        "half a warp",
        "a barrier for some",
    ],
)
def test_a_planted_mistake_is_found(
    tmp_path: Path, file: str, right: str, planted: str, complaint: str
) -> None:
    text = (emulation.CUDA / file).read_text()
    assert text.count(right) == 1
    found = wrong(build(tmp_path, file, text.replace(right, planted)))
    assert any(complaint in line for line in found), found


def test_without_a_mistake_nothing_is_found(emulator: Emulator) -> None:
    assert not wrong(emulator)
