"""Start the ranks of one case as processes, wait for them, and leave none behind."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any

from collectives_bench.case import Case, Place, RankResult
from collectives_bench.network import INTERFACE, Network, address

_PORT = 29500  # free by construction: the namespace is new
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 1.0
_STALL_SECONDS = 600.0  # far beyond the process group's own timeout: only a defect gets here


class RankFailedError(Exception):
    """A rank ended without a result; the message holds what it wrote to stderr."""


class _Rank:
    """One process, and the two unnamed files it writes: they vanish with the last process that has them."""

    def __init__(self, case: Case, place: Place, report: IO[bytes], output: IO[bytes]) -> None:
        self.rank = place.rank
        self._report = report
        self._output = output
        environment = {
            # c10d looks up the peers' host names and warns that these have none.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **os.environ,
            "GLOO_SOCKET_IFNAME": place.interface,
            "OMP_NUM_THREADS": "1",
        }
        config = json.dumps({"case": asdict(case), "place": asdict(place)})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "collectives_bench.worker", config],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=[fd for fd in (place.report_fd, place.listen_fd) if fd is not None],
        )

    def records(self) -> list[dict[str, Any]]:
        """The complete lines the rank has reported so far."""
        text = os.pread(self._report.fileno(), os.fstat(self._report.fileno()).st_size, 0).decode()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def result(self) -> RankResult:
        """What it measured; raises RankFailedError if it ended without saying so."""
        for record in self.records():
            if "result" in record:
                return RankResult(**record["result"])
        raise RankFailedError(f"rank {self.rank} ended without a result\n{self.output()}")

    def failure_time(self) -> float:
        """When it failed; a rank killed by a signal could not say, and is taken for the cause."""
        return next((record["failed_at"] for record in self.records() if "failed_at" in record), 0.0)

    def output(self) -> str:
        """What the rank wrote to stdout and stderr."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")


def _place(
    case: Case, rank: int, network: Network | None, listener: socket.socket | None, report: IO[bytes]
) -> Place:
    """Where one rank runs; its node is rank // ranks_per_node."""
    return Place(
        rank=rank,
        parent=os.getpid(),
        namespace=None if network is None else network.pids[rank // case.ranks_per_node],
        interface="lo" if network is None else INTERFACE,
        host=address(0) if listener is None else "127.0.0.1",
        port=_PORT if listener is None else listener.getsockname()[1],
        listen_fd=listener.fileno() if listener is not None and rank == 0 else None,
        report_fd=report.fileno(),
    )


def _wait(ranks: list[_Rank], on_step: Callable[[int], None]) -> None:
    """Return when all have ended well; raise RankFailedError about the first that did not."""
    step, since = 0, time.monotonic()
    while True:
        states = [rank.process.poll() for rank in ranks]
        if any(state not in (None, 0) for state in states):
            time.sleep(_GRACE_SECONDS)  # the cause may be a moment slower to end than its victims
            failed = [rank for rank in ranks if rank.process.poll() not in (None, 0)]
            first = min(failed, key=lambda rank: rank.failure_time())
            code = first.process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            raise RankFailedError(f"rank {first.rank} {how}\n{first.output()}")
        if all(state == 0 for state in states):
            return
        steps = [record["step"] for record in ranks[0].records() if "step" in record]
        if steps and steps[-1] > step:
            step, since = steps[-1], time.monotonic()
        if time.monotonic() - since > _STALL_SECONDS:
            raise RankFailedError(f"no step after {step} in {_STALL_SECONDS:.0f} s\n{ranks[0].output()}")
        on_step(step)
        time.sleep(_POLL_SECONDS)


def run(case: Case, network: Network | None, on_step: Callable[[int], None]) -> tuple[list[RankResult], str]:
    """Train `case` over `network`, or over loopback; return each rank's result and what rank 0 printed."""
    ranks: list[_Rank] = []
    with contextlib.ExitStack() as stack:
        listener = None
        if network is None:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        try:
            for rank in range(case.world):
                report = stack.enter_context(tempfile.TemporaryFile())
                output = stack.enter_context(tempfile.TemporaryFile())
                ranks.append(_Rank(case, _place(case, rank, network, listener, report), report, output))
            _wait(ranks, on_step)
            return [rank.result() for rank in ranks], ranks[0].output()
        finally:
            for started in ranks:
                started.process.kill()  # all before any wait, so that they do not wait for each other
            for started in ranks:
                started.process.wait()
