"""What NVRTC makes of the CUDA sources, with no toolkit and no GPU: code and the resources it needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from zpp.format import BlockFormat, Code, Noise, Rounding, ScaleType, ValueType
from zpp.kernels import launch, source
from zpp.kernels.launch import Kernel
from zpp.kernels.nvrtc import OPTIONS, macros

nvrtc = pytest.importorskip(
    "cuda.bindings.nvrtc", reason="needs the wheels nvidia-cuda-nvrtc and cuda-bindings, of the extra test"
)
try:
    nvrtc.nvrtcVersion()
except Exception as error:
    pytest.skip(f"cuda-bindings finds no NVRTC: {error}", allow_module_level=True)

ARCHITECTURES = [75, 80, 86, 89, 90, 100, 120]
FLOAT32, BFLOAT16, FLOAT16, BYTE = ValueType
NOISE = Noise(seed=0, stream=0)
ROWS, SEGMENT = launch.Rows(0, 1), [launch.Segment(0, 1, 0)]


def quantized(code: Code, *, rotate: bool = False, stochastic: bool = False) -> BlockFormat:
    return BlockFormat(code, rotate=rotate, rounding=Rounding(stochastic))


INT8, INT4, INT4_ROTATED = (
    quantized(Code.INT8),
    quantized(Code.INT4),
    quantized(Code.INT4, rotate=True),
)
INT8_STOCHASTIC = quantized(Code.INT8, stochastic=True)
INT4_ALL = quantized(Code.INT4, rotate=True, stochastic=True)
RAW = {kind: BlockFormat(Code(kind)) for kind in ValueType}


def encode(kind: ValueType, fmt: BlockFormat) -> Kernel:
    return launch.encode(ROWS, kind, fmt, 1, 1, 1, NOISE, 0).kernel


def encode_segments(kind: ValueType, fmt: BlockFormat) -> Kernel:
    return next(launch.encode_segments(SEGMENT, kind, fmt, 1, 1, 1, NOISE, 0)).kernel


def decode(fmt: BlockFormat, kind: ValueType) -> Kernel:
    return launch.decode(0, fmt, 1, 1, 1, ROWS, kind).kernel


def decode_segments(fmt: BlockFormat, kind: ValueType) -> Kernel:
    return next(launch.decode_segments(0, fmt, 1, 1, 1, SEGMENT, kind)).kernel


def decode_reduce(fmt: BlockFormat, kind: ValueType) -> Kernel:
    return launch.decode_reduce([0], fmt, 1, 1, 1.0, ROWS, kind).kernel


def recode(fmt: BlockFormat, out_fmt: BlockFormat) -> Kernel:
    return launch.decode_reduce_encode([0], fmt, out_fmt, 1, 1, NOISE, 0).kernel


def check(result: tuple[object, ...], program: object = None) -> tuple[object, ...]:
    """The results behind NVRTC's status; fails with the compiler's log."""
    status, *rest = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        pytest.fail(log_of(program) if program is not None else str(status))
    return tuple(rest)


def text_of(program: object, what: str) -> str:
    (size,) = check(getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    assert isinstance(size, int)
    buffer = b" " * size
    check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.decode()


def log_of(program: object) -> str:
    return text_of(program, "ProgramLog")


def compiled(kernel: Kernel, target: str) -> tuple[str, str]:
    """The compiler's report, and the PTX of virtual targets (compute_90) or nothing of real ones (sm_90)."""
    text = source.text(kernel.source).encode()
    (program,) = check(nvrtc.nvrtcCreateProgram(text, kernel.source.encode(), 0, [], []))
    real = target.startswith("sm_")
    options = [f"--gpu-architecture={target}", *OPTIONS, *macros(kernel), *(["--ptxas-options=-v"] * real)]
    try:
        check(nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options]), program)
        return log_of(program), "" if real else text_of(program, "PTX")
    finally:
        check(nvrtc.nvrtcDestroyProgram(program))


def reports(kernels: Iterable[Kernel], target: str) -> list[tuple[Kernel, str]]:
    with ThreadPoolExecutor(2) as pool:
        kernels = list(kernels)
        return list(zip(kernels, pool.map(lambda kernel: compiled(kernel, target)[0], kernels), strict=True))


EVERY_KIND = [
    encode(BFLOAT16, INT8),
    encode(FLOAT32, INT4_ALL),
    encode(FLOAT16, RAW[BFLOAT16]),
    encode(BYTE, RAW[BYTE]),
    encode_segments(BFLOAT16, INT4_ROTATED),
    decode(INT8, BFLOAT16),
    decode(RAW[FLOAT16], FLOAT32),
    decode_segments(INT4_ROTATED, FLOAT32),
    decode_reduce(INT4_ROTATED, FLOAT32),
    decode_reduce(INT8, FLOAT16),
    recode(INT8, INT4_ROTATED),
    recode(INT4, INT8_STOCHASTIC),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_for_every_architecture(architecture: int) -> None:
    for kernel, report in reports(EVERY_KIND, f"sm_{architecture}"):
        assert "0 bytes spill stores, 0 bytes spill loads" in report, kernel


HALF, SUMS = 0.5, 0.31
FLOORS = [
    *((encode(kind, fmt), HALF) for kind in (FLOAT32, BFLOAT16) for fmt in (INT8, INT4, INT4_ROTATED)),
    *((encode(FLOAT16, fmt), HALF) for fmt in (INT8, INT4_ROTATED)),
    *((encode_segments(kind, fmt), HALF) for kind in (FLOAT32, BFLOAT16) for fmt in (INT8, INT4_ROTATED)),
    *((encode(kind, fmt), SUMS) for kind in (FLOAT32, BFLOAT16) for fmt in (INT8_STOCHASTIC, INT4_ALL)),
    *((decode(fmt, kind), HALF) for fmt in (INT8, INT4, INT4_ROTATED) for kind in (FLOAT32, BFLOAT16)),
    *((decode_segments(fmt, BFLOAT16), HALF) for fmt in (INT8, INT4_ROTATED)),
    *((decode_reduce(fmt, kind), 0.37) for fmt in (INT8, INT4_ROTATED) for kind in (FLOAT32, BFLOAT16)),
    *((decode_reduce(RAW[kind], FLOAT32), SUMS) for kind in (FLOAT32, BFLOAT16)),
    *((recode(fmt, out), 0.37) for fmt in (INT8, INT4) for out in (INT4, INT4_ROTATED)),
    *((recode(INT8, out), SUMS) for out in (INT8, quantized(Code.INT8, rotate=True))),
    *((recode(INT4_ROTATED, out), 0.37) for out in (INT8, INT4_ROTATED, RAW[BFLOAT16])),
    *((recode(fmt, INT4_ALL), SUMS) for fmt in (INT8, INT4_ROTATED, RAW[FLOAT32])),
]
"""Kernels, and the least share of a multiprocessor's 64 warps that their registers and memory must allow."""

SHARED_NBYTES = {80: 164 << 10, 90: 228 << 10}


def occupancy(registers: int, shared: int, architecture: int) -> float:
    """The share of 64 warps that fits: registers go to warps 256 at a time, 1 KiB of memory to the system."""
    warps = launch.THREADS // 32
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    by_shared = SHARED_NBYTES[architecture] // (-(-(shared + 1024) // 128) * 128)
    return min(by_registers, by_shared, 64 // warps, 32) * warps / 64


def number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    assert found is not None, report
    return int(found[1])


@pytest.mark.parametrize("architecture", [80, 90])
def test_no_spills_no_local_memory_and_enough_warps(architecture: int) -> None:
    floors = dict(FLOORS)
    assert len(floors) == len(FLOORS)
    for kernel, report in reports(floors, f"sm_{architecture}"):
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, (kernel, report)
        registers, shared = number(r"Used (\d+) registers", report), number(r"(\d+) bytes smem", report)
        share = occupancy(registers, shared, architecture)
        assert share >= floors[kernel], f"{kernel}: {registers} registers, {shared} bytes: {share}"


@pytest.mark.parametrize(
    ("kernel", "loads", "stores"),
    [
        (encode(FLOAT32, INT8), 8, 2),
        (encode(BFLOAT16, INT8), 4, 2),
        (encode_segments(BFLOAT16, INT4_ROTATED), 4, 1),
        (decode(INT8, BFLOAT16), 2, 4),
        (decode_segments(INT4_ROTATED, FLOAT32), 1, 8),
        (decode_reduce(INT4_ROTATED, FLOAT32), 4, 8),
        (decode_reduce(INT8, BFLOAT16), 4, 4),
        (recode(INT8, INT4_ROTATED), 4, 1),
        (encode(BYTE, RAW[BYTE]), 2, 2),
    ],
    ids=lambda value: value.name + "".join(v[1] for v in value.macros) if isinstance(value, Kernel) else None,
)
def test_values_and_payloads_move_sixteen_bytes_at_a_time(kernel: Kernel, loads: int, stores: int) -> None:
    """A lane's group, or those of several peers; and no multiply-add but the one for exact products."""
    _, ptx = compiled(kernel, "compute_90")
    assert len(re.findall(r"\bld\.global(?:\.nc)?\.v4\.[bfu]32", ptx)) == loads
    assert len(re.findall(r"\bst\.global\.v4\.[bfu]32", ptx)) == stores
    assert ".local" not in ptx
    assert not re.search(r"\.(ftz|approx)\b", ptx)
    if "encode" in kernel.name and "decode" not in kernel.name:
        assert not re.search(r"\b(fma|mad)\.[a-z.]*f32", ptx)


def test_scales_and_blocks_are_arguments_not_specialisations() -> None:
    kinds = {
        encode(BFLOAT16, BlockFormat(Code.INT8, block=1 << n, scale=s))
        for n in range(5, 13)
        for s in ScaleType
    }
    assert len(kinds) == 1
