"""Settings of the whole suite."""

from __future__ import annotations

import emulation
import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_rank() -> None:
    """Tests start many ranks in one process."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> emulation.Emulator:
    """Every CUDA kernel, compiled for the CPU once for all tests."""
    kernels = emulation.distinct(emulation.every_kernel())
    return emulation.build(kernels, tmp_path_factory.mktemp("emulation"), units=2)
