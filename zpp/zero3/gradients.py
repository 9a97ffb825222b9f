"""A unit's gradients on their way from autograd to the optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from zpp.communicator import Communicator
from zpp.format import BlockFormat
from zpp.parted import PartedTensor
from zpp.work import Work
from zpp.zero3.unit import Slot, Unit


class Gradients:
    """Collects the gradients of a unit's whole parameters, reduce-scatters them, hands out the parts.

    `complete` is called when all gradients of the unit are in.
    """

    def __init__(
        self,
        unit: Unit,
        communicator: Communicator,
        formats: tuple[BlockFormat, BlockFormat],
        complete: Callable[[], None],
    ) -> None:
        self.unit, self._communicator, self._formats, self._complete = unit, communicator, formats, complete
        self._slots = [slot for slot in unit.slots if slot.full.requires_grad]
        self._arrived: list[tuple[int, torch.Tensor]] = []  # where a gradient starts in the unit
        self._shard: torch.Tensor | None = None
        self._work: Work | None = None
        for slot in self._slots:
            slot.full.register_post_accumulate_grad_hook(lambda full, slot=slot: self._collect(full, slot))

    @property
    def trainable(self) -> bool:
        return bool(self._slots)

    def _collect(self, full: torch.Tensor, slot: Slot) -> None:
        assert full.grad is not None
        self._arrived.append((slot.start, full.grad.contiguous()))
        full.grad = None
        if len(self._arrived) == len(self._slots):
            self._complete()

    def reduce(self) -> None:
        """Start the reduce-scatter of what has arrived: frozen and unused parameters count as zero."""
        in_order = sorted(self._arrived, key=lambda arrived: (arrived[0], arrived[1].numel()))
        self._arrived = []
        flat = PartedTensor(self.unit.flat.numel(), self.unit.flat.dtype, in_order)
        self._shard = torch.empty(self.unit.shard_numel, device=self._communicator.device)
        self._work = self._communicator.reduce_scatter(
            self._shard, flat, op=dist.ReduceOp.AVG, formats=self._formats, async_op=True
        )

    def finish(self) -> None:
        """Wait for the reduce-scatter, if one was started, and add the result to the parts' gradients."""
        if self._work is None:
            return
        self._work.wait()
        assert self._shard is not None
        rank = self._communicator.topology.rank
        first = rank * self.unit.shard_numel
        for slot in self._slots:
            size = slot.part.numel()
            offset = max(slot.start - first, 0) if size else 0
            gradient = self._shard[offset : offset + size]
            if slot.part.grad is None:
                slot.part.grad = gradient
            else:
                slot.part.grad += gradient
        self._shard = self._work = None
