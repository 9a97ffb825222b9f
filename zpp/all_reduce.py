"""All-reduce as a reduce-scatter (qgZ) followed by an all-gather (qwZ) of the float32 result."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zpp import checks
from zpp.all_gather import all_gather
from zpp.engine import VALUE_TYPES, Engine
from zpp.format import BlockFormat, Formats
from zpp.layout import ceil_div
from zpp.reduce_scatter import reduce_scatter
from zpp.work import Work


def all_reduce(
    engine: Engine,
    tensor: torch.Tensor,
    formats: Formats,
    *,
    result: BlockFormat,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    factor: float = 1.0,
) -> Work:
    """Start replacing `tensor` by its reduction over the ranks; every rank ends with the same bits.

    Any shape and size. The reduced shards are float32 until they are gathered in format `result`.
    """
    checks.tensor("tensor", tensor, engine.device)
    world = engine.topology.world_size
    shard_numel = ceil_div(tensor.numel(), world)
    flat = tensor.view(-1)
    padded = flat
    if tensor.numel() != world * shard_numel:
        padded = torch.zeros(world * shard_numel, dtype=tensor.dtype, device=tensor.device)
        padded[: tensor.numel()] = flat
    dtype = torch.float32 if tensor.dtype in VALUE_TYPES else tensor.dtype
    shard = torch.empty(shard_numel, dtype=dtype, device=tensor.device)
    both = (formats.gradients_intra, formats.gradients_inter)
    reduced = reduce_scatter(engine, shard, padded, both, op=op, factor=factor)
    gathered = all_gather(engine, padded, shard, result, after=reduced.jobs)
    if padded is flat:
        return Work("all_reduce", gathered.jobs, tensor)

    def nothing() -> None:
        """The padding is cut off in the last lane, after the gather's own jobs."""

    def cut_padding() -> None:
        flat.copy_(padded[: flat.numel()])
        engine.keep(flat)

    cut = engine.gathers.submit((nothing, nothing, cut_padding))
    return Work("all_reduce", [*gathered.jobs, cut], tensor)
