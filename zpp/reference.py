"""The specification of zpp's numerics, in NumPy. Every other kernel equals it bit for bit.

Values are float32, or the bits of bfloat16 and float16 as uint16, or bytes. All arithmetic is float32,
unfused and in the order written here. A record is a flat uint8 array: payload, then scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from zpp.format import BlockFormat, Code, Noise, Rounding, ScaleType, ValueType
from zpp.layout import GROUP, ceil_div, round_up, transposed

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]
Values = NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.uint8]

NUMPY_TYPE: dict[ValueType, np.dtype[Any]] = {
    ValueType.FLOAT32: np.dtype(np.float32),
    ValueType.BFLOAT16: np.dtype(np.uint16),
    ValueType.FLOAT16: np.dtype(np.uint16),
    ValueType.BYTE: np.dtype(np.uint8),
}
FLOAT32_MAX = np.float32(np.finfo(np.float32).max)
BFLOAT16_MAX = np.array(0x7F7F0000, np.uint32).view(np.float32)
FLOAT16_MAX = np.float32(65504.0)
SMALLEST_SCALE = np.float32(2.0**-126)
_QUIET = np.errstate(all="ignore")
"""Overflow and NaN are results here, not mistakes."""
LEVELS = {Code.INT8: (-127, 127), Code.INT4: (-8, 7)}


def to_float32(values: Values, kind: ValueType) -> Float32:
    """Widen exactly."""
    if kind is ValueType.FLOAT32:
        return values.astype(np.float32, copy=False)
    if kind is ValueType.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.view(np.float16).astype(np.float32)


def from_float32(values: Float32, kind: ValueType) -> Values:
    """Round to nearest even. Finite values stay finite (they saturate); every NaN becomes the quiet one."""
    nan = np.isnan(values)
    if kind is ValueType.FLOAT32:
        return np.where(nan, np.float32(np.nan), values)
    largest = BFLOAT16_MAX if kind is ValueType.BFLOAT16 else FLOAT16_MAX
    finite = np.isfinite(values)
    values = np.where(finite, np.clip(values, -largest, largest), values)
    if kind is ValueType.BFLOAT16:
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(nan, np.uint16(0x7FC0), rounded)
    return np.where(nan, np.uint16(0x7E00), values.astype(np.float16).view(np.uint16))


def hadamard(values: Float32) -> Float32:
    """The unnormalised Walsh-Hadamard transform H of each group of 32 (Sylvester order); H H = 32 I."""
    x = values.reshape(-1, GROUP)
    for half in (1, 2, 4, 8, 16):
        pairs = x.reshape(-1, GROUP // (2 * half), 2, half)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack((a + b, a - b), axis=2).reshape(-1, GROUP)
    return x.reshape(-1)


def rotate(values: Float32) -> Float32:
    """y = H (x / 32). Dividing first means that no finite x overflows."""
    return hadamard(values * np.float32(2.0**-5))


def unrotate(values: Float32) -> Float32:
    """x = H y, computed as 32 H (y / 32) so that only a result beyond float32 saturates."""
    t = hadamard(values * np.float32(2.0**-5))
    return np.where(np.isfinite(t), np.clip(t * np.float32(32), -FLOAT32_MAX, FLOAT32_MAX), t)


def block_scales(blocks: Float32, fmt: BlockFormat) -> Float32:
    """The scale of each row, rounded to the scale type: what the decoder will multiply by.

    int8: max|x| / 127. int4: m / -8, where m is the element of largest magnitude, with its sign, the
    positive one of a tie. A block that holds NaN or Inf has the scale NaN, an all-zero block 0.
    """
    highest, lowest = blocks.max(axis=1, initial=0), blocks.min(axis=1, initial=0)
    if fmt.code is Code.INT8:
        scales = np.maximum(highest, -lowest) / np.float32(127)
    else:
        scales = np.where(highest >= -lowest, highest, lowest) / np.float32(-8)
    bad = ~np.isfinite(blocks).all(axis=1)
    zero = (highest == 0) & (lowest == 0)
    if fmt.scale is ScaleType.BFLOAT16:
        scales = to_float32(from_float32(scales, ValueType.BFLOAT16), ValueType.BFLOAT16)
    scales = np.where(np.abs(scales) < SMALLEST_SCALE, np.copysign(SMALLEST_SCALE, scales), scales)
    scales = np.where(zero, np.float32(0), scales)
    return np.where(bad, np.float32(np.nan), scales).astype(np.float32)


def philox(counter: NDArray[np.uint64], noise: Noise) -> NDArray[np.uint32]:
    """Philox4x32-10: four words for each 64-bit counter, shape (len(counter), 4)."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    stream = [np.full_like(counter, word) for word in (noise.stream % 2**32, noise.stream >> 32)]
    c = [counter & low, counter >> shift, *stream]
    key = [noise.seed % 2**32, noise.seed >> 32]
    for _ in range(10):
        product0, product1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (product1 >> shift) ^ c[1] ^ np.uint64(key[0]),
            product1 & low,
            (product0 >> shift) ^ c[3] ^ np.uint64(key[1]),
            product0 & low,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return np.stack(c, axis=1).astype(np.uint32)


def uniform(numel: int, chunk: int, noise: Noise) -> Float32:
    """One number in [0, 1) for each value of a chunk, with 24 random bits."""
    first = (chunk * noise.pitch + noise.offset) % 2**64
    counters = np.arange(ceil_div(numel, 4), dtype=np.uint64) + np.uint64(first // 4)
    counters &= np.uint64(2**62 - 1)  # elements are counted modulo 2**64, also inside a chunk
    words = philox(counters, noise).reshape(-1)[:numel]
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def pack_int4(q: NDArray[np.int8]) -> Bytes:
    """Byte j of a group of 32 holds value j in its low half and value j + 16 in its high half."""
    halves = q.view(np.uint8).reshape(-1, 2, GROUP // 2) & np.uint8(15)
    return (halves[:, 0] | halves[:, 1] << np.uint8(4)).reshape(-1)


def unpack_int4(payload: Bytes) -> NDArray[np.int8]:
    halves = payload.reshape(-1, GROUP // 2)
    nibbles = np.stack((halves & np.uint8(15), halves >> np.uint8(4)), axis=1)
    return ((nibbles.astype(np.int8) ^ 8) - 8).reshape(-1)


def quantize(
    x: Float32, fmt: BlockFormat, noise: Noise | None, chunk: int
) -> tuple[Float32, NDArray[np.int8]]:
    """Scales and levels of values that are padded to whole groups and, if the format says so, rotated."""
    padded = np.zeros(round_up(x.size, fmt.block), np.float32)
    padded[: x.size] = x
    blocks = padded.reshape(-1, fmt.block)
    scales = block_scales(blocks, fmt)
    usable = np.isfinite(scales) & (scales != 0)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=usable)
    t = np.where(usable[:, None], blocks, np.float32(0)) * inverse[:, None]
    if fmt.rounding is Rounding.STOCHASTIC:
        if noise is None:
            raise ValueError("stochastic rounding needs a Noise")
        u = np.zeros(blocks.size, np.float32)
        u[: x.size] = uniform(x.size, chunk, noise)
        whole = np.floor(t)
        q = whole + (u.reshape(blocks.shape) < t - whole)  # t + u would be rounded, and be up too often
    else:
        q = np.rint(t)
    low, high = LEVELS[fmt.code]
    return scales, np.clip(q, low, high).astype(np.int8).reshape(-1)[: x.size]


def _encode_float32(x: Float32, fmt: BlockFormat, noise: Noise | None, chunk: int) -> Bytes:
    """One record from values that are already in the format's domain (rotated or not)."""
    scales, q = quantize(x, fmt, noise, chunk)
    payload = pack_int4(q) if fmt.code is Code.INT4 else q.view(np.uint8)
    kind = ValueType.BFLOAT16 if fmt.scale is ScaleType.BFLOAT16 else ValueType.FLOAT32
    return np.concatenate((payload, from_float32(scales, kind).view(np.uint8)))


def _pad_to_groups(x: Float32) -> Float32:
    padded = np.zeros(round_up(x.size, GROUP), np.float32)
    padded[: x.size] = x
    return padded


@_QUIET
def encode(
    src: Values, kind: ValueType, fmt: BlockFormat, *, rows: int = 1, noise: Noise | None = None
) -> Bytes:
    """Encode each chunk of `src` (count, numel) into a record; returns (count, record_nbytes).

    With `rows` the chunks form a (rows, count / rows) table whose records come out transposed: the
    two-hop order of qgZ.
    """
    count, numel = src.shape
    out = np.zeros((count, fmt.record_nbytes(numel)), np.uint8)
    for k in range(count):
        if not fmt.quantized:
            verbatim = int(fmt.code) == int(kind)
            stored = src[k] if verbatim else from_float32(to_float32(src[k], kind), ValueType(fmt.code))
            record = np.ascontiguousarray(stored).view(np.uint8)
        else:
            x = _pad_to_groups(to_float32(src[k], kind))
            record = _encode_float32(rotate(x) if fmt.rotate else x, fmt, noise, k)
        out[transposed(k, rows, count // rows), : record.size] = record
    return out


def dequantize(record: Bytes, fmt: BlockFormat, numel: int) -> Float32:
    """The values of one record in the format's own domain, padded to whole groups when quantized."""
    if not fmt.quantized:
        kind = ValueType(fmt.code)
        stored = record[: numel * kind.itemsize].view(NUMPY_TYPE[kind])
        return to_float32(stored, kind)
    payload = record[: round_up(numel, GROUP) * (8 if fmt.code is Code.INT8 else 4) // 8]
    q = unpack_int4(payload) if fmt.code is Code.INT4 else payload.view(np.int8)
    start = fmt.payload_nbytes(numel)
    stored = record[start : start + fmt.blocks(numel) * fmt.scale.itemsize]
    if fmt.scale is ScaleType.BFLOAT16:
        scales = to_float32(stored.view(np.uint16), ValueType.BFLOAT16)
    else:
        scales = stored.view(np.float32)
    y = q.astype(np.float32) * np.repeat(scales, fmt.block)[: q.size]
    clipped: Float32 = np.clip(y, -FLOAT32_MAX, FLOAT32_MAX)
    return clipped


@_QUIET
def decode(records: Bytes, fmt: BlockFormat, numel: int, kind: ValueType, *, rows: int = 1) -> Values:
    """Decode (count, record_nbytes) into (count, numel); `rows` undoes the order that encode's gave."""
    count = records.shape[0]
    out: Values = np.empty((count, numel), NUMPY_TYPE[kind])
    for k in range(count):
        record = records[transposed(k, rows, count // rows)]
        if not fmt.quantized and int(fmt.code) == int(kind):
            out[k] = record[: numel * kind.itemsize].view(NUMPY_TYPE[kind])
            continue
        y = dequantize(record, fmt, numel)
        out[k] = from_float32(unrotate(y) if fmt.rotate else y, kind)[:numel]
    return out


def _saturate(results: Float32, where: NDArray[np.bool_]) -> Float32:
    """The largest float32 in place of an Inf that came from finite numbers."""
    return np.where(where, np.clip(results, -FLOAT32_MAX, FLOAT32_MAX), results)


def _sum(records: Bytes, fmt: BlockFormat, numel: int) -> Float32:
    """The sum over peers, in rank order, in the format's domain."""
    total = dequantize(records[0], fmt, numel)
    for record in records[1:]:
        term = dequantize(record, fmt, numel)
        total = _saturate(total + term, np.isfinite(total) & np.isfinite(term))
    return total


@_QUIET
def decode_reduce(
    records: Bytes, fmt: BlockFormat, numel: int, kind: ValueType, *, factor: float = 1.0
) -> Values:
    """Decode (peers, count, record_nbytes), sum over peers, times `factor`: (count, numel)."""
    count = records.shape[1]
    out: Values = np.empty((count, numel), NUMPY_TYPE[kind])
    for k in range(count):
        total = _sum(records[:, k], fmt, numel)
        total = unrotate(total) if fmt.rotate else total
        product = _saturate(total * np.float32(factor), np.isfinite(total))
        out[k] = from_float32(product, kind)[:numel]
    return out


@_QUIET
def decode_reduce_encode(
    records: Bytes, fmt: BlockFormat, out_fmt: BlockFormat, numel: int, *, noise: Noise | None = None
) -> Bytes:
    """Decode (peers, count, record_nbytes), sum over peers, encode again: (count, out record_nbytes).

    The rotation is linear: a sum of rotated values that is to be rotated stays in that domain.
    """
    count = records.shape[1]
    out = np.zeros((count, out_fmt.record_nbytes(numel)), np.uint8)
    for k in range(count):
        total = _sum(records[:, k], fmt, numel)
        if fmt.rotate and not out_fmt.rotate:
            total = unrotate(total)
        if not out_fmt.quantized:
            record = np.ascontiguousarray(from_float32(total[:numel], ValueType(out_fmt.code))).view(np.uint8)
        else:
            x = _pad_to_groups(total[:numel]) if not (fmt.rotate and out_fmt.rotate) else total
            if out_fmt.rotate and not fmt.rotate:
                x = rotate(x)
            record = _encode_float32(x, out_fmt, noise, k)
        out[k, : record.size] = record
    return out
