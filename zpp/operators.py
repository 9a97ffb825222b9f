"""The kernels as torch operators: functions that return new tensors, and that torch.compile leaves whole.

`encode`, `decode`, `decode_reduce` and `decode_reduce_encode` are those of `zpp.reference`, on CPU and CUDA
tensors. Each calls the operator of its name in ``torch.ops.zpp``, whose fake implementation tells torch's
compiler and exporter the shape and dtype of what comes out. None has a gradient: rounding has none.

Formats must not be EXACT, which stands for whatever dtype a tensor has: name the one meant.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zpp.format import BlockFormat, Code, Noise, Rounding, ScaleType
from zpp.kernels import for_device


def encode(src: Tensor, fmt: BlockFormat, *, rows: int = 1, noise: Noise | None = None) -> Tensor:
    """Encode each row of `src`; uint8 [count, fmt.record_nbytes(numel)].

    src: [count, numel] of float32, bfloat16 or float16, its rows contiguous.
    rows: `count` chunks are a (rows, count / rows) table, whose transpose is the order of the records.
    noise: where stochastic rounding draws from; needed for no other format.
    """
    record: Tensor = torch.ops.zpp.encode(src, _numbers(fmt), rows, _words(noise))
    return record


def decode(
    records: Tensor, fmt: BlockFormat, numel: int, *, dtype: torch.dtype = torch.float32, rows: int = 1
) -> Tensor:
    """Decode uint8 [count, fmt.record_nbytes(numel)]; `dtype` [count, numel]. `rows` as for `encode`."""
    values: Tensor = torch.ops.zpp.decode(records, _numbers(fmt), numel, dtype, rows)
    return values


def decode_reduce(
    records: Sequence[Tensor],
    fmt: BlockFormat,
    numel: int,
    *,
    dtype: torch.dtype = torch.float32,
    factor: float = 1.0,
) -> Tensor:
    """The sum of what each peer's records stand for, times `factor`; `dtype` [count, numel].

    Added in order, in float32.

    records: of each peer uint8 [count, fmt.record_nbytes(numel)].
    """
    values: Tensor = torch.ops.zpp.decode_reduce(list(records), _numbers(fmt), numel, dtype, factor)
    return values


def decode_reduce_encode(
    records: Sequence[Tensor],
    fmt: BlockFormat,
    out_fmt: BlockFormat,
    numel: int,
    *,
    noise: Noise | None = None,
) -> Tensor:
    """`decode_reduce`, then `encode` of the sums; uint8 [count, out_fmt.record_nbytes(numel)]."""
    made: Tensor = torch.ops.zpp.decode_reduce_encode(
        list(records), _numbers(fmt), _numbers(out_fmt), numel, _words(noise)
    )
    return made


# A format is five integers and a noise four, since operators take no other structures.


def _numbers(fmt: BlockFormat) -> list[int]:
    return [int(fmt.code), fmt.block, int(fmt.scale), int(fmt.rotate), int(fmt.rounding)]


def _format(numbers: Sequence[int]) -> BlockFormat:
    code, block, scale, rotate, rounding = map(int, numbers)
    return BlockFormat(Code(code), block, ScaleType(scale), bool(rotate), Rounding(rounding))


def _words(noise: Noise | None) -> list[int] | None:
    """An operator's integers have 64 bits with a sign."""
    if noise is None:
        return None
    words = noise.seed, noise.stream, noise.offset, noise.pitch
    return [word - (word >> 63 << 64) for word in words]


def _noise(words: Sequence[int] | None) -> Noise | None:
    return None if words is None else Noise(*(int(word) % 2**64 for word in words))


def _record_nbytes(fmt: BlockFormat, numel: int) -> int:
    """`BlockFormat.record_nbytes`, also of a symbolic `numel`, which no cache can look up."""
    return fmt.payload_nbytes(numel) + fmt.scales_nbytes(numel)


@torch.library.custom_op("zpp::encode", mutates_args=())
def _encode(src: Tensor, fmt: Sequence[int], rows: int, noise: Sequence[int] | None) -> Tensor:
    form = _format(fmt)
    count, numel = _table("src", src)
    out = src.new_empty((count, form.record_nbytes(numel)), dtype=torch.uint8)
    for_device(src.device).encode(src, form, out, rows=rows, noise=_noise(noise))
    return out


@_encode.register_fake
def _(src: Tensor, fmt: Sequence[int], rows: int, noise: Sequence[int] | None) -> Tensor:
    count, numel = _table("src", src)
    return src.new_empty((count, _record_nbytes(_format(fmt), numel)), dtype=torch.uint8)


@torch.library.custom_op("zpp::decode", mutates_args=())
def _decode(records: Tensor, fmt: Sequence[int], numel: int, dtype: torch.dtype, rows: int) -> Tensor:
    count, _ = _table("records", records)
    out = records.new_empty((count, numel), dtype=dtype)
    for_device(records.device).decode(records, _format(fmt), out, rows=rows)
    return out


@_decode.register_fake
def _(records: Tensor, fmt: Sequence[int], numel: int, dtype: torch.dtype, rows: int) -> Tensor:
    count, _ = _table("records", records)
    return records.new_empty((count, numel), dtype=dtype)


@torch.library.custom_op("zpp::decode_reduce", mutates_args=())
def _decode_reduce(
    records: Sequence[Tensor], fmt: Sequence[int], numel: int, dtype: torch.dtype, factor: float
) -> Tensor:
    first, count = _peers(records)
    out = first.new_empty((count, numel), dtype=dtype)
    for_device(first.device).decode_reduce(records, _format(fmt), out, factor=factor)
    return out


@_decode_reduce.register_fake
def _(records: Sequence[Tensor], fmt: Sequence[int], numel: int, dtype: torch.dtype, factor: float) -> Tensor:
    first, count = _peers(records)
    return first.new_empty((count, numel), dtype=dtype)


@torch.library.custom_op("zpp::decode_reduce_encode", mutates_args=())
def _decode_reduce_encode(
    records: Sequence[Tensor],
    fmt: Sequence[int],
    out_fmt: Sequence[int],
    numel: int,
    noise: Sequence[int] | None,
) -> Tensor:
    first, count = _peers(records)
    source, made = _format(fmt), _format(out_fmt)
    out = first.new_empty((count, made.record_nbytes(numel)))
    for_device(first.device).decode_reduce_encode(records, source, made, out, numel, noise=_noise(noise))
    return out


@_decode_reduce_encode.register_fake
def _(
    records: Sequence[Tensor],
    fmt: Sequence[int],
    out_fmt: Sequence[int],
    numel: int,
    noise: Sequence[int] | None,
) -> Tensor:
    first, count = _peers(records)
    return first.new_empty((count, _record_nbytes(_format(out_fmt), numel)))


def _table(name: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise ValueError(f"{name} must have two dimensions, not the shape {tuple(tensor.shape)}")
    return tensor.shape[0], tensor.shape[1]


def _peers(records: Sequence[Tensor]) -> tuple[Tensor, int]:
    if not records:
        raise ValueError("there are no records to sum")
    return records[0], _table("records", records[0])[0]
