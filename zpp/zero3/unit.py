"""One unit: the parameters that are gathered, freed and reduced together (FSDP2: a parameter group).

A unit's parameters lie one after another in a flat tensor, which is cut into equal shards. Each rank owns
one shard in float32. Every parameter keeps its name: between steps it is the part of it that lies in this
rank's shard (1-D, possibly empty); while the unit computes it is the whole tensor in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zpp.communicator import Communicator
from zpp.errors import StaleSecondaryError
from zpp.format import BlockFormat
from zpp.layout import GROUP, round_up, shard_numel
from zpp.work import Work

Owners = dict[nn.Parameter, list[tuple[nn.Module, str]]]
"""Each parameter of a unit, once, and the modules that hold it under which name."""


@dataclass
class Slot:
    """One parameter's place in the flat tensor [start, stop), and its two forms."""

    owners: list[tuple[nn.Module, str]]
    start: int
    stop: int
    part: nn.Parameter
    """This rank's float32 part: what the optimizer steps on."""
    full: nn.Parameter
    """The whole tensor, a view of the unit's flat buffer; without memory while the unit is not gathered."""

    def install(self, parameter: nn.Parameter) -> None:
        for module, name in self.owners:
            module._parameters[name] = parameter


def _overlap(start: int, stop: int, first: int, last: int) -> tuple[int, int]:
    """[start, stop) cut to [first, last); an empty range at `first` where they do not meet."""
    a, b = max(start, first), min(stop, last)
    return (a, b) if a < b else (first, first)


class Unit:
    """Takes the parameters over: from here on the modules hold this rank's parts.

    The flat buffer's memory is taken away and given back in place (the storage is resized), because
    autograd keeps references to views of it between forward and backward.
    """

    def __init__(
        self,
        name: str,
        owners: Owners,
        communicator: Communicator,
        weights: BlockFormat,
        compute_dtype: torch.dtype,
        *,
        keep_secondary: bool,
    ) -> None:
        self.name, self.communicator, self.weights = name, communicator, weights
        world, rank = communicator.topology.world_size, communicator.topology.rank
        # Parameters start on whole groups, so that every one of them is aligned for vector loads.
        total = sum(round_up(parameter.numel(), GROUP) for parameter in owners)
        self.shard_numel = shard_numel(total, world)
        self.shard = torch.zeros(self.shard_numel, device=communicator.device)
        self.flat = torch.empty(world * self.shard_numel, dtype=compute_dtype, device=communicator.device)
        self.slots: list[Slot] = []
        start, first = 0, rank * self.shard_numel
        for parameter, places in owners.items():
            stop = start + parameter.numel()
            a, b = _overlap(start, stop, first, first + self.shard_numel)
            part = self.shard[a - first : b - first]
            if a < b:
                part.copy_(parameter.detach().reshape(-1)[a - start : b - start])
            full = self.flat[start:stop].view(parameter.shape)
            trains = parameter.requires_grad
            slot = Slot(places, start, stop, nn.Parameter(part, trains), nn.Parameter(full, trains))
            slot.install(slot.part)
            self.slots.append(slot)
            start = round_up(stop, GROUP)
        # Filling the buffer again is no change that autograd should see: it has a version counter of its own.
        self._target = self.flat.data
        self._storage = self.flat.untyped_storage()
        self._storage.resize_(0)
        self._gathering: Work | None = None
        self._generation: int | None = None  # what the flat buffer holds or is being filled with
        self._installed = False
        self._secondary = communicator.secondary_partition() if keep_secondary else None
        self._secondary_version = 0

    @property
    def flat_nbytes(self) -> int:
        """Bytes of the whole unit in the compute dtype."""
        return self.flat.numel() * self.flat.element_size()

    @property
    def secondary_nbytes(self) -> int:
        return self._secondary.nbytes if self._secondary is not None else 0

    def gather(self, generation: int) -> None:
        """Start gathering `generation` of the weights, unless it is there or on its way."""
        if self._generation == generation:
            return
        self.free()
        self._storage.resize_(self.flat_nbytes)
        if self._secondary is not None and self._secondary.holds(generation):
            self._check_unchanged(generation)
            self._gathering = self.communicator.all_gather_secondary(
                self._target, self._secondary, generation, async_op=True
            )
        else:
            self._secondary_version = self.shard._version
            self._gathering = self.communicator.all_gather(
                self._target, self.shard, fmt=self.weights, secondary=self._secondary, async_op=True
            )
        self._generation = generation

    def _check_unchanged(self, generation: int) -> None:
        if self.shard._version != self._secondary_version:
            raise StaleSecondaryError(
                f"the weights of unit {self.name} were changed in place after generation {generation} was "
                "gathered: call weights_changed() on the sharded model, on every rank, after changing them"
            )

    def wait(self) -> None:
        """Wait for the gather that was started; the modules then hold whole parameters."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            if self._secondary is not None and self._generation is not None:
                self._secondary.stamp(self._generation)
        if not self._installed:
            for slot in self.slots:
                slot.install(slot.full)
            self._installed = True

    def free(self) -> None:
        """Give the whole parameters' memory back; the modules then hold this rank's parts."""
        if self._generation is None:
            return
        self.wait()
        for slot in self.slots:
            slot.install(slot.part)
        self._installed = False
        self._generation = None
        self._storage.resize_(0)
