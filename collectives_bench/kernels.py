"""`kernels`: the speed of each kernel beside a plain copy of the same number of bytes."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from collectives_bench.clock import Clock, CudaClock, HostClock
from collectives_bench.options import UsageError, at_least, open_json
from zpp.errors import UnavailableError
from zpp.format import BlockFormat, Code
from zpp.kernels import Kernels, for_device
from zpp.kernels.numpy_backend import ReferenceKernels

INT8 = BlockFormat(Code.INT8, block=2048)
INT8_512 = BlockFormat(Code.INT8, block=512)
INT4 = BlockFormat(Code.INT4, block=128)
INT4_ROTATED = BlockFormat(Code.INT4, block=128, rotate=True)
PEERS = 2

NUMEL = {"cpu": 1 << 24, "cuda": 1 << 28}
"""By default: every buffer is well beyond the last cache."""

_CHECKED = (1 << 17) + 77
"""Values on which each case is compared with the reference."""


@dataclass(frozen=True)
class Case:
    """A kernel call, the bytes that it has to read and write, and what it leaves."""

    op: str
    format: str
    dtype: str
    nbytes: int
    call: Callable[[], None]
    out: torch.Tensor


@dataclass(frozen=True)
class Row:
    op: str
    format: str
    dtype: str
    gbps: float
    copy_gbps: float
    share_of_copy: float
    numel: int
    device: str
    threads: int | None
    torch: str


@dataclass(frozen=True)
class Setting:
    """Where the cases run, and how they are timed."""

    device: torch.device
    name: str
    kernels: Kernels
    clock: Clock
    numel: int
    threads: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--threads", type=at_least(1), help="of each CPU kernel and of the copy beside it (default 1)"
    )
    parser.add_argument(
        "--numel",
        type=at_least(1),
        help=f"values of a buffer (default {NUMEL['cpu']} on the CPU, {NUMEL['cuda']} on a GPU)",
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=15, help="timed calls of each kernel (default 15)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON line for each row")


def cases(kernels: Kernels, numel: int, device: torch.device) -> Iterator[Case]:
    """Every operation for the formats that training uses; the same values wherever they lie."""
    normal = torch.randn(1, numel, generator=torch.Generator().manual_seed(0)).to(device)
    for dtype in (torch.bfloat16, torch.float32):
        values = normal.to(dtype)
        for fmt in (INT8, INT8_512, INT4, INT4_ROTATED):
            record, out = _encoded(kernels, values, fmt), torch.zeros_like(values)
            kind = str(fmt), str(dtype).removeprefix("torch.")
            nbytes = values.nbytes + record.nbytes
            yield Case("encode", *kind, nbytes, _bind(kernels.encode, values, fmt, record), record)
            yield Case("decode", *kind, nbytes, _bind(kernels.decode, record, fmt, out), out)
            records = [record, *(record.clone() for _ in range(PEERS - 1))]
            nbytes = PEERS * record.nbytes + out.nbytes
            yield Case("decode_reduce", *kind, nbytes, _bind(kernels.decode_reduce, records, fmt, out), out)
    for fmt, out_fmt in ((INT8_512, INT4_ROTATED), (INT4, INT4), (INT8, INT8)):
        record = _encoded(kernels, normal, fmt)
        records = [record, *(record.clone() for _ in range(PEERS - 1))]
        made = _empty_record(out_fmt, numel, device)
        call = _bind(kernels.decode_reduce_encode, records, fmt, out_fmt, made, numel)
        kind, nbytes = (f"{fmt} -> {out_fmt}", "float32"), PEERS * record.nbytes + made.nbytes
        yield Case("decode_reduce_encode", *kind, nbytes, call, made)


def _empty_record(fmt: BlockFormat, numel: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(1, fmt.record_nbytes(numel), dtype=torch.uint8, device=device)


def _encoded(kernels: Kernels, values: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    record = _empty_record(fmt, values.shape[1], values.device)
    kernels.encode(values, fmt, record)
    return record


def _bind(function: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: function(*arguments)


def differences(kernels: Kernels, device: torch.device) -> Iterator[str]:
    """The cases whose results are not those of the reference, bit for bit."""
    reference = cases(ReferenceKernels(), _CHECKED, torch.device("cpu"))
    for case, want in zip(cases(kernels, _CHECKED, device), reference, strict=True):
        case.call()
        want.call()
        if not torch.equal(case.out.cpu().view(torch.uint8), want.out.view(torch.uint8)):
            yield f"{case.op} {case.format} {case.dtype}"


def measure(case: Case, setting: Setting, rounds: int) -> Row:
    """Kernel and copy in turn, so that both meet the same state of the machine; medians."""
    source = torch.ones(case.nbytes // 2, dtype=torch.uint8, device=setting.device)
    target = torch.zeros_like(source)
    pairs = [setting.clock.seconds([case.call, lambda: target.copy_(source)]) for _ in range(rounds + 2)]
    kernel, copy = (case.nbytes / statistics.median(times) / 1e9 for times in zip(*pairs[2:], strict=True))
    return Row(
        *(case.op, case.format, case.dtype),
        *(kernel, copy, kernel / copy),
        numel=setting.numel,
        device=setting.name,
        threads=setting.threads,
        torch=str(torch.__version__),
    )


def _setting(args: argparse.Namespace) -> Setting:
    numel = args.numel or NUMEL[args.device]
    if args.device == "cpu":
        threads = args.threads or 1
        torch.set_num_threads(threads)
        device = torch.device("cpu")
        return Setting(device, "cpu", for_device(device, threads), HostClock(), numel, threads)
    if args.threads is not None:
        raise UsageError("--threads is for --device cpu")
    try:
        kernels = for_device(torch.device("cuda"))
    except UnavailableError as error:
        raise UsageError(str(error)) from error
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    return Setting(device, name, kernels, CudaClock(device), numel, None)


def run(args: argparse.Namespace) -> int:
    """Check every case, then measure it and print the table. Raises UsageError."""
    with contextlib.ExitStack() as stack:
        json_file = None if args.json is None else stack.enter_context(open_json(args.json))
        setting = _setting(args)
        if wrong := list(differences(setting.kernels, setting.device)):
            raise RuntimeError(f"not the reference's bits: {'; '.join(wrong)}")
        print(f"{'op':22}{'format':44}{'dtype':10}{'GB/s':>8}{'copy':>8}{'share':>7}")
        for case in cases(setting.kernels, setting.numel, setting.device):
            row = measure(case, setting, args.rounds)
            speed = f"{row.gbps:8.1f}{row.copy_gbps:8.1f}{row.share_of_copy:7.2f}"
            print(f"{row.op:22}{row.format:44}{row.dtype:10}{speed}")
            if json_file is not None:
                print(json.dumps(asdict(row)), file=json_file, flush=True)
    return 0
