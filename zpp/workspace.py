"""Byte buffers for records in flight: reused, bounded, counted."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Protocol

import torch

from zpp.layout import round_up

_GRAIN = 4096
"""Bytes. Buffers are kept by size rounded up to this, so that nearly equal chunks share them."""


class Memory(Protocol):
    """Where buffers come from."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], uninitialised."""

    def free(self, buffer: torch.Tensor) -> None:
        """`buffer`, all of what `allocate` returned, is not used any more."""


class Heap:
    """Ordinary memory of one device, freed when nothing refers to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def free(self, buffer: torch.Tensor) -> None:
        """Nothing to do."""


def _size(nbytes: int) -> int:
    return round_up(max(nbytes, 1), _GRAIN)


class Workspace:
    """A pool of tables of records (uint8), from `memory`. At most `keep_nbytes` stay allocated while idle."""

    def __init__(self, memory: Memory, keep_nbytes: int = 256 << 20) -> None:
        self._memory, self.keep_nbytes = memory, keep_nbytes
        self._lock = threading.Lock()
        self._idle: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._idle_nbytes = 0
        self._lent_nbytes = 0
        self.peak_nbytes = 0

    def take(self, count: int, nbytes: int) -> torch.Tensor:
        """An uninitialised table of `count` records of `nbytes` bytes, to be given back by `give`."""
        size = _size(count * nbytes)
        with self._lock:
            buffers = self._idle[size]
            buffer = buffers.pop() if buffers else None
            if buffer is not None:
                self._idle_nbytes -= size
            self._lent_nbytes += size
            self.peak_nbytes = max(self.peak_nbytes, self._lent_nbytes + self._idle_nbytes)
        if buffer is None:
            buffer = self._memory.allocate(size)
        if buffer.shape == (count, nbytes):  # as it was lent before: the usual case, in the usual step
            return buffer
        return buffer.as_strided((count, nbytes), (nbytes, 1))

    def give(self, table: torch.Tensor) -> None:
        """Take back what `take` lent; the caller does not touch it again."""
        size = _size(table.numel())
        with self._lock:
            self._lent_nbytes -= size
            keep = self._idle_nbytes + size <= self.keep_nbytes
            if keep:
                self._idle[size].append(table)
                self._idle_nbytes += size
        if not keep:
            self._memory.free(table.as_strided((size,), (1,)))

    @property
    def lent_nbytes(self) -> int:
        with self._lock:
            return self._lent_nbytes
