"""The reference as kernels: where there is no compiler, and as the judge in tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from zpp import reference
from zpp.format import BlockFormat, Noise, ValueType
from zpp.kernels import operands


def as_array(tensor: Tensor) -> NDArray[Any]:
    """A NumPy view of a CPU tensor; 16-bit floats as their bits.

    Not ``tensor.numpy()``, which forbids from then on to resize the storage: zero3 does that.
    """
    kind = reference.NUMPY_TYPE[operands.VALUE_TYPES[tensor.dtype]]
    if not tensor.numel():
        return np.empty(tensor.shape, kind)
    size = tensor.element_size()
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_uint8 * (span * size)).from_address(tensor.data_ptr())
    strides = [size * stride for stride in tensor.stride()]
    return np.ndarray(tuple(tensor.shape), kind, memoryview(memory), strides=strides)


class ReferenceKernels:
    """`zpp.kernels.Kernels` by NumPy."""

    def encode(
        self, src: Tensor, fmt: BlockFormat, out: Tensor, *, rows: int = 1, noise: Noise | None = None
    ) -> None:
        kind = operands.values("src", src, fmt)
        operands.records("out", out, fmt, src.shape[1], src.shape[0])
        operands.table(src.shape[0], rows)
        as_array(out)[:] = reference.encode(as_array(src), kind, fmt, rows=rows, noise=noise)

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
        flat = np.zeros(count * numel, reference.NUMPY_TYPE[kind])
        for start, tensor in parts:
            flat[start : start + tensor.numel()] = as_array(tensor.view(-1))
        made = reference.encode(flat.reshape(count, numel), kind, fmt, rows=rows, noise=noise)
        as_array(out)[:] = made

    def decode(self, records: Tensor, fmt: BlockFormat, out: Tensor, *, rows: int = 1) -> None:
        kind = operands.values("out", out, fmt)
        operands.records("records", records, fmt, out.shape[1], out.shape[0])
        operands.table(out.shape[0], rows)
        as_array(out)[:] = reference.decode(as_array(records), fmt, out.shape[1], kind, rows=rows)

    def decode_reduce(
        self, records: Sequence[Tensor], fmt: BlockFormat, out: Tensor, *, factor: float = 1.0
    ) -> None:
        kind = operands.values("out", out, fmt)
        operands.peers(records, fmt, out.shape[1], out.shape[0])
        stacked = np.stack([as_array(peer) for peer in records])
        as_array(out)[:] = reference.decode_reduce(stacked, fmt, out.shape[1], kind, factor=factor)

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
        stacked = np.stack([as_array(peer) for peer in records])
        as_array(out)[:] = reference.decode_reduce_encode(stacked, fmt, out_fmt, numel, noise=noise)
