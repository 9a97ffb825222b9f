"""Checks that the tensors given to a kernel are what its arithmetic on pointers takes them for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zpp.format import BlockFormat, Code, ValueType

Parts = Sequence[tuple[int, Tensor]]
"""Tensors in place of one [count, numel]: each one's values, contiguous, stand from that index on, counted
through all chunks. Ordered; what they leave out is zero for encode and not written by decode."""

VALUE_TYPES = {
    torch.float32: ValueType.FLOAT32,
    torch.bfloat16: ValueType.BFLOAT16,
    torch.float16: ValueType.FLOAT16,
    torch.uint8: ValueType.BYTE,
}


def values(name: str, tensor: Tensor, fmt: BlockFormat) -> ValueType:
    """The value type of a [count, numel] operand whose rows are contiguous."""
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be [count, numel], not of shape {tuple(tensor.shape)}")
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name} must have contiguous rows, not strides {tensor.stride()}")
    kind = VALUE_TYPES.get(tensor.dtype)
    if kind is None or (kind is ValueType.BYTE) != (fmt.code is Code.BYTE):
        raise TypeError(f"{name} of {tensor.dtype} cannot be encoded as {fmt}")
    return kind


def parts(tensors: Parts, kind: ValueType, fmt: BlockFormat, total: int) -> None:
    """Parts of `total` values: in order, apart, contiguous, all of one type."""
    end = 0
    for start, tensor in tensors:
        stop = start + tensor.numel()
        if not end <= start <= stop <= total:
            raise ValueError(
                f"the part [{start}, {stop}) does not lie between {end}, where the one before ends, and "
                f"{total}, the number of values"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"the part at {start} must be contiguous, not of strides {tensor.stride()}")
        if VALUE_TYPES.get(tensor.dtype) is not kind or (kind is ValueType.BYTE) != (fmt.code is Code.BYTE):
            raise TypeError(
                f"the part at {start} of {tensor.dtype} cannot be encoded from {kind.name.lower()} as {fmt}"
            )
        end = stop


def records(name: str, tensor: Tensor, fmt: BlockFormat, numel: int, *leading: int) -> None:
    """`tensor` is uint8, contiguous, [*leading, record_nbytes of `numel` values]."""
    shape = (*leading, fmt.record_nbytes(numel))
    if tensor.dtype is not torch.uint8 or not tensor.is_contiguous():
        raise TypeError(f"{name} must be contiguous uint8, not {tensor.dtype} with strides {tensor.stride()}")
    if (got := tuple(tensor.shape)) != shape:
        raise ValueError(f"{name} must be of shape {shape} for {numel} values as {fmt}, not {got}")


def peers(tensors: Sequence[Tensor], fmt: BlockFormat, numel: int, count: int) -> None:
    """One tensor of `count` records of each peer."""
    if not len(tensors):
        raise ValueError("there are no records to sum")
    for tensor in tensors:
        records("records", tensor, fmt, numel, count)


def table(count: int, rows: int) -> None:
    if rows < 1 or count % rows:
        raise ValueError(f"{count} chunks do not form a table of {rows} rows")
