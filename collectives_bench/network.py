"""Emulated nodes: a network namespace for each, joined by a bridge, every link shaped both ways.

    node 0 [eth0] --veth-- [port0] \
                                    bridge      nodes and switch are namespaces without a name,
    node 1 [eth0] --veth-- [port1] /            each alive as long as the process that holds it

The processes that hold them die with their parent (`switch.py`), so the kernel removes interfaces, queues
and namespaces even after a SIGKILL of the benchmark, and the caller's own network is never touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

INTERFACE = "eth0"
MAX_NODES = 254  # the host part of a /24

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class NetworkUnavailableError(Exception):
    """Namespaces or shaping are not to be had on this machine; the message says why."""


@dataclass(frozen=True)
class Link:
    """The rate of one node's link, in each direction."""

    bits_per_second: int

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read a rate such as `200mbit`, `1gbit` or `2.5gbit`."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
        if match is None:
            raise ValueError(f"{text!r} is no link rate: write a number and kbit, mbit or gbit, or none")
        rate = round(float(match[1]) * _UNITS[match[2]])
        if rate < 10**6:
            raise ValueError(f"a link of {text} is too slow to train over: the least is 1mbit")
        return cls(rate)

    @property
    def burst_bytes(self) -> int:
        """Bytes that may pass at once: 2 ms of the rate, and never less than one 64 KiB segment.

        Less than the timer's grain times the rate would throttle fast links; much more would let whole
        messages through a slow link unshaped.
        """
        return max(1 << 16, self.bits_per_second // 8 // 500)

    @property
    def queue_bytes(self) -> int:
        """Bytes that may wait: 100 ms of the rate, like a switch with room, so that TCP loses little."""
        return self.burst_bytes + max(1 << 20, self.bits_per_second // 8 // 10)


def address(node: int) -> str:
    """The IPv4 address of one node inside the emulated network."""
    return f"10.77.0.{node + 1}"


class Network:
    """`nodes` emulated nodes on a switch; a context manager, and gone when its process is.

    `pids[node]` is a process to `linux.enter`. Raises NetworkUnavailableError with the reason.
    """

    def __init__(self, nodes: int, link: Link) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"nodes must be between 1 and {MAX_NODES}, got {nodes}")
        if not sys.platform.startswith("linux"):
            raise NetworkUnavailableError(f"network namespaces need Linux, this is {sys.platform}")
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise NetworkUnavailableError(f"not installed: {', '.join(missing)} (iproute2)")
        config = {"parent": os.getpid(), "nodes": nodes, "bits_per_second": link.bits_per_second}
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "collectives_bench.switch", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert self._switch.stdout is not None
            answer = self._switch.stdout.readline()
            reply: dict[str, Any] = (
                json.loads(answer) if answer else {"error": "the process that holds them ended"}
            )
            if "error" in reply:
                raise NetworkUnavailableError(reply["error"])
            self.pids: list[int] = reply["pids"]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the nodes, and with them every process that is still inside the switch's care."""
        self._switch.kill()  # its children, which hold the nodes, die with it
        self._switch.wait()
        for pipe in (self._switch.stdin, self._switch.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
