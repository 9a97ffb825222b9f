"""Pure integer arithmetic: padding, shard offsets, pipeline spans and the two-hop order.

Nothing here knows of tensors, devices or processes.
"""

from __future__ import annotations

RECORD_ALIGNMENT = 16
"""Bytes. Records, and the scales inside them, start on this boundary so that 16-byte loads are legal."""

GROUP = 32
"""Values. Payloads are padded to whole groups: the unit of rotation and of the packed 4-bit layout."""

MAX_BLOCK = 4096
"""Values. Pipeline spans are cut at multiples of it, so that cutting never changes a block."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    return ceil_div(a, multiple) * multiple


def shard_numel(numel: int, world_size: int, multiple: int = GROUP) -> int:
    """Values in each rank's shard when `numel` values are dealt to `world_size` ranks, tail padded."""
    return round_up(ceil_div(numel, world_size), multiple)


def spans(numel: int, span: int) -> list[tuple[int, int]]:
    """Cut [0, numel) into spans of at most about `span` values, each starting on a block boundary.

    The spans are of nearly equal length, so that no short straggler ends the pipeline. An empty
    range gives one empty span: every collective then has at least one message per hop.
    """
    if numel == 0:
        return [(0, 0)]
    count = ceil_div(numel, max(span, MAX_BLOCK))
    step = round_up(ceil_div(numel, count), MAX_BLOCK)
    return [(start, min(start + step, numel)) for start in range(0, numel, step)]


def transposed(index: int, rows: int, columns: int) -> int:
    """Where item `index` of a row-major (rows, columns) table stands in its transpose."""
    return (index % columns) * rows + index // columns


def two_hop_order(nodes: int, ranks_per_node: int) -> list[int]:
    """Source chunk at each record position for the hop inside the node: all nodes of one peer together.

    Chunk ``node * ranks_per_node + local_rank`` of a full tensor belongs to that rank. Sending to local
    peers first needs the order [local_rank][node], the transpose of the rank order [node][local_rank].
    """
    order = [0] * (nodes * ranks_per_node)
    for chunk in range(nodes * ranks_per_node):
        order[transposed(chunk, nodes, ranks_per_node)] = chunk
    return order
