"""Hops with the buffers that they need from the workspace."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zpp.transport import Hop
from zpp.workspace import Workspace


class Loans:
    """Sent buffers that peers may still be reading. They go back to the workspace once they have been read.

    One pipeline's hops, in the order in which they were sent: waiting here for one of them waits for jobs
    of the peers that are older than the caller's, so that no two ranks wait for each other.
    """

    def __init__(self, workspace: Workspace, most: int = 8) -> None:
        self._workspace, self._most = workspace, most
        self._read: deque[tuple[torch.Tensor, Hop]] = deque()

    def give(self, buffer: torch.Tensor, hop: Hop) -> None:
        """`buffer` was sent by `hop`. Waits for the oldest buffers if more than `most` are out."""
        self._read.append((buffer, hop))
        while self._read and self._read[0][1].returned(wait=len(self._read) > self._most):
            self._workspace.give(self._read.popleft()[0])


@dataclass(frozen=True)
class Crossing:
    """A hop with the buffers that it needs from the workspace."""

    hop: Hop
    recv: torch.Tensor | None
    workspace: Workspace
    loans: Loans

    def receive(self) -> Sequence[torch.Tensor]:
        """The records that every member of the axis sent, in axis order; to be read only."""
        return self.hop.receive()

    def release(self, sent: torch.Tensor | None = None) -> None:
        """What was received has been read. `sent` goes back to the workspace when the peers have read it."""
        self.hop.release()
        if self.recv is not None:
            self.workspace.give(self.recv)
        if sent is not None:
            self.loans.give(sent, self.hop)
