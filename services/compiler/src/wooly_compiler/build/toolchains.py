"""The vendors' compilers. Each is loaded at its first use. This runs in the worker, because a compiler may crash.

Each builder takes a source and an architecture and returns the bytes of an artifact. No flag relaxes the language's arithmetic:
products and sums are not contracted, quotients and roots are rounded correctly, and subnormal numbers are kept.
"""

from __future__ import annotations

import importlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from wooly_wis.pocl import HOW_TO_GET

from wooly_compiler.errors import BuildError

_CLANG: Final = ("clang-19", "clang-20", "clang-21")
_CLANG_FLAGS: Final = (
    "-x",
    "hip",
    "--offload-device-only",
    "--no-gpu-bundle-output",
    "-nogpuinc",
    "-nogpulib",
    "-O3",
    "-ffp-contract=off",
    "-fhip-fp32-correctly-rounded-divide-sqrt",
    "-fno-gpu-flush-denormals-to-zero",
)
_NVRTC_FLAGS: Final = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None


def missing(toolchain: str) -> str:
    """Return why this machine cannot use a toolchain; empty if it can."""
    if toolchain == "cuda":
        nvrtc = _module("cuda.bindings.nvrtc")
        if nvrtc is None:
            return "NVRTC is missing; install it with: pip install cuda-bindings nvidia-cuda-nvrtc"
        try:
            nvrtc.nvrtcVersion()
        except RuntimeError as e:  # the bindings load the library at its first use
            return f"NVRTC cannot be loaded ({e}); install it with: pip install nvidia-cuda-nvrtc"
        return ""
    if toolchain == "hip":
        if any(shutil.which(c) for c in _CLANG) or _module("hip.hiprtc"):
            return ""
        return (
            "clang-19 and hipRTC are missing; use apt-get install clang-19 lld-19, or pip install hip-python with ROCm"
        )
    return "" if _module("pyopencl") else f"pyopencl is missing; install it: {HOW_TO_GET}"


def default_signals() -> None:
    """Let a crash end this process at once. Handlers of LLVM and PoCL may deadlock instead."""
    for crash in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        signal.signal(crash, signal.SIG_DFL)


def nvrtc(source: str, arch: str, *more: str) -> tuple[bytes, str]:
    """Compile CUDA C with NVRTC, and return the code and what the compiler says.

    Args:
        source: the text.
        arch: like ``sm_90``.
        more: options beside those of every build, like ``--ptxas-options=-v``, which lets the assembler report registers.

    Raises:
        BuildError: NVRTC rejects the text.
    """
    nvrtc = _module("cuda.bindings.nvrtc")

    def check(result: Any) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BuildError(f"NVRTC failed: {result[0].name}")
        return result[1] if len(result) == 2 else result[1:]

    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        flags = [f.encode() for f in (f"--gpu-architecture={arch}", *_NVRTC_FLAGS, *more)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        said = log.rstrip(bytes(1)).decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BuildError(f"NVRTC rejects the source: {said[:2000]}")
        cubin: bytes = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check((*nvrtc.nvrtcGetCUBIN(program, cubin), cubin))
        return cubin, said
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc(source: str, arch: str) -> bytes:
    return nvrtc(source, arch)[0]


def _hip(source: str, arch: str) -> bytes:
    clang = next((found for c in _CLANG if (found := shutil.which(c))), None)
    if clang is None:
        return _hiprtc(source, arch)
    try:
        return _clang(clang, source, arch)
    except BuildError:  # clang lacks AMD's device libraries, which hipRTC contains
        if _module("hip.hiprtc") is None:
            raise
        return _hiprtc(source, arch)


def _clang(clang: str, source: str, arch: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="wooly-hip-") as directory:
        text, out = Path(directory) / "kernel.hip", Path(directory) / "kernel.o"
        text.write_text(source)
        command = [clang, *_CLANG_FLAGS, f"--offload-arch={arch}", "-c", str(text), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{Path(clang).name} rejects the source: {done.stderr[:2000]}")
        return out.read_bytes()


def _hiprtc(source: str, arch: str) -> bytes:
    hiprtc = _module("hip.hiprtc")

    def check(result: Any) -> Any:
        if result[0] != hiprtc.hiprtcResult.HIPRTC_SUCCESS:
            raise BuildError(f"hipRTC failed: {result[0].name}")
        return result[1] if len(result) == 2 else result[1:]

    program = check(hiprtc.hiprtcCreateProgram(source.encode(), b"kernel.hip", 0, [], []))
    flags = [f"--offload-arch={arch}".encode(), b"-ffp-contract=off"]
    (status,) = hiprtc.hiprtcCompileProgram(program, len(flags), flags)
    if status != hiprtc.hiprtcResult.HIPRTC_SUCCESS:
        log = bytearray(check(hiprtc.hiprtcGetProgramLogSize(program)))
        hiprtc.hiprtcGetProgramLog(program, log)
        raise BuildError(f"hipRTC rejects the source: {log.rstrip(bytes(1)).decode(errors='replace')[:2000]}")
    code = bytearray(check(hiprtc.hiprtcGetCodeSize(program)))
    check((*hiprtc.hiprtcGetCode(program, code), code))
    return bytes(code)


def _opencl(source: str, arch: str) -> bytes:
    cl = _module("pyopencl")
    from wooly_compiler.build.opencl import default_device, program_of

    device = default_device()
    default_signals()  # loading the platform installed other handlers
    try:
        program = program_of(device, source)
    except cl.Error as e:
        raise BuildError(f"OpenCL rejects the source: {str(e)[:2000]}") from e
    return bytes(program.get_info(cl.program_info.BINARIES)[0])


BUILDERS: Final[dict[str, Callable[[str, str], bytes]]] = {"cuda": _nvrtc, "hip": _hip, "opencl": _opencl}
