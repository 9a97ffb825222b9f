"""Ranks of one node that read one another's send buffers where they lie.

Every rank has an arena: memory that the other ranks of its node map as well, and that all of its send
buffers are cut from. In a hop the sender says in a few bytes where its buffer lies (a notice); the others
read it there, and say when they have (a receipt). Both travel through pipes, which end when the process
that writes to them does, so that nobody waits for the dead.

Arenas and pipes have no names. Processes find them through one another's ``/proc/PID/fd``, which works
for processes of one user, on one machine, in one PID namespace.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from zpp.errors import PeerError
from zpp.topology import Axis, Topology
from zpp.transport import Channel

_NOTICE = struct.Struct("=qq")
"""Offset in the sender's arena, and bytes."""
_TOKEN_NBYTES = 4096
"""An arena begins with random bytes, by which a peer knows that it has opened the right one."""


class Arena:
    """Shared memory of one rank. It takes room as it is used, up to the machine's memory."""

    def __init__(self) -> None:
        self.size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.fd = os.memfd_create("zpp")
        os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._lock = threading.Lock()
        self._end = _TOKEN_NBYTES
        self._free: dict[int, list[int]] = defaultdict(list)
        self.token = os.urandom(16)
        self._map[: len(self.token)] = self.token

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], on a page of its own."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if self._free[size]:
                start = self._free[size].pop()
            else:
                start = self._end
                self._end += size
        if start + size > self.size:
            raise MemoryError(f"{nbytes} bytes do not fit into an arena of {self.size}, {start} of them used")
        return self._bytes[start : start + nbytes]

    def free(self, buffer: torch.Tensor) -> None:
        start, size = self.offset(buffer), -(-buffer.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_REMOVE, start, size)
        with self._lock:
            self._free[size].append(start)

    def offset(self, buffer: torch.Tensor) -> int:
        """Where `buffer` lies in the arena, in bytes."""
        if not buffer.numel():
            return 0
        start = buffer.data_ptr() - self._bytes.data_ptr()
        assert 0 <= start <= self.size - buffer.numel(), "a send buffer from elsewhere"
        return start


class _Inbox:
    """What one peer writes to this rank."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self.reader, select.POLLIN)

    def read(self, most: int, seconds: float) -> bytes:
        """What is there, up to `most` bytes; nothing if nothing comes in time. EOFError if nothing can."""
        try:
            data = os.read(self.reader, most)
        except BlockingIOError:
            if not seconds or not self._poll.poll(seconds * 1e3):
                return b""
            data = os.read(self.reader, most)
        if not data:
            raise EOFError
        return data


class _Peer:
    """Another rank of the node, in one channel: its notices and receipts, and where it reads ours."""

    def __init__(self, rank: int, timeout: float) -> None:
        self.rank, self._timeout = rank, timeout
        self.notices, self.receipts = _Inbox(), _Inbox()
        self._lock = threading.Lock()
        self._read = 0

    def connect(self, arena: torch.Tensor, notices_fd: int, receipts_fd: int) -> None:
        self.arena, self._notices_fd, self._receipts_fd = arena, notices_fd, receipts_fd

    def publish(self, offset: int, nbytes: int) -> None:
        try:
            os.write(self._notices_fd, _NOTICE.pack(offset, nbytes))
        except BrokenPipeError as error:
            raise PeerError(f"rank {self.rank} has ended") from error

    def published(self, nbytes: int) -> int:
        """Where in its arena the peer's next send buffer lies, of `nbytes` bytes if the ranks agree."""
        notice = self._await(self.notices, _NOTICE.size, self._timeout)
        if not notice:
            raise PeerError(f"rank {self.rank} sent nothing within {self._timeout:g} s")
        offset, sent = _NOTICE.unpack(notice)
        if sent != nbytes:
            raise PeerError(f"rank {self.rank} sent {sent} bytes where {nbytes} were due")
        return int(offset)

    def acknowledge(self) -> None:
        with suppress(BrokenPipeError):  # a peer that has ended needs its buffer no longer
            os.write(self._receipts_fd, b"\0")

    def has_read(self, number: int, *, wait: bool) -> bool:
        """Whether the peer has read the first `number` buffers of this rank."""
        if self._read >= number or not self._lock.acquire(blocking=wait):
            return self._read >= number
        try:
            while self._read < number:
                receipts = self._await(self.receipts, 4096, self._timeout if wait else 0.0)
                if not receipts and wait:
                    raise PeerError(f"rank {self.rank} did not read within {self._timeout:g} s")
                if not receipts:
                    return False
                self._read += len(receipts)
            return True
        finally:
            self._lock.release()

    def _await(self, inbox: _Inbox, most: int, seconds: float) -> bytes:
        try:
            return inbox.read(most, seconds)
        except EOFError:
            raise PeerError(f"rank {self.rank} has ended") from None


@dataclass
class _InPlace:
    """A hop: the `number`-th buffer that this rank sent in the channel; if `scatter`, a part for each."""

    peers: Sequence[_Peer | None]
    send: torch.Tensor
    number: int
    scatter: bool
    me: int

    def receive(self) -> Sequence[torch.Tensor]:
        count, nbytes = self.send.shape
        count = count // len(self.peers) if self.scatter else count
        first = self.me * count * nbytes if self.scatter else 0
        parts = []
        for peer in self.peers:
            if peer is None:
                memory, start = self.send, self.send.storage_offset()
            else:
                memory, start = peer.arena, peer.published(self.send.numel())
            parts.append(memory.as_strided((count, nbytes), (nbytes, 1), start + first))
        return parts

    def release(self) -> None:
        for peer in self.peers:
            if peer is not None:
                peer.acknowledge()

    def returned(self, *, wait: bool) -> bool:
        return all(peer is None or peer.has_read(self.number, wait=wait) for peer in self.peers)


class NodeMemory:
    """This rank's arena and its peers', for hops along the axis inside the node."""

    def __init__(self, topology: Topology, timeout: float) -> None:
        self.arena = Arena()
        self._me = topology.local_rank
        ranks = topology.group(Axis.INTRA)
        self._peers: dict[Channel, list[_Peer | None]] = {
            channel: [None if rank == topology.rank else _Peer(rank, timeout) for rank in ranks]
            for channel in Channel
        }
        self._sent = dict.fromkeys(Channel, 0)
        self._opened: list[int] = []

    def start(self, channel: Channel, send: torch.Tensor, *, scatter: bool) -> _InPlace:
        """Let the other ranks of the node read `send`, or each its part of it."""
        self._sent[channel] += 1
        offset = self.arena.offset(send)
        for peer in self._peers[channel]:
            if peer is not None:
                peer.publish(offset, send.numel())
        return _InPlace(self._peers[channel], send, self._sent[channel], scatter, self._me)

    def _each(self) -> list[tuple[int, _Peer]]:
        return [(i, p) for peers in self._peers.values() for i, p in enumerate(peers) if p is not None]

    def address(self) -> list[int]:
        """What the other ranks need to know: process, arena, and a pair of pipes of each channel and rank."""
        address = [os.getpid(), self.arena.fd, self.arena.size]
        for peers in self._peers.values():
            for peer in peers:
                address += (peer.notices.writer, peer.receipts.writer) if peer is not None else (-1, -1)
        return address

    def connect(self, addresses: Sequence[Sequence[int]], tokens: Sequence[bytes]) -> None:
        """Open what the ranks of the node have told. Raises OSError where that cannot be."""
        arenas = [
            None if i == self._me else self._map(address, token)
            for i, (address, token) in enumerate(zip(addresses, tokens, strict=True))
        ]
        for slot, peers in enumerate(self._peers.values()):
            for i, peer in enumerate(peers):
                arena = arenas[i]
                if peer is None or arena is None:
                    continue
                first = 3 + 2 * (slot * len(peers) + self._me)
                fds = [self._open(addresses[i][0], addresses[i][first + k], os.O_WRONLY) for k in (0, 1)]
                peer.connect(arena, *fds)

    def _map(self, address: Sequence[int], token: bytes) -> torch.Tensor:
        pid, fd, size = address[:3]
        mapped = mmap.mmap(self._open(pid, fd, os.O_RDWR), size)
        if mapped[: len(token)] != token:
            raise OSError(f"process {pid} is another one here")
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def _open(self, pid: int, fd: int, flags: int) -> int:
        self._opened.append(os.open(f"/proc/{pid}/fd/{fd}", flags | os.O_CLOEXEC))
        return self._opened[-1]

    def settle(self) -> None:
        """All have connected: close our copies of the ends that they write to; theirs are the last."""
        for _, peer in self._each():
            os.close(peer.notices.writer)
            os.close(peer.receipts.writer)

    def close(self) -> None:
        """Close everything; memory stays as long as tensors in it do."""
        for fd in [*self._opened, self.arena.fd]:
            os.close(fd)
        for _, peer in self._each():
            os.close(peer.notices.reader)
            os.close(peer.receipts.reader)


def join(topology: Topology, exchange: Callable[[bytes], list[bytes]], timeout: float) -> NodeMemory | None:
    """Connect the ranks of every node. A collective call; None, on all ranks, if some cannot connect.

    timeout: seconds that hops wait for a peer.
    """
    mine = _open(topology, timeout) if topology.ranks_per_node > 1 and sys.platform == "linux" else None
    form = struct.Struct(f"={3 + 2 * len(Channel) * topology.ranks_per_node}q16s")
    nothing = [0] * (3 + 2 * len(Channel) * topology.ranks_per_node)
    message = form.pack(*nothing, b"") if mine is None else form.pack(*mine.address(), mine.arena.token)
    told = [form.unpack(said) for said in exchange(message)]
    node = [told[rank] for rank in topology.group(Axis.INTRA)]
    connected = mine is not None and _connect(mine, node)
    everywhere = all(said == b"\1" for said in exchange(b"\1" if connected else b"\0"))
    if mine is None:
        return None
    mine.settle()
    if everywhere:
        return mine
    mine.close()
    return None


def _open(topology: Topology, timeout: float) -> NodeMemory | None:
    try:
        return NodeMemory(topology, timeout)
    except OSError:
        return None


def _connect(mine: NodeMemory, node: Sequence[Sequence[object]]) -> bool:
    try:
        mine.connect([said[:-1] for said in node], [said[-1] for said in node])  # type: ignore[misc]
    except OSError:
        return False
    return True
