"""A unit's gradients on their way from autograd to the optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from zpp.communicator import Communicator
from zpp.format import BlockFormat
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
        self._arrived: list[Slot] = []
        self._full: torch.Tensor | None = None
        self._shard: torch.Tensor | None = None
        self._work: Work | None = None
        for slot in self._slots:
            slot.full.register_post_accumulate_grad_hook(lambda full, slot=slot: self._collect(full, slot))

    @property
    def trainable(self) -> bool:
        return bool(self._slots)

    def _take(self) -> torch.Tensor:
        if self._full is None:
            taken = self._communicator.workspace.take(self.unit.flat_nbytes)
            self._full = taken.view(self.unit.flat.dtype)
        return self._full

    def _collect(self, full: torch.Tensor, slot: Slot) -> None:
        assert full.grad is not None
        self._take()[slot.start : slot.stop].view(full.shape).copy_(full.grad)
        full.grad = None
        self._arrived.append(slot)
        if len(self._arrived) == len(self._slots):
            self._complete()

    def _zero_gaps(self, flat: torch.Tensor) -> None:
        """Padding, frozen parameters and parameters that took no part count as zero."""
        end = 0
        for slot in sorted(self._arrived, key=lambda slot: slot.start):
            flat[end : slot.start].zero_()
            end = slot.stop
        flat[end:].zero_()

    def reduce(self) -> None:
        """Start the reduce-scatter of what has arrived."""
        flat = self._take()
        self._zero_gaps(flat)
        self._arrived.clear()
        self._shard = torch.empty(self.unit.shard_numel)
        self._work = self._communicator.reduce_scatter(
            self._shard, flat, op=dist.ReduceOp.AVG, formats=self._formats, async_op=True
        )

    def finish(self) -> None:
        """Wait for the reduce-scatter, if one was started, and add the result to the parts' gradients."""
        if self._work is None:
            return
        self._work.wait()
        assert self._full is not None and self._shard is not None
        self._communicator.workspace.give(self._full.view(torch.uint8))
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
        self._full = self._shard = self._work = None
