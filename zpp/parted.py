"""Several tensors in place of one, so that nobody has to copy them together first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zpp import checks


@dataclass(frozen=True)
class PartedTensor:
    """A flat tensor of `length` values of `dtype` that nobody has put together.

    parts: the values of each tensor, contiguous, stand from the index beside it on. They are in order and
    apart; what they leave out is zero.
    """

    length: int
    dtype: torch.dtype
    parts: Sequence[tuple[int, torch.Tensor]]

    def numel(self) -> int:
        return self.length

    def check(self, name: str, device: torch.device) -> None:
        """Raise ValueError or TypeError unless the parts are what they must be."""
        end = 0
        for start, part in self.parts:
            which = f"the part of {name} at {start}"
            checks.tensor(which, part, device)
            if part.dtype != self.dtype:
                raise TypeError(f"{which} is {part.dtype}, not {self.dtype}")
            if not end <= start <= start + part.numel() <= self.length:
                raise ValueError(
                    f"{which} has {part.numel()} values: they do not lie between {end}, where the part "
                    f"before ends, and {self.length}, the length of {name}"
                )
            end = start + part.numel()

    def columns(self, rows: int, first: int, last: int) -> PartedTensor:
        """The columns [first, last) of the values as a row-major table of `rows`."""
        width = self.length // rows if rows else 0
        if (first, last) == (0, width):
            return self
        cut: list[tuple[int, torch.Tensor]] = []
        for start, part in self.parts:
            flat, stop = part.view(-1), start + part.numel()
            for row in range(start // width, -(-stop // width)):
                a, b = max(start, row * width + first), min(stop, row * width + last)
                if a < b:
                    cut.append((row * (last - first) + a - row * width - first, flat[a - start : b - start]))
        return PartedTensor(rows * (last - first), self.dtype, cut)

    def as_bytes(self) -> PartedTensor:
        size = self.dtype.itemsize
        parts = [(start * size, part.view(-1).view(torch.uint8)) for start, part in self.parts]
        return PartedTensor(self.length * size, torch.uint8, parts)

    def copy_to(self, flat: torch.Tensor) -> None:
        """Put the values together in `flat`."""
        end = 0
        for start, part in self.parts:
            flat[end:start].zero_()
            end = start + part.numel()
            flat[start:end].copy_(part.view(-1))
        flat[end:].zero_()
