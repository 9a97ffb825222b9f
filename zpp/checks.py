"""Preconditions of the collectives, checked before anything is sent."""

from __future__ import annotations

from typing import Protocol

import torch

from zpp.topology import Topology


class Values(Protocol):
    """What a tensor and what stands in for one have in common."""

    @property
    def dtype(self) -> torch.dtype: ...

    def numel(self) -> int: ...


def tensor(name: str, value: torch.Tensor, device: torch.device) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} is {value.layout}: only dense tensors can be sent")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, the communicator is for {device}")
    if not value.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} and strides {value.stride()} is not contiguous: "
            "call .contiguous() on it first"
        )


def multiple(long_name: str, long: Values, short_name: str, short: torch.Tensor, topology: Topology) -> None:
    """The long tensor holds one short tensor for each rank."""
    if long.numel() != topology.world_size * short.numel():
        raise ValueError(
            f"rank {topology.rank}: {long_name} has {long.numel()} values and {short_name} {short.numel()}: "
            f"{long_name} must have {topology.world_size} (ranks) * {short.numel()} = "
            f"{topology.world_size * short.numel()}"
        )


def same_dtype(a_name: str, a: torch.Tensor, b_name: str, b: Values) -> None:
    if a.dtype != b.dtype:
        raise TypeError(f"{a_name} is {a.dtype} and {b_name} is {b.dtype}: they must be of one dtype")
