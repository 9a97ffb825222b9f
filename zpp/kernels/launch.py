"""What a CUDA kernel is started with: its specialisation, its grid and its arguments. Pure arithmetic.

The structures are those of the sources in cuda/, which say what the fields mean.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zpp.format import BlockFormat, Noise, Rounding, ValueType
from zpp.layout import MAX_BLOCK, ceil_div

THREADS = 128
"""Of a thread block; each takes a group of 32 values."""

BLOCK_TILE = MAX_BLOCK
"""Values of a thread block, so that no block of a format is shared between two."""

MOST_BLOCKS = 2**31 - 1
MAX_SEGMENTS = 160
MAX_PEERS = 256

_I64, _U64, _U32, _INT, _POINTER = (
    *(ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32),
    ctypes.c_void_p,
)


class Record(ctypes.Structure):
    _fields_ = [
        *((name, _I64) for name in ("numel", "payload_nbytes", "nbytes")),
        *((name, _INT) for name in ("block_shift", "scale_type")),
    ]


class NoiseArguments(ctypes.Structure):
    _fields_ = [(name, _U64) for name in ("seed", "stream", "offset", "pitch")]


class Rows(ctypes.Structure):
    """Values [count, numel] in memory; `stride` is the distance of rows in values."""

    _fields_ = [("data", _POINTER), ("stride", _I64)]


class Segment(ctypes.Structure):
    """Values [start, stop) of the chunks, counted through all of them, lie at `data`."""

    _fields_ = [("start", _I64), ("stop", _I64), ("data", _POINTER)]


class Segments(ctypes.Structure):
    _fields_ = [("count", _I64), ("segments", Segment * MAX_SEGMENTS)]


_TABLE = [(name, _U32) for name in ("rows", "columns", "tiles_per_chunk", "first_tile")]


class EncodeRows(ctypes.Structure):
    _fields_ = [("record", Record), ("noise", NoiseArguments), ("out", _POINTER), *_TABLE, ("src", Rows)]


class EncodeSegments(ctypes.Structure):
    _fields_ = [("record", Record), ("noise", NoiseArguments), ("out", _POINTER), *_TABLE, ("src", Segments)]


class DecodeRows(ctypes.Structure):
    _fields_ = [("record", Record), ("records", _POINTER), *_TABLE, ("out", Rows)]


class DecodeSegments(ctypes.Structure):
    _fields_ = [("record", Record), ("records", _POINTER), *_TABLE, ("out", Segments)]


class Peers(ctypes.Structure):
    """The records of each peer."""

    _fields_ = [("count", _I64), ("records", _POINTER * MAX_PEERS)]


class DecodeReduce(ctypes.Structure):
    _fields_ = [
        ("record", Record),
        ("factor", ctypes.c_float),
        ("tiles_per_chunk", _U32),
        ("out", Rows),
        ("peers", Peers),
    ]


class DecodeReduceEncode(ctypes.Structure):
    _fields_ = [
        *(("record", Record), ("out_record", Record), ("noise", NoiseArguments)),
        *(("out", _POINTER), ("tiles_per_chunk", _U32), ("peers", Peers)),
    ]


@dataclass(frozen=True)
class Kernel:
    """One specialisation: a source in cuda/, the function in it, and the macros that choose."""

    source: str
    name: str
    macros: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Launch:
    """`blocks` thread blocks of THREADS threads; the arguments are one structure, passed by value."""

    kernel: Kernel
    blocks: int
    arguments: ctypes.Structure


def _kernel(operation: str, **macros: str | int | bool) -> Kernel:
    words = (
        (f"ZPP_{name}", str(value).lower() if value is True or value is False else str(value))
        for name, value in macros.items()
    )
    return Kernel(f"{operation}.cu", f"zpp_{operation}", tuple(words))


def _record(fmt: BlockFormat, numel: int) -> Record:
    shift = fmt.block.bit_length() - 1
    return Record(numel, fmt.payload_nbytes(numel), fmt.record_nbytes(numel), shift, fmt.scale)


def _noise(fmt: BlockFormat, noise: Noise | None) -> NoiseArguments:
    if fmt.rounding is Rounding.NEAREST:
        return NoiseArguments()
    if noise is None:
        raise ValueError("stochastic rounding needs a Noise")
    return NoiseArguments(noise.seed, noise.stream, noise.offset, noise.pitch)


def tiles(count: int, numel: int) -> int:
    """Thread blocks for `count` chunks of `numel` values."""
    blocks = count * ceil_div(numel, BLOCK_TILE)
    if blocks > MOST_BLOCKS:
        raise ValueError(
            f"{count} chunks of {numel} values are more than a launch takes: {MOST_BLOCKS} x {BLOCK_TILE}"
        )
    return blocks


def segment_spans(segments: Sequence[Segment], count: int, numel: int) -> Iterator[tuple[int, int, Segments]]:
    """Cut a launch where it needs more segments than its arguments hold: tiles [first, last), their segments.

    They are in order and apart. Raises ValueError for more than MAX_SEGMENTS in one tile.
    """
    per_chunk, total = ceil_div(numel, BLOCK_TILE), tiles(count, numel)
    starts, stops = [s.start for s in segments], [s.stop for s in segments]
    first = 0
    while first < total:
        chunk, tile = divmod(first, per_chunk)
        here = bisect_right(stops, chunk * numel + tile * BLOCK_TILE)
        last = total
        if here + MAX_SEGMENTS < len(segments):
            chunk, i = divmod(starts[here + MAX_SEGMENTS], numel)
            last = chunk * per_chunk + i // BLOCK_TILE
        if last == first:
            raise ValueError(
                f"more than {MAX_SEGMENTS} segments lie in the {BLOCK_TILE} values of tile {first}"
            )
        chosen = segments[here : here + MAX_SEGMENTS]
        yield first, last, Segments(len(chosen), (Segment * MAX_SEGMENTS)(*chosen))
        first = last


def encode(
    src: Rows,
    kind: ValueType,
    fmt: BlockFormat,
    count: int,
    numel: int,
    rows: int,
    noise: Noise | None,
    out: int,
) -> Launch:
    kernel = _encode_kernel("Rows", kind, fmt)
    table = rows, count // rows, ceil_div(numel, BLOCK_TILE), 0
    arguments = EncodeRows(_record(fmt, numel), _noise(fmt, noise), out, *table, src)
    return Launch(kernel, tiles(count, numel), arguments)


def encode_segments(
    src: Sequence[Segment],
    kind: ValueType,
    fmt: BlockFormat,
    count: int,
    numel: int,
    rows: int,
    noise: Noise | None,
    out: int,
) -> Iterator[Launch]:
    kernel = _encode_kernel("Segments", kind, fmt)
    record, words = _record(fmt, numel), _noise(fmt, noise)
    for first, last, segments in segment_spans(src, count, numel):
        table = rows, count // rows, ceil_div(numel, BLOCK_TILE), first
        yield Launch(kernel, last - first, EncodeSegments(record, words, out, *table, segments))


def decode(
    records: int, fmt: BlockFormat, count: int, numel: int, rows: int, out: Rows, kind: ValueType
) -> Launch:
    table = rows, count // rows, ceil_div(numel, BLOCK_TILE), 0
    arguments = DecodeRows(_record(fmt, numel), records, *table, out)
    return Launch(_decode_kernel("Rows", fmt, kind), tiles(count, numel), arguments)


def decode_segments(
    records: int,
    fmt: BlockFormat,
    count: int,
    numel: int,
    rows: int,
    out: Sequence[Segment],
    kind: ValueType,
) -> Iterator[Launch]:
    kernel, record = _decode_kernel("Segments", fmt, kind), _record(fmt, numel)
    for first, last, segments in segment_spans(out, count, numel):
        if segments.count:
            table = rows, count // rows, ceil_div(numel, BLOCK_TILE), first
            yield Launch(kernel, last - first, DecodeSegments(record, records, *table, segments))


def _peers(records: Sequence[int]) -> Peers:
    if len(records) > MAX_PEERS:
        raise ValueError(f"records of {len(records)} peers are more than a launch sums: {MAX_PEERS}")
    return Peers(len(records), (_POINTER * MAX_PEERS)(*records))


def decode_reduce(
    records: Sequence[int],
    fmt: BlockFormat,
    count: int,
    numel: int,
    factor: float,
    out: Rows,
    kind: ValueType,
) -> Launch:
    kernel = _kernel("decode_reduce", CODE=int(fmt.code), TYPE=int(kind), ROTATE=fmt.rotate)
    per_chunk = ceil_div(numel, BLOCK_TILE)
    arguments = DecodeReduce(_record(fmt, numel), factor, per_chunk, out, _peers(records))
    return Launch(kernel, tiles(count, numel), arguments)


def decode_reduce_encode(
    records: Sequence[int],
    fmt: BlockFormat,
    out_fmt: BlockFormat,
    count: int,
    numel: int,
    noise: Noise | None,
    out: int,
) -> Launch:
    kernel = _kernel(
        "decode_reduce_encode",
        CODE=int(fmt.code),
        ROTATED=fmt.rotate,
        OUT_CODE=int(out_fmt.code),
        ROTATE=out_fmt.rotate,
        STOCHASTIC=out_fmt.rounding is Rounding.STOCHASTIC,
    )
    record, out_record = _record(fmt, numel), _record(out_fmt, numel)
    per_chunk = ceil_div(numel, BLOCK_TILE)
    arguments = DecodeReduceEncode(
        record, out_record, _noise(out_fmt, noise), out, per_chunk, _peers(records)
    )
    return Launch(kernel, tiles(count, numel), arguments)


def _encode_kernel(view: str, kind: ValueType, fmt: BlockFormat) -> Kernel:
    stochastic = fmt.rounding is Rounding.STOCHASTIC
    choice = {"TYPE": int(kind), "CODE": int(fmt.code), "ROTATE": fmt.rotate, "STOCHASTIC": stochastic}
    return _kernel("encode", VIEW=view, **choice)


def _decode_kernel(view: str, fmt: BlockFormat, kind: ValueType) -> Kernel:
    return _kernel("decode", VIEW=view, CODE=int(fmt.code), TYPE=int(kind), ROTATE=fmt.rotate)
