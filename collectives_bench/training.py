"""The training loop of one rank, and its clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

from collectives_bench import linux, text
from collectives_bench.case import Case, Place, RankResult
from collectives_bench.model import GPT, VOCABULARY
from collectives_bench.systems import SYSTEMS, Context, SentBytes

TIMEOUT = timedelta(seconds=120)
RISE = 20
"""Steps over which the learning rate rises. Without it, one unlucky batch throws a run off for a while, by
whichever system it is trained, and losses could not be compared."""


def join(case: Case, place: Place) -> None:
    """Make the default process group: gloo over the node's interface, rendezvous at rank 0."""
    torch.set_num_threads(1)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.host,
        place.port,
        case.world,
        is_master=place.rank == 0,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=place.listen_fd,
    )
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=case.world, timeout=TIMEOUT)


class _Meter:
    """Adds up what this rank's node sends to other nodes during its turns."""

    def __init__(self, counter: SentBytes | None) -> None:
        self._counter = counter
        self.sent: int | None = None if counter is None else 0

    def start(self) -> None:
        self._before = _read_between_steps(self._counter)

    def stop(self) -> None:
        now = _read_between_steps(self._counter)
        if self.sent is not None and now is not None and self._before is not None:
            self.sent += now - self._before


def train(
    case: Case, place: Place, progress: Callable[[int], None], pause: Callable[[int], None]
) -> RankResult:
    """Train on this rank. `progress` is told of finished steps, `pause` of finished turns, off the clock."""
    torch.manual_seed(case.seed)  # the same weights on every rank
    model = GPT(case.shape)
    params = sum(parameter.numel() for parameter in model.parameters())
    sent = SYSTEMS[case.system].apply(model, Context(case.ranks_per_node))
    meter = _Meter(_counter(case, place, sent))
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, betas=(0.9, 0.95), fused=True)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / RISE, total_iters=RISE)
    data = text.load(case.text)

    step_ms: list[float] = []
    losses: list[float] = []
    for step in range(case.warmup + case.steps):
        inputs, targets = text.batch(
            data,
            seed=case.seed,
            step=step,
            rank=place.rank,
            batch_size=case.batch,
            context=case.shape.context,
        )
        turn, place_in_turn = divmod(step - case.warmup, case.turn)
        if turn >= 0 and place_in_turn == 0:
            if turn > 0:
                meter.stop()
                pause(turn)
            meter.start()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        logits = model(inputs)
        loss = F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.view(-1))
        torch.autograd.backward(loss)
        optimizer.step()
        elapsed = time.perf_counter() - start
        if step >= case.warmup:
            step_ms.append(elapsed * 1e3)
        losses.append(loss.item())
        rise.step()
        progress(step + 1)
    meter.stop()
    return RankResult(step_ms, losses, meter.sent, params, linux.peak_rss_bytes(), torch.__version__)


def _counter(case: Case, place: Place, sent: SentBytes | None) -> SentBytes | None:
    """Bytes sent to other nodes: the node's own interface where it has one, else what the system counted."""
    if place.namespace is None:
        return sent
    if place.rank % case.ranks_per_node != 0:
        return lambda: 0  # the interface is the whole node's: its first rank reports for all
    return lambda: linux.transmitted_bytes(place.interface)


def _read_between_steps(counter: SentBytes | None) -> int | None:
    """Read while no rank is inside a step; the second barrier keeps the others from running ahead."""
    dist.barrier()
    value = None if counter is None else counter()
    dist.barrier()
    return value
