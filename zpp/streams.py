"""Streams of an accelerator: queues of work that run in order, and with one another only as events say."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether everything in front of it is done."""

    def synchronize(self) -> None:
        """Wait for that on the host."""


class Stream(Protocol):
    def record_event(self) -> Event:
        """The place behind everything that is in the stream now."""

    def wait_event(self, event: Any) -> None:
        """What comes into the stream from now on starts after `event`. The host does not wait."""


class Streams(Protocol):
    """The streams of one device, as the calling thread sees them."""

    def current(self) -> Stream:
        """Where torch puts the caller's work."""

    def new(self) -> Stream: ...

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """`stream` is the current one inside the context."""

    def keep(self, tensor: torch.Tensor) -> None:
        """The memory of `tensor`, once freed, is not given out before what is in the current stream is done.

        Needed where work of another stream than the one it was allocated on uses it.
        """


class CudaStreams:
    """torch's streams of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def new(self) -> Stream:
        # Messages that wait for a free multiprocessor would make every rank wait: they come first.
        return torch.cuda.Stream(self._device, priority=-1)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


def for_device(device: torch.device) -> Streams | None:
    """The streams of `device`; None for one whose work is done when a call returns."""
    return CudaStreams(device) if device.type == "cuda" else None
