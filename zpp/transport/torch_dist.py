"""Bytes over a torch.distributed ProcessGroup (gloo today; any back end with uint8 collectives)."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zpp.agreement import compare
from zpp.errors import PeerError
from zpp.topology import Axis, Topology
from zpp.transport import Channel, Hop, node_memory
from zpp.workspace import Heap, Memory

# torch 2.13 renamed the tensor collectives and warns about the old name; 2.9 to 2.12 have only the old one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_TAGS = {channel: tag for tag, channel in enumerate(Channel)}


def detect_topology(group: dist.ProcessGroup) -> Topology:
    """The topology by host names. A collective call over the group."""
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return Topology.from_hosts(group.rank(), hosts)


@dataclass
class _Messages:
    """Messages under way, with their buffers; a failure is told in zpp's words."""

    works: list[dist.Work]
    sent: Sequence[torch.Tensor]
    received: Sequence[torch.Tensor]
    what: str

    def receive(self) -> Sequence[torch.Tensor]:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(f"{self.what} failed: {error}") from error
        return self.received

    def release(self) -> None:
        """The receive buffer is the caller's."""

    def returned(self, *, wait: bool) -> bool:
        return True  # since `receive` waited for the sends too


class TorchTransport:
    """Messages over `group`; inside nodes, where the system allows it, through shared memory.

    A subgroup for each axis is made up front, since making one is a collective call. Its two channels are
    told apart by tags: threads and sockets of their own would cost every step, and use the link no better.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology) -> None:
        self.topology = topology
        self._world = group
        # Subgroups give up on a peer after as long as the group that they come from.
        self._timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        self._groups: dict[Axis, dist.ProcessGroup] = {}
        nodes = f"{topology.nodes} nodes of {topology.ranks_per_node} ranks"
        compare(self.exchange, nodes)  # ranks that disagree would make different subgroups, and hang
        self._node = node_memory.join(topology, self.exchange, self._timeout.total_seconds())
        self.memory: Memory = Heap(torch.device("cpu")) if self._node is None else self._node.arena
        for axis in (Axis.INTRA, Axis.INTER):
            if topology.size(axis) > 1 and not self.reads_in_place(axis):
                self._groups[axis] = self._own_subgroup(axis)

    def _own_subgroup(self, axis: Axis) -> dist.ProcessGroup:
        """This rank's group of the axis, made together with whoever has to take part."""
        mine = self.topology.group(axis)
        if self._world is not dist.group.WORLD:
            # Ranks outside `group` do not call this, so only the members of each subgroup make it.
            ranks = [dist.get_global_rank(self._world, i) for i in mine]
            own: dist.ProcessGroup = dist.new_group(
                ranks, timeout=self._timeout, use_local_synchronization=True
            )
            return own
        made: list[tuple[list[int], dist.ProcessGroup]] = [
            (ranks, dist.new_group(ranks, timeout=self._timeout)) for ranks in self.topology.groups(axis)
        ]
        return next(group for ranks, group in made if ranks == mine)

    def reads_in_place(self, axis: Axis) -> bool:
        return axis is Axis.INTRA and self._node is not None

    def all_gather(
        self, channel: Channel, axis: Axis, send: torch.Tensor, recv: Sequence[torch.Tensor] | None
    ) -> Hop:
        if axis is Axis.INTRA and self._node is not None:
            return self._node.start(channel, send, scatter=False)
        return self._swap("all_gather", channel, axis, [send] * self.topology.size(axis), recv)

    def all_to_all(
        self, channel: Channel, axis: Axis, send: torch.Tensor, recv: Sequence[torch.Tensor] | None
    ) -> Hop:
        if axis is Axis.INTRA and self._node is not None:
            return self._node.start(channel, send, scatter=True)
        parts = send.split(send.shape[0] // self.topology.size(axis))
        return self._swap("all_to_all", channel, axis, parts, recv)

    def _swap(
        self,
        what: str,
        channel: Channel,
        axis: Axis,
        parts: Sequence[torch.Tensor],
        recv: Sequence[torch.Tensor] | None,
    ) -> _Messages:
        """Send `parts[i]` to member i of the axis and receive `recv[i]` from it, straight to and from memory.

        gloo's own collectives copy: its all-gather passes everything through a buffer that it allocates.
        """
        assert recv is not None
        group, tag = self._groups[axis], _TAGS[channel]
        size, me = len(parts), group.rank()
        received = [*recv[:me], parts[me], *recv[me + 1 :]]
        what = f"{what} ({channel.value}, axis {axis.value}, rank {self.topology.rank})"
        hop = _Messages([], parts, received, what)
        if parts[me].numel() == 0:
            return hop
        peers = [(me + distance) % size for distance in range(1, size)]  # not all at the same one first
        try:
            hop.works += [group.send([parts[peer]], peer, tag) for peer in peers]
            hop.works += [group.recv([received[peer]], peer, tag) for peer in peers]
        except RuntimeError as error:
            raise PeerError(f"{what} failed: {error}") from error
        return hop

    def exchange(self, message: bytes) -> list[bytes]:
        send = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        recv = torch.empty(self.topology.world_size * len(message), dtype=torch.uint8)
        try:
            _all_gather_single(recv, send, group=self._world)
        except RuntimeError as error:
            raise PeerError(f"exchange of settings failed on rank {self.topology.rank}: {error}") from error
        return [bytes(part.numpy()) for part in recv.view(self.topology.world_size, -1)]

    def close(self) -> None:
        # c10d names a group that only its members make by its ranks: were it destroyed, the next one of
        # the same ranks would meet the addresses that it left in the store. Such groups stay.
        if self._world is dist.group.WORLD:
            for group in self._groups.values():
                dist.destroy_process_group(group)
        self._groups.clear()
        if self._node is not None:
            self._node.close()
            self._node = None
