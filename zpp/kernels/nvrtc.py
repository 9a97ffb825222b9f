"""From a kernel of cuda/ to a file that a device can load. `nvrtc` is CuPy's module of that name."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zpp.errors import UnavailableError
from zpp.kernels import source
from zpp.kernels.launch import Kernel

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true")
"""Results must be the reference's bits: nothing is contracted, flushed to zero or approximated."""


def compiled(nvrtc: Any, kernel: Kernel, capability: int, folder: Path) -> Path:
    """The file in `folder` that holds `kernel` for devices of that capability; made if it is not there."""
    text = source.text(kernel.source)
    options = (architecture(capability, nvrtc.getSupportedArchs()), *OPTIONS, *macros(kernel))
    key = "\0".join([text, *options, str(nvrtc.getVersion())])
    path = folder / f"{kernel.name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    if not path.exists():
        _write(path, _compile(nvrtc, text, kernel.source, options))
    return path


def architecture(capability: int, supported: Sequence[int]) -> str:
    """NVRTC's option: the device's own code, or what the driver of a device unknown to NVRTC translates.

    capability: the compute capability times ten.
    """
    if capability in supported:
        return f"--gpu-architecture=sm_{capability}"
    older = [arch for arch in supported if arch < capability]
    if not older:
        raise UnavailableError(
            f"NVRTC makes no code for compute capability {capability / 10}: install an older one"
        )
    return f"--gpu-architecture=compute_{max(older)}"


def macros(kernel: Kernel) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in kernel.macros)


def _compile(nvrtc: Any, text: str, name: str, options: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(text, name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        own = any("=sm_" in option for option in options)
        made: bytes = completed(nvrtc.getCUBIN(program)) if own else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise UnavailableError(f"{name} does not compile:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    return made


def completed(elf: bytes) -> bytes:
    """The whole of an ELF file from what CuPy gives: it takes the last byte for the zero that ends a text.

    That byte is the highest one of an alignment, and zero too; a driver that reads a file misses it.
    """
    programs, sections = struct.unpack_from("<QQ", elf, 32)
    program_nbytes, program_count, section_nbytes, section_count = struct.unpack_from("<4H", elf, 54)
    end = max(programs + program_nbytes * program_count, sections + section_nbytes * section_count)
    return elf.ljust(end, b"\0")


def _write(path: Path, data: bytes) -> None:
    """In one step, so that another process finds all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)
