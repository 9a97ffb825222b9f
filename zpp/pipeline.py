"""A software pipeline: jobs pass through its lanes in order, each lane working on another job.

This is what overlaps the hops of a collective with one another and with the caller's computing: while
lane 2 decodes job i, lane 1 drives the second hop of job i + 1 and lane 0 encodes job i + 2. Jobs enter
every lane in the order in which they were submitted, so all ranks send in the same order, whatever the
timing.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from zpp.errors import PeerError, ZppError

Stage = Callable[[], None]
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


class Pipeline:
    """`lanes` daemon threads; at most `depth` jobs are between the first lane and the last."""

    def __init__(self, name: str, lanes: int = 3, depth: int = 4) -> None:
        self.name = name
        self._queues: list[queue.SimpleQueue[_Job | None]] = [queue.SimpleQueue() for _ in range(lanes)]
        self._slots = threading.Semaphore(depth)
        self._broken: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, stages: Sequence[Stage]) -> Future[None]:
        """Run ``stages[i]`` in lane i. The future ends with the first exception of a stage.

        After a failure the ranks no longer agree on what comes next, so every later job fails too.
        """
        if len(stages) != len(self._queues):
            raise ValueError(f"{len(stages)} stages for {len(self._queues)} lanes")
        if self._closed:
            raise ZppError(f"the {self.name} pipeline is closed")
        if not self._threads:
            self._start()
        job = _Job(stages)
        self._queues[0].put(job)
        return job.future

    def _start(self) -> None:
        for lane in range(len(self._queues)):
            name = f"zpp {self.name} {lane}"
            thread = threading.Thread(target=self._run, args=(lane,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        # A daemon thread that still runs when the interpreter is torn down can abort the process.
        weakref.finalize(self, _end, self._queues[0], self._threads, _EXIT_SECONDS)

    def _run(self, lane: int) -> None:
        last = len(self._queues) - 1
        while (job := self._queues[lane].get()) is not None:
            if lane == 0:
                self._slots.acquire()
            if not job.failed:
                self._step(job, lane)
            if lane < last:
                self._queues[lane + 1].put(job)
            else:
                self._slots.release()
                if not job.failed:
                    job.future.set_result(None)
            job = None  # a waiting lane must not keep the last job's tensors alive
        if lane < last:
            self._queues[lane + 1].put(None)

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
        _end(self._queues[0], self._threads)
        self._threads.clear()


def _end(
    entrance: queue.SimpleQueue[_Job | None],
    threads: Sequence[threading.Thread],
    seconds: float | None = None,
) -> None:
    """Have the threads end after the jobs that they have; wait for that, at most `seconds`."""
    if not threads:
        return
    entrance.put(None)
    until = None if seconds is None else time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
