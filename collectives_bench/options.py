"""What the commands have in common on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import IO


class UsageError(Exception):
    """The options do not go together, or name something that is not there."""


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: an integer from `least` on."""

    def integer(word: str) -> int:
        value = int(word)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return integer


def open_json(path: Path) -> IO[str]:
    """The file of `--json`, opened before anything is measured."""
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write --json: {error}") from error
