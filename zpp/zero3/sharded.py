"""ZeRO-3: hooks that gather a unit before it computes, free it after, and reduce its gradients.

Collectives are issued in one order on every rank: gathers as units run, prefetching along the order in
which the units were given; reduce-scatters in the reverse of that order, whichever unit is ready first.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from zpp.agreement import compare
from zpp.communicator import Communicator
from zpp.format import BlockFormat, Code
from zpp.zero3 import heap
from zpp.zero3.gradients import Gradients
from zpp.zero3.grouping import digest, group_parameters
from zpp.zero3.unit import Unit

_EXACT = BlockFormat(Code.EXACT)
_REDUCTIONS_IN_FLIGHT = 3
"""Bounds the memory of gradients that wait for a slow link: later units wait for the oldest."""


def shard(
    module: nn.Module,
    *,
    units: Iterable[nn.Module],
    communicator: Communicator,
    qwz: bool = True,
    hpz: bool = True,
    qgz: bool = True,
    compute_dtype: torch.dtype = torch.bfloat16,
    reshard_after_forward: bool = True,
    prefetch: int = 2,
) -> Sharded:
    """Shard `module`'s parameters over the communicator's ranks, in place. A collective call.

    units: submodules, in the order in which they run (usually the blocks); what they do not hold forms
    one more unit, the root's. Afterwards ``module.parameters()`` are this rank's float32 parts, under
    their own names: make the optimizer from them. Forward and backward compute in `compute_dtype`
    (floating-point inputs are cast to it); gradients are averaged over ranks. Parts and buffers are on the
    communicator's device, wherever the module was: one that does not fit there may come from the CPU.

    qwz, hpz, qgz: quantized weights, secondary partitions, quantized gradients, each by itself.
    reshard_after_forward: free units after their forward pass and gather them again in backward; if
    False they stay whole between the two. The root's unit always does.
    prefetch: how many units ahead are gathered while one computes.

    Units are freed and allocated again all the time: on a CPU glibc's malloc keeps, from here on, the memory
    of freed blocks up to the size of the largest unit, for the whole process.

    Raises MismatchError if the ranks' initial weights or arguments differ.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch must be at least 0, not {prefetch}")
    if not compute_dtype.is_floating_point:
        raise TypeError(f"compute_dtype must be a floating-point dtype, not {compute_dtype}")
    weights = communicator.formats.weights if qwz else _EXACT
    gradients = (communicator.formats.gradients_intra, communicator.formats.gradients_inter)
    gradients = gradients if qgz else (_EXACT, _EXACT)
    groups = group_parameters(module, list(units))
    compare(
        communicator.exchange,
        f"zero3 qwz={qwz} hpz={hpz} qgz={qgz} {compute_dtype} reshard={reshard_after_forward} "
        f"prefetch={prefetch} weights {digest(groups)}",
    )
    _move_buffers(module, communicator.device)
    made = []
    for (name, owner), owners in groups:
        unit = Unit(name, owners, communicator, weights, compute_dtype, keep_secondary=hpz)
        made.append((owner, unit))
    if communicator.device.type == "cpu":
        heap.keep_freed_memory(max(unit.flat_nbytes for _, unit in made))
    return Sharded(module, communicator, made, gradients, compute_dtype, reshard_after_forward, prefetch)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


class Sharded:
    """A module whose parameters are sharded; `shard` makes one. The module itself is used as before."""

    def __init__(
        self,
        module: nn.Module,
        communicator: Communicator,
        units: list[tuple[nn.Module, Unit]],
        gradient_formats: tuple[BlockFormat, BlockFormat],
        compute_dtype: torch.dtype,
        reshard_after_forward: bool,
        prefetch: int,
    ) -> None:
        self.module, self.communicator = module, communicator
        self._compute_dtype, self._reshard, self._prefetch = compute_dtype, reshard_after_forward, prefetch
        self._generation = 0
        self._root = next((unit for owner, unit in units if owner is module), None)
        self._units = [unit for owner, unit in units if owner is not module]
        self._gradients = [self._collector(unit, gradient_formats) for _, unit in reversed(units)]
        if self._root is not None:  # the root's embedding comes last in backward
            self._gradients.append(self._gradients.pop(0))
        self._in_backward = False
        self._ready: set[Unit] = set()
        self._reduced = 0
        self._hook(units)

    # Between steps

    @property
    def generation(self) -> int:
        """The version of the weights: secondary partitions of an earlier one are not used."""
        return self._generation

    def weights_changed(self) -> None:
        """Say, on every rank, that the parts were changed other than by a torch optimizer's step."""
        self._generation += 1

    def secondary_nbytes(self) -> int:
        """Bytes that this rank's secondary partitions take."""
        return sum(unit.secondary_nbytes for unit in self._all_units())

    def parts(self) -> Iterator[nn.Parameter]:
        """This rank's parts of all parameters, empty ones included."""
        for unit in self._all_units():
            for slot in unit.slots:
                yield slot.part

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradients of all ranks so that their global L2 norm is at most `max_norm`.

        Returns the norm before; the same value on every rank. A collective call.
        """
        gradients = [part.grad for part in self.parts() if part.grad is not None and part.numel()]
        squares = [gradient.double().square().sum() for gradient in gradients]
        mine = float(torch.stack(squares).sum()) if squares else 0.0  # the host waits for the device once
        everyone = self.communicator.exchange(struct.pack("d", mine))
        norm = math.sqrt(sum(struct.unpack("d", said)[0] for said in everyone))
        if not norm <= max_norm:  # NaN scales too: every consumer sees it
            for gradient in gradients:
                gradient.mul_(max_norm / (norm + 1e-6))
        return norm

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole float32 parameters and the buffers, under the module's own names. A collective call."""
        self._free_all()
        state = {key: value.detach().clone() for key, value in self.module.state_dict().items()}
        names = {
            (owner, attribute): f"{prefix}.{attribute}" if prefix else attribute
            for prefix, owner in self.module.named_modules(remove_duplicate=False)
            for attribute in owner._parameters
        }
        for unit in self._all_units():
            flat = torch.empty(unit.flat.numel(), device=self.communicator.device)
            self.communicator.all_gather(flat, unit.shard, fmt=_EXACT)
            for slot in unit.slots:
                for place in slot.owners:
                    state[names[place]] = flat[slot.start : slot.stop].view(slot.full.shape).clone()
        return state

    def _all_units(self) -> list[Unit]:
        return [*([self._root] if self._root is not None else []), *self._units]

    def _free_all(self) -> None:
        for unit in self._all_units():
            unit.free()

    # Hooks

    def _collector(self, unit: Unit, formats: tuple[BlockFormat, BlockFormat]) -> Gradients:
        return Gradients(unit, self.communicator, formats, lambda: self._gradients_complete(unit))

    def _hook(self, units: list[tuple[nn.Module, Unit]]) -> None:
        self.module.register_forward_pre_hook(self._enter, with_kwargs=True)
        for owner, unit in units:
            if owner is not self.module:
                owner.register_forward_pre_hook(lambda *_, unit=unit: self._before_forward(unit))
                owner.register_forward_hook(lambda _, args, out, unit=unit: self._after_forward(unit, out))
        self.module.register_forward_hook(lambda _, args, out: self._leave(out))
        self.module.register_load_state_dict_post_hook(lambda *_: self.weights_changed())
        ours = {id(part) for part in self.parts()}
        me = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            sharded = me()
            theirs = (id(p) for group in optimizer.param_groups for p in group["params"])
            if sharded is not None and not ours.isdisjoint(theirs):
                sharded.weights_changed()

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Start of a forward pass: the root's unit and the first ones are gathered."""
        for unit in self._all_units()[: 1 + self._prefetch]:
            unit.gather(self._generation)
        if self._root is not None:
            self._root.wait()

        def cast(value: Any) -> Any:
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(self._compute_dtype) if floats else value

        return pytree.tree_map(cast, args), pytree.tree_map(cast, kwargs)

    def _before_forward(self, unit: Unit) -> None:
        unit.gather(self._generation)
        here = self._units.index(unit)
        for following in self._units[here + 1 : here + 1 + self._prefetch]:
            following.gather(self._generation)
        unit.wait()

    def _after_forward(self, unit: Unit, output: Any) -> None:
        if not self._on_backward(output, lambda: self._before_backward(unit)) or self._reshard:
            unit.free()

    def _leave(self, output: Any) -> None:
        if not self._on_backward(output, self._start_backward):
            self._free_all()

    def _on_backward(self, output: Any, action: Callable[[], None]) -> bool:
        """Call `action` when backward reaches `output`. False if no backward pass can."""
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        for tensor in tensors:
            tensor.register_hook(lambda _: action())
        return bool(tensors)

    def _start_backward(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
            if self._root is not None:
                self._root.gather(self._generation)
            self._prefetch_before(len(self._units))
            if self._root is not None:
                self._root.wait()

    def _before_backward(self, unit: Unit) -> None:
        self._start_backward()
        unit.gather(self._generation)
        self._prefetch_before(self._units.index(unit))
        unit.wait()

    def _prefetch_before(self, index: int) -> None:
        """Gather the units that backward needs next: those before `index`, the nearest first."""
        for following in reversed(self._units[max(index - self._prefetch, 0) : index]):
            following.gather(self._generation)

    def _gradients_complete(self, unit: Unit) -> None:
        self._start_backward()
        unit.free()
        self._ready.add(unit)
        while self._reduced < len(self._gradients) and self._gradients[self._reduced].unit in self._ready:
            self._reduce_next()

    def _reduce_next(self) -> None:
        if self._reduced >= _REDUCTIONS_IN_FLIGHT:
            self._gradients[self._reduced - _REDUCTIONS_IN_FLIGHT].finish()
        gradients = self._gradients[self._reduced]
        if gradients.trainable:
            gradients.reduce()
        self._reduced += 1

    def _end_backward(self) -> None:
        """Reduce what is left: units of which some parameters took no part in this rank's step."""
        while self._reduced < len(self._gradients):
            self._reduce_next()
        for gradients in self._gradients:
            gradients.finish()
        self._free_all()
        self._ready.clear()
        self._reduced = 0
        self._in_backward = False
