"""The specification itself: records of any shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    NOISE,
    QUANTIZED,
    VERBATIM,
    decode,
    encode,
    parse,
    round_trip,
)

from zpp import reference
from zpp.format import BlockFormat, Code, Noise, Rounding, ScaleType, ValueType
from zpp.reference import Float32


@st.composite
def formats(draw: st.DrawFn) -> BlockFormat:
    return BlockFormat(
        draw(st.sampled_from((Code.INT8, Code.INT4))),
        2 ** draw(st.integers(5, 12)),
        draw(st.sampled_from(ScaleType)),
        draw(st.booleans()),
        draw(st.sampled_from(Rounding)),
    )


NUMELS = st.one_of(st.sampled_from((0, 1, 31, 32, 33, 127, 128, 129, 4095, 4097)), st.integers(0, 9000))
SEEDS = st.integers(0, 2**32 - 1)
POWERS = st.sampled_from((-126, -60, -1, 0, 7, 60, 124))


def heavy(numel: int, seed: int, power: int) -> Float32:
    return (
        (np.random.default_rng(seed).standard_t(3, numel) * 2.0**power).clip(-3e38, 3e38).astype(np.float32)
    )


@settings(max_examples=150, deadline=None)
@given(fmt=formats(), numel=NUMELS, seed=SEEDS, power=POWERS)
def test_the_error_of_every_block_is_within_its_bound(
    fmt: BlockFormat, numel: int, seed: int, power: int
) -> None:
    """Half a level for nearest, one for stochastic rounding, and what is cut off at the end of the grid."""
    x = heavy(numel, seed, power)
    record = encode(x, fmt, Noise(seed, 0))
    assert record.shape == (1, fmt.record_nbytes(numel))
    got, scales = decode(record, fmt, numel), np.abs(parse(record, fmt, numel)[1])
    worst = 1.04 if fmt.code is Code.INT4 or fmt.rounding is Rounding.STOCHASTIC else 0.5001
    for b, s in enumerate(scales.astype(np.float64)):
        cut = slice(b * fmt.block, min((b + 1) * fmt.block, numel))
        difference = got[cut].astype(np.float64) - x[cut]
        if fmt.rotate:
            # H is sqrt(32) times an orthogonal matrix; the tail's group is padded to 32 values.
            padded = -(-(cut.stop - cut.start) // 32) * 32
            assert np.linalg.norm(difference) <= math.sqrt(32 * padded) * s * worst
        else:
            assert np.abs(difference).max() <= s * worst
    # The scales themselves are no larger than the data asks for: 2^-8 is bfloat16's rounding.
    levels = 127 if fmt.code is Code.INT8 else 8
    for b, s in enumerate(scales):
        largest = float(np.abs(x[b * fmt.block : (b + 1) * fmt.block]).max())
        assert s <= max(largest / levels * (1 + 2.0**-8 + 2.0**-20), 2.0**-126)


@settings(max_examples=60, deadline=None)
@given(fmt=formats(), numel=NUMELS, seed=SEEDS)
def test_bytes_that_hold_no_value_are_zero(fmt: BlockFormat, numel: int, seed: int) -> None:
    record = encode(heavy(numel, seed, 0), fmt, Noise(seed, 0))
    levels, scales = parse(record, fmt, numel)
    if not fmt.rotate:
        assert not levels[numel:].any()
    payload = fmt.payload_nbytes(numel)
    assert not record[0, payload + scales.nbytes * fmt.scale.itemsize // 4 :].any()
    sums = reference.decode_reduce_encode(np.stack((record, record)), fmt, fmt, numel, noise=NOISE)
    assert not sums[0, payload + scales.nbytes * fmt.scale.itemsize // 4 :].any()


@settings(max_examples=60, deadline=None)
@given(
    fmt=st.one_of(formats(), st.sampled_from(VERBATIM)),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    numel=st.integers(0, 300),
    seed=SEEDS,
)
def test_rows_transpose_the_chunks(fmt: BlockFormat, rows: int, columns: int, numel: int, seed: int) -> None:
    """Chunk (row, column) has the bytes it has alone, at place (column, row); decoding undoes it."""
    count, noise = rows * columns, Noise(seed, 0, pitch=320)
    x = heavy(count * numel, seed, 0).reshape(count, numel)
    plain = reference.encode(x, FLOAT32, fmt, noise=noise)
    got = reference.encode(x, FLOAT32, fmt, rows=rows, noise=noise)
    table = plain.reshape(rows, columns, -1).swapaxes(0, 1).reshape(count, -1)
    np.testing.assert_array_equal(got, table)
    back = reference.decode(got, fmt, numel, FLOAT32, rows=rows)
    np.testing.assert_array_equal(back, reference.decode(plain, fmt, numel, FLOAT32))
    for k in range(count):
        alone = encode(x[k], fmt, Noise(seed, 0, offset=320 * k))
        np.testing.assert_array_equal(plain[k], alone[0])


@settings(max_examples=60, deadline=None)
@given(
    code=st.sampled_from((Code.INT8, Code.INT4)),
    log2=st.integers(5, 12),
    numel=NUMELS,
    seed=SEEDS,
    power=POWERS,
)
def test_decoded_values_encode_to_themselves(
    code: Code, log2: int, numel: int, seed: int, power: int
) -> None:
    """With bfloat16 scales: 127 times 8 significant bits is exact in float32. Not so with float32 scales."""
    fmt = BlockFormat(code, 2**log2)
    once = round_trip(heavy(numel, seed, power), fmt)
    np.testing.assert_array_equal(round_trip(once, fmt), once)


def test_an_empty_chunk_is_an_empty_record() -> None:
    for fmt in [*QUANTIZED, *VERBATIM]:
        record = reference.encode(np.zeros((3, 0), np.float32), FLOAT32, fmt, noise=NOISE)
        assert record.shape == (3, 0)
        assert reference.decode(record, fmt, 0, BFLOAT16).shape == (3, 0)
        assert reference.decode_reduce(record[None], fmt, 0, FLOAT32).shape == (3, 0)
        assert reference.decode_reduce_encode(record[None], fmt, fmt, 0, noise=NOISE).shape == (3, 0)


@pytest.mark.parametrize("kind", [FLOAT32, BFLOAT16, FLOAT16])
def test_verbatim_formats_keep_the_bits(kind: ValueType) -> None:
    """Whatever they are, NaNs and their payloads too."""
    fmt, size = BlockFormat(Code(kind)), kind.itemsize
    src = (
        np.random.default_rng(0).integers(0, 256, (2, 999 * size), np.uint8).view(reference.NUMPY_TYPE[kind])
    )
    record = reference.encode(src, kind, fmt)
    np.testing.assert_array_equal(record[:, : 999 * size], src.view(np.uint8))
    np.testing.assert_array_equal(reference.decode(record, fmt, 999, kind).view(np.uint8), src.view(np.uint8))
