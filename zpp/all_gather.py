"""qwZ: the block-quantized all-gather of weights, hierarchical (ZeRO++, arXiv:2306.10209, section 3.1).

    shard -> encode -> inter hop among equal local_ranks -> intra hop -> decode -> full

Each hop carries one message of whole records. Between nodes every shard crosses once per other node,
which is the least that an all-gather can send. The sender decodes its own record too, so that every rank
holds the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from zpp import checks
from zpp.engine import VALUE_TYPES, Engine
from zpp.format import BlockFormat, Code, ValueType
from zpp.layout import spans
from zpp.secondary import SecondaryPartition
from zpp.topology import Axis
from zpp.transport import Pending
from zpp.work import Work


@dataclass(frozen=True)
class _Call:
    """What the jobs of one all-gather share."""

    engine: Engine
    fmt: BlockFormat
    wire: ValueType
    shard_numel: int
    stream: int = 0
    after: Sequence[Future[None]] = ()


@dataclass
class _Job:
    """One span of one all-gather; its three stages run in the three lanes of the gather pipeline.

    `shard` is None, and `inter` given, where the records of the inter hop are there already (hpZ).
    `kept` is where the inter hop's records go if they are to stay.
    """

    call: _Call
    full: torch.Tensor
    shard: torch.Tensor | None
    offset: int
    kept: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.engine, self.fmt = self.call.engine, self.call.fmt
        self.numel = self.full.shape[1]
        self.record_nbytes = self.fmt.record_nbytes(self.numel)
        self.logical = self.numel * self.call.wire.itemsize
        self.pending: Pending | None = None
        self.encoded: torch.Tensor | None = None

    def submit(self) -> Future[None]:
        return self.engine.gathers.submit((self.encode_and_cross_nodes, self.gather_inside_node, self.decode))

    def encode_and_cross_nodes(self) -> None:
        for earlier in self.call.after:
            earlier.result()
        engine, nodes = self.engine, self.engine.topology.nodes
        self.inter = engine.workspace.take(nodes * self.record_nbytes) if self.kept is None else self.kept
        if self.shard is None:
            return
        encoded = self.inter if nodes == 1 else engine.workspace.take(self.record_nbytes)
        noise = engine.noise(self.fmt, self.call.stream, self.offset, self.call.shard_numel)
        engine.kernels.encode(self.shard, self.fmt, encoded.view(1, -1), noise=noise)
        if nodes > 1:
            self.encoded = encoded
            self.pending = engine.all_gather(Axis.INTER, encoded, self.inter, self.logical)

    def gather_inside_node(self) -> None:
        engine, size = self.engine, self.engine.topology.ranks_per_node
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        if self.encoded is not None:
            engine.workspace.give(self.encoded)
        if size == 1:
            self.records = self.inter
            return
        self.records = engine.workspace.take(size * self.inter.numel())
        self.pending = engine.all_gather(
            Axis.INTRA, self.inter, self.records, engine.topology.nodes * self.logical
        )

    def decode(self) -> None:
        engine, topology = self.engine, self.engine.topology
        if self.pending is not None:
            self.pending.wait()
        records = self.records.view(topology.world_size, self.record_nbytes)
        engine.kernels.decode(records, self.fmt, self.full, rows=topology.nodes)
        if self.records is not self.inter:
            engine.workspace.give(self.records)
        if self.kept is None:
            engine.workspace.give(self.inter)


def all_gather(
    engine: Engine,
    output: torch.Tensor,
    shard: torch.Tensor,
    fmt: BlockFormat,
    *,
    secondary: SecondaryPartition | None = None,
    after: Sequence[Future[None]] = (),
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
    statement = f"all_gather numel={shard.numel()} {shard.dtype} -> {output.dtype} as {fmt}"
    if output.dtype not in VALUE_TYPES:
        if fmt.code is not Code.EXACT:
            engine.refuse(f"all_gather of {output.dtype}")
        wire, fmt = ValueType.BYTE, BlockFormat(Code.EXACT)
        output, shard = output.view(-1).view(torch.uint8), shard.view(-1).view(torch.uint8)
    else:
        wire = VALUE_TYPES[output.dtype]
    engine.agreement.check(statement)
    engine.stats.call("all_gather")
    fmt = fmt.resolve(wire)
    if engine.topology.world_size == 1 and secondary is None:
        for earlier in after:
            earlier.result()
        output.view(-1).copy_(shard.view(-1))
        return Work("all_gather", [], output)

    full, flat = output.view(engine.topology.world_size, -1), shard.view(1, -1)
    cuts = spans(flat.shape[1], engine.shard_span())
    kept: Sequence[torch.Tensor | None] = [None] * len(cuts)
    if secondary is not None:
        kept = secondary.begin(fmt, wire, flat.shape[1], cuts)
    call = _Call(engine, fmt, wire, flat.shape[1], engine.next_stream(), after)
    jobs = [_Job(call, full[:, a:b], flat[:, a:b], a, k) for (a, b), k in zip(cuts, kept, strict=True)]
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
    full = output.view(engine.topology.world_size, -1)
    call = _Call(engine, secondary.fmt, secondary.wire, secondary.numel)
    kept = zip(secondary.cuts, secondary.records, strict=True)
    jobs = [_Job(call, full[:, a:b], None, a, records) for (a, b), records in kept]
    return Work("all_gather_secondary", [job.submit() for job in jobs], output)
