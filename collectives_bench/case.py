"""What one measurement is, where one of its ranks runs, and what that rank reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the byte-level GPT."""

    context: int
    layers: int
    width: int
    heads: int


@dataclass(frozen=True)
class Case:
    """One system, trained for `warmup + steps` steps; `batch` sequences per rank and step.

    After every `turn` timed steps but the last ones it pauses, and other systems have their turn.
    """

    system: str
    nodes: int
    ranks_per_node: int
    steps: int
    warmup: int
    batch: int
    shape: ModelShape
    text: str | None
    seed: int
    lr: float
    turn: int

    @property
    def turns(self) -> int:
        """How often it has its turn; the first one begins with the warm-up."""
        return -(-self.steps // self.turn)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Place:
    """Where one rank runs: its process, its network and the files it inherited.

    `namespace` is a process whose network namespace to join, or None for the caller's own network.
    Rank 0 serves the rendezvous, on `listen_fd` where that is given. A byte from `turn_fd` begins a turn.
    """

    rank: int
    parent: int
    namespace: int | None
    interface: str
    host: str
    port: int
    listen_fd: int | None
    report_fd: int
    turn_fd: int


@dataclass(frozen=True)
class RankResult:
    """What one rank measured; times in ms and bytes over the timed steps, losses of every step.

    `cross_node_bytes` is the rank's share of what its node sent to other nodes, None when unknown.
    """

    step_ms: list[float]
    losses: list[float]
    cross_node_bytes: int | None
    params: int
    peak_rss_bytes: int
    torch: str
