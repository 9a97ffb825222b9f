"""What the collectives must return, computed rank by rank with nothing but the NumPy reference."""

from __future__ import annotations

import numpy as np
import torch

from zpp import reference
from zpp.format import BlockFormat, ValueType

KIND = {
    torch.float32: ValueType.FLOAT32,
    torch.bfloat16: ValueType.BFLOAT16,
    torch.float16: ValueType.FLOAT16,
}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.float32:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(np.uint16)


def to_torch(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.float32:
        return torch.from_numpy(np.ascontiguousarray(array))
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(dtype)


def all_gather(shards: list[torch.Tensor], fmt: BlockFormat, dtype: torch.dtype) -> torch.Tensor:
    """Every rank's shard, encoded and decoded once."""
    fmt = fmt.resolve(KIND[dtype])
    parts = []
    for shard in shards:
        record = reference.encode(to_numpy(shard).reshape(1, -1), KIND[shard.dtype], fmt)
        parts.append(to_torch(reference.decode(record, fmt, shard.numel(), KIND[dtype])[0], dtype))
    return torch.cat(parts)


def reduce_scatter(
    fulls: list[torch.Tensor],
    ranks_per_node: int,
    formats: tuple[BlockFormat, BlockFormat],
    dtype: torch.dtype,
    factor: float,
) -> list[torch.Tensor]:
    """Each rank's part: sums inside the nodes in local rank order, then over the nodes."""
    world = len(fulls)
    kind = KIND[fulls[0].dtype]
    intra, inter = (fmt.resolve(kind) for fmt in formats)
    nodes = world // ranks_per_node
    results = []
    for owner in range(world):
        chunks = [to_numpy(full).reshape(world, -1)[owner : owner + 1] for full in fulls]
        numel = chunks[0].shape[1]
        first = intra if ranks_per_node > 1 else inter
        records = [reference.encode(chunk, kind, first) for chunk in chunks]
        last = first
        if ranks_per_node > 1 and nodes > 1:
            by_node = [np.stack(records[n * ranks_per_node :][:ranks_per_node]) for n in range(nodes)]
            records = [reference.decode_reduce_encode(r, intra, inter, numel) for r in by_node]
            last = inter
        out = reference.decode_reduce(np.stack(records), last, numel, KIND[dtype], factor=factor)
        results.append(to_torch(out[0], dtype))
    return results


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, for comparisons that tell NaNs and signed zeros apart."""
    return tensor.flatten().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
