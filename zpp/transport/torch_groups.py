"""What the transports over torch.distributed share: subgroups, messages under way, short exchanges."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zpp.errors import PeerError
from zpp.topology import Axis, Topology

# torch 2.13 renamed the tensor collectives and warns about the old name; 2.9 to 2.12 have only the old one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def detect_topology(group: dist.ProcessGroup) -> Topology:
    """The topology by host names. A collective call over the group."""
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return Topology.from_hosts(group.rank(), hosts)


def own_subgroup(
    world: dist.ProcessGroup,
    topology: Topology,
    axis: Axis,
    timeout: timedelta,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """This rank's group of the axis, made together with whoever has to take part."""
    mine = topology.group(axis)
    if world is not dist.group.WORLD:
        # Ranks outside `world` do not call this, so only the members of each subgroup make it.
        ranks = [dist.get_global_rank(world, i) for i in mine]
        own: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=True
        )
        return own
    made: list[tuple[list[int], dist.ProcessGroup]] = [
        (ranks, dist.new_group(ranks, timeout=timeout, backend=backend)) for ranks in topology.groups(axis)
    ]
    return next(group for ranks, group in made if ranks == mine)


def destroy(world: dist.ProcessGroup, groups: Sequence[dist.ProcessGroup]) -> None:
    """Give up what `own_subgroup` made of `world`."""
    # c10d names a group that only its members make by its ranks: were it destroyed, the next one of
    # the same ranks would meet the addresses that it left in the store. Such groups stay.
    if world is dist.group.WORLD:
        for group in groups:
            dist.destroy_process_group(group)


def exchange(group: dist.ProcessGroup, message: bytes, device: torch.device) -> list[bytes]:
    """Every rank's `message`, all of one length, by way of tensors on `device`."""
    send = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    recv = torch.empty(group.size() * len(message), dtype=torch.uint8, device=device)
    try:
        _all_gather_single(recv, send, group=group)
    except RuntimeError as error:
        raise PeerError(f"exchange of settings failed on rank {group.rank()}: {error}") from error
    return [bytes(part.numpy()) for part in recv.cpu().view(group.size(), -1)]


@dataclass
class Messages:
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
