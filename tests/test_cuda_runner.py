"""How kernels are compiled, kept and started: with a stand-in for CuPy, and with CuPy's NVRTC."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zpp.errors import UnavailableError
from zpp.format import BlockFormat, Code, ValueType
from zpp.kernels import for_device, launch
from zpp.kernels.cuda import CudaKernels, CupyRunner, shared_runner
from zpp.kernels.nvrtc import architecture, compiled, completed

INT8, INT4 = BlockFormat(Code.INT8, block=512), BlockFormat(Code.INT4, block=128, rotate=True)
MADE = launch.decode(4096, INT8, 3, 5000, 1, launch.Rows(8192, 5000), ValueType.BFLOAT16)
OTHER = launch.decode(4096, INT4, 3, 5000, 1, launch.Rows(8192, 5000), ValueType.BFLOAT16)

CUBIN = b"\x7fELF".ljust(64, b"\0")


class FakeCupy(SimpleNamespace):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.launched: list[tuple[int, int, str, Any]] = []
        self._here = threading.local()
        self.cuda = SimpleNamespace(nvrtc=self._nvrtc(), Device=self._device)
        self.cuda.Stream = SimpleNamespace(from_external=self._stream)

    def _nvrtc(self) -> SimpleNamespace:
        def create(text: str, name: str, headers: tuple[()], includes: tuple[()]) -> list[Any]:
            return [text, name]

        def compile_program(program: list[Any], options: tuple[str, ...]) -> None:
            self.compiled.append((program[1], options))
            program.append(options)
            if "broken" in program[0]:
                raise RuntimeError("NVRTC_ERROR_COMPILATION")

        return SimpleNamespace(
            getVersion=lambda: (13, 0),
            getSupportedArchs=lambda: (75, 80, 90),
            createProgram=create,
            compileProgram=compile_program,
            getCUBIN=lambda program: CUBIN,
            getPTX=lambda program: b"ptx",
            getProgramLog=lambda program: "line 1: error",
            destroyProgram=lambda program: None,
            NVRTCError=RuntimeError,
        )

    @contextmanager
    def _device(self, index: int) -> Iterator[None]:
        self._here.device = index
        yield

    @contextmanager
    def _stream(self, stream: Any) -> Iterator[None]:
        version, self._here.stream = stream.__cuda_stream__()
        assert version == 0
        yield

    def RawModule(self, *, path: str) -> SimpleNamespace:  # noqa: N802 - CuPy's name
        data, loaded_on = Path(path).read_bytes(), self._here.device

        def function(name: str) -> Any:
            def start(grid: tuple[int], block: tuple[int], arguments: tuple[Any]) -> None:
                assert self._here.device == loaded_on
                assert arguments[0].size == 1
                started = grid, block, arguments[0].tobytes(), data
                self.launched.append((self._here.device, self._here.stream, name, started))

            return start

        return SimpleNamespace(get_function=function)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    made = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda i: SimpleNamespace(cuda_stream=100 + i))
    return made


def test_a_kernel_goes_to_the_current_stream_of_its_device(cupy: FakeCupy, tmp_path: Path) -> None:
    run = CupyRunner(tmp_path)
    run(MADE, torch.device("cuda", 1))
    run(MADE, torch.device("cuda"))
    started = (6,), (launch.THREADS,), bytes(MADE.arguments), CUBIN
    assert cupy.launched == [(1, 101, "zpp_decode", started), (0, 100, "zpp_decode", started)]
    assert len(bytes(MADE.arguments)) == ctypes.sizeof(launch.DecodeRows)


def test_kernels_are_compiled_once_and_kept_in_files(cupy: FakeCupy, tmp_path: Path) -> None:
    for _ in range(2):
        run = CupyRunner(tmp_path / "new")
        for made in (MADE, OTHER, MADE):
            run(made, torch.device("cuda", 0))
    assert [name for name, _ in cupy.compiled] == ["decode.cu", "decode.cu"]
    options = cupy.compiled[0][1]
    assert {"--gpu-architecture=sm_90", "--fmad=false", "--ftz=false", "-DZPP_CODE=4"} <= set(options)
    assert len(list((tmp_path / "new").glob("zpp_decode-*.cubin"))) == 2
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_threads_wait_for_the_one_that_compiles(cupy: FakeCupy, tmp_path: Path) -> None:
    run = CupyRunner(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: run(MADE, torch.device("cuda", i % 2)), range(32)))
    assert len(cupy.compiled) == 1
    assert sorted({(device, stream) for device, stream, *_ in cupy.launched}) == [(0, 100), (1, 101)]
    assert len(cupy.launched) == 32


def test_a_device_that_nvrtc_does_not_know_gets_what_its_driver_translates() -> None:
    assert architecture(90, (75, 80, 90)) == "--gpu-architecture=sm_90"
    assert architecture(103, (75, 80, 90)) == "--gpu-architecture=compute_90"
    with pytest.raises(UnavailableError, match="no code for compute capability 7.5"):
        architecture(75, (80, 90))


def test_what_is_missing_is_named(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(UnavailableError, match="cuda:0 has compute capability 7.0: .* 7.5 or later"):
        for_device(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    def no_library() -> None:
        raise RuntimeError("libnvrtc.so.13")

    shared_runner.cache_clear()
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", no_library)
    with pytest.raises(UnavailableError, match="need NVRTC: install nvidia-cuda-nvrtc"):
        for_device(device)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnavailableError, match="need CuPy: install zpp with the extra cuda12 or cuda13"):
        for_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="torch finds no CUDA device"):
        for_device(device)
    with pytest.raises(UnavailableError, match="no kernels for meta"):
        for_device(torch.device("meta"))


def test_a_source_that_does_not_compile_says_why(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("zpp.kernels.source.text", lambda name: "broken")
    with pytest.raises(UnavailableError, match="decode.cu does not compile:\nline 1: error"):
        CupyRunner(tmp_path)(MADE, torch.device("cuda", 0))
    assert not list(tmp_path.iterdir())


def test_the_communicator_gets_cuda_kernels(cupy: FakeCupy) -> None:
    shared_runner.cache_clear()
    kernels = for_device(torch.device("cuda", 0))
    assert isinstance(kernels, CudaKernels)
    assert shared_runner() is shared_runner()
    shared_runner.cache_clear()


def test_cupys_own_nvrtc_compiles_the_kernels(tmp_path: Path) -> None:
    nvrtc = pytest.importorskip("cupy", reason="CuPy is not installed").cuda.nvrtc
    path = compiled(nvrtc, MADE.kernel, 90, tmp_path)
    made = path.read_bytes()
    assert made.startswith(b"\x7fELF")
    assert b"zpp_decode" in made
    assert made == completed(made) == completed(made[:-1]), "the file ends where its headers say"
    newer = compiled(nvrtc, MADE.kernel, 999, tmp_path)
    assert b".entry zpp_decode" in newer.read_bytes()
