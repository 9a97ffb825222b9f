"""The CUDA kernels on the CPU: the sources of cuda/, compiled over tests/cuda_emulation."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zpp.format import BlockFormat, Code, Noise, Rounding, ValueType
from zpp.kernels import launch
from zpp.kernels.launch import Kernel, Launch

HERE = Path(__file__).parent / "cuda_emulation"
CUDA = Path(__file__).parent.parent / "cuda"
FLAGS = (
    "-std=c++17 -O1 -fPIC -shared -ffp-contract=off -fno-strict-aliasing -Wall -Wno-psabi -Wno-parentheses"
)
GUARD = 0xA5
SCHEDULES = range(3)
"""Threads in order, from the last, and shuffled."""

CALLS = {
    "encode.cu": (
        "encode<zpp::{VIEW}, {TYPE}, {CODE}, {ROTATE}, {STOCHASTIC}>",
        "Encode<zpp::{VIEW}>",
    ),
    "decode.cu": ("decode<zpp::{VIEW}, {CODE}, {TYPE}, {ROTATE}>", "Decode<zpp::{VIEW}>"),
    "decode_reduce.cu": ("decode_reduce<{CODE}, {TYPE}, {ROTATE}>", "DecodeReduce"),
    "decode_reduce_encode.cu": (
        "decode_reduce_encode<{CODE}, {ROTATED}, {OUT_CODE}, {ROTATE}, {STOCHASTIC}>",
        "DecodeReduceEncode",
    ),
}
"""What the kernel function of each source calls, and the type of its argument."""


class EmulationError(Exception):
    """A kernel hung or touched memory that is not its own."""


def compiler() -> str | None:
    return next((path for path in map(shutil.which, ("g++", "c++", "clang++")) if path), None)


def _unit(kernels: Sequence[tuple[int, Kernel]]) -> str:
    lines = ['#include "cuda_emulation.h"', *(f'#include "{source}"' for source in CALLS)]
    for number, kernel in kernels:
        macros = {name.removeprefix("ZPP_"): value for name, value in kernel.macros}
        function, arguments = (text.format(**macros) for text in CALLS[kernel.source])
        lines.append(f'extern "C" void kernel_{number}(const void* a)')
        lines.append(f"{{ zpp::{function}(*(const zpp::{arguments}*)a); }}")
    return "\n".join(lines) + "\n"


def build(kernels: Iterable[Kernel], folder: Path, sources: Path = CUDA, units: int = 1) -> Emulator:
    """Compile the kernels into `folder`, in that many libraries at the same time."""
    program = compiler()
    assert program is not None
    numbered = list(enumerate(kernels))
    texts = {f"unit{u}": _unit(numbered[u::units]) for u in range(units)}
    commands = []
    for name, text in texts.items():
        (folder / f"{name}.cpp").write_text(text)
        inputs = [str(folder / f"{name}.cpp"), str(HERE / "cuda_emulation.cpp")]
        includes = [f"-I{HERE}", f"-I{sources}"]
        commands.append([program, *shlex.split(FLAGS), *includes, *inputs, "-o", str(folder / f"{name}.so")])
    with ThreadPoolExecutor() as pool:
        for done in pool.map(
            lambda command: subprocess.run(command, capture_output=True, text=True), commands
        ):
            assert not done.returncode, done.stderr
    libraries = [ctypes.CDLL(str(folder / f"{name}.so")) for name in texts]
    return Emulator({kernel: (libraries[n % units], f"kernel_{n}") for n, kernel in numbered})


@dataclass
class Emulator:
    """Runs launches; `schedule` says in which order the threads take turns."""

    functions: dict[Kernel, tuple[ctypes.CDLL, str]]
    schedule: int = 0
    launches: int = 0

    def __call__(self, made: Launch, device: torch.device) -> None:
        library, name = self.functions[made.kernel]
        where = (ctypes.c_uint * 2)()
        function, arguments = getattr(library, name), ctypes.byref(made.arguments)
        result = library.emulate(function, made.blocks, arguments, self.schedule, where)
        self.launches += 1
        if result:
            reason = {1: "its threads wait for different things", 2: "memory out of bounds"}.get(
                result, "no stacks"
            )
            raise EmulationError(f"{made.kernel}: {reason}, block {where[0]}, thread {where[1]}")


@dataclass
class Guarded:
    """A tensor whose memory ends `slack` bytes before a page that nobody may touch. It is never freed.

    around: what else lies between that page and the one in front, which nobody may touch either.
    """

    tensor: torch.Tensor
    around: tuple[np.ndarray[Any, np.dtype[np.uint8]], ...]

    def intact(self) -> bool:
        return all(bool((part == GUARD).all()) for part in self.around)


def guarded(emulator: Emulator, shape: Sequence[int], dtype: torch.dtype, slack: int = 0) -> Guarded:
    library, _ = next(iter(emulator.functions.values()))
    library.guarded.restype, library.guarded.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_size_t]
    nbytes = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    address = library.guarded(nbytes, slack)
    before = address % mmap.PAGESIZE
    memory = np.frombuffer(
        (ctypes.c_uint8 * (before + nbytes + slack)).from_address(address - before), np.uint8
    )
    tensor = torch.from_numpy(memory[before : before + nbytes]).view(dtype).view(*shape)
    return Guarded(tensor, (memory[:before], memory[before + nbytes :]))


QUANTIZED = [Code.INT8, Code.INT4]
VERBATIM = [BlockFormat(code) for code in (Code.FLOAT32, Code.BFLOAT16, Code.FLOAT16)]
TYPES = [ValueType.FLOAT32, ValueType.BFLOAT16, ValueType.FLOAT16]
NO_NOISE = Noise(seed=0, stream=0)


def formats() -> list[BlockFormat]:
    """One for each way in which kernels are specialised."""
    choices = itertools.product(QUANTIZED, (False, True), Rounding)
    made = [BlockFormat(code, rotate=rotate, rounding=rounding) for code, rotate, rounding in choices]
    return [*made, *VERBATIM]


def every_kernel() -> Iterator[Kernel]:
    rows = launch.Rows(0, 1)
    segment = [launch.Segment(0, 1, 0)]
    byte = (ValueType.BYTE, BlockFormat(Code.BYTE))
    for kind, fmt in [*itertools.product(TYPES, formats()), byte]:
        yield launch.encode(rows, kind, fmt, 1, 1, 1, NO_NOISE, 0).kernel
        yield next(launch.encode_segments(segment, kind, fmt, 1, 1, 1, NO_NOISE, 0)).kernel
        yield launch.decode(0, fmt, 1, 1, 1, rows, kind).kernel
        yield next(launch.decode_segments(0, fmt, 1, 1, 1, segment, kind)).kernel
        if kind is not ValueType.BYTE:
            yield launch.decode_reduce([0], fmt, 1, 1, 1.0, rows, kind).kernel
    for fmt, out_fmt in itertools.product(formats(), formats()):
        yield launch.decode_reduce_encode([0], fmt, out_fmt, 1, 1, NO_NOISE, 0).kernel


def distinct(kernels: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(kernels))
