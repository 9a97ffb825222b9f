"""The lanes are threads.

A thread that has finished a stage carries the job on into the next lane if that is free: a job that meets
no other passes through all lanes in one thread, and every change of threads that is saved is a wait for
the scheduler and for the GIL less.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from zpp.errors import PeerError, ZppError
from zpp.pipeline import LANES, Stage

_EXIT_SECONDS = 5.0
"""How long an interpreter that ends waits for jobs in flight: a peer may be gone."""


class _Job:
    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self.future: Future[None] = Future()
        self.failed = False

    def fail(self, error: BaseException) -> None:
        self.failed = True
        self.future.set_exception(error)


class _Entered:
    """Jobs that are in a lane, and the lane, for any thread to go on with; None ends a thread.

    A pipe rather than ``queue.SimpleQueue``, which wakes a thread while it holds the GIL: the one that is
    woken takes the core and then has to wait for the GIL of the one that it took the core from.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[_Job, int] | None] = deque()
        self._reader, self._writer = os.pipe()

    def put(self, entered: tuple[_Job, int] | None) -> None:
        self._jobs.append(entered)
        os.write(self._writer, b"\0")

    def get(self) -> tuple[_Job, int] | None:
        os.read(self._reader, 1)
        return self._jobs.popleft()

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class ThreadPipeline:
    """`lanes` daemon threads, as many as can be busy; at most `depth` jobs are in the lanes."""

    def __init__(self, name: str, lanes: int = LANES, depth: int = 4) -> None:
        self.name, self._last, self._depth = name, lanes - 1, depth
        self._lock = threading.Lock()
        self._waiting: list[deque[_Job]] = [deque() for _ in range(lanes)]
        self._busy = [False] * lanes
        self._inside = 0
        self._broken: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, stages: Sequence[Stage]) -> Future[None]:
        """Run ``stages[i]`` in lane i. The future ends with the first exception of a stage.

        After a failure the ranks no longer agree on what comes next, so every later job fails too.
        """
        if len(stages) != len(self._busy):
            raise ValueError(f"{len(stages)} stages for {len(self._busy)} lanes")
        if self._closed:
            raise ZppError(f"the {self.name} pipeline is closed")
        if not self._threads:
            self._start()
        return self._submit(stages)

    def _submit(self, stages: Sequence[Stage]) -> Future[None]:
        job = _Job(stages)
        with self._lock:
            self._waiting[0].append(job)
            entered = self._enter(0)
        if entered is not None:
            self._entered.put((entered, 0))
        return job.future

    def _start(self) -> None:
        self._entered = _Entered()
        for i in range(len(self._busy)):
            thread = threading.Thread(target=self._run, name=f"zpp {self.name} {i}", daemon=True)
            thread.start()
            self._threads.append(thread)
        # A daemon thread that still runs when the interpreter is torn down can abort the process.
        self._at_exit = weakref.finalize(self, self._end, _EXIT_SECONDS)

    def _run(self) -> None:
        job: _Job | None
        while (entered := self._entered.get()) is not None:
            job, lane = entered
            del entered  # no name may keep a job's tensors alive longer than the job runs
            while job is not None:
                if not job.failed:
                    self._step(job, lane)
                if lane == self._last and not job.failed:
                    job.future.set_result(None)
                job, lane = self._leave(job, lane)

    def _enter(self, lane: int) -> _Job | None:
        """Under the lock: the next job for `lane` if the lane is free for it, which then is busy."""
        if self._busy[lane] or not self._waiting[lane]:
            return None
        if lane == 0:
            if self._inside == self._depth:
                return None
            self._inside += 1
        self._busy[lane] = True
        return self._waiting[lane].popleft()

    def _leave(self, job: _Job, lane: int) -> tuple[_Job | None, int]:
        """`job` leaves `lane`. Jobs that can go on now do: one in this thread, this one if it can."""
        entered: list[tuple[_Job, int]] = []
        with self._lock:
            self._busy[lane] = False
            if lane == self._last:
                self._inside -= 1
            else:
                self._waiting[lane + 1].append(job)
            for other in (lane + 1 if lane < self._last else 0, lane):
                if (next_job := self._enter(other)) is not None:
                    entered.append((next_job, other))
        for other_job in entered[1:]:
            self._entered.put(other_job)
        return entered[0] if entered else (None, lane)

    def _step(self, job: _Job, lane: int) -> None:
        if self._broken is not None:
            error = PeerError(f"an earlier {self.name} failed ({self._broken}); make a new communicator")
            error.__cause__ = self._broken
            job.fail(error)
            return
        try:
            job.stages[lane]()
        except BaseException as error:  # handed to whoever waits for the job
            self._broken = error
            job.fail(error)

    def close(self) -> None:
        """End the threads once the jobs submitted so far are done."""
        self._closed = True
        if self._threads:
            self._at_exit.detach()
            self._end(None)
            self._threads.clear()
            self._entered.close()

    def _end(self, seconds: float | None) -> None:
        """Have the threads end after the jobs that they have; wait for that, at most `seconds`."""
        until = None if seconds is None else time.monotonic() + seconds
        last = self._submit([_nothing] * len(self._busy))
        try:
            last.exception(seconds)
        except TimeoutError:
            return
        for _ in self._threads:
            self._entered.put(None)
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))


def _nothing() -> None:
    """A stage that has nothing to do."""
