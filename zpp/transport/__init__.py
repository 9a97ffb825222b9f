"""Transports: who moves bytes. They know ranks, axes and uint8 buffers, and nothing of encodings."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import torch

from zpp.topology import Axis, Topology


class Channel(Enum):
    """An ordered stream of messages. Order holds within a channel and axis, not between channels.

    Gathers and reductions run concurrently; giving each its own channel means that no rank depends on
    how their messages interleave.
    """

    GATHER = "gather"
    REDUCE = "reduce"


class Pending(Protocol):
    def wait(self) -> None:
        """Return when the receive buffer is filled and the send buffer may be reused.

        Raises PeerError if a peer died or did not arrive in time.
        """


class Transport(Protocol):
    """Every rank of the axis makes the same calls, in the same order within a channel."""

    topology: Topology

    def all_gather(self, channel: Channel, axis: Axis, send: torch.Tensor, recv: torch.Tensor) -> Pending:
        """send: uint8 [n]; recv: uint8 [size of axis * n], in axis order."""

    def all_to_all(self, channel: Channel, axis: Axis, send: torch.Tensor, recv: torch.Tensor) -> Pending:
        """send, recv: uint8 [size of axis * n]; part i goes to, and comes from, axis index i."""

    def exchange(self, message: bytes) -> list[bytes]:
        """Blocking all-gather of a short message of the same length over the world, in rank order."""

    def close(self) -> None:
        """Give up subgroups and threads; the transport is not used again."""
