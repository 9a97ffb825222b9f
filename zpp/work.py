"""The handle of a collective that runs in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zpp.errors import PeerError
from zpp.pipeline import Job


class Work(dist.Work):
    """A torch Work over a collective's pipeline jobs. Works may be waited on in any order."""

    def __init__(self, operation: str, jobs: Sequence[Job], output: torch.Tensor) -> None:
        super().__init__()
        self._operation, self.jobs, self._output = operation, list(jobs), output

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the output is written; raise what went wrong.

        On an accelerator the caller's current stream waits, the host only if there is a timeout. A timeout
        raises PeerError and leaves the collective running: the output is not to be used.
        """
        seconds = timeout.total_seconds() if timeout else None
        until = None if seconds is None else time.monotonic() + seconds
        failed: Job | None = None
        for job in self.jobs:  # all of them, also after a failure: they write to the output
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                if job.exception(left) is not None and failed is None:
                    failed = job
            except TimeoutError:
                raise PeerError(f"{self._operation} did not finish within {seconds:g} s") from None
        if failed is not None:
            failed.result()
        return True

    def is_completed(self) -> bool:
        return all(job.done() for job in self.jobs)

    def is_success(self) -> bool:
        return self.is_completed() and not any(job.exception() for job in self.jobs)

    def exception(self) -> Any:
        return next((e for job in self.jobs if job.done() and (e := job.exception())), None)

    def result(self) -> list[torch.Tensor]:
        return [self._output]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A torch Future of [output], completed when the last job ends; on an accelerator at once, and
        whoever waits for it has the current stream wait.
        """
        devices: list[int | str | torch.device] = []
        if self._output.device.type != "cpu":
            devices.append(self._output.device)
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        pending, lock = set(self.jobs), threading.Lock()

        def finish(job: Job) -> None:
            with lock:
                pending.discard(job)
                if pending:
                    return
            error: Any = next((e for job in self.jobs if (e := job.exception())), None)
            done.set_exception(error) if error else done.set_result([self._output])

        if not self.jobs:
            done.set_result([self._output])
        for job in self.jobs:
            job.add_done_callback(finish)
        return done
