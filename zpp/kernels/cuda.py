"""The CUDA kernels: the sources in cuda/, compiled by NVRTC and started through CuPy."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zpp.errors import UnavailableError
from zpp.format import BlockFormat, Code, Noise, ValueType
from zpp.kernels import launch, nvrtc, operands
from zpp.kernels.operands import Parts
from zpp.layout import RECORD_ALIGNMENT

Run = Callable[[launch.Launch, torch.device], None]

OLDEST = 75
"""The compute capability, times ten, of the oldest devices that the kernels are made for."""


class CudaKernels:
    """`zpp.kernels.Kernels` on CUDA tensors. Kernels go to the current stream of the tensors' device.

    Nothing is allocated, copied or waited for, so that the calls can be captured in a CUDA graph (after a
    first call with the same formats, which compiles). Records must start on 16-byte boundaries.

    run: starts a kernel.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def encode(
        self, src: Tensor, fmt: BlockFormat, out: Tensor, *, rows: int = 1, noise: Noise | None = None
    ) -> None:
        kind = operands.values("src", src, fmt)
        count, numel = src.shape
        _records("out", out, fmt, numel, count)
        operands.table(count, rows)
        device = _device(src=src, out=out)
        made = launch.encode(_rows(src), kind, fmt, count, numel, rows, noise, out.data_ptr())
        self._start(made, device)

    def encode_parts(
        self,
        parts: Parts,
        kind: ValueType,
        fmt: BlockFormat,
        out: Tensor,
        numel: int,
        *,
        rows: int = 1,
        noise: Noise | None = None,
    ) -> None:
        """`encode` of chunks whose values lie in several tensors, in one launch for up to 160 of them.

        Raises ValueError for parts that overlap, are out of order or beyond out's chunks of `numel` values.
        """
        count = out.shape[0]
        _records("out", out, fmt, numel, count)
        operands.table(count, rows)
        device = _device(out=out, **_named(parts))
        segments = _segments(parts, kind, fmt, count * numel)
        for made in launch.encode_segments(segments, kind, fmt, count, numel, rows, noise, out.data_ptr()):
            self._start(made, device)

    def decode(self, records: Tensor, fmt: BlockFormat, out: Tensor, *, rows: int = 1) -> None:
        kind = operands.values("out", out, fmt)
        count, numel = out.shape
        _records("records", records, fmt, numel, count)
        operands.table(count, rows)
        device = _device(records=records, out=out)
        made = launch.decode(records.data_ptr(), fmt, count, numel, rows, _rows(out), kind)
        self._start(made, device)

    def decode_parts(
        self, records: Tensor, fmt: BlockFormat, parts: Parts, kind: ValueType, numel: int, *, rows: int = 1
    ) -> None:
        """`decode` into several tensors, see `encode_parts`; values of no part are not written."""
        count = records.shape[0]
        _records("records", records, fmt, numel, count)
        operands.table(count, rows)
        device = _device(records=records, **_named(parts))
        segments = _segments(parts, kind, fmt, count * numel)
        for made in launch.decode_segments(records.data_ptr(), fmt, count, numel, rows, segments, kind):
            self._start(made, device)

    def decode_reduce(
        self, records: Sequence[Tensor], fmt: BlockFormat, out: Tensor, *, factor: float = 1.0
    ) -> None:
        kind = operands.values("out", out, fmt)
        count, numel = out.shape
        addresses, device = _peers(records, fmt, numel, count, out)
        made = launch.decode_reduce(addresses, fmt, count, numel, factor, _rows(out), kind)
        self._start(made, device)

    def decode_reduce_encode(
        self,
        records: Sequence[Tensor],
        fmt: BlockFormat,
        out_fmt: BlockFormat,
        out: Tensor,
        numel: int,
        *,
        noise: Noise | None = None,
    ) -> None:
        count = out.shape[0]
        _records("out", out, out_fmt, numel, count)
        _summable(out_fmt)
        addresses, device = _peers(records, fmt, numel, count, out)
        made = launch.decode_reduce_encode(addresses, fmt, out_fmt, count, numel, noise, out.data_ptr())
        self._start(made, device)

    def _start(self, made: launch.Launch, device: torch.device) -> None:
        if made.blocks:
            self._run(made, device)


def _rows(values: Tensor) -> launch.Rows:
    return launch.Rows(values.data_ptr(), values.stride(0) if values.shape[0] > 1 else values.shape[1])


def _named(parts: Parts) -> dict[str, Tensor]:
    return {f"part {i}": tensor for i, (_, tensor) in enumerate(parts)}


def _segments(parts: Parts, kind: ValueType, fmt: BlockFormat, total: int) -> list[launch.Segment]:
    operands.parts(parts, kind, fmt, total)
    return [
        launch.Segment(start, start + tensor.numel(), tensor.data_ptr())
        for start, tensor in parts
        if tensor.numel()
    ]


def _records(name: str, tensor: Tensor, fmt: BlockFormat, numel: int, *leading: int) -> None:
    operands.records(name, tensor, fmt, numel, *leading)
    if behind := tensor.data_ptr() % RECORD_ALIGNMENT:
        raise ValueError(
            f"{name} must start on a {RECORD_ALIGNMENT}-byte boundary, not {behind} bytes behind one"
        )


def _peers(
    records: Sequence[Tensor], fmt: BlockFormat, numel: int, count: int, out: Tensor
) -> tuple[list[int], torch.device]:
    """Where the records of each peer lie, and the device of all operands."""
    _summable(fmt)
    operands.peers(records, fmt, numel, count)
    named = {f"records of peer {peer}": tensor for peer, tensor in enumerate(records)}
    for name, tensor in named.items():
        _records(name, tensor, fmt, numel, count)
    return [tensor.data_ptr() for tensor in records], _device(out=out, **named)


def _summable(fmt: BlockFormat) -> None:
    if fmt.code is Code.BYTE:
        raise ValueError("bytes have no sum: decode_reduce takes no BYTE records")


def _device(**tensors: Tensor) -> torch.device:
    """The one device of all operands."""
    (first, *_), devices = tensors.items(), {name: tensor.device for name, tensor in tensors.items()}
    for name, device in devices.items():
        if device != devices[first[0]]:
            raise ValueError(f"{name} is on {device}, {first[0]} on {devices[first[0]]}")
    return devices[first[0]]


@dataclass(frozen=True)
class _Stream:
    """CUDA's protocol for streams that cross libraries."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


class CupyRunner:
    """Starts kernels through CuPy on torch's current stream, each compiled once for a device.

    What NVRTC makes is kept in `cache`, for other processes too.

    NVRTC is called here and not by ``cupy.RawModule(code=...)``, which adds ``-ftz=true`` to all options.
    Any number of threads may start kernels; the first to need one compiles it while the others wait.
    """

    def __init__(self, cache: Path | None = None) -> None:
        self._cupy = import_cupy()
        self._cache = cache or Path.home() / ".cache" / "zpp" / "kernels"
        self._lock = threading.Lock()
        self._functions: dict[tuple[int, launch.Kernel], Any] = {}

    def __call__(self, made: launch.Launch, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        function = self._functions.get((index, made.kernel)) or self._load(index, made.kernel)
        cuda, stream = self._cupy.cuda, _Stream(torch.cuda.current_stream(index).cuda_stream)
        # An array of one item is passed by value: the whole structure.
        structure = np.dtype((np.void, ctypes.sizeof(made.arguments)))
        arguments = np.frombuffer(memoryview(made.arguments), structure)
        with cuda.Device(index), cuda.Stream.from_external(stream):
            function((made.blocks,), (launch.THREADS,), (arguments,))

    def _load(self, index: int, kernel: launch.Kernel) -> Any:
        with self._lock:
            if (index, kernel) not in self._functions:
                major, minor = torch.cuda.get_device_capability(index)
                path = nvrtc.compiled(self._cupy.cuda.nvrtc, kernel, 10 * major + minor, self._cache)
                with self._cupy.cuda.Device(index):
                    function = self._cupy.RawModule(path=str(path)).get_function(kernel.name)
                self._functions[index, kernel] = function
            return self._functions[index, kernel]


@lru_cache(maxsize=1)
def shared_runner() -> CupyRunner:
    """The process's: kernels are compiled and loaded once, whoever asks for them."""
    return CupyRunner()


def for_device(device: torch.device) -> CudaKernels:
    """The kernels for a CUDA device; UnavailableError where it, CuPy or NVRTC is missing or too old."""
    if not torch.cuda.is_available():
        raise UnavailableError(f"zpp has no kernels for {device}: torch finds no CUDA device")
    major, minor = torch.cuda.get_device_capability(device)
    check_capability(device, 10 * major + minor)
    return CudaKernels(shared_runner())


def import_cupy() -> Any:
    """CuPy; raises UnavailableError where it, or its NVRTC, is missing."""
    try:
        import cupy
    except ImportError as error:
        raise UnavailableError(
            "the CUDA kernels need CuPy: install zpp with the extra cuda12 or cuda13, as the driver is"
        ) from error
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # what CuPy raises where it finds no library depends on its version
        raise UnavailableError(
            "the CUDA kernels need NVRTC: install nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for CUDA 12)"
        ) from error
    return cupy


def check_capability(device: torch.device, capability: int) -> None:
    if capability < OLDEST:
        raise UnavailableError(
            f"{device} has compute capability {capability / 10}: zpp's kernels need {OLDEST / 10} or later"
        )
