"""The specification itself: what the NumPy reference promises of values, levels and blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from records import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INF,
    INT4,
    INT4_ROTATED,
    INT8,
    INT8_512,
    INT8_ROTATED,
    NAN,
    NOISE,
    QUANTIZED,
    TORCH,
    VERBATIM,
    decode,
    encode,
    nearest_bfloat16,
    normal,
    parse,
    round_trip,
    two_hop,
)

from zpp import reference
from zpp.format import BlockFormat, Code, Formats, ScaleType, ValueType
from zpp.reference import BFLOAT16_MAX, FLOAT16_MAX, FLOAT32_MAX, Float32

# ---- Conversions


def bit_patterns() -> Float32:
    """Random patterns, and every 16-bit float with what lies at and next to the middle of its neighbours."""
    upper = np.arange(65536, dtype=np.uint32) << 16
    patterns = [upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    patterns.append(
        np.arange(0x7F7F0000, 0x7F800000, 97, dtype=np.uint32)
    )  # between bfloat16's maximum and float32's
    patterns.append(np.random.default_rng(0).integers(0, 2**32, 1 << 19, dtype=np.uint32))
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    around = np.concatenate(
        (halves, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9)))
    )
    return np.concatenate([*(p.view(np.float32) for p in patterns), around, -around])


@pytest.mark.parametrize(("kind", "largest"), [(BFLOAT16, BFLOAT16_MAX), (FLOAT16, FLOAT16_MAX)])
def test_narrowing_rounds_to_nearest_even_and_saturates(kind: ValueType, largest: np.float32) -> None:
    x = bit_patterns()
    got = reference.from_float32(x, kind)
    want = torch.from_numpy(x).to(TORCH[kind]).view(torch.int16).numpy().view(np.uint16)
    inside = np.abs(x) <= largest
    assert inside.sum() > 500_000
    np.testing.assert_array_equal(got[inside], want[inside])
    beyond = np.isfinite(x) & ~inside
    assert beyond.sum() > 100
    np.testing.assert_array_equal(reference.to_float32(got[beyond], kind), np.copysign(largest, x[beyond]))
    infinite = np.array([INF, -INF], np.float32)
    np.testing.assert_array_equal(
        reference.to_float32(reference.from_float32(infinite, kind), kind), infinite
    )


@pytest.mark.parametrize(("kind", "quiet"), [(FLOAT32, 0x7FC00000), (BFLOAT16, 0x7FC0), (FLOAT16, 0x7E00)])
def test_every_nan_becomes_the_quiet_one(kind: ValueType, quiet: int) -> None:
    nans = np.array([0x7FC00000, 0x7F800001, 0xFF800001, 0xFFFFFFFF, 0x7FFFFFFF, 0xFFC00000], np.uint32)
    got = reference.from_float32(nans.view(np.float32), kind)
    assert [int(bits) for bits in got.view(np.uint32 if kind is FLOAT32 else np.uint16)] == [quiet] * 6


@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT16])
def test_widening_is_exact(kind: ValueType) -> None:
    bits = np.arange(65536).astype(np.uint16)
    want = torch.from_numpy(bits.view(np.int16)).view(TORCH[kind]).float().numpy()
    got = reference.to_float32(bits, kind)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(np.uint32), want[~nan].view(np.uint32))
    np.testing.assert_array_equal(reference.from_float32(got, kind)[~nan], bits[~nan])


@pytest.mark.parametrize("fmt", [INT8, INT4_ROTATED], ids=str)
def test_decoding_to_16_bits_rounds_once(fmt: BlockFormat) -> None:
    record = encode(normal(5000), fmt)
    for kind in (BFLOAT16, FLOAT16):
        want = torch.from_numpy(decode(record, fmt, 5000)).to(TORCH[kind]).float().numpy()
        np.testing.assert_array_equal(decode(record, fmt, 5000, kind), want)


@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("fmt", [INT8, INT4_ROTATED, VERBATIM[0]], ids=str)
def test_16_bit_sources_are_encoded_as_the_float32_they_stand_for(fmt: BlockFormat, kind: ValueType) -> None:
    src = reference.from_float32(normal(2, 999), kind)
    got = reference.encode(src, kind, fmt)
    np.testing.assert_array_equal(got, reference.encode(reference.to_float32(src, kind), FLOAT32, fmt))


# ---- Levels and scales


@pytest.mark.parametrize("scale_type", ScaleType)
@pytest.mark.parametrize("block", [32, 128, 2048, 4096])
def test_int8_maps_the_largest_magnitude_to_127(block: int, scale_type: ScaleType) -> None:
    fmt = BlockFormat(Code.INT8, block=block, scale=scale_type)
    x = (normal(8 * block + 17) * 10.0 ** np.random.default_rng(1).uniform(-20, 20)).astype(np.float32)
    record = encode(x, fmt)
    levels, scales = parse(record, fmt, x.size)
    assert scales.size == 9
    for b, s in enumerate(scales):
        values, q = x[b * block : (b + 1) * block], levels[b * block : (b + 1) * block]
        largest = np.abs(values).argmax()
        assert q[largest] == math.copysign(127, values[largest])
        assert np.abs(q).max() == 127
        exact = np.float32(np.abs(values).max()) / np.float32(127)
        assert s == (nearest_bfloat16(exact) if scale_type is ScaleType.BFLOAT16 else exact)
        decoded = s * q[: values.size].astype(np.float32)
        # 127 levels times the 2^-8 by which a bfloat16 scale may be off is less than half a level.
        assert np.abs(decoded - values).max() <= s * (0.5 + 2**-15)
        np.testing.assert_array_equal(decode(record, fmt, x.size)[b * block : (b + 1) * block], decoded)


@pytest.mark.parametrize("scale_type", ScaleType)
@pytest.mark.parametrize("block", [32, 128, 4096])
def test_int4_maps_the_element_of_largest_magnitude_to_minus_8(block: int, scale_type: ScaleType) -> None:
    fmt = BlockFormat(Code.INT4, block=block, scale=scale_type)
    x = normal(64 * block + 17, seed=3)
    record = encode(x, fmt)
    levels, scales = parse(record, fmt, x.size)
    decoded = decode(record, fmt, x.size)
    assert {-1, 1} == {int(sign) for sign in np.sign(scales)}
    for b, s in enumerate(scales):
        cut = slice(b * block, min((b + 1) * block, x.size))
        largest = np.abs(x[cut]).argmax()
        assert levels[cut][largest] == -8
        exact = float(x[cut][largest] / np.float32(-8))
        assert s == (nearest_bfloat16(exact) if scale_type is ScaleType.BFLOAT16 else exact)
        assert decoded[cut][largest] == s * -8
        np.testing.assert_array_equal(decoded[cut], s * levels[cut].astype(np.float32))
        # Only what lies beyond 7.5 levels on the other side is cut off: at most 8.04 levels become 7.
        wide = x[cut] / s > 7.5
        assert np.abs(decoded[cut] - x[cut])[~wide].max() <= abs(s) * 0.5001
        assert np.abs(decoded[cut] - x[cut]).max() <= abs(s) * 1.04


@pytest.mark.parametrize("fmt", [INT8_512, INT4], ids=str)
def test_levels_round_to_nearest_even(fmt: BlockFormat) -> None:
    x = np.zeros(fmt.block, np.float32)
    x[:9] = [-127 if fmt.code is Code.INT8 else -8, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, -3.5]
    levels, scales = parse(encode(x, fmt), fmt, fmt.block)
    assert scales[0] == 1
    assert levels[1:9].tolist() == [0, 2, 2, 4, 0, -2, -2, -4]


@pytest.mark.parametrize("order", [(3.0, -3.0), (-3.0, 3.0)])
def test_the_positive_one_of_a_tie_decides_the_sign(order: tuple[float, float]) -> None:
    x = np.zeros(128, np.float32)
    x[[5, 77]] = order
    levels, scales = parse(encode(x, INT4), INT4, 128)
    assert scales[0] == -0.375
    assert [levels[i] for i in (5, 77)] == [-8 if value > 0 else 7 for value in order]


def test_a_positive_maximum_is_not_clipped() -> None:
    """A grid of -8 to 7 whose scale is max / 8 cuts every positive maximum by 12.5 %."""
    x = normal(1 << 14)
    got = round_trip(x, INT4).reshape(-1, 128)
    largest = np.abs(x.reshape(-1, 128)).argmax(axis=1)
    ratio = got[np.arange(128), largest] / x.reshape(-1, 128)[np.arange(128), largest]
    assert np.abs(ratio - 1).max() <= 2**-8


@pytest.mark.parametrize("sign", [1, -1])
def test_the_smallest_scale_has_a_sign_too(sign: int) -> None:
    x = np.zeros(128, np.float32)
    x[3] = sign * 7.9 * 2.0**-126
    levels, scales = parse(encode(x, INT4), INT4, 128)
    assert scales[0] == -sign * 2.0**-126
    assert levels[3] == -8


@pytest.mark.parametrize("fmt", QUANTIZED, ids=str)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_blocks_decode_to_exact_zeros(fmt: BlockFormat, zero: float) -> None:
    x = normal(3 * fmt.block)
    x[fmt.block : 2 * fmt.block] = zero
    got = round_trip(x, fmt)
    assert not got[fmt.block : 2 * fmt.block].view(np.uint32).any()
    assert got[: fmt.block].any()
    assert got[2 * fmt.block :].any()


@pytest.mark.parametrize("fmt", [INT8, INT8_ROTATED, INT4, INT4_ROTATED], ids=str)
def test_blocks_too_small_for_a_normal_scale_keep_an_absolute_error(fmt: BlockFormat) -> None:
    """Scales do not go below 2^-126, the smallest normal float32."""
    for power in range(-149, -115):
        x = (normal(fmt.block) * np.float32(2.0) ** power).astype(np.float32)
        got = round_trip(x, fmt)
        s = abs(float(parse(encode(x, fmt), fmt, fmt.block)[1][0]))
        # Rotation divides by 32 first: what is below 2^-144 may vanish there.
        assert s >= 2.0**-126 or np.abs(x).max() < (2.0**-144 if fmt.rotate else 2.0**-149)
        bound = math.sqrt(fmt.block * (32 if fmt.rotate else 1)) * max(s, 2.0**-126)
        assert np.linalg.norm(got - x) <= bound * 1.04
        if not fmt.rotate:
            largest = np.abs(x).argmax()
            assert abs(got[largest] - x[largest]) <= 0.5001 * max(s, 2.0**-126)


@pytest.mark.parametrize("fmt", QUANTIZED, ids=str)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_non_finite_value_makes_its_whole_block_nan_and_no_other(fmt: BlockFormat, bad: float) -> None:
    block, numel = fmt.block, 3 * fmt.block + 5
    x = normal(numel)
    clean = round_trip(x, fmt)
    for at in (0, block + 7, 2 * block - 1, numel - 1):
        spoilt = x.copy()
        spoilt[at] = bad
        hit = np.arange(numel) // block == at // block
        record = encode(spoilt, fmt)
        assert np.isnan(parse(record, fmt, numel)[1]).tolist() == [b == at // block for b in range(4)]
        for kind in (FLOAT32, BFLOAT16, FLOAT16):
            np.testing.assert_array_equal(np.isnan(decode(record, fmt, numel, kind)), hit)
        np.testing.assert_array_equal(decode(record, fmt, numel)[~hit], clean[~hit])
        # Through the sums too, whichever peer has it.
        records = np.stack((encode(x, fmt), record))
        for peers in (records, records[::-1]):
            np.testing.assert_array_equal(
                np.isnan(reference.decode_reduce(peers, fmt, numel, FLOAT32)[0]), hit
            )
            again = reference.decode_reduce_encode(peers, fmt, fmt, numel, noise=NOISE)
            np.testing.assert_array_equal(np.isnan(decode(again, fmt, numel)), hit)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT16])
def test_non_finite_16_bit_gradients_reach_the_trainer(kind: ValueType, bad: float) -> None:
    """Overflow detection must see through both hops of a reduce-scatter."""
    x = normal(4, 1, 4096)
    x[2, 0, 1000] = bad
    out = two_hop(x, Formats.default().gradients_intra, Formats.default().gradients_inter, 2, kind)
    assert np.isnan(out[0, 896:1024]).all()
    assert np.isfinite(np.delete(out[0], np.s_[512:1024])).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("fmt", VERBATIM, ids=str)
def test_verbatim_formats_keep_non_finite_values(fmt: BlockFormat, bad: float) -> None:
    x = normal(50)
    x[7] = bad
    got = round_trip(x, fmt)
    np.testing.assert_array_equal(got[7], np.float32(bad))
    assert np.isfinite(np.delete(got, 7)).all()


def huge_and_tiny() -> list[Float32]:
    signs = np.where(np.random.default_rng(0).random(300) < 0.5, np.float32(-1), np.float32(1))
    magnitudes = [FLOAT32_MAX, BFLOAT16_MAX, np.float32(1e38), np.float32(3e-39), np.float32(1e-45)]
    constant = [np.full(300, m, np.float32) for m in magnitudes]
    alternating = np.where(np.arange(300) % 2, FLOAT32_MAX, -FLOAT32_MAX)
    mixed = (normal(300) * 1e38).clip(-FLOAT32_MAX, FLOAT32_MAX)
    lone = np.zeros(300, np.float32)
    lone[[0, 200]] = FLOAT32_MAX, 1e-45
    return [*constant, *(signs * c for c in constant), alternating, mixed, lone]


@pytest.mark.parametrize("fmt", [*QUANTIZED, *VERBATIM], ids=str)
def test_nothing_finite_becomes_non_finite(fmt: BlockFormat) -> None:
    for case, x in enumerate(huge_and_tiny()):
        record = encode(x, fmt)
        for kind in (FLOAT32, BFLOAT16, FLOAT16):
            assert np.isfinite(decode(record, fmt, 300, kind)).all(), (case, kind)
            reduced = reference.decode_reduce(record[None], fmt, 300, kind)[0]
            assert np.isfinite(reference.to_float32(reduced, kind)).all(), (case, kind)
        # Sums that float32 holds, by a margin for the errors of the levels.
        peers = np.stack([encode(x * np.float32(0.4), fmt), encode(x * np.float32(0.4), fmt)])
        assert np.isfinite(reference.decode_reduce(peers, fmt, 300, FLOAT32)).all(), case
        for out_fmt in [*QUANTIZED, *VERBATIM]:
            for records in (record[None], peers):
                again = reference.decode_reduce_encode(records, fmt, out_fmt, 300, noise=NOISE)
                assert np.isfinite(decode(again, out_fmt, 300)).all(), (case, out_fmt)


@pytest.mark.parametrize("fmt", [INT8, INT4_ROTATED, VERBATIM[0]], ids=str)
def test_sums_and_products_of_finite_values_saturate(fmt: BlockFormat) -> None:
    records = np.stack([encode(np.full(128, 3e38, np.float32), fmt)] * 2)
    largest = np.finfo(np.float32).max
    assert (reference.decode_reduce(records, fmt, 128, FLOAT32) > 0.99 * largest).all()
    assert (reference.decode_reduce(records, fmt, 128, FLOAT32, factor=4.0) == largest).all()
    for out_fmt in (INT8, INT4_ROTATED, VERBATIM[0]):
        again = reference.decode_reduce_encode(records, fmt, out_fmt, 128)
        assert np.isfinite(decode(again, out_fmt, 128)).all()


def test_an_infinite_term_makes_the_sum_infinite() -> None:
    fmt = VERBATIM[0]
    records = np.stack([encode(np.full(32, x, np.float32), fmt) for x in (3e38, np.inf, 3e38)])
    assert np.isposinf(reference.decode_reduce(records, fmt, 32, FLOAT32, factor=0.5)).all()
