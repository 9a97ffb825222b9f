"""The few Linux calls that Python's os module lacks: namespaces, and dying with one's parent."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent, of process id `parent`, ends for any reason.

    Call it after `enter` or `new_user_namespace`: the kernel forgets the setting when credentials change.
    """
    _check(_libc().prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the call, so no signal will come
        os._exit(1)


def new_user_namespace() -> None:
    """Become root of a new user namespace, which then owns the network namespaces made in it."""
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc().unshare(_CLONE_NEWUSER), "unshare(CLONE_NEWUSER)")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def new_network_namespace() -> None:
    """Move this process to a new network namespace: it ends when no process is left in it."""
    _check(_libc().unshare(_CLONE_NEWNET), "unshare(CLONE_NEWNET)")


def enter(pid: int) -> None:
    """Join the network namespace of process `pid`, and first its user namespace where that is another."""
    with open(f"/proc/{pid}/ns/net", "rb") as network, open(f"/proc/{pid}/ns/user", "rb") as user:
        if os.fstat(user.fileno()).st_ino != os.stat("/proc/self/ns/user").st_ino:
            _check(_libc().setns(user.fileno(), _CLONE_NEWUSER), f"setns(user namespace of {pid})")
        _check(_libc().setns(network.fileno(), _CLONE_NEWNET), f"setns(network namespace of {pid})")


def transmitted_bytes(interface: str) -> int:
    """Bytes sent through `interface` of this process's network namespace since it was made."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"no interface {interface} in /proc/self/net/dev")


def peak_rss_bytes() -> int:
    """The largest resident set this process has had since its exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no VmHWM in /proc/self/status")
