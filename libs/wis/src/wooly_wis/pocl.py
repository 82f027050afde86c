"""What a compiler and an executor must see alike in PoCL, the OpenCL of CPUs: its devices, and the CPU that it builds code for.

PoCL asks its LLVM for the name of the CPU. An LLVM that is older than the CPU answers `generic`, which clang does not take for an
x86-64 CPU, so PoCL builds no kernel at all. No setting of PoCL gives it another name. `cpu_of` writes one into PoCL's description
of the device, where clang, the name of a binary's device and the code generator read it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import re
import struct
from collections.abc import Sequence
from pathlib import Path

#: PoCL's devices that code for a CPU is compiled for: the calling thread, and all cores.
POCL_UNITS = ("basic", "pthread")

#: How to get PoCL here, for messages. No package of pip's contains it for other processors.
HOW_TO_GET = (
    "pip install 'pyopencl[pocl]'"
    if platform.machine() in ("x86_64", "AMD64")
    else "pip install pyopencl, and PoCL from the system's packages (Debian, Ubuntu: apt-get install pocl-opencl-icd)"
)

#: LLVM's name of a CPU that it does not know.
_UNKNOWN = b"generic"
#: Names of x86-64 CPUs, best first, and what a CPU must have to run their code. Each is at most as long as `_UNKNOWN`.
_NAMES: tuple[tuple[bytes, frozenset[str]], ...] = (
    (b"znver3", frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm", "sse4a"])),
    (b"haswell", frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"])),
    (b"x86-64", frozenset()),
)
#: Instructions by which PoCL chooses its library of functions, as Linux names them.
_LIBRARIES = ("avx512f", "avx2", "fma4", "f16c", "avx", "sse4_1", "ssse3")
#: PoCL's description of a device names the target before the CPU.
_TRIPLE = re.compile(rb"x86_64-[\w-]+\0")
#: Bytes of PoCL's description of a device that contain both.
_DESCRIPTION = 2048


def prepare(cache: Path | None) -> None:
    """Set what PoCL and pyopencl read when they start. Call it before the first use of OpenCL in this process.

    Args:
        cache: folder in which PoCL keeps its files; None: PoCL's own folder.
    """
    os.environ["POCL_DEVICES"] = " ".join(POCL_UNITS)
    if cache is not None:
        os.environ["POCL_CACHE_DIR"] = str(cache)
    # pyopencl would keep a database in the user's cache folder, which a service may lack; making anew what is in it is faster.
    os.environ["PYOPENCL_NO_CACHE"] = "1"


def pocl_target(cores: int, platform: str, devices: Sequence[str], cpu: str) -> str:
    """Name of a CPU as a target of PoCL. Another CPU or another version of PoCL has another name, because its code differs.

    Args:
        cores: number of cores that kernels may use.
        platform: PoCL's description of itself.
        devices: PoCL's descriptions of the devices of `POCL_UNITS`.
        cpu: what `cpu_of` says of these devices. The machines of a cloud may describe different CPUs alike.
    """
    name = hashlib.blake2b("\0".join([platform, *devices, cpu]).encode(), digest_size=6).hexdigest()
    return f"opencl:{name}-x{cores}"


def cpu_of(device: int) -> str:
    """Return the CPU that a device of PoCL builds code for, and give it a name if LLVM does not know it. Call it before a build.

    Args:
        device: address of the device (`int_ptr` of pyopencl).

    Returns:
        LLVM's name of the CPU, or nothing if PoCL's description of the device has another form; and the instructions by which
        PoCL chooses its library of functions.
    """
    at, name = _name(device)
    if name == _UNKNOWN:
        name = _best(_flags())
        ctypes.memmove(at, name + b"\0", len(name) + 1)
    return "+".join([name.decode(), *[flag for flag in _LIBRARIES if flag in _flags()]])


def _best(flags: frozenset[str]) -> bytes:
    """The best name for a CPU that has these instructions."""
    return next(name for name, needs in _NAMES if needs <= flags)


def _name(device: int) -> tuple[int, bytes]:
    """The place and text of the CPU's name in PoCL's description of a device; (0, nothing) if it has another form.

    Memory is read as a file, so that a number that is no address ends nothing.
    """
    own = Path("/proc/self/mem")
    if platform.machine() != "x86_64" or not own.exists():
        return 0, b""
    with own.open("rb", buffering=0) as memory:

        def read(at: int, n: int) -> bytes:
            try:
                return os.pread(memory.fileno(), n, at)
            except (OSError, OverflowError):
                return b""

        raw = read(device, _DESCRIPTION)
        words = [word for (word,) in struct.iter_unpack("<Q", raw[: len(raw) // 8 * 8])]
        for word, following in itertools.pairwise(words):
            if word and following and _TRIPLE.match(read(word, 64)):
                name, ended, _ = read(following, 64).partition(b"\0")
                if ended and name.isascii():
                    return following, name
    return 0, b""


@functools.cache
def _flags() -> frozenset[str]:
    """The instructions of this machine's CPU, as Linux names them; nothing on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()
