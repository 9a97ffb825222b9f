"""`python -m collectives_bench COMMAND`: the table goes to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from collectives_bench.options import UsageError

COMMANDS = {
    "train": "train a small GPT over emulated nodes: step time, cross-node bytes, loss",
    "kernels": "speed of the encode and decode kernels",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 0 fine, 1 failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m collectives_bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    module = None
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        # Only the chosen command is imported: what the other one needs may be missing.
        if arguments[:1] == [name]:
            module = importlib.import_module(f"collectives_bench.{name}")
            module.add_arguments(subparser)
    args = parser.parse_args(arguments)
    assert module is not None, "argparse accepted a command that is not the first argument"
    try:
        return int(module.run(args))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
