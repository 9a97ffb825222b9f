"""A software pipeline: jobs pass through its lanes in order, each lane working on another job.

This is what overlaps the hops of a collective with one another and with the caller's computing: while
lane 2 decodes job i, lane 1 drives the second hop of job i + 1 and lane 0 encodes job i + 2. Jobs enter
every lane in the order in which they were submitted, so all ranks send in the same order, whatever the
timing. On a CPU the lanes are threads, on an accelerator streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Stage = Callable[[], None]

LANES = 3


class Job(Protocol):
    """What was submitted. A ``concurrent.futures.Future`` is one.

    On an accelerator to wait means: what comes into the caller's current stream from then on starts after
    the job. Only with a timeout does the host itself wait.
    """

    def result(self, timeout: float | None = None) -> None:
        """Wait for the job; raise what went wrong, or TimeoutError."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the job; return what went wrong, None if nothing did. May raise TimeoutError."""

    def done(self) -> bool:
        """Whether the job has ended. Does not wait."""

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with the job when it has ended; on an accelerator at once, in the last lane's stream."""


class Pipeline(Protocol):
    """After a failure the ranks no longer agree on what comes next, so every later job fails too."""

    def submit(self, stages: Sequence[Stage]) -> Job:
        """Run ``stages[i]`` in lane i."""

    def close(self) -> None:
        """Return once the jobs submitted so far are done; later ones are refused."""
