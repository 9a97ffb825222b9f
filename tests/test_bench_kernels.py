"""`python -m collectives_bench kernels`, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from collectives_bench.__main__ import main

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
