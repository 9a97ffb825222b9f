"""The process that holds the emulated switch, and starts one process per node to hold the node.

    python -m collectives_bench.switch '{"parent": PID, "nodes": 2, "bits_per_second": 1000000000}'

It answers with one JSON line, {"pids": [...]} or {"error": "..."}, and waits until its stdin is closed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial

from collectives_bench import linux
from collectives_bench.network import INTERFACE, Link, address

# Jumbo frames: interfaces count a large TCP segment as one frame or as many, depending on where the kernel
# splits it, and with 9000 bytes the headers in question are 0.7 % of the bytes, with 1500 they are 4.5 %.
_MTU = 9000


def _command(line: str, inside: int | None = None) -> None:
    """Run one `ip` or `tc` command, in the namespaces of process `inside` or in this process's own."""
    done = subprocess.run(
        line.split(),
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=None if inside is None else partial(linux.enter, inside),
    )
    if done.returncode != 0:
        raise OSError(f"`{line}` failed: {(done.stderr or done.stdout).strip()}")


def _hold_node() -> int:
    """Fork a process with a network namespace of its own; return its id once the namespace is there."""
    parent = os.getpid()
    ready, announce = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            linux.die_with_parent(parent)
            os.close(ready)
            linux.new_network_namespace()
            os.write(announce, b"1")
            os.close(announce)
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(announce)
    with os.fdopen(ready, "rb") as stream:
        if stream.read(1) != b"1":
            raise OSError("a new network namespace is not permitted")
    return pid


def _connect(node: int, pid: int, link: Link) -> None:
    """Join one node to the bridge and shape what it sends and what is sent to it."""
    port = f"port{node}"
    shape = f"root tbf rate {link.bits_per_second}bit burst {link.burst_bytes} limit {link.queue_bytes}"
    _command(f"ip link add {port} mtu {_MTU} type veth peer name {INTERFACE} mtu {_MTU} netns {pid}")
    _command(f"ip link set {port} addrgenmode none master switch up")
    _command(f"tc qdisc add dev {port} {shape}")
    _command("ip link set lo up", inside=pid)
    # Without IPv6 addresses the kernel sends no neighbour discovery, which the counters would include.
    _command(f"ip link set {INTERFACE} addrgenmode none", inside=pid)
    _command(f"ip address add {address(node)}/24 dev {INTERFACE}", inside=pid)
    _command(f"ip link set {INTERFACE} up", inside=pid)
    _command(f"tc qdisc add dev {INTERFACE} {shape}", inside=pid)


def _build(nodes: int, link: Link, parent: int) -> list[int]:
    if os.geteuid() != 0:
        linux.new_user_namespace()
    linux.die_with_parent(parent)
    pids = [_hold_node() for _ in range(nodes)]
    linux.new_network_namespace()
    _command("ip link add switch type bridge")
    _command("ip link set switch addrgenmode none up")
    for node, pid in enumerate(pids):
        _connect(node, pid, link)
    return pids


def main() -> int:
    """Build the network, report it, and hold it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; we end with it
    config = json.loads(sys.argv[1])
    try:
        pids = _build(config["nodes"], Link(config["bits_per_second"]), config["parent"])
    except (OSError, subprocess.SubprocessError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps({"pids": pids}), flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
