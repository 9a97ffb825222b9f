"""Keeps the memory of freed units for the next ones, as torch's caching allocators do on accelerators."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's names for mallopt(3)."""
_INT_MAX = 2**31 - 1


def keep_freed_memory(largest: int) -> None:
    """Have malloc keep freed blocks of up to `largest` bytes, for this process and from now on.

    Otherwise glibc may return each freed unit to the system, which hands the next out page by page, zeroed
    again: for large units that takes longer than to decode them. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, min(largest + 4096, _INT_MAX))  # above it, blocks are mapped one by one
        mallopt(_TRIM_THRESHOLD, _INT_MAX)
