"""Ranks compare what they are about to do before they do it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable

from zpp.errors import MismatchError

_NBYTES = 512
"""Every message has this length, so that ranks that disagree still exchange it."""


def compare(exchange: Callable[[bytes], list[bytes]], statement: str) -> None:
    """A collective call: raise MismatchError, naming the ranks that differ, unless all state the same."""
    text = statement.encode()
    digest = hashlib.sha256(text).digest()
    message = (digest + text)[:_NBYTES].ljust(_NBYTES, b"\0")
    said = exchange(message)
    if len(set(said)) == 1:
        return
    usual = Counter(said).most_common(1)[0][0]
    others = {rank: other for rank, other in enumerate(said) if other != usual}

    def words(raw: bytes) -> str:
        return raw[len(digest) :].rstrip(b"\0").decode(errors="replace")

    lines = "; ".join(f"rank {rank}: {words(other)}" for rank, other in others.items())
    count = len(said) - len(others)
    raise MismatchError(f"ranks disagree. {count} of {len(said)} ranks: {words(usual)}; {lines}")


class Agreement:
    """Compares each statement the first time it is made, or every time if `always` is set."""

    def __init__(self, exchange: Callable[[bytes], list[bytes]], *, always: bool) -> None:
        self._exchange, self._always = exchange, always
        self._agreed: set[tuple[Hashable, ...]] = set()

    def check(self, template: str, *what: Hashable) -> None:
        """State ``template.format(*what)``, which is spelled only where it has to be compared."""
        said = (template, *what)
        if self._always or said not in self._agreed:
            compare(self._exchange, template.format(*what))
            self._agreed.add(said)
