"""Bytes between CPUs, over a torch.distributed ProcessGroup (gloo)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zpp.agreement import compare
from zpp.errors import PeerError
from zpp.topology import Axis, Topology
from zpp.transport import Channel, Hop, node_memory
from zpp.transport.torch_groups import Messages, destroy, exchange, own_subgroup
from zpp.workspace import Heap, Memory

_TAGS = {channel: tag for tag, channel in enumerate(Channel)}


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
                self._groups[axis] = own_subgroup(group, topology, axis, self._timeout)

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
    ) -> Messages:
        """Send `parts[i]` to member i of the axis and receive `recv[i]` from it, straight to and from memory.

        gloo's own collectives copy: its all-gather passes everything through a buffer that it allocates.
        """
        assert recv is not None
        group, tag = self._groups[axis], _TAGS[channel]
        size, me = len(parts), group.rank()
        received = [*recv[:me], parts[me], *recv[me + 1 :]]
        what = f"{what} ({channel.value}, axis {axis.value}, rank {self.topology.rank})"
        hop = Messages([], parts, received, what)
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
        return exchange(self._world, message, torch.device("cpu"))

    def close(self) -> None:
        destroy(self._world, list(self._groups.values()))
        self._groups.clear()
        if self._node is not None:
            self._node.close()
            self._node = None
