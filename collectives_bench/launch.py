"""Start the ranks of one case as processes, let them work in turns, and leave none behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any, Self

from collectives_bench.case import Case, Place, RankResult
from collectives_bench.network import INTERFACE, Network, address

_FIRST_PORT = 29500  # free by construction: the namespace is new
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
            pass_fds=[fd for fd in (place.report_fd, place.listen_fd, place.turn_fd) if fd is not None],
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


class World:
    """The ranks of one case as processes, over `network` or over loopback. A context manager: it leaves none.

    index: tells worlds apart that live at the same time on one network.
    """

    def __init__(self, case: Case, network: Network | None, index: int) -> None:
        self._case, self._turn = case, 0
        self._ranks: list[_Rank] = []
        self._stack = contextlib.ExitStack()
        try:
            self._start(network, index)
        except BaseException:
            self.close()
            raise

    def _start(self, network: Network | None, index: int) -> None:
        files = self._stack
        turn_fd, self._turns = os.pipe()
        files.callback(os.close, self._turns)
        listener = None
        if network is None:
            listener = files.enter_context(socket.create_server(("127.0.0.1", 0)))
        for rank in range(self._case.world):
            report = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed with the stack
            output = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            place = Place(
                rank=rank,
                parent=os.getpid(),
                namespace=None if network is None else network.pids[rank // self._case.ranks_per_node],
                interface="lo" if network is None else INTERFACE,
                host=address(0) if listener is None else "127.0.0.1",
                port=_FIRST_PORT + index if listener is None else listener.getsockname()[1],
                listen_fd=listener.fileno() if listener is not None and rank == 0 else None,
                report_fd=report.fileno(),
                turn_fd=turn_fd,
            )
            self._ranks.append(_Rank(self._case, place, report, output))
        os.close(turn_fd)

    def run_turn(self, on_step: Callable[[int], None]) -> None:
        """Let the ranks go on until they pause or end; raise RankFailedError about the first that failed."""
        if self._turn:
            self._signal(signal.SIGCONT)
            os.write(self._turns, bytes(len(self._ranks)))
        self._turn += 1
        step, since = 0, time.monotonic()
        while not self._turn_is_over():
            steps = [record["step"] for record in self._ranks[0].records() if "step" in record]
            if steps and steps[-1] > step:
                step, since = steps[-1], time.monotonic()
            if time.monotonic() - since > _STALL_SECONDS:
                raise RankFailedError(
                    f"no step after {step} in {_STALL_SECONDS:.0f} s\n{self._ranks[0].output()}"
                )
            on_step(step)
            time.sleep(_POLL_SECONDS)
        if self._turn < self._case.turns:
            self._signal(signal.SIGSTOP)  # gloo's threads wake a hundred times a second, whatever happens

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            rank.process.send_signal(number)

    def _turn_is_over(self) -> bool:
        states = [rank.process.poll() for rank in self._ranks]
        if any(state not in (None, 0) for state in states):
            time.sleep(_GRACE_SECONDS)  # the cause may be a moment slower to end than its victims
            failed = [rank for rank in self._ranks if rank.process.poll() not in (None, 0)]
            first = min(failed, key=lambda rank: rank.failure_time())
            code = first.process.returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            raise RankFailedError(f"rank {first.rank} {how}\n{first.output()}")
        if self._turn == self._case.turns:
            return all(state == 0 for state in states)
        return all({"paused": self._turn} in rank.records() for rank in self._ranks)

    def results(self) -> tuple[list[RankResult], str]:
        """After the last turn: what each rank measured, and what rank 0 printed."""
        return [rank.result() for rank in self._ranks], self._ranks[0].output()

    def close(self) -> None:
        """End what still runs."""
        for started in self._ranks:
            started.process.kill()  # all before any wait, so that they do not wait for each other
        for started in self._ranks:
            started.process.wait()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
