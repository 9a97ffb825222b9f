"""Every kernel against the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import expected
import pytest
import torch

from zpp.format import BlockFormat, Code, Noise, Rounding, ScaleType
from zpp.kernels import host
from zpp.kernels.host import HostKernels
from zpp.kernels.numpy_backend import ReferenceKernels

REFERENCE = ReferenceKernels()
LIBRARY = host.load_library()
BEST = LIBRARY.zpp_best_level() if LIBRARY else -1
LENGTHS = [0, 1, 7, 31, 32, 33, 127, 4097, 65536 + 4096 + 5, 3 * 65536]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOISE = Noise(seed=0x1234_5678_9ABC_DEF0, stream=2**40 + 3, offset=4096, pitch=1 << 20)
FORMATS = [
    BlockFormat(Code.INT8),
    BlockFormat(Code.INT8, block=32, scale=ScaleType.FLOAT32),
    BlockFormat(Code.INT8, block=512, rotate=True),
    BlockFormat(Code.INT8, block=4096, rounding=Rounding.STOCHASTIC),
    BlockFormat(Code.INT4, block=128),
    BlockFormat(Code.INT4, block=128, rotate=True),
    BlockFormat(Code.INT4, block=64, scale=ScaleType.FLOAT32, rotate=True, rounding=Rounding.STOCHASTIC),
    BlockFormat(Code.FLOAT32),
    BlockFormat(Code.BFLOAT16),
    BlockFormat(Code.FLOAT16),
]


def test_the_library_is_built() -> None:
    assert LIBRARY is not None, "the C++ kernels were not built: is there a compiler?"


@pytest.fixture(params=[(level, threads) for level in range(BEST + 1) for threads in (1, 3)], ids=str)
def kernels(request: pytest.FixtureRequest) -> HostKernels:
    assert LIBRARY is not None
    return HostKernels(LIBRARY, request.param[1], request.param[0])


SPECIAL = [float("nan"), float("inf"), -float("inf"), 3.4028234e38, -3.3e38, 1e38, 65504.0, -65504.0, 65519.0]
SPECIAL += [1e-45, -1e-40, 1.2e-38, 6e-8, -6.1e-5, 0.0, -0.0, 127.0, -8.0]


def sources(numel: int, dtype: torch.dtype, seed: int = 0) -> Iterator[torch.Tensor]:
    """Normal, heavy-tailed, tied, tiny and huge values, zero blocks, and single special values."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, numel, generator=generator)
    yield normal.to(dtype)
    yield (normal * torch.randn(4, numel, generator=generator).exp() ** 3).to(dtype)
    yield torch.randint(-2, 3, (4, numel), generator=generator).to(dtype)
    yield (normal * 1e-40).to(dtype)
    yield (normal * 1e38).to(dtype)
    yield torch.zeros(4, numel, dtype=dtype)
    scattered = normal.clone()
    for i, special in enumerate(SPECIAL):
        if numel:
            scattered[i % 4, (i * 997) % numel] = special
    yield scattered.to(dtype)
    bits = torch.randint(-(2**31), 2**31, (4, numel), generator=generator, dtype=torch.int64).to(torch.int32)
    yield bits.view(torch.float32) if dtype is torch.float32 else bits.to(torch.int16).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(expected.bits(a), expected.bits(b))


def empty_records(fmt: BlockFormat, numel: int, *leading: int) -> torch.Tensor:
    return torch.full((*leading, fmt.record_nbytes(numel)), 0xA5, dtype=torch.uint8)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_and_decode(kernels: HostKernels, fmt: BlockFormat, dtype: torch.dtype) -> None:
    for numel in LENGTHS[: 8 if fmt.rounding is Rounding.STOCHASTIC else None]:
        for src in sources(numel, dtype):
            got, want = empty_records(fmt, numel, 4), empty_records(fmt, numel, 4)
            kernels.encode(src, fmt, got, rows=2, noise=NOISE)
            REFERENCE.encode(src, fmt, want, rows=2, noise=NOISE)
            assert same(got, want), numel
            for out_dtype in DTYPES:
                out, again = torch.empty(4, numel, dtype=out_dtype), torch.empty(4, numel, dtype=out_dtype)
                kernels.decode(want, fmt, out, rows=2)
                REFERENCE.decode(want, fmt, again, rows=2)
                assert same(out, again), (numel, out_dtype)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_decode_reduce(kernels: HostKernels, fmt: BlockFormat) -> None:
    for numel in (0, 1, 33, 4097):
        peers = [list(sources(numel, torch.float32, seed)) for seed in range(3)]
        for case in range(len(peers[0])):
            records = empty_records(fmt, numel, 3, 4)
            for peer, record in zip(peers, records, strict=True):
                REFERENCE.encode(peer[case], fmt, record, noise=NOISE)
            for dtype in DTYPES:
                got, want = torch.empty(4, numel, dtype=dtype), torch.empty(4, numel, dtype=dtype)
                kernels.decode_reduce(records, fmt, got, factor=1 / 3)
                REFERENCE.decode_reduce(records, fmt, want, factor=1 / 3)
                assert same(got, want), (numel, dtype, case)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("out_fmt", FORMATS, ids=str)
def test_decode_reduce_encode(kernels: HostKernels, fmt: BlockFormat, out_fmt: BlockFormat) -> None:
    for numel in (1, 33, 4097):
        peers = [list(sources(numel, torch.float32, seed)) for seed in range(3)]
        for case in range(len(peers[0])):
            records = empty_records(fmt, numel, 3, 4)
            for peer, record in zip(peers, records, strict=True):
                REFERENCE.encode(peer[case], fmt, record, noise=NOISE)
            got, want = empty_records(out_fmt, numel, 4), empty_records(out_fmt, numel, 4)
            kernels.decode_reduce_encode(records, fmt, out_fmt, got, numel, noise=NOISE)
            REFERENCE.decode_reduce_encode(records, fmt, out_fmt, want, numel, noise=NOISE)
            assert same(got, want), (numel, case)


@pytest.mark.parametrize("fmt", FORMATS[:6], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_unaligned(kernels: HostKernels, fmt: BlockFormat, dtype: torch.dtype) -> None:
    memory = next(sources(4 * 1003 + 1, dtype))[0, 1:].view(4, 1003)
    src = memory[:, 3:500]
    got, want = empty_records(fmt, 497, 4), empty_records(fmt, 497, 4)
    kernels.encode(src, fmt, got, noise=NOISE)
    REFERENCE.encode(src.clone(), fmt, want, noise=NOISE)
    assert same(got, want)
    around = torch.zeros(4 * 1003 + 1, dtype=dtype)
    kernels.decode(want, fmt, around[1:].view(4, 1003)[:, 3:500])
    plain = torch.empty(4, 497, dtype=dtype)
    REFERENCE.decode(want, fmt, plain)
    assert same(around[1:].view(4, 1003)[:, 3:500], plain)
    assert not around[1:].view(4, 1003)[:, 500:].any() and not around[1:].view(4, 1003)[:, :3].any()


def test_flush_to_zero_mode_of_the_caller_changes_nothing(kernels: HostKernels) -> None:
    fmt, src = BlockFormat(Code.FLOAT16), torch.full((1, 64), 1e-7)
    want, got = empty_records(fmt, 64, 1), empty_records(fmt, 64, 1)
    REFERENCE.encode(src, fmt, want)
    decoded = torch.empty(1, 64)
    torch.set_flush_denormal(True)
    try:
        kernels.encode(src, fmt, got)
        kernels.decode(got, fmt, decoded)
    finally:
        torch.set_flush_denormal(False)
    assert same(got, want) and decoded.min() > 0


def test_bytes_travel_verbatim(kernels: HostKernels) -> None:
    fmt, src = BlockFormat(Code.BYTE), torch.arange(4 * 99, dtype=torch.int64).to(torch.uint8).view(4, 99)
    records, out = empty_records(fmt, 99, 4), torch.empty_like(src)
    kernels.encode(src, fmt, records, rows=2)
    assert torch.equal(records[1, :99], src[2]) and not records[:, 99:].any()
    kernels.decode(records, fmt, out, rows=2)
    assert torch.equal(out, src)


@pytest.mark.parametrize("made", [REFERENCE, HostKernels(LIBRARY, 1) if LIBRARY else None])
def test_wrong_operands_are_refused_with_their_numbers(made: HostKernels | ReferenceKernels) -> None:
    fmt = BlockFormat(Code.INT8)
    src, out = torch.zeros(4, 64), empty_records(fmt, 64, 4)
    with pytest.raises(ValueError, match=r"out must be of shape \(4, 80\) for 64 values .* not \(4, 79\)"):
        made.encode(src, fmt, out[:, :79].contiguous())
    with pytest.raises(ValueError, match="contiguous rows, not strides"):
        made.encode(torch.zeros(64, 4).T, fmt, out)
    with pytest.raises(TypeError, match="torch.int32 cannot be encoded"):
        made.encode(src.int(), fmt, out)
    with pytest.raises(TypeError, match="uint8 cannot be encoded as int8/2048"):
        made.encode(src.byte(), fmt, out)
    with pytest.raises(ValueError, match="4 chunks do not form a table of 3 rows"):
        made.encode(src, fmt, out, rows=3)
    with pytest.raises(ValueError, match="needs a Noise"):
        made.encode(src, BlockFormat(Code.INT8, rounding=Rounding.STOCHASTIC), out)
    with pytest.raises(ValueError, match="count, numel"):
        made.decode(out, fmt, torch.zeros(256))
