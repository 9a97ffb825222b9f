"""`python -m collectives_bench train`, run as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectives_bench import text
from collectives_bench.case import Case, ModelShape, RankResult
from collectives_bench.network import INTERFACE, Link, Network, NetworkUnavailableError
from collectives_bench.report import summarise, table

ROOT = Path(__file__).parent.parent
TINY = ["--layers", "2", "--width", "128", "--heads", "4", "--steps", "12", "--warmup", "1", "--lr", "3e-3"]
KEYS = {
    "system", "step_ms_median", "cross_node_bytes_per_step", "cross_node_M", "loss_first", "loss_last",
    "params", "nodes", "ranks_per_node", "link", "peak_rss_bytes", "torch",
}  # fmt: skip


@pytest.fixture(scope="module")
def namespaces() -> None:
    try:
        Network(1, Link.parse("1gbit")).close()
    except NetworkUnavailableError as reason:
        pytest.skip(f"no network namespaces here: {reason}")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "collectives_bench", *arguments]


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(*arguments),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
        timeout=120,
    )


def test_compute_and_fsdp2_over_a_shaped_link(namespaces: None, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    done = _run("train", "--systems", "compute,fsdp2", "--link", "1gbit", "--json", str(file), *TINY)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["system", "compute", "fsdp2"]

    compute, fsdp2 = (json.loads(line) for line in file.read_text().splitlines())
    for row in (compute, fsdp2):
        assert set(row) >= KEYS
        assert (row["link"], row["nodes"], row["ranks_per_node"]) == ("1gbit", 2, 2)
        assert row["step_ms_median"] > 0
        assert row["loss_last"] < row["loss_first"] - 0.5
    assert compute["loss_first"] == fsdp2["loss_first"], "same weights, same data"
    assert fsdp2["cross_node_M"] == pytest.approx(2.99, rel=0.05)
    assert fsdp2["cross_node_bytes_per_step"] == pytest.approx(fsdp2["cross_node_M"] * 2 * fsdp2["params"])
    assert compute["cross_node_M"] < 0.01


def test_zpp_trains_as_zero3_does_with_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    """By the transport's own counters, since a shaped link may not be had; the losses are real."""
    file = tmp_path / "rows.jsonl"
    sizes = ("--layers", "2", "--width", "128", "--heads", "4", "--context", "32")
    done = _run(
        "train", "--systems", "zero3,zpp", "--steps", "30", "--warmup", "1", *sizes, "--json", str(file)
    )
    assert done.returncode == 0, done.stderr
    zero3, zpp = (json.loads(line) for line in file.read_text().splitlines())
    assert 1.4 <= zero3["cross_node_M"] <= 1.55
    assert zpp["cross_node_M"] <= min(0.40, zero3["cross_node_M"] / 3.75)
    assert zpp["loss_last"] < 0.9 * zpp["loss_first"]
    assert abs(zpp["loss_last"] / zero3["loss_last"] - 1) < 0.01


def test_without_namespaces_it_says_so_and_runs_over_loopback(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    # Where no `ip` is installed there is no network to shape.
    arguments = ["train", "--systems", "fsdp2", "--link", "1gbit", "--nodes", "1", "--json", str(file), *TINY]
    done = _run(*arguments, PATH="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert "loopback" in done.stderr
    assert "ip" in done.stderr
    row = json.loads(file.read_text())
    assert (row["link"], row["cross_node_bytes_per_step"], row["cross_node_M"]) == ("none", None, None)


def test_a_failing_rank_is_shown_and_the_exit_status_is_1(tmp_path: Path) -> None:
    # The text is there when the options are checked, and can be read once only.
    pipe = tmp_path / "text"
    os.mkfifo(pipe)
    command = _command("train", "--systems", "compute", "--nodes", "1", "--text", str(pipe), *TINY)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        pipe.write_bytes(bytes(1000))
        pipe.unlink()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert "FileNotFoundError" in err
    assert "failed: compute" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "COMMAND"),
        (["nosuch"], "nosuch"),
        (["train", "--systems", "nosuch"], "nosuch"),
        (["train", "--steps", "0"], "at least 1"),
        (["train", "--width", "100", "--heads", "3"], "multiple"),
        (["train", "--link", "fast"], "link"),
        (["train", "--nodes", "1000"], "1000"),
        (["train", "--text", "/nonexistent"], "/nonexistent"),
        (["train", "--json", "/nonexistent/file"], "/nonexistent/file"),
        (["train", "--context", "100000000"], "100000000"),
        (["train", "--lr", "nan"], "--lr"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], complaint: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stdout == ""


def _descendants(pid: int) -> dict[int, str]:
    """Every process below `pid`, with its command line."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    found: dict[int, str] = {}
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            queue.append(child)
            found[child] = _command_line(child)
    return found


def _command_line(pid: int) -> str:
    """Empty once the process has ended, even if nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture
def training(namespaces: None) -> Iterator[subprocess.Popen[bytes]]:
    arguments = ["train", "--systems", "fsdp2", "--link", "1gbit", "--steps", "100000"]
    process = subprocess.Popen(
        _command(*arguments), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    yield process
    process.kill()
    process.wait()


def _sent(processes: dict[int, str]) -> int:
    """Bytes that left the interfaces of the worker processes' nodes so far."""
    total = 0
    for pid in (pid for pid, line in processes.items() if "worker" in line):
        for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            total += int(counters.split()[8]) if name.strip() == INTERFACE else 0
    return total


@pytest.mark.parametrize(
    ("number", "status", "nbytes"),
    [
        (signal.SIGKILL, -9, 0),  # while the ranks start
        (signal.SIGKILL, -9, 10_000_000),  # while they train
        (signal.SIGINT, 130, 10_000_000),
        (signal.SIGTERM, 130, 0),
    ],
)
def test_no_process_outlives_a_killed_benchmark(
    number: signal.Signals, status: int, nbytes: int, training: subprocess.Popen[bytes]
) -> None:
    deadline = time.monotonic() + 60
    processes: dict[int, str] = {}
    while sum("worker" in line for line in processes.values()) < 4 or _sent(processes) < nbytes:
        assert time.monotonic() < deadline, "training did not start"
        time.sleep(0.05)
        processes = _descendants(training.pid)
    assert sum("worker" in line for line in processes.values()) == 4
    assert sum("switch" in line for line in processes.values()) == 3  # the switch and two nodes

    training.send_signal(number)
    assert training.wait(timeout=10) == status
    deadline = time.monotonic() + 5
    while any(map(_command_line, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid, line in processes.items() if line and _command_line(pid) == line]


def _case(system: str) -> Case:
    shape = ModelShape(context=64, layers=1, width=8, heads=1)
    return Case(system, 2, 2, steps=3, warmup=1, batch=1, shape=shape, text=None, seed=0, lr=1e-3, turn=2)


def _results(scale: float) -> list[RankResult]:
    return [
        RankResult(
            step_ms=[scale * (10 + rank), scale * 20, scale * 30],
            losses=[4.0 + rank, 3.0, 2.0, 1.0],
            cross_node_bytes=int(scale * (600, 0, 900, 300)[rank]),
            params=100,
            peak_rss_bytes=rank << 20,
            torch="x",
        )
        for rank in range(4)
    ]


def test_a_row_takes_the_slowest_rank_and_the_busiest_node() -> None:
    row = summarise(_case("zero3"), _results(1), "1gbit")
    assert row.step_ms_median == 20  # of 13, 20, 30
    assert row.cross_node_bytes_per_step == 400  # 1200 bytes of node 1 in 3 steps
    assert row.cross_node_M == 2.0
    assert row.loss_first == 5.5
    assert row.peak_rss_bytes == 3 << 20


def test_the_table_compares_with_zero3() -> None:
    rows = [summarise(_case("zero3"), _results(1), "none"), summarise(_case("zpp"), _results(0.5), "none")]
    lines = [line.split() for line in table(rows).splitlines()]
    assert lines[1][1:6] == ["20.0", "1.000", "400", "2.000", "1.000"]
    assert lines[2][1:6] == ["10.0", "0.500", "200", "1.000", "0.500"]


def test_batches_depend_on_seed_step_and_rank_only() -> None:
    data = text.load(None)
    assert len(data) > 100_000

    def batch(seed: int, step: int, rank: int) -> list[list[int]]:
        inputs, targets = text.batch(data, seed=seed, step=step, rank=rank, batch_size=3, context=16)
        assert inputs.shape == targets.shape == (3, 16)
        assert (inputs[:, 1:] == targets[:, :-1]).all()
        return inputs.tolist()

    assert batch(0, 0, 0) == batch(0, 0, 0)
    different = [batch(0, 0, 0), batch(1, 0, 0), batch(0, 1, 0), batch(0, 0, 1)]
    assert all(different.count(one) == 1 for one in different)
