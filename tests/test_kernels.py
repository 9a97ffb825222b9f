"""Every kernel against the reference, bit for bit.

The reference is slow: its answer is computed once for a case and compared with every instruction set, alone
and over threads.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import expected
import pytest
import torch

from zpp.format import BlockFormat, Code, Noise, Rounding, ScaleType
from zpp.kernels import host
from zpp.kernels.host import HostKernels
from zpp.kernels.numpy_backend import ReferenceKernels
from zpp.kernels.operands import VALUE_TYPES, Parts

REFERENCE = ReferenceKernels()
LIBRARY = host.load_library()
LEVELS = range(LIBRARY.zpp_best_level() + 1) if LIBRARY else range(0)
HOST = {f"level {level}": HostKernels(LIBRARY, 1, level) for level in LEVELS if LIBRARY}
THREADED = {f"level {level}, 3 threads": HostKernels(LIBRARY, 3, level) for level in LEVELS if LIBRARY}
needs_the_library = pytest.mark.skipif(LIBRARY is None, reason="the C++ kernels were not built")

SHORT = [0, 1, 7, 31, 32, 33, 127, 4097]
LONG = [65536 + 4096 + 5, 3 * 65536]
"""Values that several threads share: the first and the last one's parts differ in length."""
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
SPECIAL = [float("nan"), float("inf"), -float("inf"), 3.4028234e38, -3.3e38, 1e38, 65504.0, -65504.0, 65519.0]
SPECIAL += [1e-45, -1e-40, 1.2e-38, 6e-8, -6.1e-5, 0.0, -0.0, 127.0, -8.0]


def test_the_library_is_built_where_a_compiler_is() -> None:
    """Who builds zpp without on purpose names no compiler in CXX, to setup.py and here."""
    names = shlex.split(os.environ.get("CXX", ""))[:1] or ["c++", "g++", "clang++"]
    compilers = [path for path in map(shutil.which, names) if path]
    if not compilers and LIBRARY is None:
        pytest.skip(f"none of {', '.join(names)} is here: zpp uses the reference")
    assert LIBRARY is not None, (
        f"{compilers[0]} is here and zpp/kernels/_host.so is not: build it with setup.py"
    )


def patterns(numel: int, seed: int) -> Iterator[torch.Tensor]:
    """Normal, heavy-tailed, tied, tiny, huge, zeros, groups of any magnitude, scattered special values."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, numel, generator=generator)
    yield normal
    yield normal * torch.randn(4, numel, generator=generator).exp() ** 3
    yield torch.randint(-2, 3, (4, numel), generator=generator).float()
    yield normal * 1e-40
    yield normal * 1e38
    yield torch.zeros(4, numel)
    powers = torch.randint(-149, 128, (4, -(-numel // 32)), generator=generator).double()
    spread = normal * 2.0 ** powers.repeat_interleave(32, dim=1)[:, :numel]
    yield spread.clamp(-3.4e38, 3.4e38).float()
    scattered = normal.clone()
    for i, special in enumerate(SPECIAL):
        if numel:
            scattered[i % 4, (i * 997) % numel] = special
    yield scattered


@lru_cache(maxsize=64)
def sources(numel: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """The patterns in `dtype`, and bits at random. Long ones are for the cut over threads: a few of them."""
    made = [values.to(dtype) for values in patterns(numel, seed)]
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (4, numel), generator=generator, dtype=torch.int64).to(torch.int32)
    made.append(bits.view(torch.float32) if dtype is torch.float32 else bits.to(torch.int16).view(dtype))
    return made if numel < 65536 else made[-2:]


@lru_cache(maxsize=64)
def mixed_sources(numel: int, peers: int) -> list[list[torch.Tensor]]:
    """float32 values of several peers: all of one pattern, then each of another one."""
    every = [sources(numel, torch.float32, seed) for seed in range(peers)]
    alike = [list(case) for case in zip(*every, strict=True)]
    return [*alike, [every[peer][(3 * peer + 1) % len(alike)] for peer in range(peers)]]


@lru_cache(maxsize=8)
def peer_records(fmt: BlockFormat, numel: int, peers: int) -> list[tuple[torch.Tensor, ...]]:
    """Each peer's records [4, record_nbytes], for each of the mixed sources."""
    made = []
    for case in mixed_sources(numel, peers):
        made.append(empty_records(fmt, numel, peers, 4).unbind())
        for src, record in zip(case, made[-1], strict=True):
            REFERENCE.encode(src, fmt, record, noise=NOISE)
    return made


def empty_records(fmt: BlockFormat, numel: int, *leading: int) -> torch.Tensor:
    return torch.full((*leading, fmt.record_nbytes(numel)), 0xA5, dtype=torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(expected.bits(a), expected.bits(b))


def compare(case: str, out: torch.Tensor, operation: str, *operands: Any, **options: Any) -> torch.Tensor:
    """Fill `out` by the reference and hold every host kernel to it, byte for byte; returns `out`.

    Starting threads for a few values takes longer than all else here: only long outputs, and empty ones.
    """
    getattr(REFERENCE, operation)(*operands, out=out, **options)
    got = torch.empty_like(out)
    for name, kernels in (HOST if 0 < out.numel() < 6000 else HOST | THREADED).items():
        expected.bits(got).fill_(0xA5)  # what a kernel leaves unwritten shows
        getattr(kernels, operation)(*operands, out=got, **options)
        wrong = (expected.bits(got) != expected.bits(out)).nonzero()
        if len(wrong):
            where = f"{len(wrong)} of {out.nbytes} bytes differ, the first at {int(wrong[0])}"
            pytest.fail(f"{operation}, {name}: {case}: {where}")
    return out


@needs_the_library
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encode_and_decode(fmt: BlockFormat, dtype: torch.dtype) -> None:
    for numel in SHORT + LONG:
        for source, src in enumerate(sources(numel, dtype)):
            case = f"{numel} values of source {source}"
            record = empty_records(fmt, numel, 4)
            compare(case, record, "encode", src, fmt, rows=2, noise=NOISE)
            # A record does not tell what it was made from: one source type meets all types of output.
            for out_dtype in DTYPES if dtype is torch.float32 else [dtype]:
                out = torch.empty(4, numel, dtype=out_dtype)
                compare(f"{case} to {out_dtype}", out, "decode", record, fmt, rows=2)


@needs_the_library
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("peers", "numel"), [(3, 0), (3, 1), (1, 33), (3, 33), (17, 33), (3, 4097), (2, LONG[0])]
)
def test_decode_reduce(fmt: BlockFormat, peers: int, numel: int) -> None:
    for source, records in enumerate(peer_records(fmt, numel, peers)):
        for dtype, factor in itertools.product(DTYPES, (1 / 3, 3.5)):
            case, out = f"source {source} to {dtype}, factor {factor}", torch.empty(4, numel, dtype=dtype)
            compare(case, out, "decode_reduce", records, fmt, factor=factor)


@needs_the_library
@pytest.mark.parametrize("out_fmt", FORMATS, ids=str)  # the inner loop: `peer_records` keeps one format's
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_decode_reduce_encode(fmt: BlockFormat, out_fmt: BlockFormat) -> None:
    for peers, numel in [(3, 0), (3, 1), (1, 33), (3, 33), (3, 4097)]:
        for source, records in enumerate(peer_records(fmt, numel, peers)):
            case, out = f"{peers} x {numel} values of source {source}", empty_records(out_fmt, numel, 4)
            compare(case, out, "decode_reduce_encode", records, fmt, out_fmt, numel=numel, noise=NOISE)


@needs_the_library
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_decode_reduce_encode_over_threads(fmt: BlockFormat) -> None:
    """Into the next format of the list: every format is read once and written once."""
    out_fmt, numel = FORMATS[(FORMATS.index(fmt) + 1) % len(FORMATS)], LONG[0]
    for source, records in enumerate(peer_records(fmt, numel, 2)):
        out = empty_records(out_fmt, numel, 4)
        case = f"{numel} values of source {source} to {out_fmt}"
        compare(case, out, "decode_reduce_encode", records, fmt, out_fmt, numel=numel, noise=NOISE)


@needs_the_library
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_many_short_chunks(fmt: BlockFormat) -> None:
    """Threads share whole chunks; the table is not square, so that its two sides cannot be mistaken."""
    src = sources(33 * 105, torch.float32)[0].view(420, 33)
    record = compare("6 rows", empty_records(fmt, 33, 420), "encode", src, fmt, rows=6, noise=NOISE)
    compare("6 rows", torch.empty(420, 33), "decode", record, fmt, rows=6)
    records = record.view(2, 210, -1).unbind()
    compare("2 peers", torch.empty(210, 33), "decode_reduce", records, fmt, factor=0.5)
    for out_fmt in (FORMATS[2], FORMATS[4], FORMATS[9]):
        case, out = f"2 peers to {out_fmt}", empty_records(out_fmt, 33, 210)
        compare(case, out, "decode_reduce_encode", records, fmt, out_fmt, numel=33, noise=NOISE)


def pieces(total: int, dtype: torch.dtype) -> list[tuple[int, torch.Tensor]]:
    """Tensors over [0, total): some with gaps between them, some on 16-byte boundaries, one empty."""
    values, made, start = sources(2 * total, dtype)[0][0], [], 5
    for i, numel in enumerate([700, 0, 1, 4091, 2048, 8192, 1, 1, 333]):
        start += 32 * (i % 3)
        if start + numel < total:
            made.append((start, values[start + i % 2 : start + i % 2 + numel]))
            start += numel
    return made


def joined(parts: Parts, count: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.zeros(count * numel, dtype=dtype)
    for start, tensor in parts:
        flat[start : start + tensor.numel()] = tensor
    return flat.view(count, numel)


@needs_the_library
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_as_good_as_a_copy_of_them(fmt: BlockFormat, dtype: torch.dtype) -> None:
    for numel in (0, 1, 1056, 4096, 5000, LONG[0]):
        parts, kind = pieces(4 * numel, dtype), VALUE_TYPES[dtype]
        want = empty_records(fmt, numel, 4)
        REFERENCE.encode(joined(parts, 4, numel, dtype), fmt, want, rows=2, noise=NOISE)
        for name, kernels in (HOST | THREADED | {"reference": REFERENCE}).items():
            got = empty_records(fmt, numel, 4)
            kernels.encode_parts(parts, kind, fmt, got, numel, rows=2, noise=NOISE)
            assert torch.equal(got, want), (name, numel)


@pytest.mark.parametrize("made", [REFERENCE, *list(HOST.values())[:1]], ids=["reference", *list(HOST)[:1]])
def test_wrong_parts_are_refused(made: HostKernels | ReferenceKernels) -> None:
    fmt, kind, part = BlockFormat(Code.INT8), VALUE_TYPES[torch.float32], torch.zeros(64)
    out = empty_records(fmt, 64, 2)
    for parts in ([(0, part), (63, part)], [(65, part)], [(64, part), (0, part)], [(-1, part)]):
        with pytest.raises(ValueError, match=r"the part \[.*\) does not lie between"):
            made.encode_parts(parts, kind, fmt, out, 64)
    with pytest.raises(TypeError, match="the part at 0 of torch.float16 cannot be encoded from float32"):
        made.encode_parts([(0, part.half())], kind, fmt, out, 64)
    with pytest.raises(ValueError, match="the part at 0 must be contiguous"):
        made.encode_parts([(0, torch.zeros(64, 2)[:, 0])], kind, fmt, out, 64)


@needs_the_library
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_and_unaligned(fmt: BlockFormat, dtype: torch.dtype) -> None:
    values = sources(4 * 1003 + 1, dtype)[0][0]
    src = values[1:].view(4, 1003)[:, 3:500]
    record = compare("strided", empty_records(fmt, 497, 4), "encode", src, fmt, noise=NOISE)
    plain = torch.empty(4, 497, dtype=dtype)
    REFERENCE.decode(record, fmt, plain)
    reduced = torch.empty(4, 497, dtype=dtype)
    REFERENCE.decode_reduce([record], fmt, reduced, factor=0.5)
    for name, kernels in HOST.items():
        around = torch.zeros(4 * 1003 + 1, dtype=dtype)
        table = around[1:].view(4, 1003)
        for want in (plain, reduced):
            if want is plain:
                kernels.decode(record, fmt, table[:, 3:500])
            else:
                kernels.decode_reduce([record], fmt, table[:, 3:500], factor=0.5)
            assert same(table[:, 3:500], want), name
            assert not around[0], name
            assert not table[:, 500:].any(), name
            assert not table[:, :3].any(), name


@needs_the_library
def test_flush_to_zero_mode_of_the_caller_changes_nothing() -> None:
    fmt, src = BlockFormat(Code.FLOAT16), torch.full((1, 64), 1e-7)
    want = empty_records(fmt, 64, 1)
    REFERENCE.encode(src, fmt, want)
    for name, kernels in HOST.items():
        got, decoded = empty_records(fmt, 64, 1), torch.empty(1, 64)
        torch.set_flush_denormal(True)
        try:
            kernels.encode(src, fmt, got)
            kernels.decode(got, fmt, decoded)
        finally:
            torch.set_flush_denormal(False)
        assert same(got, want), name
        assert decoded.min() > 0, name


@needs_the_library
def test_noise_beyond_the_last_element() -> None:
    """Elements are counted modulo 2**64, also inside a chunk."""
    fmt = BlockFormat(Code.INT8, block=64, rounding=Rounding.STOCHASTIC)
    noise = Noise(seed=2**64 - 1, stream=2**64 - 1, offset=2**64 - 64, pitch=2**63)
    compare("the end", empty_records(fmt, 128, 4), "encode", torch.randn(4, 128), fmt, noise=noise)


@pytest.mark.parametrize("made", [REFERENCE, *HOST.values()], ids=["reference", *HOST])
def test_bytes_travel_verbatim(made: HostKernels | ReferenceKernels) -> None:
    fmt, src = BlockFormat(Code.BYTE), torch.arange(4 * 99, dtype=torch.int64).to(torch.uint8).view(4, 99)
    records, out = empty_records(fmt, 99, 4), torch.empty_like(src)
    made.encode(src, fmt, records, rows=2)
    assert torch.equal(records[1, :99], src[2])
    assert not records[:, 99:].any()
    made.decode(records, fmt, out, rows=2)
    assert torch.equal(out, src)


@pytest.mark.parametrize("made", [REFERENCE, *list(HOST.values())[:1]], ids=["reference", *list(HOST)[:1]])
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


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("out_fmt", FORMATS, ids=str)
@needs_the_library
def test_what_stands_behind_the_last_value_of_a_record_is_no_value(
    fmt: BlockFormat, out_fmt: BlockFormat
) -> None:
    """Encoders write zeros there; a record from elsewhere may hold anything."""
    numel = 33
    records = empty_records(fmt, numel, 2, 1).unbind()
    for record in records:
        REFERENCE.encode(torch.ones(1, numel), fmt, record, noise=NOISE)
        if fmt.quantized:
            record[:, 33 if fmt.code is Code.INT8 else 17 : fmt.payload_nbytes(numel)] = 0x77
    got, want = empty_records(out_fmt, numel, 1), empty_records(out_fmt, numel, 1)
    REFERENCE.decode_reduce_encode(records, fmt, out_fmt, want, numel, noise=NOISE)
    for name, kernels in HOST.items():
        kernels.decode_reduce_encode(records, fmt, out_fmt, got, numel, noise=NOISE)
        assert torch.equal(got, want), name
