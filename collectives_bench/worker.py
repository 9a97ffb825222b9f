"""One rank: `python -m collectives_bench.worker JSON`, started by `launch.py`.

It appends JSON lines to the file it inherited: {"step": n} from rank 0, {"paused": n} after the n-th turn,
and at the end {"result": {...}} or {"failed_at": seconds}. Nothing is imported that starts threads before
the namespace is joined: a process with threads may not enter a user namespace.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any

from collectives_bench import linux
from collectives_bench.case import Case, ModelShape, Place


def _append(report_fd: int, record: dict[str, Any]) -> None:
    os.write(report_fd, (json.dumps(record) + "\n").encode())


def _report_failure(
    report_fd: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Say when: the launcher shows the rank that failed first, the others fail because it is gone."""
    _append(report_fd, {"failed_at": time.monotonic()})
    sys.__excepthook__(kind, error, trace)


def _run(case: Case, place: Place) -> None:
    import torch.distributed as dist

    from collectives_bench.training import join, train

    def progress(step: int) -> None:
        if place.rank == 0:
            _append(place.report_fd, {"step": step})

    def pause(turn: int) -> None:
        _append(place.report_fd, {"paused": turn})
        if not os.read(place.turn_fd, 1):
            raise EOFError("the launcher has ended")

    join(case, place)
    result = train(case, place, progress, pause)
    dist.barrier()  # nobody leaves while others may still want something
    dist.destroy_process_group()
    _append(place.report_fd, {"result": asdict(result)})


def main() -> int:
    """Enter the rank's place, train, report."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    config = json.loads(sys.argv[1])
    place = Place(**config["place"])
    case = Case(**{**config["case"], "shape": ModelShape(**config["case"]["shape"])})
    if place.namespace is not None:
        linux.enter(place.namespace)
    linux.die_with_parent(place.parent)
    sys.excepthook = partial(_report_failure, place.report_fd)
    _run(case, place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
