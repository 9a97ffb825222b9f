"""Training text as bytes, and the batch each rank takes from it at each step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor


def load(path: str | None) -> npt.NDArray[np.uint8]:
    """The bytes of the file at `path`, or the Python language reference that comes with every Python."""
    if path is not None:
        return np.frombuffer(Path(path).read_bytes(), dtype=np.uint8)
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), dtype=np.uint8)


def batch(
    data: npt.NDArray[np.uint8], *, seed: int, step: int, rank: int, batch_size: int, context: int
) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets, int64 (batch_size, context): a function of its arguments alone.

    So every system sees the same data, and the ranks of one step different parts of it.
    """
    import torch  # here, since the command line reads the text too and has no other use for torch

    starts = np.random.default_rng([seed, step, rank]).integers(len(data) - context, size=batch_size)
    windows = np.stack([data[start : start + context + 1] for start in starts]).astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
