"""The emulated network: its links have the rate asked for, and it ends with the process that made it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectives_bench import linux
from collectives_bench.network import INTERFACE, Link, Network, NetworkUnavailableError, address

_RECEIVE = """
import socket, sys, time
from collectives_bench import linux
linux.enter(int(sys.argv[1]))
with socket.create_server((sys.argv[2], 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    early = received = len(connection.recv(1 << 20))
    start = time.perf_counter()
    while part := connection.recv(1 << 20):
        received += len(part)
    print((received - early) * 8 / (time.perf_counter() - start))
"""
_SEND = """
import socket, sys
from collectives_bench import linux
linux.enter(int(sys.argv[1]))
before = linux.transmitted_bytes(sys.argv[4])
with socket.create_connection((sys.argv[2], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[3])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(linux.transmitted_bytes(sys.argv[4]) - before)
"""
_HOLD = """
import sys
from collectives_bench.network import Link, Network
with Network(2, Link.parse("1gbit")) as network:
    print(network._switch.pid, *network.pids, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    try:
        Network(1, Link.parse("1gbit")).close()
    except NetworkUnavailableError as reason:
        pytest.skip(f"no network namespaces here: {reason}")


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def _python(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("rate", ["200mbit", "1gbit"])
def test_a_transfer_gets_the_rate_asked_for(
    rate: str, sender: int, processes: list[subprocess.Popen[str]]
) -> None:
    link = Link.parse(rate)
    nbytes = link.bits_per_second // 16  # half a second
    receiver = 1 - sender
    with Network(2, link) as network:
        receive = _python(_RECEIVE, network.pids[receiver], address(receiver))
        processes.append(receive)
        assert _line(receive) == "ready\n"
        send = _python(_SEND, network.pids[sender], address(receiver), nbytes, INTERFACE)
        processes.append(send)
        achieved = float(_line(receive))
        counted = int(_line(send))
    assert achieved == pytest.approx(link.bits_per_second, rel=0.1)
    assert nbytes < counted < 1.1 * nbytes


def _inodes_of_network_namespaces() -> set[int]:
    """The network namespaces that some process is in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.stat(process / "ns/net").st_ino)
        except OSError:
            continue  # it ended meanwhile
    return found


def _assert_ends(namespaces: set[int]) -> None:
    deadline = time.monotonic() + 5
    while namespaces & _inodes_of_network_namespaces() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not namespaces & _inodes_of_network_namespaces()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_owner_is_killed(
    number: signal.Signals, processes: list[subprocess.Popen[str]]
) -> None:
    links = Path("/proc/self/net/dev").read_text().count(":")
    owner = _python(_HOLD)
    processes.append(owner)
    pids = [int(word) for word in _line(owner).split()]
    namespaces = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in pids}
    assert len(namespaces) == 3
    assert os.stat("/proc/self/ns/net").st_ino not in namespaces
    assert Path("/proc/self/net/dev").read_text().count(":") == links, "our own network was touched"

    owner.send_signal(number)
    owner.wait(timeout=10)
    _assert_ends(namespaces)
    assert Path("/proc/self/net/dev").read_text().count(":") == links


def test_closing_removes_the_nodes() -> None:
    with Network(3, Link.parse("1gbit")) as network:
        namespaces = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in network.pids}
        assert len(namespaces) == 3
    _assert_ends(namespaces)


@pytest.mark.parametrize("text", ["", "fast", "10", "1 gbit", "-1gbit", "0gbit", "10kbit", "1gb", "1e3mbit"])
def test_a_wrong_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="link"):
        Link.parse(text)


def test_rates_and_bursts() -> None:
    assert Link.parse("2.5gbit").bits_per_second == 2_500_000_000
    for rate in ("1mbit", "200mbit", "1gbit", "10gbit"):
        link = Link.parse(rate)
        assert link.burst_bytes >= 65536, "a burst must hold one segment of the largest size"
        assert link.burst_bytes <= max(65536, link.bits_per_second / 8 * 0.005)
        assert link.queue_bytes > link.burst_bytes


def test_an_unknown_interface_is_named() -> None:
    with pytest.raises(ValueError, match="nosuch0"):
        linux.transmitted_bytes("nosuch0")
