"""Ships the CUDA sources and builds the CPU kernels.

Those are one shared library of the same C++ compiled for several instruction sets.

The library is loaded through ctypes (zpp/kernels/host.py): it needs no Python headers, and its name holds no
Python version. A build that fails leaves zpp installable: the NumPy reference then does the work.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

KERNELS = Path("zpp", "kernels")
INCLUDES = ["-Icuda", f"-I{KERNELS}"]
# The compiler may not contract, reassociate or assume: every instruction set must give the reference's bits.
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    "-Wno-psabi",  # vectors are passed between inlined functions only, never across the interface
]
BASELINE: dict[str, list[str]] = {"baseline": []}
X86_64 = {
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"],
}
HINTS = ["-mprefer-vector-width=512"]
"""Flags that change speed only, left out where the compiler does not know them."""

WARNING = """
zpp: the CPU kernels were not built, the slow NumPy reference will be used instead.
zpp: {reason}
zpp: install a C++17 compiler (or name one in CXX) and install zpp again.
"""


class BuildFailed(Exception):  # noqa: N818 - ends here, in a warning
    """Why there is no library."""


def run(command: Sequence[str]) -> str:
    """What the command prints; raises BuildFailed with what it complains about."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise BuildFailed(f"`{shlex.join(command)}` failed:\n{done.stderr}")
    return done.stdout


def find_compiler() -> list[str]:
    """CXX if it is set (it may hold flags), else the first usual name on the path."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildFailed("no C++ compiler was found")


def accepts(compiler: Sequence[str], flag: str) -> bool:
    try:
        run([*compiler, flag, "-x", "c++", "-fsyntax-only", os.devnull])
    except BuildFailed:
        return False
    return True


def compile_commands(compiler: list[str], folder: Path) -> dict[Path, list[str]]:
    """The objects of the library and the command that makes each."""
    # The compiler's target, not this machine: the two differ when cross-compiling, and on 32-bit systems.
    sets = BASELINE | (X86_64 if run([*compiler, "-dumpmachine"]).startswith("x86_64") else {})
    unknown = {hint for hint in HINTS if not accepts(compiler, hint)}
    common = [*compiler, *FLAGS, *INCLUDES, "-c"]
    commands = {folder / "host.o": [*common, str(KERNELS / "host.cpp")]}
    for name, flags in sets.items():
        wanted = [flag for flag in flags if flag not in unknown]
        source = str(KERNELS / "host_kernels.cpp")
        commands[folder / f"host_kernels_{name}.o"] = [*common, *wanted, f"-DZPP_ISA={name}", source]
    return {target: [*command, "-o", str(target)] for target, command in commands.items()}


def build(target: Path, folder: Path) -> None:
    """Compile into `folder` and link `target`; raises BuildFailed."""
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    commands = compile_commands(compiler, folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands.values()))
    linked = folder / target.name
    run([*compiler, "-shared", "-pthread", *map(str, commands), "-o", str(linked)])
    replace(linked, target)


def replace(source: Path, target: Path) -> None:
    """Copy `source` over `target` in one step: a process that has the old library mapped keeps it whole."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        temporary = Path(file.name)
    try:
        shutil.copyfile(source, temporary)
        shutil.copymode(source, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink()
        raise


class BuildHostKernels(build_ext):  # type: ignore[misc]
    """setuptools' command, with its two steps replaced: compile, and for an editable install copy."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.build_lib, self.get_ext_filename(ext.name))
        try:
            build(target, Path(self.build_temp, "host_kernels"))
        except BuildFailed as error:
            print(WARNING.format(reason=error), file=sys.stderr)
            target.unlink(missing_ok=True)  # a library of older sources is worse than none

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            name = self.get_ext_filename(ext.name)
            built, beside_sources = Path(self.build_lib, name), Path(name)
            if built.exists():
                replace(built, beside_sources)
            else:
                beside_sources.unlink(missing_ok=True)


class BuildPython(build_py):  # type: ignore[misc]
    """setuptools' command, and the CUDA sources: zpp/kernels/source.py looks for them in the package first.

    An editable install finds them in the checkout.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "zpp", "cuda")
            target.mkdir(parents=True, exist_ok=True)
            for path in sorted(Path("cuda").glob("*.cu*")):
                shutil.copyfile(path, target / path.name)


setup(
    ext_modules=[
        Extension(
            "zpp.kernels._host",
            sources=[str(KERNELS / "host.cpp"), str(KERNELS / "host_kernels.cpp")],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildHostKernels, "build_py": BuildPython},
)
