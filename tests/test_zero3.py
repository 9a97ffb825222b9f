"""The ZeRO-3 layer over in-process ranks: parity with unsharded training, hpZ, staleness, traffic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small_model import Net, batch, loss_of, net
from torch import nn

import zpp
from zpp.format import BlockFormat, Code, Formats
from zpp.topology import Axis
from zpp.transport.inprocess import InProcessTransport, run


def gradient(part: torch.Tensor) -> torch.Tensor:
    assert part.grad is not None
    return part.grad


def sharded(
    transport: InProcessTransport, formats: Formats | None = None, device: str = "cpu", **settings: Any
) -> tuple[Net, zpp.zero3.Sharded]:
    model = net()
    communicator = zpp.Communicator(
        transport=transport, formats=formats or Formats.default(), device=device, threads=1
    )
    return model, zpp.zero3.shard(model, units=list(model.blocks), communicator=communicator, **settings)


def train(
    transport: InProcessTransport,
    steps: int,
    formats: Formats | None = None,
    *,
    eps: float = 1e-8,
    device: str = "cpu",
    **settings: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, handle = sharded(transport, formats, device, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=eps)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(step, transport.topology.rank).to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = handle.full_state_dict()
    handle.communicator.close()
    return losses, state


EXACT: dict[str, Any] = {"qwz": False, "hpz": False, "qgz": False}


@pytest.mark.parametrize(("world", "per_node"), [(1, 1), (2, 1), (2, 2), (4, 2), (6, 3)])
def test_unquantized_equals_training_without_shards(world: int, per_node: int) -> None:
    """float32: the same losses and weights as one process that averages the ranks' gradients.

    Sums in another order differ in the last bits. AdamW divides by the size of the gradient, so with its
    usual eps a gradient that is almost zero would turn those bits into a visible step.
    """
    steps, eps = 12, 1e-4
    everyone = run(world, per_node, lambda t: train(t, steps, eps=eps, compute_dtype=torch.float32, **EXACT))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=eps)
    for step in range(steps):
        optimizer.zero_grad()
        losses = [loss_of(model, batch(step, rank)) for rank in range(world)]
        (torch.stack(losses).sum() / world).backward()
        optimizer.step()
        for rank, loss in enumerate(losses):
            assert everyone[rank][0][step] == pytest.approx(loss.item(), rel=1e-5)
    for _, state in everyone:
        assert list(state) == list(model.state_dict())
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (6, 3), (6, 2)])
@pytest.mark.parametrize("quantized", [False, True])
def test_hpz_alone_changes_no_bit_in_50_steps(world: int, per_node: int, quantized: bool) -> None:
    """Also with quantized weights and gradients: the secondary holds the very records that crossed."""
    base: dict[str, Any] = {"qwz": quantized, "qgz": quantized}
    without = run(world, per_node, lambda t: train(t, 50, hpz=False, **base))
    with_hpz = run(world, per_node, lambda t: train(t, 50, hpz=True, **base))
    for (losses_a, state_a), (losses_b, state_b) in zip(without, with_hpz, strict=True):
        assert losses_a == losses_b
        assert all(torch.equal(state_a[name], state_b[name]) for name in state_a)


@pytest.mark.parametrize("formats", [Formats.default(), Formats.zeropp()])
def test_quantized_training_follows_exact_training(formats: Formats) -> None:
    exact = run(4, 2, lambda t: train(t, 60, **EXACT))
    quantized = run(4, 2, lambda t: train(t, 60, formats))
    a = sum(sum(losses[-10:]) for losses, _ in exact)
    b = sum(sum(losses[-10:]) for losses, _ in quantized)
    first = sum(sum(losses[:2]) for losses, _ in exact) * 5
    assert a < 0.95 * first, "training does train"
    assert b == pytest.approx(a, rel=0.01)


def test_every_rank_ends_with_the_same_weights() -> None:
    states = [state for _, state in run(4, 2, lambda t: train(t, 3))]
    assert all(torch.equal(states[0][k], state[k]) for state in states[1:] for k in state)


def test_backward_of_hpz_sends_no_weights_between_nodes() -> None:
    def body(transport: InProcessTransport) -> list[int]:
        model, handle = sharded(transport, qwz=False, hpz=True, qgz=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for step in range(2):
            optimizer.zero_grad()
            start = handle.communicator.stats.wire_bytes(Axis.INTER)
            loss = loss_of(model, batch(step, transport.topology.rank))
            middle = handle.communicator.stats.wire_bytes(Axis.INTER)
            loss.backward()
            end = handle.communicator.stats.wire_bytes(Axis.INTER)
            optimizer.step()
            seen += [middle - start, end - middle]
        handle.communicator.close()
        return seen

    forward, backward, forward2, backward2 = run(4, 2, body)[0]
    gradients = weights = 2 * sum(_shard_numels(4))
    assert forward == forward2 == weights
    assert backward == backward2 == gradients, "gradients only"


def _shard_numels(world: int) -> list[int]:
    """Of each unit of Net, padding included."""

    def padded(numel: int) -> int:
        return math.ceil(numel / 32) * 32

    model = net()
    units = [list(block.parameters()) for block in model.blocks] + [[model.embed.weight, model.head.bias]]
    totals = [sum(padded(parameter.numel()) for parameter in unit) for unit in units]
    return [padded(math.ceil(total / world)) for total in totals]


def test_secondary_is_used_again_until_the_weights_change() -> None:
    """Further micro-steps and evaluation stay inside the node; a step of the optimizer ends that."""

    def body(transport: InProcessTransport) -> list[bool]:
        model, handle = sharded(transport)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        stats = handle.communicator.stats
        crossed = []

        def forward(grad: bool = True) -> torch.Tensor:
            before = stats.wire_bytes(Axis.INTER)
            with torch.set_grad_enabled(grad):
                loss = loss_of(model, batch(0, 0))
            crossed.append(stats.wire_bytes(Axis.INTER) > before)
            return loss

        forward().backward()
        forward().backward()
        first = forward(grad=False)
        optimizer.step()
        second = forward(grad=False)
        forward(grad=False)
        model.load_state_dict(model.state_dict())
        forward(grad=False)
        handle.weights_changed()
        forward(grad=False)
        assert second < first, "the evaluation after the step sees the new weights"
        return crossed

    assert run(4, 2, body)[0] == [True, False, False, True, False, True, True]


def test_weights_changed_in_place_are_noticed() -> None:
    def body(transport: InProcessTransport) -> None:
        model, handle = sharded(transport)
        with torch.no_grad():
            loss_of(model, batch(0, 0))
            for parameter in model.parameters():
                parameter.mul_(0.5)
            with pytest.raises(zpp.StaleSecondaryError, match=r"call weights_changed\(\)"):
                loss_of(model, batch(0, 0))
            handle.weights_changed()
            loss_of(model, batch(0, 0))

    run(4, 2, body)


def test_gradients_accumulate_like_torch() -> None:
    def body(transport: InProcessTransport) -> list[torch.Tensor]:
        grads = []
        for together in (False, True):
            model, handle = sharded(transport, compute_dtype=torch.float32, **EXACT)
            rank = transport.topology.rank
            if together:
                (loss_of(model, batch(0, rank)) + loss_of(model, batch(1, rank))).backward()
            else:
                loss_of(model, batch(0, rank)).backward()
                loss_of(model, batch(1, rank)).backward()
            grads.append(torch.cat([gradient(part) for part in handle.parts()]))
        return grads

    for apart, together in run(4, 2, body):
        torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-6)


def test_unused_and_frozen_parameters() -> None:
    """A unit that takes no part on some ranks gets zeros from them; a frozen one gets no gradient."""

    def body(transport: InProcessTransport) -> None:
        model = net()
        up: Any = model.blocks[1].up
        extra = nn.Linear(5, 5)
        model.blocks[0].requires_grad_(False)
        up.bias.requires_grad_(False)
        nn.init.ones_(extra.weight)
        nn.init.ones_(extra.bias)
        model.extra = extra
        communicator = zpp.Communicator(transport=transport, threads=1)
        handle = zpp.zero3.shard(model, units=list(model.blocks), communicator=communicator, **EXACT)
        loss_of(model, batch(0, transport.topology.rank)).backward()
        assert all(p.grad is None for p in model.blocks[0].parameters())
        assert up.bias.grad is None and up.weight.grad is not None
        assert not gradient(extra.weight).any()
        assert all(torch.isfinite(p.grad).all() for p in handle.parts() if p.grad is not None)

    run(4, 2, body)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_on_one_rank_is_seen(bad: float) -> None:
    def body(transport: InProcessTransport) -> tuple[bool, float]:
        model, handle = sharded(transport)
        loss = loss_of(model, batch(0, transport.topology.rank))
        (loss * bad if transport.topology.rank == 1 else loss).backward()
        norm = handle.clip_grad_norm_(1.0)
        gradients = [gradient(part) for part in handle.parts() if part.numel()]
        return all(not torch.isfinite(g).any() for g in gradients), norm

    for spread, norm in run(4, 2, body):
        assert spread, "every block of every rank held it"
        assert norm != norm or norm == float("inf")


def test_clipping_is_global() -> None:
    def body(transport: InProcessTransport) -> tuple[float, float]:
        model, handle = sharded(transport, compute_dtype=torch.float32, **EXACT)
        loss_of(model, batch(0, 0)).backward()
        norm = handle.clip_grad_norm_(0.1)
        return norm, sum(float(gradient(part).square().sum()) for part in handle.parts())

    everyone = run(4, 2, body)
    model = net()
    loss_of(model, batch(0, 0)).backward()
    want = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert [norm for norm, _ in everyone] == [pytest.approx(want, rel=1e-5)] * 4
    assert sum(squares for _, squares in everyone) ** 0.5 == pytest.approx(0.1, rel=1e-3)


def test_memory_is_given_back_between_steps() -> None:
    def body(transport: InProcessTransport) -> None:
        model, handle = sharded(transport)
        loss_of(model, batch(0, 0)).backward()
        numels = _shard_numels(4)
        assert sum(p.numel() for p in handle.parts()) <= sum(numels)
        assert sum(p.untyped_storage().nbytes() for p in {unit.flat for unit in handle._all_units()}) == 0
        record = BlockFormat(Code.INT8).record_nbytes
        assert handle.secondary_nbytes() == 2 * sum(record(n) for n in numels)
        assert handle.communicator.workspace.lent_nbytes - handle.secondary_nbytes() < 4096 * 2 * len(numels)

    run(4, 2, body)


def test_ranks_with_other_weights_or_arguments_are_refused() -> None:
    def other_weights(transport: InProcessTransport) -> None:
        model = net()
        if transport.topology.rank == 2:
            with torch.no_grad():
                model.head.bias[3] += 1
        communicator = zpp.Communicator(transport=transport, threads=1)
        with pytest.raises(zpp.MismatchError, match="rank 2: zero3 .* weights"):
            zpp.zero3.shard(model, units=list(model.blocks), communicator=communicator)

    def other_arguments(transport: InProcessTransport) -> None:
        with pytest.raises(zpp.MismatchError, match="rank 1: zero3 qwz=False"):
            sharded(transport, qwz=transport.topology.rank != 1)

    run(4, 2, other_weights)
    run(4, 2, other_arguments)


def test_wrong_arguments() -> None:
    def body(transport: InProcessTransport) -> None:
        communicator = zpp.Communicator(transport=transport, threads=1)
        model = net()
        with pytest.raises(ValueError, match="unit Linear is not a submodule of Net"):
            zpp.zero3.shard(model, units=[nn.Linear(1, 1)], communicator=communicator)
        with pytest.raises(ValueError, match="given twice"):
            zpp.zero3.shard(model, units=[model.blocks[0]] * 2, communicator=communicator)
        with pytest.raises(ValueError, match="prefetch must be at least 0, not -1"):
            zpp.zero3.shard(model, units=[], communicator=communicator, prefetch=-1)
        with pytest.raises(TypeError, match="compute_dtype"):
            zpp.zero3.shard(model, units=[], communicator=communicator, compute_dtype=torch.int8)
        with pytest.raises(TypeError, match="is torch.float64, not float32"):
            zpp.zero3.shard(net().double(), units=[], communicator=communicator)
        with pytest.raises(ValueError, match="parameter weight of embed has no values"):
            zpp.zero3.shard(net().to("meta"), units=[], communicator=communicator)
        with pytest.raises(ValueError, match="Identity has no parameters"):
            zpp.zero3.shard(nn.Identity(), units=[], communicator=communicator)

    run(1, 1, body)
