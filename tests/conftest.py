"""Settings of the whole suite."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_rank() -> None:
    """Tests start many ranks in one process."""
    torch.set_num_threads(1)
