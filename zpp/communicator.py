"""The object that a trainer holds: zpp's collectives over one group of ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import zpp.all_gather
import zpp.all_reduce
import zpp.reduce_scatter
from zpp import kernels, streams
from zpp.agreement import Agreement, compare
from zpp.engine import Engine
from zpp.format import BlockFormat, Formats
from zpp.parted import PartedTensor
from zpp.secondary import SecondaryPartition
from zpp.stats import Stats
from zpp.topology import Topology
from zpp.transport import Transport
from zpp.transport.torch_device import DeviceTransport, require_nccl
from zpp.transport.torch_dist import TorchTransport
from zpp.transport.torch_groups import detect_topology
from zpp.version import __version__
from zpp.work import Work
from zpp.workspace import Workspace


class Communicator:
    """Quantized collectives over a torch.distributed group, or over another transport.

    group: the ranks, the default group if None. ranks_per_node: how many consecutive ranks share a node;
    found from the host names if None. formats: the default encodings. device: where tensors live, the CPU or
    a CUDA device (the current one if it has no index), to which the group's back end has to be NCCL.
    strict: raise instead of passing through what cannot be compressed. seed: of stochastic rounding.
    span: values of the full tensor that one pipeline job moves; larger tensors go in several, so that
    their hops overlap. threads: of the CPU kernels, ``torch.get_num_threads()`` if None. debug: compare the
    ranks' arguments at every call rather than once per kind of call; ``ZPP_DEBUG=1`` if None.

    Making one is a collective call: all ranks of the group make it, with the same arguments, and call its
    methods in the same order. Settings that differ raise MismatchError on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        ranks_per_node: int | None = None,
        formats: Formats | None = None,
        device: torch.device | str = "cpu",
        transport: Transport | None = None,
        strict: bool = False,
        seed: int = 0,
        span: int = 4 << 20,
        threads: int | None = None,
        debug: bool | None = None,
    ) -> None:
        if span < 1:
            raise ValueError(f"span must be at least 1 value, not {span}")
        self.formats = Formats.default() if formats is None else formats
        device = torch.device(device)
        fused = kernels.for_device(device, threads)
        if device == torch.device("cuda"):  # without an index, which its tensors have
            device = torch.device("cuda", torch.cuda.current_device())
        queues = streams.for_device(device)
        if transport is None:
            transport = _torch_transport(group, ranks_per_node, device)
        elif group is not None or ranks_per_node is not None:
            raise ValueError("a transport brings its own group and ranks_per_node: pass either, not both")
        compare(transport.exchange, f"zpp {__version__}, {self.formats}, span {span}, seed {seed}")
        if debug is None:
            debug = os.environ.get("ZPP_DEBUG") == "1"
        self._engine = Engine(
            transport=transport,
            kernels=fused,
            workspace=Workspace(transport.memory, streams=queues),
            stats=Stats(),
            agreement=Agreement(transport.exchange, always=debug),
            device=device,
            streams=queues,
            span=span,
            seed=seed,
            strict=strict,
        )

    @property
    def device(self) -> torch.device:
        """Where the tensors of all calls have to be."""
        return self._engine.device

    @property
    def topology(self) -> Topology:
        return self._engine.topology

    @property
    def stats(self) -> Stats:
        return self._engine.stats

    @property
    def workspace(self) -> Workspace:
        """The buffers of records in flight: `peak_nbytes` and `lent_nbytes` say how much they take."""
        return self._engine.workspace

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        fmt: BlockFormat | None = None,
        secondary: SecondaryPartition | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Gather every rank's `input` (n values) into `output` (world_size * n values): qwZ.

        See `zpp.all_gather.all_gather`. Returns a Work if `async_op`, else waits.
        """
        fmt = self.formats.weights if fmt is None else fmt
        work = zpp.all_gather.all_gather(self._engine, output, input, fmt, secondary=secondary)
        return _finish(work, async_op)

    def secondary_partition(self) -> SecondaryPartition:
        """An empty secondary partition for one shard: pass it to `all_gather`, then stamp it."""
        return SecondaryPartition(self.topology.nodes, self._engine.workspace)

    def all_gather_secondary(
        self, output: torch.Tensor, secondary: SecondaryPartition, generation: int, *, async_op: bool = False
    ) -> Work | None:
        """Gather `output` again from the node's secondary partitions, without crossing nodes: hpZ."""
        work = zpp.all_gather.all_gather_secondary(self._engine, output, secondary, generation)
        return _finish(work, async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | PartedTensor,
        *,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG,
        factor: float = 1.0,
        formats: tuple[BlockFormat, BlockFormat] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce `input` (world_size * n values) and leave this rank's part in `output` (n values): qgZ.

        input may be several tensors, which are encoded where they are: a `PartedTensor`.
        formats: inside the node, and between nodes. See `zpp.reduce_scatter.reduce_scatter`.
        """
        if formats is None:
            formats = (self.formats.gradients_intra, self.formats.gradients_inter)
        work = zpp.reduce_scatter.reduce_scatter(self._engine, output, input, formats, op=op, factor=factor)
        return _finish(work, async_op)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        factor: float = 1.0,
        async_op: bool = False,
    ) -> Work | None:
        """Replace `tensor` by its reduction over the ranks, the same bits on each."""
        work = zpp.all_reduce.all_reduce(
            self._engine, tensor, self.formats, result=self.formats.weights, op=op, factor=factor
        )
        return _finish(work, async_op)

    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's `message`, in rank order; all of one length. Blocks."""
        return self._engine.transport.exchange(message)

    def close(self) -> None:
        """Finish what was started, then give up threads and subgroups. A collective call."""
        self._engine.close()


def _finish(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _torch_transport(
    group: dist.ProcessGroup | None, ranks_per_node: int | None, device: torch.device
) -> Transport:
    if not dist.is_initialized():
        raise ValueError("call torch.distributed.init_process_group first, or pass a transport")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("this rank is not a member of the group")
    if device.type != "cpu":
        require_nccl(group, device)
    if ranks_per_node is None:
        topology = detect_topology(group)
    else:
        topology = Topology(group.rank(), group.size(), ranks_per_node)
    if device.type == "cpu":
        return TorchTransport(group, topology)
    return DeviceTransport(group, topology, device)
