"""`python -m collectives_bench kernels`, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from collectives_bench.__main__ import main
from collectives_bench.clock import HostClock
from collectives_bench.kernels import differences
from zpp.format import BlockFormat
from zpp.kernels import for_device
from zpp.kernels.numpy_backend import ReferenceKernels

ROOT = Path(__file__).parent.parent
KEYS = {"op", "format", "dtype", "gbps", "copy_gbps", "share_of_copy"}
OPS = {"encode", "decode", "decode_reduce", "decode_reduce_encode"}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "collectives_bench", "kernels", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)


def test_one_json_line_for_each_row_of_the_table(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    done = _run("--device", "cpu", "--numel", "65536", "--rounds", "3", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    header, *table = done.stdout.splitlines()
    assert header.split()[:3] == ["op", "format", "dtype"]

    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == len(table) > 0
    for row, line in zip(rows, table, strict=True):
        assert set(row) >= KEYS
        assert line.split()[0] == row["op"]
        for shown in (row["format"], row["dtype"], f"{row['gbps']:.1f}", f"{row['copy_gbps']:.1f}"):
            assert shown in line
        assert row["gbps"] > 0
        assert row["share_of_copy"] == pytest.approx(row["gbps"] / row["copy_gbps"])
    assert {row["op"] for row in rows} == OPS
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32"}
    assert len({(row["op"], row["format"], row["dtype"]) for row in rows}) == len(rows), "each case once"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--numel", "0"], "argument --numel: must be at least 1, got 0"),
        (["--rounds", "-3"], "argument --rounds: must be at least 1, got -3"),
        (["--threads", "0"], "argument --threads: must be at least 1, got 0"),
        (["--device", "abacus"], "invalid choice: 'abacus'"),
        (["--rounds", "often"], "argument --rounds: invalid integer value: 'often'"),
        (["--device", "cuda", "--threads", "2"], "--threads is for --device cpu"),
        (["--format", "int8"], "unrecognized arguments: --format int8"),
    ],
)
def test_bad_options_end_in_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    """In this process: each interpreter that imports torch takes seconds."""
    try:
        status: object = main(["kernels", *arguments])
    except SystemExit as exit_:
        status = exit_.code
    printed = capsys.readouterr()
    assert status == 2
    assert sentence in printed.err
    assert printed.out == ""


def test_the_status_reaches_the_shell() -> None:
    done = _run("--numel", "-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("argument --numel: must be at least 1, got -1\n")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", "--json", str(tmp_path / "missing" / "rows.jsonl")]) == 2
    printed = capsys.readouterr()
    assert "cannot write --json" in printed.err
    assert not printed.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_gpu_table_ends_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    assert "torch finds no CUDA device" in printed.err
    assert not printed.out


class _OneBitOff(ReferenceKernels):
    def decode_reduce(
        self, records: Sequence[Tensor], fmt: BlockFormat, out: Tensor, *, factor: float = 1.0
    ) -> None:
        super().decode_reduce(records, fmt, out, factor=factor)
        if fmt.rotate:
            out.view(-1).view(torch.uint8)[-1] ^= 1


def test_kernels_that_are_wrong_are_not_measured() -> None:
    cpu = torch.device("cpu")
    assert list(differences(for_device(cpu), cpu)) == []
    assert list(differences(_OneBitOff(), cpu)) == [
        f"decode_reduce int4/128 rotated {dtype}" for dtype in ("bfloat16", "float32")
    ]


def test_calls_are_timed_one_by_one() -> None:
    done: list[int] = []

    def slow() -> None:
        done.append(1)
        time.sleep(0.02)

    first, second = HostClock().seconds([slow, lambda: done.append(2)])
    assert done == [1, 2]
    assert 0.02 <= first < 10
    assert 0 <= second < first
