"""`python -m collectives_bench train`: step time, cross-node bytes and loss of each way to train.

A byte-level GPT is trained on real text over `nodes * ranks-per-node` processes, by the systems in turns of a
few steps, from the same weights on the same data. With `--link` every node is a network namespace and its
link is shaped; the bytes are then those that its interface sent.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from collectives_bench import launch, text
from collectives_bench.case import Case, ModelShape, RankResult
from collectives_bench.network import MAX_NODES, Link, Network, NetworkUnavailableError
from collectives_bench.options import UsageError, at_least, open_json
from collectives_bench.report import Row, summarise, table
from collectives_bench.systems import SYSTEMS

_DEFAULT_SYSTEMS = "fsdp2,zero3,zeropp,zpp"


def _systems(word: str) -> list[str]:
    names = [name.strip() for name in word.split(",")]
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such system: {', '.join(unknown)} (have {', '.join(SYSTEMS)})")
    return list(dict.fromkeys(names))


def _link(word: str) -> str:
    if word != "none":
        try:
            Link.parse(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return word


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `train`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "systems:\n" + "\n".join(f"  {name:9}{it.summary}" for name, it in SYSTEMS.items())
    add, positive = parser.add_argument, at_least(1)
    add("--systems", type=_systems, default=_DEFAULT_SYSTEMS, help="comma-separated (default %(default)s)")
    add("--nodes", type=positive, default=2, help="emulated nodes (default %(default)s)")
    add("--ranks-per-node", type=positive, default=2, help="processes on each (default %(default)s)")
    add("--link", type=_link, default="none", help="rate of each node's link, as 200mbit, 1gbit or 10gbit; "
        "none (default): all ranks on loopback, unshaped")  # fmt: skip
    add("--steps", type=positive, default=40, help="timed steps (default %(default)s)")
    add("--warmup", type=at_least(0), default=5, help="steps before the clock (default %(default)s)")
    add("--turn", type=positive, default=5, help="timed steps of a system before the next one has its turn; "
        "with --steps or more, each ends before the next starts (default %(default)s)")  # fmt: skip
    add("--batch", type=positive, default=1, help="sequences per rank and step (default %(default)s)")
    add("--context", type=positive, default=64, help="bytes per sequence (default %(default)s)")
    add("--layers", type=positive, default=6, help="transformer blocks (default %(default)s)")
    add("--width", type=positive, default=384, help="model width (default %(default)s)")
    add("--heads", type=positive, default=6, help="attention heads (default %(default)s)")
    add("--text", metavar="FILE", help="train on FILE (default: the Python language reference)")
    add("--seed", type=at_least(0), default=0, help="of the weights and the data (default %(default)s)")
    add("--lr", type=float, default=3e-4, help="AdamW's learning rate (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write one JSON line per system to FILE")


def run(args: argparse.Namespace) -> int:
    """Measure every system and print the table; 1 if a rank failed. Raises UsageError."""
    with contextlib.ExitStack() as stack:
        _check(args)
        json_file = None if args.json is None else stack.enter_context(open_json(args.json))
        # SIGTERM unwinds like Ctrl-C does; ranks and network would die with us anyway.
        signal.signal(signal.SIGTERM, _interrupt)
        return _measure(args, _network(args, stack), json_file)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _check(args: argparse.Namespace) -> None:
    if args.width % args.heads:
        raise UsageError(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if args.nodes > MAX_NODES:
        raise UsageError(f"--nodes {args.nodes} is more than {MAX_NODES}")
    if not args.lr > 0:
        raise UsageError(f"--lr must be positive, got {args.lr}")
    try:
        length = len(text.load(args.text))
    except OSError as error:
        raise UsageError(f"cannot read --text: {error}") from error
    if length <= args.context:
        raise UsageError(f"the text has {length} bytes, --context {args.context} needs one more than itself")


def _network(args: argparse.Namespace, stack: contextlib.ExitStack) -> Network | None:
    if args.link == "none":
        return None
    try:
        return stack.enter_context(Network(args.nodes, Link.parse(args.link)))
    except NetworkUnavailableError as reason:
        print(f"no shaped network here, running over loopback instead: {reason}", file=sys.stderr)
        return None


def _case(args: argparse.Namespace, system: str) -> Case:
    return Case(
        system=system,
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        steps=args.steps,
        warmup=args.warmup,
        batch=args.batch,
        shape=ModelShape(args.context, args.layers, args.width, args.heads),
        text=args.text,
        seed=args.seed,
        lr=args.lr,
        turn=args.turn,
    )


def _measure(args: argparse.Namespace, network: Network | None, json_file: IO[str] | None) -> int:
    link = "none" if network is None else args.link
    cases = [_case(args, system) for system in args.systems]
    results, failed = _take_turns(cases, network)
    rows: list[Row] = []
    for case in (case for case in cases if case.system in results):
        ranks, output = results[case.system]
        if output:
            print(f"{case.system}: rank 0 wrote\n{output}", file=sys.stderr)
        rows.append(summarise(case, ranks, link))
        if json_file is not None:
            print(rows[-1].json_line(), file=json_file, flush=True)
    if rows:
        print(_title(args, link, rows[0]))
        print(table(rows), flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _take_turns(
    cases: list[Case], network: Network | None
) -> tuple[dict[str, tuple[list[RankResult], str]], list[str]]:
    """Run all cases, a turn of each after the other; what each measured, and the systems that failed.

    One works while the others pause, so that a slow spell of the machine meets them all alike.
    """
    results: dict[str, tuple[list[RankResult], str]] = {}
    failed: list[str] = []
    with contextlib.ExitStack() as stack:
        worlds: dict[str, launch.World] = {}
        for turn in range(cases[0].turns):
            for i, case in enumerate(case for case in cases if case.system not in failed):
                try:
                    if turn == 0:
                        worlds[case.system] = stack.enter_context(launch.World(case, network, i))
                    world = worlds[case.system]
                    world.run_turn(_progress(case))
                    if turn == case.turns - 1:
                        results[case.system] = world.results()
                except launch.RankFailedError as error:
                    _clear_progress()
                    print(f"{case.system}: {error}", file=sys.stderr)
                    failed.append(case.system)
                _clear_progress()
                if case.system in results or case.system in failed:
                    worlds[case.system].close()
    return results, failed


def _title(args: argparse.Namespace, link: str, row: Row) -> str:
    return (
        f"{args.nodes} nodes x {args.ranks_per_node} ranks, link {link}, {row.params:,} parameters, "
        f"batch {args.batch} x {args.context} per rank, {args.steps} steps"
    )


def _progress(case: Case) -> Callable[[int], None]:
    """A line on stderr that is written over, where a person watches."""

    def show(step: int) -> None:
        if sys.stderr.isatty():
            print(
                f"\r{case.system}: step {step} of {case.warmup + case.steps}\x1b[K", end="", file=sys.stderr
            )

    return show


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
