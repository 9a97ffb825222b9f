"""What every collective of a communicator shares: transport, kernels, pipelines, buffers, counters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zpp.agreement import Agreement
from zpp.crossing import Crossing, Loans
from zpp.format import BlockFormat, Noise, Rounding, ValueType
from zpp.kernels import Kernels
from zpp.layout import GROUP, round_up
from zpp.pipeline import Pipeline
from zpp.pipeline.streams import StreamPipeline
from zpp.pipeline.threads import ThreadPipeline
from zpp.stats import Stats
from zpp.streams import Streams
from zpp.topology import Axis, Topology
from zpp.transport import Channel, Transport
from zpp.workspace import Workspace

VALUE_TYPES = {
    torch.float32: ValueType.FLOAT32,
    torch.bfloat16: ValueType.BFLOAT16,
    torch.float16: ValueType.FLOAT16,
}
"""The dtypes that formats encode. Every other dtype travels as it is."""


@dataclass
class Engine:
    """`span` bounds a pipeline job: the values of the full tensor that one job moves.

    streams: the device's; None where work is done when a call returns.
    """

    transport: Transport
    kernels: Kernels
    workspace: Workspace
    stats: Stats
    agreement: Agreement
    device: torch.device
    streams: Streams | None = None
    span: int = 4 << 20
    seed: int = 0
    strict: bool = False
    _noise_streams: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.gathers = self._pipeline("gather")
        self.reductions = self._pipeline("reduction")
        self._loans = {channel: Loans(self.workspace) for channel in Channel}

    def _pipeline(self, name: str) -> Pipeline:
        return ThreadPipeline(name) if self.streams is None else StreamPipeline(name, self.streams)

    @property
    def topology(self) -> Topology:
        return self.transport.topology

    def shard_span(self) -> int:
        """Values of one shard that a pipeline job moves."""
        return max(1, self.span // self.topology.world_size)

    def noise(self, fmt: BlockFormat, stream: int, offset: int, shard_numel: int) -> Noise | None:
        """The random numbers of this rank for a span of one hop; None where the format rounds to nearest."""
        if fmt.rounding is Rounding.NEAREST:
            return None
        keyed = (stream * self.topology.world_size + self.topology.rank) % 2**64
        return Noise(self.seed, keyed, offset, round_up(shard_numel, GROUP))

    def next_stream(self) -> int:
        """A number that no other call of this communicator has, the same on every rank."""
        return next(self._noise_streams)

    def keep(self, tensor: torch.Tensor) -> None:
        """A pipeline's lane uses memory that is not of the workspace: it stays until the lane has done so."""
        if self.streams is not None:
            self.streams.keep(tensor)

    def all_gather(
        self, axis: Axis, send: torch.Tensor, logical: int, *, into: Sequence[torch.Tensor] | None = None
    ) -> Crossing:
        """Start a hop of an all-gather and count it; `logical` is what `send` stands for, in bytes.

        into: where each member's records are to stay, `send` being this rank's; None if they need not.
        """
        size = self.topology.size(axis)
        self.stats.hop(axis, logical=(size - 1) * logical, wire=(size - 1) * send.numel())
        room = None
        if into is None and not self.transport.reads_in_place(axis):
            room = self.workspace.take(size * send.shape[0], send.shape[1])
            into = room.split(send.shape[0])
        hop = self.transport.all_gather(Channel.GATHER, axis, send, into)
        return Crossing(hop, room, self.workspace, self._loans[Channel.GATHER])

    def all_to_all(self, axis: Axis, send: torch.Tensor, logical: int) -> Crossing:
        """Start a hop of a reduce-scatter and count it; `logical` is one peer's part, in bytes."""
        size = self.topology.size(axis)
        self.stats.hop(axis, logical=(size - 1) * logical, wire=(size - 1) * send.numel() // size)
        room = recv = None
        if not self.transport.reads_in_place(axis):
            room = self.workspace.take(*send.shape)
            recv = room.split(send.shape[0] // size)
        hop = self.transport.all_to_all(Channel.REDUCE, axis, send, recv)
        return Crossing(hop, room, self.workspace, self._loans[Channel.REDUCE])

    def refuse(self, what: str) -> None:
        """`what` cannot be compressed: count it, or raise if the communicator is strict."""
        if self.strict:
            raise TypeError(f"{what} cannot be compressed, and the communicator is strict")
        self.stats.fallback(what)

    def close(self) -> None:
        self.gathers.close()
        self.reductions.close()
        self.transport.close()
