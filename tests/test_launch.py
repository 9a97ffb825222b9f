"""The geometry of the CUDA kernels, and the parts of tensors dealt to launches: plain arithmetic."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpp.format import BlockFormat, Code, Noise, Rounding, ScaleType, ValueType
from zpp.kernels import launch
from zpp.kernels.launch import BLOCK_TILE, MAX_SEGMENTS, Segment, segment_spans, tiles
from zpp.layout import ceil_div

ROWS = launch.Rows(4096, 5000)


@pytest.mark.parametrize(
    ("count", "numel", "blocks"),
    [(0, 100, 0), (3, 0, 0), (1, 1, 1), (1, 4096, 1), (1, 4097, 2), (3, 4097, 6), (2, 2**40, 2**29)],
)
def test_a_thread_block_takes_a_tile_of_one_chunk(count: int, numel: int, blocks: int) -> None:
    assert tiles(count, numel) == blocks


def test_a_launch_has_a_limit() -> None:
    assert tiles(1, (2**31 - 1) * BLOCK_TILE) == 2**31 - 1
    with pytest.raises(ValueError, match="1 chunks of .* values are more than a launch takes"):
        tiles(1, (2**31 - 1) * BLOCK_TILE + 1)


def test_arguments_fit_what_every_driver_takes() -> None:
    types = [launch.EncodeRows, launch.EncodeSegments, launch.DecodeRows, launch.DecodeSegments]
    types = [*types, launch.DecodeReduce, launch.DecodeReduceEncode]
    assert all(ctypes.sizeof(kind) <= 4096 and ctypes.sizeof(kind) % 8 == 0 for kind in types)


def test_arguments_say_what_the_caller_said() -> None:
    noise = Noise(seed=1, stream=2, offset=32, pitch=64)
    fmt = BlockFormat(Code.INT4, block=128, scale=ScaleType.FLOAT32, rounding=Rounding.STOCHASTIC)
    made = launch.encode(ROWS, ValueType.BFLOAT16, fmt, 6, 5000, 2, noise, 1 << 40)
    assert made.blocks == 12
    assert dict(made.kernel.macros) == {
        "ZPP_VIEW": "Rows",
        "ZPP_TYPE": "1",
        "ZPP_CODE": "5",
        "ZPP_ROTATE": "false",
        "ZPP_STOCHASTIC": "true",
    }
    arguments = made.arguments
    assert isinstance(arguments, launch.EncodeRows)
    assert (arguments.rows, arguments.columns, arguments.tiles_per_chunk) == (2, 3, 2)
    assert (arguments.out, arguments.src.data, arguments.src.stride) == (1 << 40, 4096, 5000)
    record = arguments.record
    assert (record.numel, record.block_shift, record.scale_type) == (5000, 7, 1)
    assert (record.payload_nbytes, record.nbytes) == (fmt.payload_nbytes(5000), fmt.record_nbytes(5000))
    assert (arguments.noise.seed, arguments.noise.stream) == (1, 2)
    assert (arguments.noise.offset, arguments.noise.pitch) == (32, 64)


def test_more_peers_than_a_launch_takes_are_refused() -> None:
    fmt = BlockFormat(Code.INT8)
    made = launch.decode_reduce(range(launch.MAX_PEERS), fmt, 1, 5, 1.0, ROWS, ValueType.FLOAT32)
    assert isinstance(made.arguments, launch.DecodeReduce)
    assert made.arguments.peers.count == launch.MAX_PEERS
    assert list(made.arguments.peers.records)[1:] == list(range(1, launch.MAX_PEERS))
    with pytest.raises(ValueError, match="records of 257 peers are more than a launch sums: 256"):
        launch.decode_reduce(range(257), fmt, 1, 5, 1.0, ROWS, ValueType.FLOAT32)


@st.composite
def segmented(draw: st.DrawFn) -> tuple[list[Segment], int, int]:
    """Chunks and segments in them, more than one launch takes, at most 100 in a tile."""
    count, numel = draw(st.integers(1, 4)), draw(st.integers(1, 5 * BLOCK_TILE))
    shortest = draw(st.sampled_from([50, 1000, BLOCK_TILE]))
    segments: list[Segment] = []
    start = draw(st.integers(0, 100))
    while start < count * numel and len(segments) < 400:
        stop = min(start + shortest + draw(st.integers(0, 9)), count * numel)
        segments.append(Segment(start, stop, 16 * start))
        start = stop + draw(st.integers(0, 3))
    return segments, count, numel


@given(segmented())
def test_every_tile_gets_the_segments_that_it_meets(case: tuple[list[Segment], int, int]) -> None:
    segments, count, numel = case
    per_chunk, done = ceil_div(numel, BLOCK_TILE), 0
    for first, last, chosen in segment_spans(segments, count, numel):
        assert first == done < last
        held = {chosen.segments[i].start for i in range(chosen.count)}
        for tile in range(first, last):
            chunk, i = divmod(tile, per_chunk)
            start = chunk * numel + i * BLOCK_TILE
            stop = chunk * numel + min((i + 1) * BLOCK_TILE, numel)
            assert {s.start for s in segments if s.start < stop and s.stop > start} <= held
        done = last
    assert done == tiles(count, numel)


def test_few_segments_take_one_launch() -> None:
    segments = [Segment(100 * i, 100 * i + 50, 0) for i in range(MAX_SEGMENTS)]
    assert len(list(segment_spans(segments, 1, 100 * MAX_SEGMENTS))) == 1
    assert list(segment_spans([], 0, 7)) == []
