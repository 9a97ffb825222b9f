"""How long calls take, one beside the other: on a CPU by its clock, on a GPU by events in its stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Protocol

import torch

Call = Callable[[], object]

_AHEAD_NBYTES = 2 << 30
"""Written before each measurement on a GPU: about half a millisecond, in which the host puts all calls into
the stream, so that none waits for Python; and nothing of the calls' own data is left in the L2 cache."""


class Clock(Protocol):
    def seconds(self, calls: list[Call]) -> list[float]:
        """Run the calls one after another; what each of them took."""


class HostClock:
    def seconds(self, calls: list[Call]) -> list[float]:
        times = [time.perf_counter()]
        for call in calls:
            call()
            times.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(times)]


class CudaClock:
    def __init__(self, device: torch.device) -> None:
        self._ahead = torch.empty(_AHEAD_NBYTES, dtype=torch.uint8, device=device)

    def seconds(self, calls: list[Call]) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
        with torch.cuda.device(self._ahead.device):
            self._ahead.zero_()
            events[0].record()
            for call, event in zip(calls, events[1:], strict=True):
                call()
                event.record()
            events[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
