"""Hops that read peers' memory in place: ranks are threads here, which find one another as processes do."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import expected
import pytest
import torch

import zpp
from zpp.format import BlockFormat, Code
from zpp.topology import Axis, Topology
from zpp.transport import Channel, Hop, node_memory
from zpp.transport.inprocess import InProcessTransport, run
from zpp.transport.node_memory import Arena, NodeMemory
from zpp.workspace import Workspace

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create and /proc")

INT8 = BlockFormat(Code.INT8, block=512)
INT4 = BlockFormat(Code.INT4, block=128, rotate=True)
Recv = Sequence[torch.Tensor] | None


def join(transport: InProcessTransport, timeout: float = 20.0) -> NodeMemory:
    made = node_memory.join(transport.topology, transport.exchange, timeout)
    assert made is not None
    return made


class SlowReader:
    """A hop whose data is looked at only a while after it was there."""

    def __init__(self, hop: Hop, delay: Callable[[], None]) -> None:
        self._hop, self._delay = hop, delay
        self.release, self.returned = hop.release, hop.returned

    def receive(self) -> Sequence[torch.Tensor]:
        parts = self._hop.receive()
        self._delay()
        return parts


class InPlaceTransport:
    """Messages between nodes as `between` sends them; inside a node, through its memory."""

    def __init__(self, between: InProcessTransport, delay: Callable[[], None]) -> None:
        self.topology, self.exchange = between.topology, between.exchange
        self._between, self._node, self._delay = between, join(between), delay
        self.memory = self._node.arena

    def reads_in_place(self, axis: Axis) -> bool:
        return axis is Axis.INTRA

    def all_gather(self, channel: Channel, axis: Axis, send: torch.Tensor, recv: Recv) -> Hop:
        if axis is Axis.INTRA:
            return SlowReader(self._node.start(channel, send, scatter=False), self._delay)
        return self._between.all_gather(channel, axis, send, recv)

    def all_to_all(self, channel: Channel, axis: Axis, send: torch.Tensor, recv: Recv) -> Hop:
        if axis is Axis.INTRA:
            return SlowReader(self._node.start(channel, send, scatter=True), self._delay)
        return self._between.all_to_all(channel, axis, send, recv)

    def close(self) -> None:
        self._node.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_members_read_the_whole_or_their_parts() -> None:
    def body(transport: InProcessTransport) -> None:
        node, me = join(transport), transport.topology.local_rank
        for nbytes in (0, 3, 3 * 5000):
            send = node.arena.allocate(nbytes).view(3, nbytes // 3)
            send.fill_(10 + transport.topology.rank)
            for scatter in (False, True):
                hop = node.start(Channel.GATHER, send, scatter=scatter)
                got = hop.receive()
                size = nbytes // 3 if scatter else nbytes
                first = transport.topology.node * 3
                assert [part.flatten().tolist() for part in got] == [
                    [10 + first + i] * size for i in range(3)
                ]
                transport.exchange(b"read")
                assert not hop.returned(wait=False)
                transport.exchange(b"seen")
                hop.release()
                assert hop.returned(wait=True)
                transport.exchange(b"done")
        numbers = node.arena.allocate(3).view(3, 1)
        numbers.copy_((torch.arange(3) + 10 * me).view(3, 1))
        hop = node.start(Channel.REDUCE, numbers, scatter=True)
        assert [part.tolist() for part in hop.receive()] == [[[10 * i + me]] for i in range(3)]
        transport.exchange(b"read")
        node.close()

    before = open_files()
    run(6, 3, body)
    assert open_files() == before


class Scribbling(Workspace):
    """What is given back changes at once, so that a buffer given back too early shows."""

    def give(self, view: torch.Tensor) -> None:
        view.fill_(0xA5)
        super().give(view)


def traffic(transport: Any) -> list[torch.Tensor]:
    """Many collectives at once: gathers that keep secondaries and use them, and reductions."""
    zp = zpp.Communicator(transport=transport, threads=1, span=8 * 4096)
    rank, world = transport.topology.rank, transport.topology.world_size
    secondaries = [zp.secondary_partition() for _ in range(3)]
    outs: list[torch.Tensor] = []
    for step in range(4):
        works: list[Any] = []
        for i, secondary in enumerate(secondaries):
            generator = torch.Generator().manual_seed(1000 * step + 10 * rank + i)
            full = torch.randn(world * 20_001, generator=generator).bfloat16()
            whole, part = torch.empty_like(full), torch.empty(20_001)
            outs += [whole, part]
            works.append(zp.reduce_scatter(part, full, formats=(INT8, INT4), async_op=True))
            zp.all_gather(whole, full[:20_001], fmt=INT8, secondary=secondary)
            secondary.stamp(step)
        for secondary in reversed(secondaries):  # the last one read is the first one overwritten
            outs.append(torch.empty(world * 20_001, dtype=torch.bfloat16))
            works.append(zp.all_gather_secondary(outs[-1], secondary, step, async_op=True))
        for work in works[:: -1 if rank % 2 else 1]:
            work.wait()
    zp.close()
    return outs


def slow(rank: int) -> Callable[[], None]:
    chance = random.Random(rank)
    return lambda: time.sleep(chance.choice((0.0, 0.005 * (rank % 3))))


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (3, 3), (6, 3)])
def test_nothing_is_overwritten_before_the_peers_have_read_it(
    world: int, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = run(world, per_node, traffic)
    monkeypatch.setattr("zpp.communicator.Workspace", Scribbling)
    got = run(world, per_node, lambda transport: traffic(in_place(transport)))
    for mine, theirs in zip(want, got, strict=True):
        assert all(torch.equal(expected.bits(a), expected.bits(b)) for a, b in zip(mine, theirs, strict=True))


def in_place(transport: InProcessTransport) -> InPlaceTransport:
    return InPlaceTransport(transport, slow(transport.topology.rank))


def test_the_test_above_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without receipts, somebody reads what was scribbled over."""
    want = run(3, 3, traffic)
    monkeypatch.setattr("zpp.communicator.Workspace", Scribbling)
    monkeypatch.setattr(node_memory._InPlace, "returned", lambda *_, **__: True)
    got = run(3, 3, lambda transport: traffic(in_place(transport)))
    pairs = [
        (a, b) for mine, theirs in zip(want, got, strict=True) for a, b in zip(mine, theirs, strict=True)
    ]
    assert not all(torch.equal(expected.bits(a), expected.bits(b)) for a, b in pairs)


def test_a_peer_that_has_ended_is_noticed_at_once() -> None:
    def body(transport: InProcessTransport) -> None:
        node = join(transport)
        send = node.arena.allocate(64).view(1, 64)
        hop = node.start(Channel.GATHER, send, scatter=False)
        hop.receive()
        transport.exchange(b"read")
        if transport.topology.rank == 1:
            node.close()
        transport.exchange(b"over")
        if transport.topology.rank == 0:
            with pytest.raises(zpp.PeerError, match="rank 1 has ended"):
                hop.returned(wait=True)
            hop.release()
            with pytest.raises(zpp.PeerError, match="rank 1 has ended"):
                node.start(Channel.GATHER, send, scatter=False)
            node.close()

    run(2, 2, body)


def test_a_peer_that_stays_away_is_named_within_the_timeout() -> None:
    def body(transport: InProcessTransport) -> None:
        node = join(transport, timeout=0.2)
        if transport.topology.rank == 0:
            hop = node.start(Channel.GATHER, node.arena.allocate(64).view(1, 64), scatter=False)
            with pytest.raises(zpp.PeerError, match=r"rank 1 sent nothing within 0.2 s"):
                hop.receive()
            assert not hop.returned(wait=False)
            with pytest.raises(zpp.PeerError, match=r"rank 1 did not read within 0.2 s"):
                hop.returned(wait=True)
        transport.exchange(b"done")
        node.close()

    run(2, 2, body)


def test_ranks_that_disagree_on_the_size_are_told() -> None:
    def body(transport: InProcessTransport) -> None:
        node = join(transport)
        mine = 64 + transport.topology.rank
        hop = node.start(Channel.GATHER, node.arena.allocate(mine).view(1, mine), scatter=False)
        other = 1 - transport.topology.rank
        with pytest.raises(
            zpp.PeerError, match=f"rank {other} sent {64 + other} bytes where {mine} were due"
        ):
            hop.receive()
        transport.exchange(b"done")
        node.close()

    run(2, 2, body)


@pytest.mark.parametrize("step", ["_open", "connect", "token"])
def test_where_one_rank_cannot_connect_none_does_and_nothing_stays_open(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("refused")

    def body(transport: InProcessTransport) -> NodeMemory | None:
        return node_memory.join(transport.topology, transport.exchange, 5.0)

    if step == "_open":
        made = node_memory._open
        monkeypatch.setattr(
            node_memory, "_open", lambda topology, t: None if topology.rank == 2 else made(topology, t)
        )
    elif step == "connect":
        connect = NodeMemory.connect
        monkeypatch.setattr(
            NodeMemory,
            "connect",
            lambda self, *said: refuse() if self._me == 1 else connect(self, *said),
        )
    else:
        connect = NodeMemory.connect
        monkeypatch.setattr(
            NodeMemory, "connect", lambda self, addresses, tokens: connect(self, addresses, [b"x" * 16] * 2)
        )
    before = open_files()
    assert run(4, 2, body) == [None] * 4
    assert open_files() == before


def test_one_rank_per_node_shares_nothing() -> None:
    def never(_: bytes) -> list[bytes]:
        return [bytes(8 * (3 + 2 * len(Channel)) + 16) if len(_) > 1 else b"\0"]

    assert node_memory.join(Topology(0, 1, 1), never, 1.0) is None


def test_an_arena_gives_freed_memory_back_and_uses_its_place_again() -> None:
    arena = Arena()
    first, second = arena.allocate(5000), arena.allocate(8192)
    first.fill_(1)
    second.fill_(2)
    used = os.fstat(arena.fd).st_blocks
    place = arena.offset(first)
    arena.free(first)
    assert os.fstat(arena.fd).st_blocks == used - 2 * 4096 // 512
    again = arena.allocate(8000)
    assert arena.offset(again) == place
    assert not again.any()
    assert torch.equal(second, torch.full((8192,), 2, dtype=torch.uint8))
    with pytest.raises(MemoryError, match="do not fit into an arena"):
        arena.allocate(arena.size)
    os.close(arena.fd)


DYING = """
import os, sys, torch, torch.distributed as dist, zpp
from datetime import timedelta
rank = int(sys.argv[1])
store, timeout = dist.FileStore(sys.argv[2], 2), timedelta(seconds=60)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
zp = zpp.Communicator(ranks_per_node=2)
for step in range(3):
    if rank == 1 and step == 2:
        os._exit(0)
    try:
        zp.all_gather(torch.empty(2000), torch.ones(1000))
    except zpp.PeerError as error:
        print(step, error, flush=True)
        os._exit(7)
"""


def test_a_process_that_dies_is_noticed_long_before_the_timeout(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DYING]
    start = time.monotonic()
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said, _ = ranks[0].communicate(timeout=100)
    assert ranks[1].wait(timeout=10) == 0
    assert (ranks[0].returncode, said) == (7, "2 rank 1 has ended\n")
    assert time.monotonic() - start < 45
