"""Kernels: the four functions of `zpp.reference`, fused, one object per kind of device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zpp.errors import UnavailableError
from zpp.format import BlockFormat, Noise, ValueType
from zpp.kernels.operands import Parts


class Kernels(Protocol):
    """The reference's functions on torch tensors. Formats are resolved; nothing is allocated or converted.

    src and out of values: [count, numel], the last dimension contiguous, rows at any stride; float32,
    bfloat16, float16, or uint8 where the format's code is BYTE. Records: uint8, contiguous.
    """

    def encode(
        self, src: Tensor, fmt: BlockFormat, out: Tensor, *, rows: int = 1, noise: Noise | None = None
    ) -> None:
        """src [count, numel] -> out [count, record_nbytes]; the chunks as a (rows, ...) table, transposed."""

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
        """`encode` of chunks of `numel` values of type `kind` that lie in several tensors."""

    def decode(self, records: Tensor, fmt: BlockFormat, out: Tensor, *, rows: int = 1) -> None:
        """records [count, record_nbytes] -> out [count, numel]; `rows` undoes the order that encode gave."""

    def decode_reduce(
        self, records: Sequence[Tensor], fmt: BlockFormat, out: Tensor, *, factor: float = 1.0
    ) -> None:
        """Each peer's records [count, record_nbytes] -> out [count, numel]: sums in order, times factor."""

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
        """Each peer's records [count, record_nbytes] -> sums -> out [count, record_nbytes of out_fmt]."""


def for_device(device: torch.device, threads: int | None = None) -> Kernels:
    """The fastest kernels for tensors on `device`.

    threads: of the CPU kernels; ``torch.get_num_threads()`` if None. Without the compiled library the CPU
    falls back to the NumPy reference, with a RuntimeWarning. Raises UnavailableError for a CUDA device
    without CuPy or NVRTC or older than compute capability 7.5, and for devices of other kinds.
    """
    from zpp.kernels import cuda, host, numpy_backend

    if device.type == "cuda":
        return cuda.for_device(device)
    if device.type != "cpu":
        raise UnavailableError(f"zpp has no kernels for {device}: move the tensors to the CPU")
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    library = host.load_library()
    if library is None:
        warnings.warn(
            "zpp was installed without a C++ compiler: the CPU kernels are the NumPy reference, which is "
            "exact and slow. Install a compiler and reinstall zpp.",
            RuntimeWarning,
            stacklevel=2,
        )
        return numpy_backend.ReferenceKernels()
    return host.HostKernels(library, threads)
