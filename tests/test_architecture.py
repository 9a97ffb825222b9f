"""Imports go one way: every module has a layer, and imports only from the layers below its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("zpp", "collectives_bench")

LAYERS = (
    # What everything may use.
    ("zpp.errors", "zpp.version"),
    ("zpp.layout", "zpp.topology", "zpp.agreement", "zpp.pipeline", "zpp.streams"),
    ("zpp.pipeline.streams", "zpp.pipeline.threads"),
    ("zpp.format", "zpp.checks", "zpp.stats", "zpp.workspace"),
    ("zpp.parted", "zpp.reference"),
    # Kernels and transports, which know nothing of one another.
    ("zpp.kernels.launch", "zpp.kernels.operands", "zpp.kernels.source", "zpp.transport"),
    ("zpp.kernels.nvrtc", "zpp.transport.node_memory", "zpp.transport.torch_groups"),
    ("zpp.kernels.cuda", "zpp.kernels.host", "zpp.kernels.numpy_backend"),
    ("zpp.transport.inprocess", "zpp.transport.torch_device", "zpp.transport.torch_dist"),
    ("zpp.kernels",),
    ("zpp.kernels.exact", "zpp.operators"),
    # The collectives.
    ("zpp.crossing", "zpp.secondary", "zpp.work"),
    ("zpp.engine",),
    ("zpp.all_gather", "zpp.reduce_scatter"),
    ("zpp.all_reduce",),
    ("zpp.communicator",),
    # What is built on the collectives.
    ("zpp.zero3.heap", "zpp.zero3.unit"),
    ("zpp.zero3.gradients", "zpp.zero3.grouping"),
    ("zpp.zero3.sharded",),
    ("zpp.zero3",),
    ("zpp",),
    # The benchmarks.
    ("collectives_bench",),
    (
        "collectives_bench.case",
        "collectives_bench.clock",
        "collectives_bench.linux",
        "collectives_bench.options",
        "collectives_bench.text",
    ),
    ("collectives_bench.kernels", "collectives_bench.model", "collectives_bench.network"),
    ("collectives_bench.launch", "collectives_bench.report", "collectives_bench.switch"),
    ("collectives_bench.systems",),
    ("collectives_bench.train", "collectives_bench.training"),
    ("collectives_bench.__main__", "collectives_bench.worker"),
)
LAYER = {module: i for i, row in enumerate(LAYERS) for module in row}

ONLY_IN = {"cupy": "zpp.kernels.cuda", "mpi4py": "zpp.transport.mpi"}
"""Optional dependencies, each behind the one module that may import it."""

COLLECTIVES = LAYER["zpp.work"]
"""From this layer up, and in the transports over it, modules may speak to torch.distributed."""

MOST_LINES = 350

Sources = Mapping[str, str]


def sources() -> dict[str, str]:
    """The text of every module, by its dotted name."""
    found = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imported(module: str, text: str, modules: Sources) -> Iterator[str]:
    """The modules that `module` imports, wherever in it; `torch.distributed` also where it is only used."""
    is_package = any(other.startswith(f"{module}.") for other in modules)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield name if name in modules or name == "torch.distributed" else source
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def complaint(module: str, target: str) -> str | None:
    """Why `module` may not import `target`; None if it may."""
    for package, home in ONLY_IN.items():
        if within(target, package) and module != home:
            return f"only {home} imports {package}"
    if within(target, "torch.distributed"):
        allowed = module.startswith("zpp.transport.torch_") or LAYER[module] >= COLLECTIVES
        return None if allowed else "it stands below the transports over it"
    if not any(within(target, package) for package in PACKAGES):
        return None
    sides = ("zpp.kernels", "zpp.transport")
    if {side for side in sides for name in (module, target) if within(name, side)} == set(sides):
        return "kernels and transports do not know one another"
    if LAYER.get(target, -1) >= LAYER[module]:
        return "it is not in a lower layer"
    return None


def wrong_imports(modules: Sources) -> list[str]:
    """Every import that goes the wrong way, and every module without a layer, in words."""
    found = [f"{module} has no layer" for module in modules if module not in LAYER]
    for module, text in modules.items():
        for target in imported(module, text, modules) if module in LAYER else ():
            if reason := complaint(module, target):
                found.append(f"{module} imports {target}: {reason}")
    return found


def test_imports_go_one_way() -> None:
    assert wrong_imports(sources()) == []


def test_the_table_holds_no_module_twice_or_too_many() -> None:
    listed = [module for row in LAYERS for module in row]
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) <= set(sources())


@pytest.mark.parametrize(
    ("module", "line", "expected"),
    [
        ("zpp.layout", "import zpp.format", "not in a lower layer"),
        ("zpp.layout", "from zpp.format import BlockFormat", "not in a lower layer"),
        ("zpp.layout", "def f():\n    from zpp import engine", "zpp.engine: it is not in a lower layer"),
        ("zpp.layout", "from . import engine", "zpp.engine: it is not in a lower layer"),
        ("zpp.zero3.unit", "from .sharded import Sharded", "zpp.zero3.sharded: it is not in a lower layer"),
        ("zpp.zero3", "from ..communicator import Communicator", None),
        ("zpp.zero3", "from .. import zero3", "not in a lower layer"),
        ("zpp.all_gather", "import zpp.reduce_scatter", "not in a lower layer"),
        ("zpp.engine", "import zpp", "not in a lower layer"),
        ("zpp.engine", "import collectives_bench.case", "not in a lower layer"),
        ("zpp.kernels.host", "import zpp.transport", "do not know one another"),
        ("zpp.kernels.exact", "from zpp.transport.inprocess import run", "do not know one another"),
        ("zpp.transport.torch_dist", "from zpp.kernels import operands", "do not know one another"),
        ("zpp.engine", "import cupy", "only zpp.kernels.cuda imports cupy"),
        ("collectives_bench.kernels", "import cupy.cuda", "only zpp.kernels.cuda imports cupy"),
        ("zpp.communicator", "from mpi4py import MPI", "only zpp.transport.mpi imports mpi4py"),
        ("zpp.pipeline.threads", "import torch.distributed as dist", "it stands below"),
        ("zpp.kernels.host", "from torch import distributed", "it stands below"),
        ("zpp.checks", "def f(group: torch.distributed.ProcessGroup): ...", "it stands below"),
        ("zpp.new", "", "zpp.new has no layer"),
    ],
)
def test_a_planted_import_is_found(module: str, line: str, expected: str | None) -> None:
    modules = sources()
    modules[module] = modules.get(module, "") + f"\n{line}\n"
    found = wrong_imports(modules)
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]


def test_files_stay_short_enough_to_read() -> None:
    kinds = {".py", ".cpp", ".h", ".cu", ".cuh"}
    files = [path for folder in (*PACKAGES, "cuda") for path in (ROOT / folder).rglob("*")]
    lines = {path: path.read_text().count("\n") for path in files if path.suffix in kinds}
    assert len(lines) > len(LAYER)
    assert not {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > MOST_LINES}
