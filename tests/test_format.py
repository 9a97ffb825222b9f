"""Formats: what is refused, how many bytes a record takes, and the presets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from zpp.format import BlockFormat, Code, Formats, Noise, Rounding, ScaleType, ValueType

INT8 = BlockFormat(Code.INT8)
INT4 = BlockFormat(Code.INT4, block=128)
QUANTIZED = [Code.INT8, Code.INT4]
VERBATIM = [Code.FLOAT32, Code.BFLOAT16, Code.FLOAT16, Code.BYTE, Code.EXACT]


@pytest.mark.parametrize("block", [0, 1, 16, 31, 33, 48, 100, 2047, 4095, 8192, -128])
@pytest.mark.parametrize("code", QUANTIZED)
def test_a_block_that_is_no_power_of_two_from_32_to_4096_is_refused(code: Code, block: int) -> None:
    with pytest.raises(ValueError, match=f"block must be a power of two from 32 to 4096, not {block}$"):
        BlockFormat(code, block=block)


@pytest.mark.parametrize("block", [32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_every_power_of_two_from_32_to_4096_is_a_block(block: int) -> None:
    assert BlockFormat(Code.INT8, block=block).block == block


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"code": 4}, "code must be a Code, not 4"),
        ({"code": "int8"}, "code must be a Code, not 'int8'"),
        ({"code": ValueType.FLOAT32}, "code must be a Code, not <ValueType.FLOAT32: 0>"),
        ({"code": Code.INT8, "scale": 1}, "scale must be a ScaleType, not 1"),
        ({"code": Code.INT8, "scale": Code.BFLOAT16}, "scale must be a ScaleType, not <Code.BFLOAT16: 1>"),
        ({"code": Code.INT8, "rounding": True}, "rounding must be a Rounding, not True"),
        ({"code": Code.INT8, "block": 128.0}, "block must be an int and rotate a bool, not 128.0 and False"),
        ({"code": Code.INT8, "block": "128"}, "block must be an int and rotate a bool, not '128' and False"),
        ({"code": Code.INT8, "rotate": 1}, "block must be an int and rotate a bool, not 2048 and 1"),
    ],
)
def test_fields_of_the_wrong_type_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError) as caught:
        BlockFormat(**fields)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("code", VERBATIM)
@pytest.mark.parametrize(
    "field",
    [{"block": 128}, {"scale": ScaleType.FLOAT32}, {"rotate": True}, {"rounding": Rounding.STOCHASTIC}],
    ids=lambda field: next(iter(field)),
)
def test_codes_that_keep_values_take_no_other_field(code: Code, field: dict[str, Any]) -> None:
    sentence = f"{code.name} keeps values as they are: it takes no block, scale, rotation or rounding"
    with pytest.raises(ValueError, match=sentence):
        BlockFormat(code, **field)
    assert not BlockFormat(code).quantized


def test_formats_are_values() -> None:
    """They are keys of caches and part of the digest that ranks compare."""
    assert BlockFormat(Code.INT4, block=128) == INT4
    assert hash(BlockFormat(Code.INT4, block=128)) == hash(INT4)
    assert dataclasses.replace(INT4, rotate=True) != INT4
    with pytest.raises(dataclasses.FrozenInstanceError):
        INT4.block = 64  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fmt", "numel", "payload", "blocks", "record"),
    [
        (INT8, 0, 0, 0, 0),
        (INT8, 1, 32, 1, 48),
        (INT8, 32, 32, 1, 48),
        (INT8, 33, 64, 1, 80),
        (INT8, 4096, 4096, 2, 4112),
        (INT8, 4097, 4128, 3, 4144),
        (INT8, 8 * 2048, 16384, 8, 16400),
        (INT8, 8 * 2048 + 1, 16416, 9, 16448),
        (INT8, 2**40, 2**40, 2**29, 2**40 + 2**30),
        (INT4, 0, 0, 0, 0),
        (INT4, 1, 16, 1, 32),
        (INT4, 128, 64, 1, 80),
        (INT4, 129, 80, 2, 96),
        (INT4, 4096, 2048, 32, 2112),
        (INT4, 4097, 2064, 33, 2144),
        (BlockFormat(Code.INT8, block=512, scale=ScaleType.FLOAT32), 4096, 4096, 8, 4128),
        (BlockFormat(Code.INT8, block=512, scale=ScaleType.FLOAT32), 4097, 4128, 9, 4176),
        (BlockFormat(Code.INT4, block=32, rotate=True, rounding=Rounding.STOCHASTIC), 4096, 2048, 128, 2304),
        (BlockFormat(Code.FLOAT32), 0, 0, 0, 0),
        (BlockFormat(Code.FLOAT32), 5, 32, 0, 32),
        (BlockFormat(Code.BFLOAT16), 8, 16, 0, 16),
        (BlockFormat(Code.FLOAT16), 9, 32, 0, 32),
        (BlockFormat(Code.BYTE), 17, 32, 0, 32),
    ],
    ids=str,
)
def test_wire_sizes(fmt: BlockFormat, numel: int, payload: int, blocks: int, record: int) -> None:
    assert fmt.payload_nbytes(numel) == payload
    assert fmt.blocks(numel) == blocks
    assert fmt.record_nbytes(numel) == record


@pytest.mark.parametrize(
    ("fmt", "bits"),
    [
        *((BlockFormat(Code.INT8, block=64, scale=scale), 8) for scale in ScaleType),
        *((BlockFormat(Code.INT4, block=64, scale=scale), 4) for scale in ScaleType),
        (BlockFormat(Code.FLOAT32), 32),
        (BlockFormat(Code.BFLOAT16), 16),
        (BlockFormat(Code.FLOAT16), 16),
        (BlockFormat(Code.BYTE), 8),
    ],
    ids=str,
)
def test_records_are_aligned_and_hold_what_they_must(fmt: BlockFormat, bits: int) -> None:
    """Payloads of whole groups of 32; payload and scales end on 16 bytes, with at most 15 unused."""
    for numel in [*range(300), 65535, 65536, 65537]:
        values = -(-numel // 32) * 32 if fmt.quantized else numel
        scales = -(-numel // 64) * fmt.scale.itemsize if fmt.quantized else 0
        payload, record = fmt.payload_nbytes(numel), fmt.record_nbytes(numel)
        assert payload % 16 == record % 16 == 0, numel
        assert values * bits <= payload * 8 < values * bits + 16 * 8, numel
        assert scales <= record - payload < scales + 16, numel


@pytest.mark.parametrize(
    ("fmt", "bits_per_value"),
    [
        (Formats.default().weights, 8 + 16 / 2048),
        (Formats.default().gradients_intra, 8 + 16 / 512),
        (Formats.default().gradients_inter, 4 + 16 / 128),
        (Formats.zeropp().gradients_inter, 4 + 16 / 128),
    ],
    ids=str,
)
def test_bits_per_value_of_the_presets_scales_included(fmt: BlockFormat, bits_per_value: float) -> None:
    numel = 1 << 24
    assert fmt.record_nbytes(numel) * 8 / numel == bits_per_value


def test_exact_takes_the_type_of_the_values() -> None:
    exact = BlockFormat(Code.EXACT)
    for values, code in zip(ValueType, [Code.FLOAT32, Code.BFLOAT16, Code.FLOAT16, Code.BYTE], strict=True):
        assert exact.resolve(values) == BlockFormat(code)
        assert exact.resolve(values).payload_nbytes(64) == 64 * values.itemsize
        assert INT4.resolve(values) is INT4
    for size in (exact.payload_nbytes, exact.record_nbytes):
        with pytest.raises(ValueError, match="EXACT format has no size until it is resolved"):
            size(64)


def test_item_sizes() -> None:
    assert [kind.itemsize for kind in ValueType] == [4, 2, 2, 1]
    assert [scale.itemsize for scale in ScaleType] == [2, 4]


@pytest.mark.parametrize(
    ("fmt", "text"),
    [
        (INT8, "int8/2048"),
        (INT4, "int4/128"),
        (BlockFormat(Code.INT4, block=128, rotate=True), "int4/128 rotated"),
        (
            BlockFormat(Code.INT8, 32, ScaleType.FLOAT32, rotate=True, rounding=Rounding.STOCHASTIC),
            "int8/32 float32 scales rotated stochastic",
        ),
        (BlockFormat(Code.BFLOAT16), "bfloat16"),
        (BlockFormat(Code.EXACT), "exact"),
    ],
)
def test_formats_say_what_they_are(fmt: BlockFormat, text: str) -> None:
    assert str(fmt) == text


def test_presets() -> None:
    bfloat16, nearest = ScaleType.BFLOAT16, Rounding.NEAREST
    default = Formats.default()
    assert default.weights == BlockFormat(Code.INT8, 2048, bfloat16, False, nearest)
    assert default.gradients_intra == BlockFormat(Code.INT8, 512, bfloat16, False, nearest)
    assert default.gradients_inter == BlockFormat(Code.INT4, 128, bfloat16, True, nearest)
    zeropp = Formats.zeropp()
    assert zeropp.weights.code is Code.INT8
    assert zeropp.gradients_intra == zeropp.gradients_inter
    assert zeropp.gradients_inter.code is Code.INT4
    exact = Formats.exact()
    assert exact.weights == exact.gradients_intra == exact.gradients_inter == BlockFormat(Code.EXACT)


@pytest.mark.parametrize("name", ["seed", "stream"])
@pytest.mark.parametrize("value", [-1, 2**64])
def test_noise_takes_keys_of_64_bits(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must fit 64 unsigned bits, not {value}$"):
        Noise(**{"seed": 0, "stream": 0, name: value})
    assert getattr(Noise(**{"seed": 0, "stream": 0, name: 2**64 - 1}), name) == 2**64 - 1


@pytest.mark.parametrize("name", ["offset", "pitch"])
@pytest.mark.parametrize("value", [1, 31, 33])
def test_noise_starts_at_whole_groups(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a multiple of 32, not {value}$"):
        Noise(**{"seed": 0, "stream": 0, name: value})
    assert getattr(Noise(**{"seed": 0, "stream": 0, name: 96}), name) == 96


@pytest.mark.parametrize("name", ["seed", "stream", "offset", "pitch"])
@pytest.mark.parametrize("value", [1.5, True, "1"])
def test_noise_takes_integers(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an int, not {value!r}$"):
        Noise(**{"seed": 0, "stream": 0, name: value})  # type: ignore[arg-type]


def test_noise_cannot_start_before_zero() -> None:
    with pytest.raises(ValueError, match="offset must fit 64 unsigned bits, not -32$"):
        Noise(seed=0, stream=0, offset=-32)


def test_formats_are_block_formats() -> None:
    with pytest.raises(TypeError, match="gradients_intra must be a BlockFormat, not 'int8'$"):
        Formats(BlockFormat(Code.INT8), "int8", BlockFormat(Code.INT4))  # type: ignore[arg-type]
