"""Which ranks share a node, and the three axes along which they talk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Axis(Enum):
    INTRA = "intra"
    """The ranks of one node."""
    INTER = "inter"
    """The ranks with the same local_rank on all nodes."""
    WORLD = "world"


@dataclass(frozen=True)
class Topology:
    """`world_size` ranks on nodes of `ranks_per_node` consecutive ranks each, seen from `rank`."""

    rank: int
    world_size: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size} ranks")
        if self.ranks_per_node < 1 or self.world_size % self.ranks_per_node:
            raise ValueError(
                f"{self.world_size} ranks do not divide into nodes of {self.ranks_per_node}: start the same "
                "number of ranks on every node, or pass ranks_per_node=1, which sends every rank's part in "
                "one hop"
            )

    @classmethod
    def from_hosts(cls, rank: int, hosts: Sequence[str]) -> Topology:
        """The topology of ranks of which rank i runs on ``hosts[i]``.

        Raises ValueError where nodes hold unequal numbers of ranks, or ranks that are not consecutive.
        """
        names = list(dict.fromkeys(hosts))
        sizes = [list(hosts).count(name) for name in names]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"nodes hold {' and '.join(map(str, sizes))} ranks: start the same number on every node, or "
                "pass ranks_per_node=1, which sends every rank's part in one hop"
            )
        if list(hosts) != [name for name in names for _ in range(sizes[0])]:
            raise ValueError(
                f"the ranks of a node are not consecutive (rank order of hosts: {', '.join(hosts)}): "
                "start the ranks node by node, or pass ranks_per_node=1"
            )
        return cls(rank, len(hosts), sizes[0])

    @cached_property
    def nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @cached_property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @cached_property
    def local_rank(self) -> int:
        return self.rank % self.ranks_per_node

    def size(self, axis: Axis) -> int:
        if axis is Axis.WORLD:
            return self.world_size
        return self.ranks_per_node if axis is Axis.INTRA else self.nodes

    def index(self, axis: Axis) -> int:
        """This rank's place on the axis."""
        if axis is Axis.WORLD:
            return self.rank
        return self.local_rank if axis is Axis.INTRA else self.node

    def groups(self, axis: Axis) -> list[list[int]]:
        """All groups of ranks along the axis: the same list on every rank, to make subgroups from."""
        if axis is Axis.WORLD:
            return [list(range(self.world_size))]
        if axis is Axis.INTRA:
            starts = range(0, self.world_size, self.ranks_per_node)
            return [list(range(start, start + self.ranks_per_node)) for start in starts]
        return [list(range(i, self.world_size, self.ranks_per_node)) for i in range(self.ranks_per_node)]

    def group(self, axis: Axis) -> list[int]:
        """The ranks of this rank's own group along the axis."""
        return next(ranks for ranks in self.groups(axis) if self.rank in ranks)
