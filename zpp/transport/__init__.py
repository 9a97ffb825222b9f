"""Transports: who moves bytes. They know ranks, axes and uint8 buffers, and nothing of encodings."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch

from zpp.topology import Axis, Topology
from zpp.workspace import Memory


class Channel(Enum):
    """An ordered stream of messages. Order holds within a channel and axis, not between channels.

    Gathers and reductions run concurrently; giving each its own channel means that no rank depends on
    how their messages interleave.
    """

    GATHER = "gather"
    REDUCE = "reduce"


class Hop(Protocol):
    """One message of every rank of an axis to every other, under way."""

    def receive(self) -> Sequence[torch.Tensor]:
        """What every member sent this rank, in axis order, its own part included; not to be written to.

        Raises PeerError if a peer died or did not arrive in time.
        """

    def release(self) -> None:
        """What was received has been read: its memory may be used again."""

    def returned(self, *, wait: bool) -> bool:
        """Whether every member has read what this rank sent, so that the send buffer may be used again.

        Asked after `receive`. `wait` returns only when it is so; raises PeerError like `receive`.
        """


class Transport(Protocol):
    """Every rank of the axis makes the same calls, in the same order within a channel."""

    topology: Topology
    memory: Memory
    """Every `send` lies in a buffer from it."""

    def reads_in_place(self, axis: Axis) -> bool:
        """Whether the members of the axis read one another's send buffers, so that hops need no `recv`."""

    def all_gather(
        self, channel: Channel, axis: Axis, send: torch.Tensor, recv: Sequence[torch.Tensor] | None
    ) -> Hop:
        """send: n records, uint8 [n, nbytes]; recv: as much from each member, `send` itself in its place."""

    def all_to_all(
        self, channel: Channel, axis: Axis, send: torch.Tensor, recv: Sequence[torch.Tensor] | None
    ) -> Hop:
        """send: uint8 [size of axis * n, nbytes], n records for each member; recv: [n, nbytes] from each."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Blocking all-gather of a short message of the same length over the world, in rank order."""

    def close(self) -> None:
        """Give up subgroups and threads; the transport is not used again."""
