"""Collectives and ZeRO-3 on a device with streams: nothing races, and no wait could be left out."""

from __future__ import annotations

import math
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
from small_model import batch, loss_of, net
from stream_races import Device, Emulation, FakeStream
from test_zero3 import train

import zpp
from zpp.errors import PeerError, ZppError
from zpp.format import BlockFormat, Code, Rounding
from zpp.pipeline.streams import StreamPipeline
from zpp.transport.inprocess import InProcessTransport, run
from zpp.work import Work

INT8 = BlockFormat(Code.INT8, block=128)
NOISY = BlockFormat(Code.INT4, block=128, rotate=True, rounding=Rounding.STOCHASTIC)
EXACT = BlockFormat(Code.EXACT)
WORLDS = [(1, 1), (2, 1), (2, 2), (4, 2), (6, 3)]
NUMEL = 1000


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Emulation:
    return Emulation(monkeypatch)


def collectives(transport: InProcessTransport, device: str = "cpu") -> list[torch.Tensor]:
    """All of them, several under way at the same time, their tensors let go of as early as can be."""
    world, rank = transport.topology.world_size, transport.topology.rank
    generator = torch.Generator().manual_seed(rank)
    zp = zpp.Communicator(transport=transport, device=device, threads=1, span=world * 384)

    def normal(numel: int) -> torch.Tensor:
        return torch.randn(numel, generator=generator).to(device)

    def empty(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    secondary = zp.secondary_partition()
    results = []
    for step in range(3):
        full, ints = normal(world * NUMEL).bfloat16(), torch.arange(world * NUMEL, device=device) * (rank + 1)
        shard, again = empty(NUMEL), empty(NUMEL, torch.bfloat16)
        whole, twice = empty(world * NUMEL), empty(world * NUMEL)
        works = [
            zp.reduce_scatter(shard, full, formats=(INT8, NOISY), async_op=True),
            zp.reduce_scatter(again, full, formats=(EXACT, EXACT), async_op=True),
            zp.all_gather(whole, normal(NUMEL), secondary=secondary, async_op=True),
        ]
        assert all(works)
        works[2].wait()  # type: ignore[union-attr]
        secondary.stamp(step)
        works.append(zp.all_gather_secondary(twice, secondary, step, async_op=True))
        parts = zpp.PartedTensor(world * NUMEL, torch.float32, [(3, normal(500)), (800, normal(100))])
        parted, summed, odd = empty(NUMEL), empty(NUMEL, torch.int64), normal(world * 100 + 1)
        works.append(zp.reduce_scatter(parted, parts, async_op=True))
        works.append(zp.reduce_scatter(summed, ints, op=torch.distributed.ReduceOp.SUM, async_op=True))
        works.append(zp.all_reduce(odd, async_op=True))
        del parts, full, ints
        for work in reversed(works):
            assert work is not None
            work.wait()
        results += [t.clone() for t in (shard, again, whole, twice, parted, summed, odd)]
    zp.close()
    return results


@pytest.mark.parametrize(("world", "per_node"), WORLDS)
def test_nothing_races_and_no_bit_changes(emulation: Emulation, world: int, per_node: int) -> None:
    want = run(world, per_node, collectives)
    got = emulation.run(world, per_node, collectives)
    assert Counter(emulation.device.complaints) == {}
    for mine, theirs in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def training(transport: InProcessTransport) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train(transport, 3)


@pytest.mark.parametrize(("world", "per_node"), WORLDS)
def test_training_does_not_race_and_no_bit_changes(emulation: Emulation, world: int, per_node: int) -> None:
    want = run(world, per_node, training)
    got = emulation.run(world, per_node, training)
    assert Counter(emulation.device.complaints) == {}
    for (losses, weights), (want_losses, want_weights) in zip(got, want, strict=True):
        assert losses == want_losses
        assert all(torch.equal(weights[name], want_weights[name]) for name in want_weights)


def test_every_wait_and_every_keep_is_needed(emulation: Emulation) -> None:
    """Without any single one of them something races, or memory is given out too early."""
    emulation.run(4, 2, training)
    trained = emulation.device.sites
    emulation.run(4, 2, collectives)
    sites = emulation.device.sites
    assert len(sites) > 10
    assert trained <= sites
    for site in sites:
        emulation.run(4, 2, collectives, ignored=site)
        assert emulation.device.complaints, f"nothing needs {site}"


def test_whatever_is_made_is_made_on_the_communicators_device(emulation: Emulation) -> None:
    """Here a tensor that no device is named for has no values at all."""

    def body(transport: InProcessTransport) -> list[float]:
        model, batches = net(), [batch(step, transport.topology.rank) for step in range(3)]
        losses = []
        with torch.device("meta"):
            communicator = zpp.Communicator(transport=transport, device="cpu", threads=1)
            handle = zpp.zero3.shard(model, units=list(model.blocks), communicator=communicator)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for tokens in batches:
                optimizer.zero_grad()
                loss = loss_of(model, tokens)
                loss.backward()
                handle.clip_grad_norm_(1.0)
                optimizer.step()
                losses.append(loss.item())
            assert all(value.device.type == "cpu" for value in handle.full_state_dict().values())
            odd = torch.ones(7, device="cpu")
            communicator.all_reduce(odd)
            communicator.close()
        return [*losses, *odd.tolist()]

    for losses in emulation.run(4, 2, body):
        assert all(map(math.isfinite, losses))
        assert losses[3:] == [pytest.approx(4.0, rel=0.01)] * 7


class _Pending:
    """An event that a device never comes to."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("the host would wait for ever")


def test_jobs_of_streams_run_at_once_and_in_order() -> None:
    device = Device()
    pipeline, seen = StreamPipeline("test", device), []  # type: tuple[StreamPipeline, list[tuple[int, Any]]]
    jobs = [pipeline.submit([lambda: seen.append((0, device.current()))] * 3)]
    jobs.append(pipeline.submit([lambda: seen.append((1, device.current()))] * 3))
    assert [i for i, _ in seen] == [0, 0, 0, 1, 1, 1]
    lanes = [lane for _, lane in seen[:3]]
    assert [lane for _, lane in seen[3:]] == lanes
    assert len({*lanes, device.caller()}) == 4
    for job in jobs:
        job.result(timeout=1)
        assert job.done()
    called: list[Any] = []
    jobs[0].add_done_callback(lambda job: called.append((job, device.current())))
    assert called == [(jobs[0], lanes[2])]
    pipeline.close()
    with pytest.raises(ZppError, match="the test pipeline is closed"):
        pipeline.submit([lambda: None] * 3)
    with pytest.raises(ValueError, match="1 stages for 3 lanes"):
        StreamPipeline("test", device).submit([lambda: None])


def test_a_failure_in_a_stream_ends_later_jobs_too() -> None:
    pipeline, ran = StreamPipeline("test", Device()), []  # type: tuple[StreamPipeline, list[str]]

    def fail() -> None:
        raise RuntimeError("lost")

    first = pipeline.submit([lambda: ran.append("a"), fail, lambda: ran.append("never")])
    second = pipeline.submit([lambda: ran.append("never")] * 3)
    with pytest.raises(RuntimeError, match="lost"):
        first.result()
    with pytest.raises(PeerError, match=r"an earlier test failed \(lost\)"):
        second.result()
    work = Work("all_gather", [second, first], torch.empty(1))
    with pytest.raises(PeerError, match="an earlier test failed"):
        work.wait()
    assert ran == ["a"]


def test_a_wait_with_a_timeout_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStream, "record_event", lambda _: _Pending())
    monkeypatch.setattr(FakeStream, "wait_event", lambda *_: None)
    work = Work("all_gather", [StreamPipeline("test", Device()).submit([lambda: None] * 3)], torch.empty(1))
    assert not work.is_completed()
    with pytest.raises(PeerError, match=r"all_gather did not finish within 0\.01 s"):
        work.wait(timedelta(seconds=0.01))
    work.wait()  # on an accelerator only the stream waits
