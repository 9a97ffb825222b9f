"""The CPU kernels: a C library (host.cpp) called through ctypes, which lets go of the GIL meanwhile."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from zpp.format import BlockFormat, Noise, Rounding, ValueType
from zpp.kernels import operands


class _Format(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
        ("rotate", ctypes.c_int32),
        ("stochastic", ctypes.c_int32),
        ("block", ctypes.c_int64),
    ]


class _Noise(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("seed", "stream", "offset", "pitch")]


class _Part(ctypes.Structure):
    _fields_ = [("start", ctypes.c_int64), ("stop", ctypes.c_int64), ("data", ctypes.c_void_p)]


_NO_NOISE = _Noise(0, 0, 0, 0)
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_SIGNATURES = {
    "zpp_encode": [_INT, _INT, _POINTER, _INT, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER],
    "zpp_encode_parts": [
        *(_INT, _INT, _POINTER, _LONG, _INT, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER)
    ],
    "zpp_decode": [_INT, _INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER, _INT, _LONG],
    "zpp_decode_reduce": [
        *(_INT, _INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, ctypes.c_float, _POINTER, _INT, _LONG)
    ],
    "zpp_decode_reduce_encode": [
        *(_INT, _INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER)
    ],
}


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None if none were built when zpp was installed."""
    for path in sorted(Path(__file__).parent.glob("_host*.so")):
        library = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.zpp_best_level.restype = _INT
        return library
    return None


@lru_cache(maxsize=256)
def _format(fmt: BlockFormat) -> _Format:
    return _Format(fmt.code, fmt.scale, fmt.rotate, fmt.rounding is Rounding.STOCHASTIC, fmt.block)


def _noise(fmt: BlockFormat, noise: Noise | None) -> _Noise:
    if fmt.rounding is Rounding.NEAREST:
        return _NO_NOISE
    if noise is None:
        raise ValueError("stochastic rounding needs a Noise")
    return _Noise(noise.seed, noise.stream, noise.offset, noise.pitch)


def _pointers(records: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_POINTER * len(records))(*[peer.data_ptr() for peer in records])


def _row_stride(values: Tensor) -> int:
    return values.stride(0) if values.shape[0] > 1 else values.shape[1]


class HostKernels:
    """`zpp.kernels.Kernels` on CPU tensors, over up to `threads` threads where a tensor is large.

    level: the instruction set, 0 the baseline, 1 AVX2, 2 AVX-512; the best that the machine has if None.
    All give the same bits.
    """

    def __init__(self, library: ctypes.CDLL, threads: int, level: int | None = None) -> None:
        best = library.zpp_best_level()
        if level is not None and not 0 <= level <= best:
            raise ValueError(f"level must be from 0 to {best} on this machine, not {level}")
        self._library, self._threads = library, threads
        self.level = best if level is None else level

    def encode(
        self, src: Tensor, fmt: BlockFormat, out: Tensor, *, rows: int = 1, noise: Noise | None = None
    ) -> None:
        kind = operands.values("src", src, fmt)
        count, numel = src.shape
        operands.records("out", out, fmt, numel, count)
        operands.table(count, rows)
        self._library.zpp_encode(
            self.level,
            self._threads,
            src.data_ptr(),
            kind,
            _row_stride(src),
            count,
            numel,
            rows,
            ctypes.byref(_format(fmt)),
            ctypes.byref(_noise(fmt, noise)),
            out.data_ptr(),
        )

    def encode_parts(
        self,
        parts: operands.Parts,
        kind: ValueType,
        fmt: BlockFormat,
        out: Tensor,
        numel: int,
        *,
        rows: int = 1,
        noise: Noise | None = None,
    ) -> None:
        count = out.shape[0]
        operands.records("out", out, fmt, numel, count)
        operands.table(count, rows)
        operands.parts(parts, kind, fmt, count * numel)
        table = [_Part(start, start + tensor.numel(), tensor.data_ptr()) for start, tensor in parts]
        self._library.zpp_encode_parts(
            self.level,
            self._threads,
            (_Part * len(table))(*table),
            len(table),
            kind,
            count,
            numel,
            rows,
            ctypes.byref(_format(fmt)),
            ctypes.byref(_noise(fmt, noise)),
            out.data_ptr(),
        )

    def decode(self, records: Tensor, fmt: BlockFormat, out: Tensor, *, rows: int = 1) -> None:
        kind = operands.values("out", out, fmt)
        count, numel = out.shape
        operands.records("records", records, fmt, numel, count)
        operands.table(count, rows)
        self._library.zpp_decode(
            self.level,
            self._threads,
            records.data_ptr(),
            ctypes.byref(_format(fmt)),
            count,
            numel,
            rows,
            out.data_ptr(),
            kind,
            _row_stride(out),
        )

    def decode_reduce(
        self, records: Sequence[Tensor], fmt: BlockFormat, out: Tensor, *, factor: float = 1.0
    ) -> None:
        kind = operands.values("out", out, fmt)
        count, numel = out.shape
        operands.peers(records, fmt, numel, count)
        self._library.zpp_decode_reduce(
            self.level,
            self._threads,
            _pointers(records),
            ctypes.byref(_format(fmt)),
            len(records),
            count,
            numel,
            factor,
            out.data_ptr(),
            kind,
            _row_stride(out),
        )

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
        operands.peers(records, fmt, numel, out.shape[0])
        operands.records("out", out, out_fmt, numel, out.shape[0])
        self._library.zpp_decode_reduce_encode(
            self.level,
            self._threads,
            _pointers(records),
            ctypes.byref(_format(fmt)),
            len(records),
            out.shape[0],
            numel,
            ctypes.byref(_format(out_fmt)),
            ctypes.byref(_noise(out_fmt, noise)),
            out.data_ptr(),
        )
