"""Bytes between accelerators, over a torch.distributed ProcessGroup."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zpp.agreement import compare
from zpp.errors import PeerError, UnavailableError
from zpp.topology import Axis, Topology
from zpp.transport import Channel, Hop
from zpp.transport.torch_groups import Messages, destroy, exchange, own_subgroup
from zpp.workspace import Heap, Memory


def require_nccl(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise UnavailableError unless `group` has NCCL for `device`: others copy through the host."""
    try:
        backend = group._get_backend(device).name()
    except RuntimeError:
        backend = "nothing"
    if backend != "nccl":
        raise UnavailableError(
            f"the group has {backend} for {device}, zpp needs NCCL there: "
            'init_process_group("cpu:gloo,cuda:nccl")'
        )


class DeviceTransport:
    """Messages over `group` between tensors on `device`, straight from and to their memory.

    Every hop is one batch of sends and receives, which NCCL makes one kernel. Each axis and channel has a
    group of its own, made up front, since NCCL has no tags and runs the messages of a group one by one:
    neither the two hops nor gathers and reductions are to wait for one another.

    `Hop.receive` has the current stream wait, not the host. A peer that is lost ends the process by torch's
    watchdog within the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup, topology: Topology, device: torch.device) -> None:
        self.topology = topology
        self.memory: Memory = Heap(device)
        self._world = group
        backend = group._get_backend(device)
        timeout: timedelta = backend.options._timeout
        try:
            group._get_backend(torch.device("cpu"))
            self._exchanged_on = torch.device("cpu")
        except RuntimeError:
            self._exchanged_on = device
        nodes = f"{topology.nodes} nodes of {topology.ranks_per_node} ranks"
        compare(self.exchange, nodes)  # ranks that disagree would make different subgroups, and hang
        self._groups = {
            (axis, channel): own_subgroup(group, topology, axis, timeout, backend.name())
            for axis in (Axis.INTRA, Axis.INTER)
            for channel in Channel
            if topology.size(axis) > 1
        }

    def reads_in_place(self, axis: Axis) -> bool:
        return False

    def all_gather(
        self, channel: Channel, axis: Axis, send: torch.Tensor, recv: Sequence[torch.Tensor] | None
    ) -> Hop:
        return self._swap("all_gather", channel, axis, [send] * self.topology.size(axis), recv)

    def all_to_all(
        self, channel: Channel, axis: Axis, send: torch.Tensor, recv: Sequence[torch.Tensor] | None
    ) -> Hop:
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
        """Send `parts[i]` to member i of the axis and receive `recv[i]` from it."""
        assert recv is not None
        group = self._groups[axis, channel]
        size, me = len(parts), group.rank()
        received = [*recv[:me], parts[me], *recv[me + 1 :]]
        what = f"{what} ({channel.value}, axis {axis.value}, rank {self.topology.rank})"
        if parts[me].numel() == 0:
            return Messages([], parts, received, what)
        peers = [(me + distance) % size for distance in range(1, size)]  # not all at the same one first
        messages = [
            *(dist.P2POp(dist.isend, parts[peer], group=group, group_peer=peer) for peer in peers),
            *(dist.P2POp(dist.irecv, received[peer], group=group, group_peer=peer) for peer in peers),
        ]
        try:
            return Messages(dist.batch_isend_irecv(messages), parts, received, what)
        except RuntimeError as error:
            raise PeerError(f"{what} failed: {error}") from error

    def exchange(self, message: bytes) -> list[bytes]:
        return exchange(self._world, message, self._exchanged_on)

    def close(self) -> None:
        destroy(self._world, list(self._groups.values()))
        self._groups.clear()
