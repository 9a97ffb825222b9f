"""The lanes are streams: a job is put into them by the thread that submits it, and the device runs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from zpp.errors import PeerError, ZppError
from zpp.pipeline import LANES, Job, Stage
from zpp.streams import Event, Stream, Streams

_POLL_SECONDS = 1e-4


class StreamJob:
    """A job that is in its streams up to `end`, the last one of them being `stream`."""

    def __init__(self, streams: Streams, stream: Stream, end: Event, failure: BaseException | None) -> None:
        self._streams, self._stream, self._end, self._failure = streams, stream, end, failure

    def result(self, timeout: float | None = None) -> None:
        if (failure := self.exception(timeout)) is not None:
            raise failure

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if timeout is not None:
            self._wait_on_host(timeout)
        self._streams.current().wait_event(self._end)
        return self._failure

    def _wait_on_host(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while not self._end.query():
            if time.monotonic() >= until:
                raise TimeoutError
            time.sleep(_POLL_SECONDS)

    def done(self) -> bool:
        return self._end.query()

    def add_done_callback(self, fn: Callable[[StreamJob], object]) -> None:
        with self._streams.on(self._stream):
            fn(self)


class StreamPipeline:
    """One stream for each lane.

    A job starts after what is in the submitter's current stream. Its stages are called at once, in the
    submitting thread: ranks that submit in the same order also start their messages in the same order, on
    which NCCL insists where several of its communicators are in use.
    """

    def __init__(self, name: str, streams: Streams, lanes: int = LANES) -> None:
        self.name, self._streams = name, streams
        self._lanes = [streams.new() for _ in range(lanes)]
        self._lock = threading.Lock()
        self._broken: BaseException | None = None
        self._closed = False

    def submit(self, stages: Sequence[Stage]) -> Job:
        if len(stages) != len(self._lanes):
            raise ValueError(f"{len(stages)} stages for {len(self._lanes)} lanes")
        if self._closed:
            raise ZppError(f"the {self.name} pipeline is closed")
        ready = self._streams.current().record_event()
        with self._lock:
            return self._submit(stages, ready)

    def _submit(self, stages: Sequence[Stage], ready: Event) -> Job:
        failure: BaseException | None = None
        if self._broken is not None:
            failure = PeerError(f"an earlier {self.name} failed ({self._broken}); make a new communicator")
            failure.__cause__ = self._broken
        lane = self._lanes[0]
        for stage, lane in zip(stages, self._lanes, strict=True):
            lane.wait_event(ready)
            if failure is None:
                try:
                    with self._streams.on(lane):
                        stage()
                except BaseException as error:  # handed to whoever waits for the job
                    failure = self._broken = error
            ready = lane.record_event()
        return StreamJob(self._streams, lane, ready, failure)

    def close(self) -> None:
        self._closed = True
        for lane in self._lanes:
            lane.record_event().synchronize()
