"""Streams without an accelerator: everything runs at once, and vector clocks tell what a device may do.

On a device, work of two streams is ordered only where an event was recorded in one and waited for in the
other. `Device` follows these orders through every torch operation, kernel and message of all ranks, and
writes down each pair of accesses to the same byte, one of them a write, that nothing orders; and memory
that is used on a stream other than the one that it was allocated on without being kept for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import zpp.kernels
import zpp.streams
from zpp.kernels import Kernels
from zpp.streams import Stream
from zpp.topology import Axis
from zpp.transport import Channel, Hop
from zpp.transport.inprocess import InProcessTransport, run

T = TypeVar("T")
Clock = dict[int, int]
Site = tuple[str, int]
"""A line that waits or keeps."""


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


@dataclass
class FakeEvent:
    device: Device
    clock: Clock

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _join(self.device.rank().host, self.clock)


@dataclass(eq=False)
class FakeStream:
    device: Device
    number: int
    name: str
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.device, dict(self.clock))

    def wait_event(self, event: FakeEvent) -> None:
        if self.device.obeys():
            _join(self.clock, event.clock)


class _Memory:
    """One allocation: who wrote and who read each byte last, and when."""

    def __init__(self, storage: torch.UntypedStorage, owner: FakeStream, time: int) -> None:
        self.storage, self.owner = storage, owner  # holding it means that no other gets its address
        self.writer = np.full(storage.nbytes(), owner.number)
        self.written = np.full(storage.nbytes(), time)
        self.read: dict[int, np.ndarray] = {}
        self.used: dict[FakeStream, int] = {}
        self.kept: Clock = {}  # what the streams that it was kept for had behind them
        self.keepers: set[FakeStream] = set()


class _Rank(threading.local):
    """A thread's part: its current stream, and what its host has waited for."""

    def __init__(self) -> None:
        self.host: Clock = {}
        self.caller: FakeStream | None = None
        self.stream: FakeStream | None = None
        self.lanes = 0
        self.hops: dict[tuple[Channel, Axis], FakeStream] = {}


class Device:
    """`zpp.streams.Streams` of all ranks. `ignored` is a site whose waiting or keeping does nothing."""

    def __init__(self, ignored: Site | None = None) -> None:
        self.complaints: list[str] = []
        self.sites: set[Site] = set()
        self._ignored = ignored
        self._streams: list[FakeStream] = []
        self._hops: set[FakeStream] = set()
        self._callers: set[FakeStream] = set()
        self._memories: dict[int, _Memory] = {}
        self._lock = threading.RLock()
        self._rank = _Rank()

    def rank(self) -> _Rank:
        return self._rank

    # zpp.streams.Streams

    def current(self) -> FakeStream:
        return self._rank.stream or self.caller()

    def caller(self) -> FakeStream:
        if self._rank.caller is None:
            self._rank.caller = self._new("caller")
            self._callers.add(self._rank.caller)
        return self._rank.caller

    def new(self) -> FakeStream:
        self._rank.lanes += 1
        return self._new(f"lane {self._rank.lanes}")

    def _new(self, name: str) -> FakeStream:
        with self._lock:
            self._streams.append(FakeStream(self, len(self._streams), name))
            return self._streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, FakeStream)
        before, self._rank.stream = self._rank.stream, stream
        try:
            yield
        finally:
            self._rank.stream = before

    def keep(self, tensor: torch.Tensor) -> None:
        stream = self.current()
        if tensor.numel() and self.obeys():
            with self._lock:
                memory = self._memory(tensor.untyped_storage())
                memory.keepers.add(stream)
                _join(memory.kept, stream.clock)

    # What happens on the device

    def obeys(self) -> bool:
        frame = sys._getframe(2)
        while frame.f_code.co_name == "keep" and frame.f_back is not None:
            frame = frame.f_back
        site = frame.f_globals["__name__"], frame.f_lineno
        self.sites.add(site)
        return site != self._ignored

    def hop(self, channel: Channel, axis: Axis) -> FakeStream:
        hops = self._rank.hops
        if (channel, axis) not in hops:
            hops[channel, axis] = self._new(f"{channel.value} {axis.value}")
            self._hops.add(hops[channel, axis])
        return hops[channel, axis]

    def access(self, tensor: torch.Tensor, *, write: bool, what: str) -> None:
        """The current stream reads or writes `tensor`."""
        if not tensor.numel():
            return
        stream = self.current()
        with self._lock:
            memory = self._memory(tensor.untyped_storage())
            _join(stream.clock, self._rank.host)
            stream.clock[stream.number] = now = stream.clock.get(stream.number, 0) + 1
            seen = np.array([stream.clock.get(other.number, 0) for other in self._streams])
            at = _bytes_of(tensor)
            writers = memory.writer[at]
            late = seen[writers] < memory.written[at]
            if late.any():
                self._complain(what, stream, "a write", int(writers[late][0]))
            if write:
                for reader, times in memory.read.items():
                    if (times[at] > seen[reader]).any():
                        self._complain(what, stream, "a read", reader)
                memory.writer[at], memory.written[at] = stream.number, now
            else:
                times = memory.read.setdefault(stream.number, np.zeros(len(memory.writer), dtype=np.int64))
                times[at] = now
            memory.used[stream] = now

    def _complain(self, what: str, stream: FakeStream, earlier: str, other: int) -> None:
        self.complaints.append(f"{what} on {stream.name} races with {earlier} on {self._streams[other].name}")

    def _memory(self, storage: torch.UntypedStorage) -> _Memory:
        """Under the lock. What nobody was seen to allocate has been there since before the first thread."""
        if storage._cdata not in self._memories:
            self._memories[storage._cdata] = _Memory(storage, self.caller(), 0)
        return self._memories[storage._cdata]

    def allocated(self, storage: torch.UntypedStorage) -> None:
        """The current stream got `storage`'s memory, whatever was there before."""
        stream = self.current()
        with self._lock:
            stream.clock[stream.number] = now = stream.clock.get(stream.number, 0) + 1
            if (freed := self._memories.get(storage._cdata)) is not None:
                self._check_kept(freed)
            self._memories[storage._cdata] = _Memory(storage, stream, now)

    def _check_kept(self, memory: _Memory) -> None:
        own = {memory.owner, *memory.keepers, *self._hops}  # a back end sees to its messages itself
        if memory.owner in self._callers:
            own |= self._callers  # what threads share here, processes would not
        for stream, last in memory.used.items():
            if stream not in own and memory.kept.get(stream.number, 0) < last:
                self.complaints.append(f"memory of {memory.owner.name} is used on {stream.name}, not kept")

    def finish(self) -> None:
        for memory in self._memories.values():
            self._check_kept(memory)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray | slice:
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return slice(start, start + tensor.numel() * size)
    at = np.array([start])
    for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = (at[:, None] + np.arange(count) * stride * size).ravel()
    return (at[:, None] + np.arange(size)).ravel()


class _Operations(TorchDispatchMode):
    """Every torch operation is work of the current stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name == "set_":
            return out
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        mine = set()
        for argument in () if name.startswith("new_") or name.endswith("_like") else func._schema.arguments:
            write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(given.get(argument.name)):
                mine.add(tensor.untyped_storage()._cdata)
                self._device.access(tensor, write=write, what=str(func))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in mine and tensor.numel():
                self._device.allocated(storage)
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _WatchedKernels:
    """The CPU's kernels as work of the current stream: what is written stands among `written`."""

    def __init__(self, kernels: Kernels, device: Device) -> None:
        self._kernels, self._device = kernels, device

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._kernels, name)
        written = {"encode": 2, "encode_parts": 3, "decode": 2, "decode_reduce": 2, "decode_reduce_encode": 3}

        def call(*args: Any, **kwargs: Any) -> None:
            for i, argument in enumerate(args):
                for tensor in _tensors(argument):
                    self._device.access(tensor, write=i == written[name], what=name)
            function(*args, **kwargs)

        return call


@dataclass
class _Messages:
    inner: Hop
    device: Device
    stream: FakeStream
    end: FakeEvent

    def receive(self) -> Sequence[torch.Tensor]:
        self.device.current().wait_event(self.end)
        return self.inner.receive()

    def release(self) -> None:
        self.inner.release()

    def returned(self, *, wait: bool) -> bool:
        return self.inner.returned(wait=wait)


class StreamTransport(InProcessTransport):
    """Messages that a stream of their own reads and writes, from when they are started, as NCCL's do."""

    device: Device

    def _start(
        self,
        channel: Channel,
        axis: Axis,
        send: torch.Tensor,
        recv: Sequence[torch.Tensor] | None,
        *,
        scatter: bool,
    ) -> Any:
        assert recv is not None
        stream = self.device.hop(channel, axis)
        ready = self.device.current().record_event()
        inner = super()._start(channel, axis, send, recv, scatter=scatter)
        with self.device.on(stream):
            _join(stream.clock, ready.clock)
            self.device.access(send, write=False, what="send")
            for member, part in enumerate(recv):
                if member != self.topology.index(axis):
                    self.device.access(part, write=True, what="receive")
            end = stream.record_event()
        return _Messages(inner, self.device, stream, end)


class Emulation:
    """Makes communicators of threads take the CPU for a device with streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._inside = threading.local()
        self.device = Device()
        kernels_for, resize = zpp.kernels.for_device, torch.UntypedStorage.resize_

        def watched(device: torch.device, threads: int | None = None) -> Any:
            kernels = kernels_for(device, threads)
            return _WatchedKernels(kernels, self.device) if self._here() else kernels

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if self._here():
                self.device.allocated(storage)
            return result

        monkeypatch.setattr(zpp.kernels, "for_device", watched)
        monkeypatch.setattr(zpp.streams, "for_device", lambda device: self.device if self._here() else None)
        monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)

    def _here(self) -> bool:
        return getattr(self._inside, "device", False)

    def run(
        self,
        world: int,
        per_node: int,
        body: Callable[[InProcessTransport], T],
        *,
        ignored: Site | None = None,
    ) -> list[T]:
        """`zpp.transport.inprocess.run` on one device; `complaints` and `sites` are what was seen."""
        device = self.device = Device(ignored)

        def on_streams(transport: InProcessTransport) -> T:
            self._inside.device = True
            watched = StreamTransport(transport._world, transport.topology.rank)
            watched.device = device
            with _Operations(device):
                return body(watched)

        results = run(world, per_node, on_streams)
        device.finish()
        return results
