"""`kernels`: the speed of each kernel beside a plain copy of the same number of bytes."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from collectives_bench.options import at_least, open_json
from zpp.format import BlockFormat, Code
from zpp.kernels import Kernels, for_device

INT8 = BlockFormat(Code.INT8, block=2048)
INT8_512 = BlockFormat(Code.INT8, block=512)
INT4 = BlockFormat(Code.INT4, block=128)
INT4_ROTATED = BlockFormat(Code.INT4, block=128, rotate=True)
PEERS = 2


@dataclass(frozen=True)
class Case:
    """A kernel call, and the bytes that it has to read and write."""

    op: str
    format: str
    dtype: str
    nbytes: int
    call: Callable[[], None]


@dataclass(frozen=True)
class Row:
    op: str
    format: str
    dtype: str
    gbps: float
    copy_gbps: float
    share_of_copy: float
    threads: int
    numel: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument(
        "--threads", type=at_least(1), default=1, help="of each kernel and of the copy (default 1)"
    )
    parser.add_argument(
        "--numel", type=at_least(1), default=1 << 24, help="values of a buffer (default 16777216)"
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=15, help="timed calls of each kernel (default 15)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON line for each row")


def cases(kernels: Kernels, numel: int) -> Iterator[Case]:
    """Every operation for the formats that training uses."""
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.randn(1, numel).to(dtype)
        for fmt in (INT8, INT8_512, INT4, INT4_ROTATED):
            record = torch.zeros(1, fmt.record_nbytes(numel), dtype=torch.uint8)
            kernels.encode(values, fmt, record)
            out = torch.empty_like(values)
            kind = str(fmt), str(dtype).removeprefix("torch.")
            nbytes = values.nbytes + record.nbytes
            yield Case("encode", *kind, nbytes, _bind(kernels.encode, values, fmt, record))
            yield Case("decode", *kind, nbytes, _bind(kernels.decode, record, fmt, out))
            records = [record.clone() for _ in range(PEERS)]
            nbytes = PEERS * record.nbytes + out.nbytes
            yield Case("decode_reduce", *kind, nbytes, _bind(kernels.decode_reduce, records, fmt, out))
    for fmt, out_fmt in ((INT8_512, INT4_ROTATED), (INT4, INT4), (INT8, INT8)):
        record = torch.zeros(1, fmt.record_nbytes(numel), dtype=torch.uint8)
        kernels.encode(torch.randn(1, numel), fmt, record)
        records = [record.clone() for _ in range(PEERS)]
        made = torch.zeros(1, out_fmt.record_nbytes(numel), dtype=torch.uint8)
        call = _bind(kernels.decode_reduce_encode, records, fmt, out_fmt, made, numel)
        kind, nbytes = (f"{fmt} -> {out_fmt}", "float32"), PEERS * record.nbytes + made.nbytes
        yield Case("decode_reduce_encode", *kind, nbytes, call)


def _bind(function: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: function(*arguments)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(case: Case, rounds: int, threads: int, numel: int) -> Row:
    """Kernel and copy in turn, so that both meet the same state of the machine; medians."""
    source = torch.ones(case.nbytes // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 2):
        pair = _seconds(case.call), _seconds(lambda: target.copy_(source))
        if i >= 2:
            times[0].append(pair[0])
            times[1].append(pair[1])
    gbps, copy = (case.nbytes / statistics.median(t) / 1e9 for t in times)
    return Row(case.op, case.format, case.dtype, gbps, copy, gbps / copy, threads, numel)


def run(args: argparse.Namespace) -> int:
    """Measure every case and print the table. Raises UsageError."""
    with contextlib.ExitStack() as stack:
        json_file = None if args.json is None else stack.enter_context(open_json(args.json))
        torch.set_num_threads(args.threads)
        kernels = for_device(torch.device(args.device), args.threads)
        print(f"{'op':22}{'format':44}{'dtype':10}{'GB/s':>8}{'copy':>8}{'share':>7}")
        for case in cases(kernels, args.numel):
            row = measure(case, args.rounds, args.threads, args.numel)
            speed = f"{row.gbps:8.1f}{row.copy_gbps:8.1f}{row.share_of_copy:7.2f}"
            print(f"{row.op:22}{row.format:44}{row.dtype:10}{speed}")
            if json_file is not None:
                print(json.dumps(asdict(row)), file=json_file, flush=True)
    return 0
