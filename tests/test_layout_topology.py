"""Integers only: padding, spans, two-hop order; nodes and axes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpp import layout
from zpp.topology import Axis, Topology


@given(st.integers(0, 10**12), st.integers(1, 10**9))
def test_spans_cover_once_in_order_on_block_boundaries(numel: int, span: int) -> None:
    span = max(span, numel // 1000)
    cuts = layout.spans(numel, span)
    assert cuts[0][0] == 0 and cuts[-1][1] == numel
    assert all(a[1] == b[0] for a, b in pairwise(cuts))
    assert all(start % layout.MAX_BLOCK == 0 for start, _ in cuts)
    assert all(stop - start <= max(span, layout.MAX_BLOCK) + layout.MAX_BLOCK for start, stop in cuts)


@given(st.integers(0, 10**12), st.integers(1, 16384))
def test_shards_hold_everything(numel: int, world: int) -> None:
    shard = layout.shard_numel(numel, world)
    assert shard % layout.GROUP == 0
    assert world * shard >= numel > world * (shard - layout.GROUP) or numel == shard == 0


def test_two_hop_order_of_three_nodes_of_two() -> None:
    """Ranks 0 2 4 have local_rank 0 and come first, node by node."""
    assert layout.two_hop_order(3, 2) == [0, 2, 4, 1, 3, 5]


@given(st.integers(1, 40), st.integers(1, 40))
def test_transposing_twice_is_the_identity(rows: int, columns: int) -> None:
    for i in range(rows * columns):
        assert layout.transposed(layout.transposed(i, rows, columns), columns, rows) == i


@pytest.mark.parametrize(("world", "per_node"), [(1, 1), (4, 2), (6, 2), (16, 8), (16, 1), (5, 5)])
def test_axes_partition_the_world(world: int, per_node: int) -> None:
    for rank in range(world):
        topology = Topology(rank, world, per_node)
        assert topology.node * per_node + topology.local_rank == rank
        for axis in Axis:
            groups = topology.groups(axis)
            assert sorted(rank for group in groups for rank in group) == list(range(world))
            mine = topology.group(axis)
            assert mine[topology.index(axis)] == rank and len(mine) == topology.size(axis)


def test_nodes_come_from_host_names() -> None:
    assert Topology.from_hosts(2, ["a", "a", "b", "b"]) == Topology(2, 4, 2)
    assert Topology.from_hosts(0, ["a"]) == Topology(0, 1, 1)
    with pytest.raises(ValueError, match=r"nodes hold 7 and 8 ranks: .*ranks_per_node=1"):
        Topology.from_hosts(0, ["a"] * 7 + ["b"] * 8)
    with pytest.raises(ValueError, match="not consecutive"):
        Topology.from_hosts(0, ["a", "b", "a", "b"])


def test_ragged_worlds_are_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"15 ranks do not divide into nodes of 8.*ranks_per_node=1"):
        Topology(0, 15, 8)
    with pytest.raises(ValueError, match="rank 4 is not in a world of 4"):
        Topology(4, 4, 2)
