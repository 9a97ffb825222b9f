"""All collectives over in-process ranks, against the reference, bit for bit."""

from __future__ import annotations

from typing import Any

import expected
import pytest
import torch
import torch.distributed as dist

import zpp
from zpp.format import BlockFormat, Code, Formats, Rounding
from zpp.topology import Axis
from zpp.transport.inprocess import InProcessTransport, run

WORLDS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (16, 8), (16, 2)]
SIZES = [0, 1, 7, 4097, 1009 * 64]
INT4 = BlockFormat(Code.INT4, block=128)
ROTATED = BlockFormat(Code.INT4, block=128, rotate=True)
INT8 = BlockFormat(Code.INT8, block=512)
EXACT = BlockFormat(Code.EXACT)


def communicator(transport: InProcessTransport, **settings: Any) -> zpp.Communicator:
    return zpp.Communicator(transport=transport, threads=1, **settings)


def values(rank: int, numel: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize(("world", "per_node"), WORLDS)
def test_all_gather_equals_the_reference(world: int, per_node: int) -> None:
    cases = [(n, fmt, dtype) for n in SIZES for fmt in (INT8, ROTATED, EXACT) for dtype in expected.KIND]

    def body(transport: InProcessTransport) -> list[torch.Tensor]:
        zp = communicator(transport)
        got = []
        for numel, fmt, dtype in cases:
            output = torch.empty(world * numel, dtype=dtype)
            zp.all_gather(output, values(transport.topology.rank, numel, dtype), fmt=fmt)
            got.append(output)
        zp.close()
        return got

    everyone = run(world, per_node, body)
    for i, (numel, fmt, dtype) in enumerate(cases):
        shards = [values(rank, numel, dtype) for rank in range(world)]
        want = torch.cat(shards) if world == 1 else expected.all_gather(shards, fmt, dtype)
        for got in everyone:
            assert torch.equal(expected.bits(got[i]), expected.bits(want)), (numel, fmt, dtype)


@pytest.mark.parametrize(("world", "per_node"), WORLDS)
def test_reduce_scatter_equals_the_reference(world: int, per_node: int) -> None:
    formats = [(INT8, ROTATED), (INT4, INT4), (ROTATED, ROTATED), (ROTATED, INT8), (EXACT, EXACT)]
    cases = [(n, f, dtype) for n in SIZES for f in formats for dtype in (torch.bfloat16, torch.float32)]

    def body(transport: InProcessTransport) -> list[torch.Tensor]:
        zp = communicator(transport)
        got = []
        for numel, pair, dtype in cases:
            output = torch.empty(numel)
            zp.reduce_scatter(output, values(transport.topology.rank, world * numel, dtype), formats=pair)
            got.append(output)
        zp.close()
        return got

    everyone = run(world, per_node, body)
    for i, (numel, pair, dtype) in enumerate(cases):
        fulls = [values(rank, world * numel, dtype) for rank in range(world)]
        want = [fulls[0].float()]
        if world > 1:
            want = expected.reduce_scatter(fulls, per_node, pair, torch.float32, 1 / world)
        for rank, got in enumerate(everyone):
            assert torch.equal(expected.bits(got[i]), expected.bits(want[rank])), (numel, pair, dtype)


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (8, 4), (3, 1), (2, 2)])
def test_the_mean_is_the_mean(world: int, per_node: int) -> None:
    """Least-squares slope against the float32 mean within 0.005 of 1 at int8, and a small error."""
    numel = 1 << 15

    def body(transport: InProcessTransport) -> torch.Tensor:
        output = torch.empty(numel)
        full = values(transport.topology.rank, world * numel, torch.float32)
        communicator(transport).reduce_scatter(output, full, formats=(INT8, INT8))
        return output

    got = torch.cat(run(world, per_node, body)).double()
    want = torch.stack([values(rank, world * numel, torch.float32) for rank in range(world)]).double().mean(0)
    assert abs(float(got @ want / (want @ want)) - 1) < 0.005
    assert float((got - want).norm() / want.norm()) < 0.02


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("fmt", [INT8, EXACT])
def test_pipelined_spans_do_not_change_a_bit(numel: int, fmt: BlockFormat) -> None:
    """Cutting a tensor into many jobs gives the same result, also with rounding noise."""
    noisy = BlockFormat(Code.INT4, block=128, rotate=True, rounding=Rounding.STOCHASTIC)

    def body(transport: InProcessTransport, span: int) -> list[torch.Tensor]:
        zp = communicator(transport, span=span)
        full = values(transport.topology.rank, 4 * numel)
        part, whole = torch.empty(numel), torch.empty(4 * numel, dtype=torch.bfloat16)
        zp.reduce_scatter(part, full, formats=(noisy, noisy))
        zp.all_gather(whole, full[:numel], fmt=fmt)
        zp.close()
        return [part, whole]

    whole = run(4, 2, lambda transport: body(transport, 1 << 22))
    cut = run(4, 2, lambda transport: body(transport, 4 * 4096))
    for a, b in zip(whole, cut, strict=True):
        assert all(torch.equal(expected.bits(x), expected.bits(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("world", "per_node"), [(1, 1), (4, 2), (6, 3), (3, 1)])
@pytest.mark.parametrize("numel", [0, 1, 7, 4097])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_all_reduce_gives_every_rank_the_same_sum(
    world: int, per_node: int, numel: int, dtype: torch.dtype
) -> None:
    def start(rank: int) -> torch.Tensor:
        return (100 * values(rank, numel, torch.float32)).to(dtype)

    def body(transport: InProcessTransport) -> torch.Tensor:
        tensor = start(transport.topology.rank)
        communicator(transport).all_reduce(tensor)
        return tensor

    everyone = run(world, per_node, body)
    assert all(torch.equal(got, everyone[0]) for got in everyone)
    want = torch.stack([start(rank).double() for rank in range(world)]).sum(0)
    if not dtype.is_floating_point:
        assert torch.equal(everyone[0].double(), want)
    elif numel:
        assert float((everyone[0].double() - want).norm() / want.norm()) < 0.15


@pytest.mark.parametrize(("world", "per_node"), [(1, 1), (2, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_parts_are_reduced_as_the_tensor_that_they_stand_for(
    world: int, per_node: int, dtype: torch.dtype
) -> None:
    """Also where ranks lack different parts, or all, and where a tensor goes in several spans."""
    numel = 3 * 4096 + 7

    def body(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor]:
        zp, rank = communicator(transport, span=world * 4096), transport.topology.rank
        full, parts = torch.zeros(world * numel, dtype=dtype), []
        for i, start in enumerate(range(64 * rank + 5, world * numel - 5000, 5000)):
            if (i + rank) % 3 and rank < 3:
                values = (100 * torch.randn(70, 4 + i, generator=torch.Generator().manual_seed(i))).to(dtype)
                parts.append((start, values))
                full[start : start + values.numel()] = values.flatten()
        got, want = (torch.empty(numel, dtype=dtype) for _ in range(2))
        op = dist.ReduceOp.SUM
        zp.reduce_scatter(want, full, op=op, formats=(INT8, ROTATED))
        zp.reduce_scatter(got, zpp.PartedTensor(world * numel, dtype, parts), op=op, formats=(INT8, ROTATED))
        zp.close()
        return got, want

    for got, want in run(world, per_node, body):
        assert want.any()
        assert torch.equal(expected.bits(got), expected.bits(want))


def test_works_may_be_waited_on_in_any_order() -> None:
    def body(transport: InProcessTransport) -> bool:
        zp = communicator(transport)
        rank = transport.topology.rank
        fulls = [values(100 * rank + i, 4 * 999) for i in range(6)]
        parts = [torch.empty(999) for _ in fulls]
        outs = [torch.empty(4 * 999, dtype=torch.bfloat16) for _ in fulls]
        works: list[Any] = []
        for full, part, out in zip(fulls, parts, outs, strict=True):
            works.append(zp.reduce_scatter(part, full, async_op=True))
            works.append(zp.all_gather(out, full[:999], async_op=True))
        order = works[::-1] if rank % 2 else works
        done = [work.wait() for work in order]
        futures = [work.get_future().wait() for work in works]
        again = [torch.empty(999) for _ in fulls]
        for full, part in zip(fulls, again, strict=True):
            zp.reduce_scatter(part, full)
        zp.close()
        same = all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
        return all(done) and len(futures) == 12 and same and all(w.is_success() for w in works)

    assert all(run(4, 2, body))


def test_shard_may_be_a_view_of_the_output() -> None:
    def body(transport: InProcessTransport) -> list[torch.Tensor]:
        zp = communicator(transport, span=4 * 4096)
        rank, numel = transport.topology.rank, 20_001
        apart = torch.empty(4 * numel, dtype=torch.bfloat16)
        together = torch.empty_like(apart)
        zp.all_gather(apart, values(rank, numel))
        mine = together[rank * numel : (rank + 1) * numel]
        mine.copy_(values(rank, numel))
        zp.all_gather(together, mine)
        return [apart, together]

    for apart, together in run(4, 2, body):
        assert torch.equal(apart, together)


def test_bytes_on_the_wire_are_those_of_the_format() -> None:
    """2 x 2 ranks: int8 sends a quarter of M between nodes to gather, int4 an eighth to reduce."""
    numel = 1 << 16
    formats = Formats.default()

    def body(transport: InProcessTransport) -> list[int]:
        zp = communicator(transport)
        out = torch.empty(4 * numel, dtype=torch.bfloat16)
        zp.all_gather(out, values(0, numel))
        gathered = zp.stats.wire_bytes(Axis.INTER)
        zp.reduce_scatter(torch.empty(numel), out)
        return [gathered, zp.stats.wire_bytes(Axis.INTER) - gathered, zp.stats.wire_bytes(Axis.INTRA)]

    for gathered, reduced, intra in run(4, 2, body):
        assert gathered == formats.weights.record_nbytes(numel) == numel + 2 * numel // 2048
        assert reduced == formats.gradients_inter.record_nbytes(numel) == numel // 2 + 2 * numel // 128
        assert intra == 2 * gathered + 2 * formats.gradients_intra.record_nbytes(numel)


@pytest.mark.parametrize("fmt", [INT8, EXACT])
def test_secondary_gathers_the_same_bits_inside_the_node(fmt: BlockFormat) -> None:
    def body(transport: InProcessTransport) -> tuple[bool, int]:
        zp = communicator(transport, span=8 * 4096)
        first = torch.empty(4 * 20_001, dtype=torch.bfloat16)
        second = torch.empty_like(first)
        secondary = zp.secondary_partition()
        zp.all_gather(first, values(transport.topology.rank, 20_001), fmt=fmt, secondary=secondary)
        secondary.stamp(7)
        before = zp.stats.wire_bytes(Axis.INTER)
        zp.all_gather_secondary(second, secondary, 7)
        crossed = zp.stats.wire_bytes(Axis.INTER) - before
        zp.close()
        return torch.equal(expected.bits(first), expected.bits(second)), crossed

    assert run(4, 2, body) == [(True, 0)] * 4


def test_secondary_of_another_generation_is_refused() -> None:
    def body(transport: InProcessTransport) -> None:
        zp = communicator(transport)
        output, shard = torch.empty(4 * 64, dtype=torch.bfloat16), values(0, 64)
        secondary = zp.secondary_partition()
        with pytest.raises(zpp.StaleSecondaryError, match="nothing complete"):
            zp.all_gather_secondary(output, secondary, 1)
        zp.all_gather(output, shard, secondary=secondary)
        secondary.stamp(1)
        with pytest.raises(zpp.StaleSecondaryError, match="holds generation 1, generation 2 was asked"):
            zp.all_gather_secondary(output, secondary, 2)
        zp.all_gather(output, shard, secondary=secondary)
        with pytest.raises(zpp.StaleSecondaryError):
            zp.all_gather_secondary(output, secondary, 1)

    run(4, 2, body)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("pair", [(INT8, ROTATED), (INT4, INT4), (EXACT, EXACT)])
def test_non_finite_gradients_reach_their_owner(bad: float, pair: tuple[BlockFormat, BlockFormat]) -> None:
    """One rank's NaN or Inf at one place: the owner's block is not finite, all else is."""
    numel, place = 4096, 2 * 4096 + 1000

    def body(transport: InProcessTransport) -> torch.Tensor:
        full = values(transport.topology.rank, 4 * numel)
        if transport.topology.rank == 3:
            full[place] = bad
        output = torch.empty(numel)
        communicator(transport).reduce_scatter(output, full, formats=pair)
        return output

    parts = run(4, 2, body)
    assert not torch.isfinite(parts[2][1000])
    broken = (~torch.isfinite(torch.cat(parts))).view(-1, 512).any(1)
    assert int(broken.sum()) == 1, "only the block that holds it"


def test_zeros_stay_zero() -> None:
    def body(transport: InProcessTransport) -> torch.Tensor:
        zp = communicator(transport)
        part, whole = torch.ones(4097), torch.ones(4 * 4097, dtype=torch.bfloat16)
        zp.reduce_scatter(part, torch.zeros(4 * 4097, dtype=torch.bfloat16))
        zp.all_gather(whole, torch.zeros(4097, dtype=torch.bfloat16))
        return torch.cat([part, whole.float()])

    assert all(not got.any() for got in run(4, 2, body))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64, torch.complex64, torch.bool])
def test_what_no_format_encodes_passes_through_exactly(dtype: torch.dtype) -> None:
    def start(rank: int) -> torch.Tensor:
        return (1000 * values(rank, 4 * 4097, torch.float32)).to(dtype)

    def body(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor, int]:
        zp = communicator(transport, span=4 * 4096)
        full = start(transport.topology.rank)
        part, whole = torch.empty(4097, dtype=dtype), torch.empty(4 * 4097, dtype=dtype)
        zp.reduce_scatter(part, full, op=dist.ReduceOp.SUM)
        zp.all_gather(whole, full[:4097])
        return part, whole, sum(zp.stats.snapshot().fallbacks.values())

    results = run(4, 2, body)
    total = start(0) + start(1) + (start(2) + start(3))  # the order of the hops
    assert torch.equal(torch.cat([part for part, _, _ in results]), total)
    for _, whole, fallbacks in results:
        assert torch.equal(whole, torch.cat([start(rank)[:4097] for rank in range(4)]))
        assert fallbacks == 2


def test_strict_refuses_what_it_cannot_compress() -> None:
    def body(transport: InProcessTransport) -> None:
        zp = communicator(transport, strict=True)
        with pytest.raises(TypeError, match="int32 cannot be compressed"):
            zp.all_gather(torch.empty(8, dtype=torch.int32), torch.empty(4, dtype=torch.int32))

    run(2, 1, body)
