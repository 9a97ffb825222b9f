"""Bytes over a torch.distributed ProcessGroup (gloo today; any back end with uint8 collectives)."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zpp.agreement import compare
from zpp.errors import PeerError
from zpp.topology import Axis, Topology
from zpp.transport import Channel

# torch 2.13 renamed the tensor collectives and warns about the old name; 2.9 to 2.12 have only the old one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def detect_topology(group: dist.ProcessGroup) -> Topology:
    """The topology by host names. A collective call over the group."""
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return Topology.from_hosts(group.rank(), hosts)


@dataclass
class _Pending:
    """Messages under way, with their buffers; a failure is told in zpp's words."""

    works: list[dist.Work]
    buffers: list[torch.Tensor]
    what: str

    def wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(f"{self.what} failed: {error}") from error


class TorchTransport:
    """Subgroups for both axes and both channels, made up front: a collective call over `group`."""

    def __init__(self, group: dist.ProcessGroup, topology: Topology) -> None:
        self.topology = topology
        self._world = group
        # Subgroups give up on a peer after as long as the group that they come from.
        self._timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        self._groups: dict[tuple[Channel, Axis], dist.ProcessGroup] = {}
        nodes = f"{topology.nodes} nodes of {topology.ranks_per_node} ranks"
        compare(self.exchange, nodes)  # ranks that disagree would make different subgroups, and hang
        for channel in Channel:
            for axis in (Axis.INTRA, Axis.INTER):
                if topology.size(axis) > 1:
                    self._groups[channel, axis] = self._own_subgroup(axis)

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

    def all_gather(self, channel: Channel, axis: Axis, send: torch.Tensor, recv: torch.Tensor) -> _Pending:
        size = self.topology.size(axis)
        return self._swap(f"all_gather ({channel.value}", channel, axis, [send] * size, recv.view(size, -1))

    def all_to_all(self, channel: Channel, axis: Axis, send: torch.Tensor, recv: torch.Tensor) -> _Pending:
        size = self.topology.size(axis)
        parts = list(send.view(size, -1))
        return self._swap(f"all_to_all ({channel.value}", channel, axis, parts, recv.view(size, -1))

    def _swap(
        self, what: str, channel: Channel, axis: Axis, parts: list[torch.Tensor], recv: torch.Tensor
    ) -> _Pending:
        """Send `parts[i]` to member i of the axis and receive `recv[i]` from it, straight to and from memory.

        gloo's own collectives copy: its all-gather passes everything through a buffer that it allocates.
        """
        group = self._groups[channel, axis]
        size, me = len(parts), group.rank()
        pending = _Pending([], [recv, *parts], f"{what}, axis {axis.value}, rank {self.topology.rank})")
        if recv.numel() == 0:
            return pending
        peers = [(me + distance) % size for distance in range(1, size)]  # not all at the same one first
        try:
            pending.works += [group.recv([recv[peer]], peer, 0) for peer in peers]
            pending.works += [group.send([parts[peer]], peer, 0) for peer in peers]
        except RuntimeError as error:
            raise PeerError(f"{pending.what} failed: {error}") from error
        recv[me].copy_(parts[me])
        return pending

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
