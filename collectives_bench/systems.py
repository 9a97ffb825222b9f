"""The ways to train that are compared. Each one changes the model in place, before its optimizer is made.

Nothing heavy is imported here: the command line only needs the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collectives_bench.model import GPT

SentBytes = Callable[[], int]


@dataclass(frozen=True)
class Context:
    """What a system needs to know beyond the default process group."""

    ranks_per_node: int


@dataclass(frozen=True)
class System:
    """`apply` may return a counter of the bytes this rank has sent to other nodes so far.

    The counter is used where no network interface can be read.
    """

    summary: str
    apply: Callable[[GPT, Context], SentBytes | None]


def _compute(model: GPT, context: Context) -> SentBytes:
    import torch

    model.to(torch.bfloat16)
    return lambda: 0


def _fsdp2(model: GPT, context: Context) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _zpp(model: GPT, context: Context, *, qwz: bool, hpz: bool, qgz: bool, paper: bool = False) -> SentBytes:
    import zpp

    formats = zpp.Formats.zeropp() if paper else zpp.Formats.default()
    communicator = zpp.Communicator(ranks_per_node=context.ranks_per_node, formats=formats)
    units = list(model.blocks)
    zpp.zero3.shard(model, units=units, communicator=communicator, qwz=qwz, hpz=hpz, qgz=qgz)
    return lambda: int(communicator.stats.wire_bytes(zpp.Axis.INTER))


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        "compute": System("each rank alone, no communication: the floor under every step time", _compute),
        "fsdp2": System("torch.distributed.fsdp.fully_shard on every block and the root", _fsdp2),
        "zero3": System(
            "zpp without compression",
            partial(_zpp, qwz=False, hpz=False, qgz=False),
        ),
        "qwz": System(
            "zpp, quantized weight all-gather only",
            partial(_zpp, qwz=True, hpz=False, qgz=False),
        ),
        "hpz": System(
            "zpp, secondary parameter partition only",
            partial(_zpp, qwz=False, hpz=True, qgz=False),
        ),
        "qgz": System(
            "zpp, quantized gradient reduce-scatter only",
            partial(_zpp, qwz=False, hpz=False, qgz=True),
        ),
        "zeropp": System(
            "zpp with all three, in the formats of the ZeRO++ paper",
            partial(_zpp, qwz=True, hpz=True, qgz=True, paper=True),
        ),
        "zpp": System(
            "zpp with all three, in its default formats",
            partial(_zpp, qwz=True, hpz=True, qgz=True),
        ),
    }
)
