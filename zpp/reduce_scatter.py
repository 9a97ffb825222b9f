"""qgZ: the quantized, hierarchical gradient reduce-scatter (ZeRO++, arXiv:2306.10209, section 3.3).

    full -> encode, permuted -> intra all-to-all -> decode, sum, encode -> inter all-to-all
         -> decode, sum, multiply -> shard

A value is encoded at most twice, whatever the world size. Chunks for all nodes of one local peer travel
together (the two-hop order), so each hop is one message per peer. With one rank per node, or one node,
the hop that vanishes is left out: that is the one-hop form, with a single encoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from zpp import checks
from zpp.crossing import Crossing
from zpp.engine import VALUE_TYPES, Engine
from zpp.format import BlockFormat, Code, ValueType
from zpp.kernels import Kernels
from zpp.kernels.exact import ExactKernels
from zpp.layout import spans
from zpp.parted import PartedTensor
from zpp.pipeline import Job
from zpp.topology import Axis
from zpp.work import Work


@dataclass(frozen=True)
class _Call:
    """What the jobs of one reduce-scatter share."""

    engine: Engine
    kernels: Kernels
    intra: BlockFormat
    inter: BlockFormat
    wire: ValueType
    factor: float
    streams: tuple[int, int]
    shard_numel: int


@dataclass
class _Span:
    """One span of one reduce-scatter; its three stages run in the three lanes of the reduction pipeline."""

    call: _Call
    full: torch.Tensor | PartedTensor | None
    """The span of all ranks' chunks; let go of once it is encoded."""
    shard: torch.Tensor
    offset: int

    def __post_init__(self) -> None:
        self.engine, self.kernels = self.call.engine, self.call.kernels
        self.intra, self.inter = self.call.intra, self.call.inter
        self.local, self.nodes = self.engine.topology.ranks_per_node, self.engine.topology.nodes
        assert self.full is not None
        self.numel = self.full.numel() // self.engine.topology.world_size
        self.logical = self.numel * self.full.dtype.itemsize

    def submit(self) -> Job:
        return self.engine.reductions.submit((self.encode, self.reduce_and_cross_nodes, self.reduce))

    def _take(self, fmt: BlockFormat, count: int) -> torch.Tensor:
        return self.engine.workspace.take(count, fmt.record_nbytes(self.numel))

    def encode(self) -> None:
        """Into the order of the first hop: all nodes of one local peer together."""
        world = self.local * self.nodes
        first = self.intra if self.local > 1 else self.inter
        self.send = self._take(first, world)
        noise = self.engine.noise(first, self.call.streams[0], self.offset, self.call.shard_numel)
        rows, out = self.nodes if self.local > 1 else 1, self.send
        if isinstance(self.full, PartedTensor):
            parts, kind = self.full.parts, self.call.wire
            self.kernels.encode_parts(parts, kind, first, out, self.numel, rows=rows, noise=noise)
            for _, part in parts:
                self.engine.keep(part)
        else:
            assert self.full is not None
            self.kernels.encode(self.full, first, out, rows=rows, noise=noise)
            self.engine.keep(self.full)
        self.full = None
        if self.local > 1:
            self._cross(Axis.INTRA, self.nodes * self.logical)

    def _cross(self, axis: Axis, logical: int) -> None:
        self.crossing: Crossing = self.engine.all_to_all(axis, self.send, logical)

    def reduce_and_cross_nodes(self) -> None:
        if self.nodes == 1:
            return
        if self.local > 1:
            crossing, sent = self.crossing, self.send
            parts = crossing.receive()
            self.send = self._take(self.inter, self.nodes)
            noise = self.engine.noise(self.inter, self.call.streams[1], self.offset, self.call.shard_numel)
            self.kernels.decode_reduce_encode(
                parts, self.intra, self.inter, self.send, self.numel, noise=noise
            )
            crossing.release(sent)
        self._cross(Axis.INTER, self.logical)

    def reduce(self) -> None:
        last = self.inter if self.nodes > 1 else self.intra
        self.kernels.decode_reduce(self.crossing.receive(), last, self.shard, factor=self.call.factor)
        self.engine.keep(self.shard)
        self.crossing.release(self.send)


def factor_of(op: dist.ReduceOp.RedOpType, factor: float, dtype: torch.dtype, world_size: int) -> float:
    """What the sum over ranks is multiplied by, once."""
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"op must be ReduceOp.SUM or ReduceOp.AVG, not {op}")
    factor = factor / world_size if op == dist.ReduceOp.AVG else factor
    if factor != 1.0 and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"a tensor of {dtype} can be summed, not multiplied by {factor:g}")
    return factor


def reduce_scatter(
    engine: Engine,
    shard: torch.Tensor,
    full: torch.Tensor | PartedTensor,
    formats: tuple[BlockFormat, BlockFormat],
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG,
    factor: float = 1.0,
) -> Work:
    """Start reducing `full` over the ranks, leaving part `rank` of the result in `shard`.

    full: [world_size * n] values; shard: [n] values, of the same dtype, or float32 from a 16-bit `full`.
    formats: inside the node and between nodes. Sums are float32, in rank order; `factor`, divided by the
    world size for AVG, multiplies once, at the end. One rank alone sends nothing and rounds nothing.
    Dtypes that no format encodes are summed exactly in their own arithmetic, counted in stats.
    """
    checks.tensor("output", shard, engine.device)
    if isinstance(full, PartedTensor):
        full.check("input", engine.device)
    else:
        checks.tensor("input", full, engine.device)
    checks.multiple("input", full, "output", shard, engine.topology)
    if shard.dtype not in VALUE_TYPES or full.dtype not in VALUE_TYPES:
        checks.same_dtype("output", shard, "input", full)
    factor = factor_of(op, factor, full.dtype, engine.topology.world_size)
    template = "reduce_scatter numel={} {} -> {} factor={:g} as {}, {}"
    statement = template, shard.numel(), full.dtype, shard.dtype, factor, *formats
    kernels, wire, formats = _wire(engine, full.dtype, formats)
    engine.agreement.check(*statement)
    engine.stats.call("reduce_scatter")
    if engine.topology.world_size == 1:
        return _alone(shard, full, factor)

    streams = engine.next_stream(), engine.next_stream()
    intra, inter = (fmt.resolve(wire) for fmt in formats)
    call = _Call(engine, kernels, intra, inter, wire, factor, streams, shard.numel())
    flat = shard.view(1, -1)
    jobs = [
        _Span(call, _columns(full, engine.topology.world_size, a, b, wire), flat[:, a:b], a)
        for a, b in spans(flat.shape[1], engine.shard_span())
    ]
    return Work("reduce_scatter", [job.submit() for job in jobs], shard)


def _wire(
    engine: Engine, dtype: torch.dtype, formats: tuple[BlockFormat, BlockFormat]
) -> tuple[Kernels, ValueType, tuple[BlockFormat, BlockFormat]]:
    """By what and as what values of `dtype` travel; as they are where no format encodes them."""
    if dtype in VALUE_TYPES:
        return engine.kernels, VALUE_TYPES[dtype], formats
    if any(fmt.code is not Code.EXACT for fmt in formats):
        engine.refuse(f"reduce_scatter of {dtype}")
    exact = BlockFormat(Code.EXACT)
    return ExactKernels(engine.kernels, dtype), ValueType.BYTE, (exact, exact)


def _alone(shard: torch.Tensor, full: torch.Tensor | PartedTensor, factor: float) -> Work:
    if isinstance(full, PartedTensor):
        full.copy_to(shard.view(-1))
    else:
        shard.view(-1).copy_(full.view(-1))
    if factor != 1.0:
        shard.mul_(factor)
    return Work("reduce_scatter", [], shard)


def _columns(
    full: torch.Tensor | PartedTensor, rows: int, first: int, last: int, wire: ValueType
) -> torch.Tensor | PartedTensor:
    """Columns [first, last) of the values as a table, in bytes where no format encodes them."""
    if isinstance(full, PartedTensor):
        cut = full.columns(rows, first, last)
        return cut.as_bytes() if wire is ValueType.BYTE else cut
    table = full.view(rows, -1)
    if wire is ValueType.BYTE:
        size = full.element_size()
        return table.view(torch.uint8)[:, first * size : last * size]
    return table[:, first:last]
