"""qwZ: the block-quantized all-gather of weights, hierarchical (ZeRO++, arXiv:2306.10209, section 3.1).

    shard -> encode -> inter hop among equal local_ranks -> intra hop -> decode -> full

Each hop carries one message of whole records. Between nodes every shard crosses once per other node,
which is the least that an all-gather can send. The sender decodes its own record too, so that every rank
holds the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zpp import checks
from zpp.crossing import Crossing
from zpp.engine import VALUE_TYPES, Engine
from zpp.format import BlockFormat, Code, ValueType
from zpp.layout import spans
from zpp.pipeline import Job
from zpp.secondary import KeptRecords, SecondaryPartition
from zpp.topology import Axis, Topology
from zpp.work import Work


@dataclass(frozen=True)
class _Call:
    """What the jobs of one all-gather share."""

    engine: Engine
    fmt: BlockFormat
    wire: ValueType
    shard_numel: int
    stream: int = 0
    after: Sequence[Job] = ()


@dataclass
class _Span:
    """One span of one all-gather; its three stages run in the three lanes of the gather pipeline.

    `full` holds, for each local_rank, the values of all nodes' ranks that have it: [nodes, span].
    `shard` is None where the records of the inter hop are in `kept` already (hpZ). `kept` is where they go
    if they are to stay.
    """

    call: _Call
    full: Sequence[torch.Tensor]
    shard: torch.Tensor | None
    offset: int
    kept: KeptRecords | None = None

    def __post_init__(self) -> None:
        self.engine, self.fmt = self.call.engine, self.call.fmt
        self.numel = self.full[0].shape[1]
        self.record_nbytes = self.fmt.record_nbytes(self.numel)
        self.logical = self.numel * self.call.wire.itemsize
        self.after = list(self.call.after)
        self.crossing: Crossing | None = None

    def submit(self) -> Job:
        kept = self.kept
        if kept is not None and kept.job is not None:
            self.after.append(kept.job)
        stages = self.encode_and_cross_nodes, self.gather_inside_node, self.decode
        job = self.engine.gathers.submit(stages)
        if kept is not None:
            kept.job = job
        return job

    def encode_and_cross_nodes(self) -> None:
        for earlier in self.after:
            earlier.result()
        engine, topology = self.engine, self.engine.topology
        if self.kept is None:
            self.inter = engine.workspace.take(topology.nodes, self.record_nbytes)
            rows = self.inter.split(1)
        else:
            self.inter, rows = self.kept.table, self.kept.rows
        if self.shard is None:
            return
        if self.kept is not None:
            self.kept.reclaim()
        mine = rows[topology.node]
        noise = engine.noise(self.fmt, self.call.stream, self.offset, self.call.shard_numel)
        engine.kernels.encode(self.shard, self.fmt, mine, noise=noise)
        engine.keep(self.shard)
        if topology.nodes > 1:
            self.crossing = engine.all_gather(Axis.INTER, mine, self.logical, into=rows)

    def gather_inside_node(self) -> None:
        topology = self.engine.topology
        if self.crossing is not None:
            self.crossing.receive()
            self.crossing.release()
            self.crossing = None
        if topology.ranks_per_node > 1:
            self.crossing = self.engine.all_gather(Axis.INTRA, self.inter, topology.nodes * self.logical)

    def decode(self) -> None:
        engine = self.engine
        tables = [self.inter] if self.crossing is None else self.crossing.receive()
        for table, values in zip(tables, self.full, strict=True):
            engine.kernels.decode(table, self.fmt, values)
        engine.keep(self.full[0])
        if self.kept is not None:
            engine.keep(self.kept.table)
            if self.crossing is not None:
                self.crossing.release()
                self.kept.hop = self.crossing.hop
        elif self.crossing is not None:
            self.crossing.release(self.inter)
        else:
            engine.workspace.give(self.inter)


def all_gather(
    engine: Engine,
    output: torch.Tensor,
    shard: torch.Tensor,
    fmt: BlockFormat,
    *,
    secondary: SecondaryPartition | None = None,
    after: Sequence[Job] = (),
) -> Work:
    """Start gathering every rank's `shard` into `output` on all ranks, in rank order.

    shard: [n] values; output: [world_size * n] values, of the same dtype, or float32 master values into a
    16-bit output. `shard` may be a view of `output`. With `secondary`, the records that crossed nodes stay
    there, for `all_gather_secondary`. `after` must end before `shard` is read. One rank alone copies
    exactly. Dtypes that no format encodes travel as they are, counted in stats.
    """
    checks.tensor("output", output, engine.device)
    checks.tensor("input", shard, engine.device)
    checks.multiple("output", output, "input", shard, engine.topology)
    if shard.dtype not in VALUE_TYPES or output.dtype not in VALUE_TYPES:
        checks.same_dtype("output", output, "input", shard)
    statement = "all_gather numel={} {} -> {} as {}", shard.numel(), shard.dtype, output.dtype, fmt
    if output.dtype not in VALUE_TYPES:
        if fmt.code is not Code.EXACT:
            engine.refuse(f"all_gather of {output.dtype}")
        wire, fmt = ValueType.BYTE, BlockFormat(Code.EXACT)
        output, shard = output.view(-1).view(torch.uint8), shard.view(-1).view(torch.uint8)
    else:
        wire = VALUE_TYPES[output.dtype]
    engine.agreement.check(*statement)
    engine.stats.call("all_gather")
    fmt = fmt.resolve(wire)
    if engine.topology.world_size == 1 and secondary is None:
        for earlier in after:
            earlier.result()
        output.view(-1).copy_(shard.view(-1))
        return Work("all_gather", [], output)

    flat = shard.view(1, -1)
    cuts = spans(flat.shape[1], engine.shard_span())
    kept: Sequence[KeptRecords | None] = [None] * len(cuts)
    if secondary is not None:
        kept = secondary.begin(fmt, wire, flat.shape[1], cuts)
    call = _Call(engine, fmt, wire, flat.shape[1], engine.next_stream(), after)
    parts = zip(cuts, _by_local_rank(engine.topology, output, cuts), kept, strict=True)
    jobs = [_Span(call, full, flat[:, a:b], a, records) for (a, b), full, records in parts]
    return Work("all_gather", [job.submit() for job in jobs], output)


def all_gather_secondary(
    engine: Engine, output: torch.Tensor, secondary: SecondaryPartition, generation: int
) -> Work:
    """hpZ: start gathering `output` again from the secondary partitions of this node; nothing crosses nodes.

    Raises StaleSecondaryError unless the secondary holds `generation` of the weights.
    """
    checks.tensor("output", output, engine.device)
    secondary.require(generation, output.numel() // engine.topology.world_size)
    engine.stats.call("all_gather_secondary")
    call = _Call(engine, secondary.fmt, secondary.wire, secondary.numel)
    cuts = secondary.cuts
    parts = zip(cuts, _by_local_rank(engine.topology, output, cuts), secondary.records, strict=True)
    jobs = [_Span(call, full, None, a, records) for (a, _), full, records in parts]
    return Work("all_gather_secondary", [job.submit() for job in jobs], output)


def _by_local_rank(
    topology: Topology, output: torch.Tensor, cuts: Sequence[tuple[int, int]]
) -> list[Sequence[torch.Tensor]]:
    """For each span of the shards the values of `output`, a tensor [nodes, span] for each local_rank."""
    table = output.view(topology.nodes, topology.ranks_per_node, -1)
    if len(cuts) == 1:
        return [table.unbind(1)]
    return [table[:, :, first:last].unbind(1) for first, last in cuts]
