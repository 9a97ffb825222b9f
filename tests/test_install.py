"""The package as others get it: what is shipped, what an import does, what happens without a compiler."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import zpp

ROOT = Path(__file__).parent.parent
MADE = ("__pycache__", "*.so", "*.egg-info", "build", "dist", ".*")
"""What a checkout holds beside its sources."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with nothing built."""
    copy = tmp_path_factory.mktemp("checkout") / "zpp"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*MADE))
    return copy


def _python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_installed_version_is_that_of_the_code() -> None:
    try:
        installed = importlib.metadata.version("zpp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("zpp is imported from a checkout that is not installed")
    assert installed == zpp.__version__


def test_the_source_distribution_holds_every_source(checkout: Path, tmp_path: Path) -> None:
    code = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    _python("-c", code, str(tmp_path), cwd=checkout)
    with tarfile.open(tmp_path / f"zpp-{zpp.__version__}.tar.gz") as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
        member = archive.extractfile(f"zpp-{zpp.__version__}/PKG-INFO")
        assert member is not None
        metadata = member.read().decode().splitlines()
    kinds = {".py", ".cpp", ".h", ".cu", ".cuh", ".typed"}
    sources = {
        str(path.relative_to(ROOT))
        for folder in ("zpp", "collectives_bench", "cuda")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in kinds
    }
    assert {"zpp/kernels/host_kernels.cpp", "zpp/kernels/host.h", "cuda/numerics.cuh"} <= sources
    assert not sources - held
    assert {"LICENSE", "setup.cfg", "setup.py", "pyproject.toml"} <= held
    assert not [name for name in held if name.endswith(".so")]
    assert f"Version: {zpp.__version__}" in metadata


def test_a_wheel_brings_the_cuda_sources_and_a_checkout_has_them(checkout: Path, tmp_path: Path) -> None:
    code = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    built = shutil.copytree(checkout, tmp_path / "built")
    _python("-c", code, str(tmp_path), cwd=built, CXX="/nonexistent/c++")
    (wheel,) = tmp_path.glob("zpp-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    look = """
from zpp.kernels import source
assert '#include "' not in source.text("encode.cu")
print(source.folder())
"""
    for place, folder in ((tmp_path / "installed", "zpp/cuda"), (checkout, "cuda")):
        done = _python("-c", look, cwd=tmp_path, PYTHONPATH=str(place))
        assert Path(done.stdout.strip()) == place / folder
        names = {path.name for path in (ROOT / "cuda").iterdir()}
        assert {path.name for path in (place / folder).iterdir()} == names


def test_without_a_compiler_the_build_succeeds_and_says_what_is_missing(
    checkout: Path, tmp_path: Path
) -> None:
    stale = tmp_path / "zpp" / "kernels" / "_host.so"
    stale.parent.mkdir(parents=True)
    stale.touch()
    command = [
        "setup.py",
        "build_ext",
        "--build-lib",
        str(tmp_path),
        "--build-temp",
        str(tmp_path / "objects"),
    ]
    done = _python(*command, cwd=checkout, CXX="/nonexistent/c++")
    assert "NumPy reference" in done.stderr
    assert "/nonexistent/c++ cannot be run" in done.stderr
    assert not stale.exists(), "a library of other sources must not be taken for this one"


def test_importing_zpp_touches_no_gpu_no_mpi_and_no_process_group(tmp_path: Path) -> None:
    # Empty stand-ins, so that an import is seen where the real ones are not installed.
    for name in ("cupy", "mpi4py"):
        (tmp_path / f"{name}.py").touch()
    code = """
import json, sys, threading
import zpp
import torch
optional = [name for name in ("cupy", "mpi4py") if name in sys.modules]
print(json.dumps([optional, torch.cuda.is_initialized(), torch.distributed.is_initialized(),
                  threading.active_count()]))
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = _python("-c", code, cwd=tmp_path, PYTHONPATH=path)
    assert json.loads(done.stdout) == [[], False, False, 1]


def test_without_the_library_zpp_warns_once_and_the_reference_does_the_work(
    checkout: Path, tmp_path: Path
) -> None:
    code = """
import torch, zpp
from zpp.transport.inprocess import run
shards = [torch.arange(rank, 254 + rank).float() - 127 for rank in (0, 1)]
def body(transport):
    output = torch.empty(2 * 254)
    communicator = zpp.Communicator(transport=transport)
    communicator.all_gather(output, shards[transport.topology.rank])
    communicator.close()
    return output
for _ in range(2):
    for output in run(2, 1, body):
        assert torch.equal(output, torch.cat(shards)), output
print(zpp.__file__)
"""
    done = _python("-c", code, cwd=tmp_path, PYTHONPATH=str(checkout))
    assert Path(done.stdout.strip()).is_relative_to(checkout)
    assert done.stderr.count("RuntimeWarning: zpp was installed without") == 1
