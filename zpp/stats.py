"""Counts of what was asked to move and of what was sent, per axis, and of every loud fallback."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, replace

from zpp.topology import Axis


@dataclass
class AxisStats:
    """`messages` counts hops; bytes are those this rank sent to other ranks of the axis."""

    messages: int = 0
    logical_bytes: int = 0
    wire_bytes: int = 0


@dataclass
class Snapshot:
    axes: dict[Axis, AxisStats]
    calls: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)


class Stats:
    """One communicator's counters. Safe to read from any thread while collectives run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Snapshot({axis: AxisStats() for axis in Axis})

    def hop(self, axis: Axis, *, logical: int, wire: int) -> None:
        with self._lock:
            counts = self._now.axes[axis]
            counts.messages += 1
            counts.logical_bytes += logical
            counts.wire_bytes += wire

    def call(self, operation: str) -> None:
        with self._lock:
            self._now.calls[operation] += 1

    def fallback(self, reason: str) -> None:
        """A tensor that was to be compressed went through as it is."""
        with self._lock:
            self._now.fallbacks[reason] += 1

    def wire_bytes(self, axis: Axis) -> int:
        """Bytes this rank has sent along the axis, scales and padding included."""
        with self._lock:
            return self._now.axes[axis].wire_bytes

    def snapshot(self) -> Snapshot:
        with self._lock:
            axes = {axis: replace(counts) for axis, counts in self._now.axes.items()}
            return Snapshot(axes, self._now.calls.copy(), self._now.fallbacks.copy())
