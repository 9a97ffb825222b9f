"""What a record looks like: the encoding of values into payload and scales, and its size in bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import lru_cache

from zpp.layout import GROUP, MAX_BLOCK, RECORD_ALIGNMENT, ceil_div, round_up


class ValueType(IntEnum):
    """The type of the values that are encoded or decoded. The numbers are those of the C interface."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    BYTE = 3

    @property
    def itemsize(self) -> int:
        return (4, 2, 2, 1)[self]


class Code(IntEnum):
    """How one value is written. The numbers are those of the C interface.

    The first four keep values as they are (converted to that type where the source differs); ``EXACT``
    stands for whichever of them matches the caller's tensor.
    """

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    BYTE = 3
    INT8 = 4
    INT4 = 5
    EXACT = 15


class ScaleType(IntEnum):
    BFLOAT16 = 0
    FLOAT32 = 1

    @property
    def itemsize(self) -> int:
        return (2, 4)[self]


class Rounding(IntEnum):
    NEAREST = 0
    STOCHASTIC = 1


_BITS = {Code.FLOAT32: 32, Code.BFLOAT16: 16, Code.FLOAT16: 16, Code.BYTE: 8, Code.INT8: 8, Code.INT4: 4}


@dataclass(frozen=True)
class BlockFormat:
    """Everything that fixes an encoding.

    ``block`` values share one scale (a power of two, 32 to 4096). ``rotate`` applies a Hadamard
    transform over 32 values before encoding, which spreads outliers. Codes that do not quantize take
    none of the other fields.
    """

    code: Code
    block: int = 2048
    scale: ScaleType = ScaleType.BFLOAT16
    rotate: bool = False
    rounding: Rounding = Rounding.NEAREST

    def __post_init__(self) -> None:
        for name, kind in (("code", Code), ("scale", ScaleType), ("rounding", Rounding)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be a {kind.__name__}, not {getattr(self, name)!r}")
        if not isinstance(self.block, int) or not isinstance(self.rotate, bool):
            raise TypeError(f"block must be an int and rotate a bool, not {self.block!r} and {self.rotate!r}")
        if not GROUP <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two from {GROUP} to {MAX_BLOCK}, not {self.block}")
        if not self.quantized and any(getattr(self, f.name) != f.default for f in fields(self)[1:]):
            raise ValueError(
                f"{self.code.name} keeps values as they are: it takes no block, scale, rotation or rounding"
            )

    @property
    def quantized(self) -> bool:
        return self.code in (Code.INT8, Code.INT4)

    def resolve(self, values: ValueType) -> BlockFormat:
        """This format with ``EXACT`` replaced by the code that keeps `values` as they are."""
        return replace(self, code=Code(values)) if self.code is Code.EXACT else self

    def payload_nbytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` values; quantized payloads are padded to whole groups of 32."""
        if self.code is Code.EXACT:
            raise ValueError("an EXACT format has no size until it is resolved for a value type")
        bits = _BITS[self.code]
        values = round_up(numel, GROUP) if self.quantized else numel
        return round_up(values * bits // 8, RECORD_ALIGNMENT)

    def blocks(self, numel: int) -> int:
        return ceil_div(numel, self.block) if self.quantized else 0

    def scales_nbytes(self, numel: int) -> int:
        """Bytes of the scales of `numel` values."""
        return round_up(self.blocks(numel) * self.scale.itemsize, RECORD_ALIGNMENT)

    def record_nbytes(self, numel: int) -> int:
        """Bytes of one record of `numel` values: payload, then scales, each padded to 16 bytes."""
        return _record_nbytes(self, numel)

    def __str__(self) -> str:
        if not self.quantized:
            return self.code.name.lower()
        parts = [f"{self.code.name.lower()}/{self.block}"]
        parts += ["float32 scales"] * (self.scale is ScaleType.FLOAT32)
        parts += ["rotated"] * self.rotate
        parts += ["stochastic"] * (self.rounding is Rounding.STOCHASTIC)
        return " ".join(parts)


@lru_cache(maxsize=4096)
def _record_nbytes(fmt: BlockFormat, numel: int) -> int:
    return fmt.payload_nbytes(numel) + fmt.scales_nbytes(numel)


@dataclass(frozen=True)
class Noise:
    """Where the random numbers of stochastic rounding come from: Philox4x32-10 (Salmon et al., 2011).

    Value i of chunk k draws the word for element ``k * pitch + offset + i`` (modulo 2**64) of `stream` under
    `seed`, so that results repeat bit for bit and do not depend on how a tensor is cut. `pitch` and
    `offset` are multiples of 32.
    """

    seed: int
    stream: int
    offset: int = 0
    pitch: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if type(value) is not int:
                raise TypeError(f"{name} must be an int, not {value!r}")
            if not 0 <= value < 2**64:
                raise ValueError(f"{name} must fit 64 unsigned bits, not {value}")
            if name in ("offset", "pitch") and value % GROUP:
                raise ValueError(f"{name} must be a multiple of {GROUP}, not {value}")


@dataclass(frozen=True)
class Formats:
    """The encodings of one training run: weights, and gradients inside and between nodes."""

    weights: BlockFormat
    gradients_intra: BlockFormat
    gradients_inter: BlockFormat

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, BlockFormat):
                raise TypeError(f"{field.name} must be a BlockFormat, not {value!r}")

    @classmethod
    def exact(cls) -> Formats:
        """Nothing is quantized."""
        return cls(BlockFormat(Code.EXACT), BlockFormat(Code.EXACT), BlockFormat(Code.EXACT))

    @classmethod
    def default(cls) -> Formats:
        """int8 weights; gradients int8 inside the node, rotated int4 between nodes."""
        return cls(
            weights=BlockFormat(Code.INT8, block=2048),
            gradients_intra=BlockFormat(Code.INT8, block=512),
            gradients_inter=BlockFormat(Code.INT4, block=128, rotate=True),
        )

    @classmethod
    def zeropp(cls) -> Formats:
        """The ZeRO++ paper's choice: int8 weights, gradients int4 on both hops."""
        return cls(
            weights=BlockFormat(Code.INT8, block=2048),
            gradients_intra=BlockFormat(Code.INT4, block=128),
            gradients_inter=BlockFormat(Code.INT4, block=128),
        )
