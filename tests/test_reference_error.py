"""The specification itself: how much the formats lose, and that sums and means are what they say."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from records import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT4,
    INT4_ROTATED,
    INT8,
    INT8_512,
    INT8_ROTATED,
    VERBATIM,
    decode,
    encode,
    error,
    normal,
    round_trip,
    slope,
    two_hop,
)

from zpp import reference
from zpp.format import BlockFormat, Code, Formats


def test_error_of_normal_data() -> None:
    x = normal(1 << 19)
    blocks = x.reshape(-1, 128)
    absmax = np.abs(blocks).max(axis=1, keepdims=True) / 7
    assert error(round_trip(x, INT4), x) == pytest.approx(0.1034, abs=0.0005)
    assert error(round_trip(x, INT4_ROTATED), x) == pytest.approx(0.1034, abs=0.0007)
    assert error(np.rint(blocks / absmax) * absmax, blocks) == pytest.approx(0.1176, abs=0.0005)
    assert error(round_trip(x, INT8), x) == pytest.approx(0.0083, abs=0.0002)
    assert error(round_trip(x, INT8_512), x) == pytest.approx(0.0074, abs=0.0002)


def test_rotation_halves_the_error_of_heavy_tails() -> None:
    """Student-t(3) has no fourth moment, so that one sample says little: means over eight."""
    samples = [np.random.default_rng(seed).standard_t(3, 1 << 18).astype(np.float32) for seed in range(8)]
    plain, rotated = ([error(round_trip(x, fmt), x) for x in samples] for fmt in (INT4, INT4_ROTATED))
    assert np.mean(plain) == pytest.approx(0.199, abs=0.002)
    assert np.mean(rotated) == pytest.approx(0.102, abs=0.001)


@pytest.mark.parametrize("common", [0.0, 1.0], ids=["independent", "correlated"])
@pytest.mark.parametrize(
    ("intra", "inter", "tolerance"),
    [
        (INT8_512, INT8_512, 0.0003),
        (Formats.default().gradients_intra, Formats.default().gradients_inter, 0.003),
        (Formats.zeropp().gradients_intra, Formats.zeropp().gradients_inter, 0.005),
    ],
    ids=["int8", "default", "zeropp"],
)
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (2, 4), (3, 2)])
def test_the_mean_is_the_mean(
    intra: BlockFormat, inter: BlockFormat, tolerance: float, nodes: int, ranks_per_node: int, common: float
) -> None:
    """Not the sum, nor ranks_per_node times the mean; for one chunk and for several."""
    x = normal(nodes * ranks_per_node, 2, 1 << 15) + np.float32(common) * normal(1, 2, 1 << 15, seed=1)
    out = two_hop(x, intra, inter, nodes)
    want = x.astype(np.float64).mean(axis=0).astype(np.float32)
    assert slope(out, want) == pytest.approx(1.0, abs=tolerance)
    assert error(out, want) < (0.012 if inter.code is Code.INT8 else 0.15)


def test_values_beyond_half_precision_keep_their_size() -> None:
    """Kernels that take every gradient for float16 lose what bfloat16 and float32 hold."""
    x = normal(4, 1, 4096) * np.float32(2.0) ** np.array([100, 20, -30, -90], np.float32)[:, None, None]
    for kind in (FLOAT32, BFLOAT16):
        for row in x:
            same = np.stack([row, row])
            out = two_hop(same, INT8_512, INT8_512, 2, kind)
            assert error(out, row) < 0.013


def test_chunks_of_any_length_lose_no_block() -> None:
    for numel in (40960, 40961, 3 * 40960 + 5):
        x = normal(numel)
        for fmt in (INT8, INT4_ROTATED):
            got = round_trip(x, fmt)
            for start in range(0, numel, fmt.block):
                cut = slice(start, start + fmt.block)
                # An encoding that leaves out a block has the error 1 there.
                assert error(got[cut], x[cut]) < (0.02 if fmt.code is Code.INT8 else 0.35), start


def test_sums_are_in_float32_and_in_rank_order() -> None:
    fmt = BlockFormat(Code.BFLOAT16)
    small = [encode(np.full(40, 2.0**-8, np.float32), fmt)] * 63
    records = np.stack([encode(np.ones(40, np.float32), fmt), *small])
    got = reference.decode_reduce(records, fmt, 40, FLOAT32)
    np.testing.assert_array_equal(got, np.full((1, 40), 1 + 63 / 256))
    again = reference.decode_reduce_encode(records, fmt, VERBATIM[0], 40)
    np.testing.assert_array_equal(decode(again, VERBATIM[0], 40), got[0])

    exact = VERBATIM[0]
    ordered = [encode(np.full(40, value, np.float32), exact) for value in (1e8, 1.0, -1e8)]
    assert not reference.decode_reduce(np.stack(ordered), exact, 40, FLOAT32).any()
    assert (
        reference.decode_reduce(np.stack([ordered[0], ordered[2], ordered[1]]), exact, 40, FLOAT32) == 1
    ).all()


def test_the_factor_multiplies_the_sum_once_in_float32() -> None:
    x, factor = normal(3, 1000), 1 / 3
    records = np.stack([encode(row, VERBATIM[0]) for row in x])
    want = ((x[0] + x[1]) + x[2]) * np.float32(factor)
    got = reference.decode_reduce(records, VERBATIM[0], 1000, FLOAT32, factor=factor)
    np.testing.assert_array_equal(got[0], want)
    for kind in (BFLOAT16, FLOAT16):
        narrow = reference.decode_reduce(records, VERBATIM[0], 1000, kind, factor=factor)
        np.testing.assert_array_equal(narrow[0], reference.from_float32(want, kind))


# ---- Rotation


def sylvester() -> NDArray[np.int64]:
    h = np.ones((1, 1), np.int64)
    for _ in range(5):
        h = np.kron(np.array([[1, 1], [1, -1]]), h)
    return h


def test_the_transform_is_the_hadamard_matrix() -> None:
    h = sylvester()
    np.testing.assert_array_equal(h @ h, 32 * np.eye(32))
    identity = np.eye(32, dtype=np.float32)
    np.testing.assert_array_equal(reference.hadamard(identity.reshape(-1)).reshape(32, 32), h)
    x, y = np.random.default_rng(0).integers(-1000, 1000, (2, 50, 32))
    both = [reference.hadamard(v.astype(np.float32).reshape(-1)).reshape(50, 32) for v in (x, y, 3 * x - y)]
    np.testing.assert_array_equal(both[0], x @ h)
    np.testing.assert_array_equal(3 * both[0] - both[1], both[2])
    twice = reference.hadamard(both[0].reshape(-1)).reshape(50, 32)
    np.testing.assert_array_equal(twice, 32 * x)


def test_unrotate_undoes_rotate() -> None:
    small = np.random.default_rng(0).integers(-(2**15), 2**15, 320).astype(np.float32)
    np.testing.assert_array_equal(reference.unrotate(reference.rotate(small)), small)
    np.testing.assert_allclose(reference.rotate(small), reference.hadamard(small) / 32, rtol=0)
    x = normal(3200)
    np.testing.assert_allclose(reference.unrotate(reference.rotate(x)), x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("fmt", [INT8_ROTATED, INT4_ROTATED], ids=str)
def test_sums_commute_with_the_rotation(fmt: BlockFormat) -> None:
    records = np.stack([encode(normal(5001, seed=seed), fmt) for seed in range(5)])
    want = sum(decode(record, fmt, 5001).astype(np.float64) for record in records)
    got = reference.decode_reduce(records, fmt, 5001, FLOAT32)[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("fmt", [INT8_512, INT8_ROTATED, VERBATIM[0]], ids=str)
@pytest.mark.parametrize("out_fmt", [INT8_512, INT8_ROTATED, VERBATIM[0]], ids=str)
def test_re_encoding_gives_the_sum_in_either_domain(fmt: BlockFormat, out_fmt: BlockFormat) -> None:
    records = np.stack([encode(normal(4999, seed=seed), fmt) for seed in range(3)])
    want = reference.decode_reduce(records, fmt, 4999, FLOAT32)[0]
    got = decode(reference.decode_reduce_encode(records, fmt, out_fmt, 4999), out_fmt, 4999)
    assert error(got, want) < (0.0085 if out_fmt.quantized else 1e-7)
    if not (fmt.rotate and out_fmt.rotate):
        # What lies between is float32: the same bytes as from the sums.
        np.testing.assert_array_equal(got, round_trip(want, out_fmt))
