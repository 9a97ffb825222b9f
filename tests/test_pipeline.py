"""The pipeline by itself: order, overlap, failure, end."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from zpp.errors import PeerError, ZppError
from zpp.pipeline.threads import ThreadPipeline

ROOT = Path(__file__).parent.parent
AT_EXIT = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if "zpp" in thread.name]))
from zpp.pipeline.threads import ThreadPipeline
ThreadPipeline("forgotten").submit([lambda: None] * 3).result()
"""


def nothing() -> None:
    pass


def test_jobs_enter_every_lane_in_the_order_of_submission() -> None:
    pipeline, seen = ThreadPipeline("test"), [[], [], []]  # type: tuple[ThreadPipeline, list[list[int]]]
    jobs = [[(lambda lane=lane, i=i: seen[lane].append(i)) for lane in range(3)] for i in range(50)]
    for future in [pipeline.submit(stages) for stages in jobs]:
        future.result(timeout=10)
    pipeline.close()
    assert seen == [list(range(50))] * 3


def test_lanes_work_on_different_jobs_at_the_same_time() -> None:
    pipeline, met = ThreadPipeline("test"), threading.Barrier(3, timeout=10)
    stages = [[nothing, nothing, met.wait], [nothing, met.wait, nothing], [met.wait, nothing, nothing]]
    for future in [pipeline.submit(job) for job in stages]:  # type: ignore[arg-type]
        future.result(timeout=10)
    pipeline.close()


def test_a_lane_has_one_job_at_a_time_and_the_lanes_together_at_most_depth() -> None:
    pipeline, chance, lock = ThreadPipeline("test", depth=2), random.Random(5), threading.Lock()
    now = [0, 0, 0]
    started, most, order = 0, 0, [[], [], []]  # type: tuple[int, int, list[list[int]]]

    def stage(lane: int, job: int, seconds: float) -> None:
        nonlocal started, most
        with lock:
            now[lane] += 1
            started += lane == 0
            most = max(most, started)
            assert now[lane] == 1
            order[lane].append(job)
        time.sleep(seconds)
        with lock:
            now[lane] -= 1
            started -= lane == 2

    futures = []
    for job in range(100):
        seconds = [chance.choice((0.0, 0.0, 0.002)) for _ in range(3)]
        futures.append(
            pipeline.submit([partial(stage, lane, job, seconds[lane]) for lane in range(3)]),
        )
        time.sleep(chance.choice((0.0, 0.0, 0.003)))
    for future in futures:
        future.result(timeout=10)
    pipeline.close()
    assert order == [list(range(100))] * 3
    assert most == 2


def test_after_a_failure_every_later_job_fails_and_none_hangs() -> None:
    pipeline = ThreadPipeline("test")

    def fail() -> None:
        raise RuntimeError("the peer is gone")

    first = pipeline.submit([nothing, fail, nothing])
    with pytest.raises(RuntimeError, match="the peer is gone"):
        first.result(timeout=10)
    for _ in range(10):
        with pytest.raises(PeerError, match="an earlier test failed .the peer is gone."):
            pipeline.submit([nothing] * 3).result(timeout=10)
    pipeline.close()
    with pytest.raises(ZppError, match="the test pipeline is closed"):
        pipeline.submit([nothing] * 3)


def test_a_pipeline_that_nobody_closed_ends_before_the_interpreter() -> None:
    command = [sys.executable, "-c", AT_EXIT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
