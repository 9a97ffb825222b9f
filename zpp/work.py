"""The handle of a collective that runs in the background."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zpp.errors import PeerError


class Work(dist.Work):
    """A torch Work over the futures of a collective's pipeline jobs. Works may be waited on in any order."""

    def __init__(self, operation: str, futures: Sequence[Future[None]], output: torch.Tensor) -> None:
        super().__init__()
        self._operation, self.futures, self._output = operation, list(futures), output

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the output is written; raise what went wrong.

        A timeout raises PeerError and leaves the collective running: the output is not to be used.
        """
        seconds = timeout.total_seconds() if timeout else None
        until = None if seconds is None else time.monotonic() + seconds
        failed: Future[None] | None = None
        for future in self.futures:  # all of them, also after a failure: they write to the output
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                if future.exception(left) is not None and failed is None:
                    failed = future
            except TimeoutError:
                raise PeerError(f"{self._operation} did not finish within {seconds:g} s") from None
        if failed is not None:
            failed.result()
        return True

    def is_completed(self) -> bool:
        return all(future.done() for future in self.futures)

    def is_success(self) -> bool:
        return self.is_completed() and not any(future.exception() for future in self.futures)

    def exception(self) -> Any:
        return next((e for f in self.futures if f.done() and (e := f.exception())), None)

    def result(self) -> list[torch.Tensor]:
        return [self._output]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A torch Future of [output], completed when the last job ends."""
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def finish(_: Future[None]) -> None:
            if not self.is_completed() or done.done():
                return
            error = self.exception()
            done.set_exception(error) if error else done.set_result([self._output])

        if not self.futures:
            done.set_result([self._output])
        for future in self.futures:
            future.add_done_callback(finish)
        return done
