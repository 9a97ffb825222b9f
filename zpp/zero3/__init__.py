"""A thin ZeRO-3 layer (arXiv:1910.02054) over zpp's collectives."""

from zpp.zero3.sharded import Sharded, shard

__all__ = ["Sharded", "shard"]
