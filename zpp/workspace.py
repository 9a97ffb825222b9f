"""Byte buffers for records in flight: reused, bounded, counted."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Protocol

import torch

from zpp.layout import round_up
from zpp.streams import Event, Streams

_GRAIN = 4096
"""Bytes. Buffers are kept by size rounded up to this, so that nearly equal chunks share them."""
_SPARE = 4
"""Idle buffers of a size, on a device with streams, beyond which one is lent again: a job that was lent the
buffer of the one before would have to wait for it, and nothing would overlap."""


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
    """A pool of tables of records (uint8), from `memory`. At most `keep_nbytes` stay allocated while idle.

    On a device with `streams` a table is lent to the current stream, which first waits for whoever had it.
    """

    def __init__(
        self, memory: Memory, keep_nbytes: int = 256 << 20, *, streams: Streams | None = None
    ) -> None:
        self._memory, self.keep_nbytes, self._streams = memory, keep_nbytes, streams
        self._lock = threading.Lock()
        self._idle: dict[int, deque[tuple[torch.Tensor, Event | None]]] = defaultdict(deque)
        self._idle_nbytes = 0
        self._lent_nbytes = 0
        self.peak_nbytes = 0

    def take(self, count: int, nbytes: int) -> torch.Tensor:
        """An uninitialised table of `count` records of `nbytes` bytes, to be given back by `give`."""
        size = _size(count * nbytes)
        with self._lock:
            buffer, read = self._pop(size)
            self._lent_nbytes += size
            self.peak_nbytes = max(self.peak_nbytes, self._lent_nbytes + self._idle_nbytes)
        if buffer is None:
            buffer = self._memory.allocate(size)
        elif read is not None and self._streams is not None:
            self._streams.current().wait_event(read)
        if buffer.shape == (count, nbytes):  # as it was lent before: the usual case, in the usual step
            return buffer
        return buffer.as_strided((count, nbytes), (nbytes, 1))

    def _pop(self, size: int) -> tuple[torch.Tensor | None, Event | None]:
        """Under the lock: an idle buffer, and what to wait for before it is written to."""
        idle = self._idle[size]
        if len(idle) < (1 if self._streams is None else _SPARE):
            return None, None
        self._idle_nbytes -= size
        # The one used last is in the cache of a CPU; the one used first is ready on a device with streams.
        return idle.pop() if self._streams is None else idle.popleft()

    def give(self, table: torch.Tensor) -> None:
        """Take back what `take` lent; what the current stream holds may still use it, nothing after that."""
        size, read = _size(table.numel()), None
        if self._streams is not None:
            self._streams.keep(table)
            read = self._streams.current().record_event()
        with self._lock:
            self._lent_nbytes -= size
            keep = self._idle_nbytes + size <= self.keep_nbytes
            if keep:
                self._idle[size].append((table, read))
                self._idle_nbytes += size
        if not keep:
            self._memory.free(table.as_strided((size,), (1,)))

    @property
    def lent_nbytes(self) -> int:
        with self._lock:
            return self._lent_nbytes
