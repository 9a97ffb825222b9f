"""Where the CUDA sources are, and their text with everything that they include."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from zpp.errors import UnavailableError

_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)


@lru_cache(maxsize=1)
def folder() -> Path:
    """The installed package holds the sources as ``zpp/cuda``; a checkout holds them beside ``zpp``."""
    package = Path(__file__).parent.parent
    for place in (package / "cuda", package.parent / "cuda"):
        if (place / "numerics.cuh").is_file():
            return place
    raise UnavailableError(f"the CUDA sources are neither in {package / 'cuda'} nor beside {package}")


@lru_cache(maxsize=8)
def text(name: str) -> str:
    """The source `name` of cuda/, each file that it includes in its place, once.

    One text, so that the compiler needs no folder of headers, and a hash of it says whether anything changed.
    """
    seen: set[str] = set()

    def expanded(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        body = (folder() / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: expanded(match[1]), body)

    return expanded(name)
