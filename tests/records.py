"""Formats, data and an independent reader of records, for the tests of the specification."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from zpp import reference
from zpp.format import BlockFormat, Code, Noise, Rounding, ScaleType, ValueType
from zpp.reference import Bytes, Float32, Values

FLOAT32, BFLOAT16, FLOAT16 = ValueType.FLOAT32, ValueType.BFLOAT16, ValueType.FLOAT16
TORCH = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
INT8, INT8_512 = BlockFormat(Code.INT8), BlockFormat(Code.INT8, block=512)
INT4, INT4_ROTATED = BlockFormat(Code.INT4, block=128), BlockFormat(Code.INT4, block=128, rotate=True)
INT8_ROTATED = BlockFormat(Code.INT8, block=256, rotate=True)
INT8_STOCHASTIC = BlockFormat(Code.INT8, block=64, scale=ScaleType.FLOAT32, rounding=Rounding.STOCHASTIC)
INT4_STOCHASTIC = BlockFormat(Code.INT4, block=32, rotate=True, rounding=Rounding.STOCHASTIC)
QUANTIZED = [INT8, INT8_512, INT8_ROTATED, INT8_STOCHASTIC, INT4, INT4_ROTATED, INT4_STOCHASTIC]
VERBATIM = [BlockFormat(code) for code in (Code.FLOAT32, Code.BFLOAT16, Code.FLOAT16)]
NOISE = Noise(seed=1, stream=2)
NAN, INF = float("nan"), float("inf")


def normal(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def encode(x: Float32, fmt: BlockFormat, noise: Noise = NOISE) -> Bytes:
    """One record of a flat array."""
    return reference.encode(x.reshape(1, -1), FLOAT32, fmt, noise=noise)


def decode(record: Bytes, fmt: BlockFormat, numel: int, kind: ValueType = FLOAT32) -> Float32:
    return reference.to_float32(reference.decode(record, fmt, numel, kind)[0], kind)


def round_trip(x: Float32, fmt: BlockFormat, noise: Noise = NOISE) -> Float32:
    return decode(encode(x, fmt, noise), fmt, x.size)


def parse(record: Bytes, fmt: BlockFormat, numel: int) -> tuple[NDArray[np.int64], Float32]:
    """Levels and scales, read as the layout says, value by value."""
    padded = -(-numel // 32) * 32
    if fmt.code is Code.INT8:
        levels = record[0, :padded].view(np.int8).astype(np.int64)
    else:
        # Byte j of a group holds value j in its low half, value j + 16 in its high half.
        at = np.arange(padded)
        byte = record[0, at // 32 * 16 + at % 16].astype(np.int64)
        nibble = np.where(at % 32 < 16, byte & 15, byte >> 4)
        levels = np.where(nibble > 7, nibble - 16, nibble)
    start, blocks = fmt.payload_nbytes(numel), -(-numel // fmt.block)
    stored = record[0, start : start + blocks * fmt.scale.itemsize].copy()
    if fmt.scale is ScaleType.FLOAT32:
        return levels, stored.view(np.float32)
    return levels, torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16).float().numpy()


def nearest_bfloat16(x: float | np.float32) -> float:
    return torch.tensor(float(x), dtype=torch.float32).bfloat16().item()


def error(got: Float32, want: Float32) -> float:
    """Relative L2 error."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want.astype(np.float64)))


def slope(got: Float32, want: Float32) -> float:
    """Least squares: 1 if `got` is `want` but for an error that does not depend on it."""
    a, b = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    return float(a @ b / (b @ b))


def two_hop(
    x: Float32, intra: BlockFormat, inter: BlockFormat, nodes: int, kind: ValueType = FLOAT32
) -> Float32:
    """The mean of x (world, count, numel) over the world, through both hops of qgZ; in float32."""
    world, _, numel = x.shape
    records = [reference.encode(reference.from_float32(rank, kind), kind, intra) for rank in x]
    by_node = np.split(np.stack(records), nodes)
    sums = [reference.decode_reduce_encode(node, intra, inter, numel) for node in by_node]
    out: Values = reference.decode_reduce(np.stack(sums), inter, numel, FLOAT32, factor=1 / world)
    return reference.to_float32(out, FLOAT32)
