"""Ranks as threads of one process and one device: to test, to learn, to measure without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from zpp import streams
from zpp.errors import PeerError
from zpp.streams import Event
from zpp.topology import Axis, Topology
from zpp.transport import Channel, Hop
from zpp.workspace import Heap, Memory

T = TypeVar("T")


@dataclass(frozen=True)
class _Posted:
    data: torch.Tensor
    ready: Event | None = None
    """Behind what wrote `data`, on a device with streams."""


@dataclass
class _Slot:
    """One collective call of one group: what each member posted."""

    posted: dict[int, _Posted] = field(default_factory=dict)
    taken: int = 0


class World:
    """What the ranks of one process share: the mailboxes and the first failure."""

    def __init__(self, world_size: int, ranks_per_node: int, timeout: float = 30.0) -> None:
        self.world_size, self.ranks_per_node, self.timeout = world_size, ranks_per_node, timeout
        self._changed = threading.Condition()
        self._slots: dict[tuple[object, ...], _Slot] = {}
        self._failed: str | None = None

    def fail(self, reason: str) -> None:
        """Wake every waiting rank with an error."""
        with self._changed:
            self._failed = self._failed or reason
            self._changed.notify_all()

    def post(self, key: tuple[object, ...], rank: int, posted: _Posted) -> None:
        with self._changed:
            self._slots.setdefault(key, _Slot()).posted[rank] = posted
            self._changed.notify_all()

    def collect(self, key: tuple[object, ...], ranks: list[int]) -> list[_Posted]:
        """What `ranks` posted under `key`, once all have; each of them collects once."""
        with self._changed:
            slot = self._slots.setdefault(key, _Slot())
            arrived = self._changed.wait_for(
                lambda: self._failed is not None or len(slot.posted) == len(ranks), self.timeout
            )
            if len(slot.posted) < len(ranks):
                missing = sorted(set(ranks) - set(slot.posted))
                reason = self._failed if arrived else f"nothing came within {self.timeout:g} s"
                raise PeerError(f"waiting for ranks {missing}: {reason}")
            slot.taken += 1
            if slot.taken == len(ranks):
                del self._slots[key]
            return [slot.posted[rank] for rank in ranks]


@dataclass
class _Messages:
    collect: Callable[[], Sequence[torch.Tensor]]

    def receive(self) -> Sequence[torch.Tensor]:
        return self.collect()

    def release(self) -> None:
        """The receive buffer is the caller's."""

    def returned(self, *, wait: bool) -> bool:
        return True  # what was sent was copied at once


class InProcessTransport:
    """One rank's end of a World whose ranks have their tensors on `device`."""

    def __init__(self, world: World, rank: int, device: torch.device | str = "cpu") -> None:
        self.topology = Topology(rank, world.world_size, world.ranks_per_node)
        self.memory: Memory = Heap(torch.device(device))
        self._streams = streams.for_device(torch.device(device))
        self._world = world
        self._sequence: dict[tuple[object, ...], int] = {}

    def _key(self, *stream: object) -> tuple[object, ...]:
        sequence = self._sequence.get(stream, 0)
        self._sequence[stream] = sequence + 1
        return (*stream, sequence)

    def reads_in_place(self, axis: Axis) -> bool:
        return False

    def all_gather(
        self, channel: Channel, axis: Axis, send: torch.Tensor, recv: Sequence[torch.Tensor] | None
    ) -> Hop:
        return self._start(channel, axis, send, recv, scatter=False)

    def all_to_all(
        self, channel: Channel, axis: Axis, send: torch.Tensor, recv: Sequence[torch.Tensor] | None
    ) -> Hop:
        return self._start(channel, axis, send, recv, scatter=True)

    def _start(
        self,
        channel: Channel,
        axis: Axis,
        send: torch.Tensor,
        recv: Sequence[torch.Tensor] | None,
        *,
        scatter: bool,
    ) -> _Messages:
        assert recv is not None
        ranks, me = self.topology.group(axis), self.topology.index(axis)
        key = self._key(channel, axis, tuple(ranks))
        data = send.clone()
        ready = None if self._streams is None else self._streams.current().record_event()
        self._world.post(key, self.topology.rank, _Posted(data, ready))

        def collect() -> Sequence[torch.Tensor]:
            for rank, part, posted in zip(ranks, recv, self._world.collect(key, ranks), strict=True):
                data = self._ready(posted)
                mine = data.view(len(ranks), -1)[me] if scatter else data
                if mine.numel() != part.numel():
                    raise PeerError(f"rank {rank} sent {mine.numel()} bytes where {part.numel()} were due")
                part.copy_(mine.view_as(part))
            return recv

        return _Messages(collect)

    def _ready(self, posted: _Posted) -> torch.Tensor:
        """What was posted, for the current stream to read."""
        if self._streams is not None:
            self._streams.current().wait_event(posted.ready)
            self._streams.keep(posted.data)
        return posted.data

    def exchange(self, message: bytes) -> list[bytes]:
        key = self._key("exchange")
        posted = _Posted(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        self._world.post(key, self.topology.rank, posted)
        ranks = list(range(self.topology.world_size))
        return [bytes(posted.data.numpy()) for posted in self._world.collect(key, ranks)]

    def close(self) -> None:
        """The World keeps nothing of a rank that has collected what it waited for."""


def run(
    world_size: int,
    ranks_per_node: int,
    body: Callable[[InProcessTransport], T],
    *,
    timeout: float = 30.0,
    device: torch.device | str = "cpu",
) -> list[T]:
    """Run `body` on every rank of a new World, each in a thread; its results in rank order.

    The first exception, by time, is raised again once every rank has ended; the other ranks' waits end
    with a PeerError that names it.

    On an accelerator autograd has one thread for all ranks, in which one would wait for another for ever:
    a `body` with a backward pass calls torch.autograd.set_multithreading_enabled(False) first.
    """
    world = World(world_size, ranks_per_node, timeout)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = body(InProcessTransport(world, rank, device))
        except BaseException as error:  # handed to the caller below
            errors.append(error)
            world.fail(f"rank {rank} failed: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=rank_main, args=(i,), name=f"rank {i}") for i in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
