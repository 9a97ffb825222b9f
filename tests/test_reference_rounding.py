"""The specification itself: stochastic rounding."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from records import (
    FLOAT32,
    INT4_STOCHASTIC,
    INT8_STOCHASTIC,
    VERBATIM,
    decode,
    encode,
    normal,
    parse,
    round_trip,
)

from zpp import reference
from zpp.format import BlockFormat, Code, Noise, Rounding, ScaleType


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter: str, key: str, words: str) -> None:
    """kat_vectors of Random123 (Salmon et al., 2011)."""
    c = [int(word, 16) for word in counter.split()]
    k = [int(word, 16) for word in key.split()]
    noise = Noise(seed=k[1] << 32 | k[0], stream=c[3] << 32 | c[2])
    got = reference.philox(np.array([c[1] << 32 | c[0]], np.uint64), noise)
    assert " ".join(f"{word:08x}" for word in got[0]) == words


FRACTIONS = np.array(
    [127, 0.25, -0.25, 0.5, 0.9, -0.9, 10.125, -63.75, 0.01, -0.01, 1, -2, 0] + [0.375] * 19, np.float32
)
"""A block of 32 whose int8 scale is exactly 1."""
STOCHASTIC = BlockFormat(Code.INT8, block=32, rounding=Rounding.STOCHASTIC)


def test_a_value_is_rounded_up_when_its_own_word_says_so() -> None:
    x, noise = np.tile(FRACTIONS, 40), Noise(seed=0x0123_4567_89AB_CDEF, stream=2**63 + 5, offset=2**34 + 64)
    words = reference.philox(np.arange((2**34 + 64) // 4, (2**34 + 64 + x.size) // 4, dtype=np.uint64), noise)
    u = (words.reshape(-1) >> np.uint32(8)).astype(np.float64) / 2**24
    levels, scales = parse(encode(x, STOCHASTIC, noise), STOCHASTIC, x.size)
    assert (scales == 1).all()
    np.testing.assert_array_equal(levels, np.floor(x) + (u < x - np.floor(x)))


def test_the_same_noise_repeats_and_any_other_does_not() -> None:
    x = normal(4096)
    for fmt in (INT8_STOCHASTIC, INT4_STOCHASTIC):
        first = encode(x, fmt, Noise(7, 8, 64, 32))
        np.testing.assert_array_equal(encode(x, fmt, Noise(7, 8, 64, 32)), first)
        for other in (
            Noise(6, 8, 64),
            Noise(7 + 2**32, 8, 64),
            Noise(7, 9, 64),
            Noise(7, 8 + 2**32, 64),
            Noise(7, 8, 96),
        ):
            assert (encode(x, fmt, other) != first).mean() > 0.1, other


def stochastic_levels(fmt: BlockFormat) -> NDArray[np.int64]:
    """Levels of FRACTIONS, (streams * 64, 32)."""
    x = np.tile(FRACTIONS, 64)
    return np.concatenate([parse(encode(x, fmt, Noise(5, s)), fmt, x.size)[0] for s in range(200)]).reshape(
        -1, 32
    )


def test_stochastic_rounding_is_unbiased() -> None:
    levels = stochastic_levels(STOCHASTIC)
    assert (np.floor(FRACTIONS) <= levels).all()
    assert (levels <= np.ceil(FRACTIONS)).all()
    part = FRACTIONS.astype(np.float64) % 1
    standard_error = np.sqrt(part * (1 - part) / len(levels))
    assert (np.abs(levels.mean(axis=0) - FRACTIONS) <= 4 * standard_error).all()
    nearest = stochastic_levels(BlockFormat(Code.INT8, block=32))
    assert (np.abs(nearest.mean(axis=0) - FRACTIONS) > 4 * standard_error).sum() > 20, "this test sees a bias"


def test_whole_levels_are_never_rounded_up() -> None:
    """A sum of level and draw, rounded to float32, would lift levels from 64 up about once in 2^18."""
    fmt = BlockFormat(Code.INT8, block=4096, scale=ScaleType.FLOAT32, rounding=Rounding.STOCHASTIC)
    x = np.full(1 << 20, 100, np.float32)
    x[::4096] = 127
    assert np.array_equal(decode(encode(x, fmt, noise=Noise(seed=1, stream=0)), fmt, x.size), x)


def test_the_draws_of_two_values_are_independent() -> None:
    """The 19 equal values of the block: their roundings have the variance of as many separate coins."""
    ups = stochastic_levels(STOCHASTIC)[:, 13:].sum(axis=1)
    assert ups.var() == pytest.approx(19 * 0.375 * 0.625, rel=0.05)


@pytest.mark.parametrize("fmt", [INT8_STOCHASTIC, INT4_STOCHASTIC], ids=str)
def test_the_noise_does_not_depend_on_how_a_tensor_is_cut(fmt: BlockFormat) -> None:
    x = normal(4 * 1024)
    whole = decode(encode(x, fmt, Noise(1, 2, offset=96)), fmt, x.size)
    chunks = reference.encode(x.reshape(4, 1024), FLOAT32, fmt, noise=Noise(1, 2, offset=96, pitch=1024))
    np.testing.assert_array_equal(reference.decode(chunks, fmt, 1024, FLOAT32).reshape(-1), whole)
    for start, stop in ((0, 64), (64, 1024), (1024, 4096)):
        noise = Noise(1, 2, offset=96 + start)
        np.testing.assert_array_equal(round_trip(x[start:stop], fmt, noise), whole[start:stop])
        record = encode(x[start:stop], VERBATIM[0])
        again = reference.decode_reduce_encode(record[None], VERBATIM[0], fmt, stop - start, noise=noise)
        np.testing.assert_array_equal(decode(again, fmt, stop - start), whole[start:stop])


def test_stochastic_formats_need_a_noise() -> None:
    with pytest.raises(ValueError, match="stochastic rounding needs a Noise"):
        reference.encode(normal(1, 32), FLOAT32, INT8_STOCHASTIC)
