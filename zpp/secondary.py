"""hpZ: the secondary partition (ZeRO++, arXiv:2306.10209, section 3.2).

After a forward gather a rank keeps what the inter hop brought it: the records of all ranks with its own
local_rank, 1/L of the weights for L ranks per node, still encoded. The ranks of one node together hold
everything, so the weights can be gathered again without crossing nodes, and decode to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zpp.errors import StaleSecondaryError
from zpp.format import BlockFormat, ValueType
from zpp.pipeline import Job
from zpp.transport import Hop
from zpp.workspace import Workspace


@dataclass
class KeptRecords:
    """The records of one span, and who used them last: that job is over before the next one starts."""

    table: torch.Tensor
    """uint8 [nodes, record_nbytes], this rank's own record included."""
    job: Job | None = None
    hop: Hop | None = None
    """The hop inside the node by which the peers read them."""

    def __post_init__(self) -> None:
        self.rows = self.table.split(1)

    def reclaim(self) -> None:
        """Wait until the peers have read them: they may then be overwritten."""
        if self.hop is not None:
            self.hop.returned(wait=True)
            self.hop = None


class SecondaryPartition:
    """The records of one shard's inter hop, stamped with the generation of the weights they encode.

    A partition is stamped only after the gather that fills it was waited for, and loses its stamp when
    the next one begins; a use with another generation raises, so old or half-written weights cannot be
    read.
    """

    def __init__(self, nodes: int, workspace: Workspace) -> None:
        self._nodes, self._workspace = nodes, workspace
        self.generation: int | None = None
        self.records: list[KeptRecords] = []
        self.cuts: list[tuple[int, int]] = []
        self.wire = ValueType.FLOAT32

    @property
    def nbytes(self) -> int:
        return sum(records.table.numel() for records in self.records)

    def begin(
        self, fmt: BlockFormat, wire: ValueType, numel: int, cuts: list[tuple[int, int]]
    ) -> list[KeptRecords]:
        """Drop the stamp; room for the records of `numel` values cut into spans, a table a span."""
        self.generation = None
        sizes = [fmt.record_nbytes(stop - start) for start, stop in cuts]
        if sizes != [records.table.shape[1] for records in self.records]:
            self._drop()
            self.records = [KeptRecords(self._workspace.take(self._nodes, size)) for size in sizes]
        self.fmt, self.wire, self.numel, self.cuts = fmt, wire, numel, cuts
        return self.records

    def _drop(self) -> None:
        for records in self.records:
            if records.job is not None:
                records.job.result()
            records.reclaim()
            self._workspace.give(records.table)

    def stamp(self, generation: int) -> None:
        """The gather that filled the partition is complete: it holds `generation` of the weights."""
        self.generation = generation

    def holds(self, generation: int) -> bool:
        return self.generation == generation

    def invalidate(self) -> None:
        self.generation = None

    def require(self, generation: int, numel: int) -> None:
        if self.generation != generation:
            held = "nothing complete" if self.generation is None else f"generation {self.generation}"
            raise StaleSecondaryError(
                f"the secondary partition holds {held}, generation {generation} was asked for"
            )
        if self.numel != numel:
            raise ValueError(f"the secondary partition is of shards of {self.numel} values, not {numel}")
