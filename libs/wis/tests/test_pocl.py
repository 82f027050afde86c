"""PoCL's CPU: its name in PoCL's description of a device, and the target that is named after it."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wooly_wis import pocl

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="PoCL's library knows its CPU on other machines")

TRIPLE = ctypes.create_string_buffer(b"x86_64-unknown-linux-gnu")
ZEN = frozenset(["sse4_1", "ssse3", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm", "sse4a", "avx512f"])


def device(*words):
    """Memory like PoCL's description of a device, with these numbers in it."""
    return (ctypes.c_uint64 * 300)(*words)


@pytest.mark.parametrize(
    "flags, named",
    [(ZEN, b"znver3"), (ZEN - {"sse4a"}, b"haswell"), (ZEN - {"avx2"}, b"x86-64"), (frozenset(), b"x86-64")],
)
def test_a_cpu_that_llvm_does_not_know_gets_a_name_whose_code_it_can_run(monkeypatch, flags, named):
    monkeypatch.setattr(pocl, "_flags", lambda: flags)
    name = ctypes.create_string_buffer(b"generic")
    memory = device(7, 0, ctypes.addressof(TRIPLE), ctypes.addressof(name))
    found = pocl.cpu_of(ctypes.addressof(memory))
    assert name.value == named and found.split("+")[0].encode() == named
    assert set(found.split("+")[1:]) == flags & set(pocl._LIBRARIES)
    assert pocl.cpu_of(ctypes.addressof(memory)) == found, "a second look says something else"


def test_a_name_that_llvm_gave_stays():
    name = ctypes.create_string_buffer(b"skylake-avx512")
    memory = device(ctypes.addressof(TRIPLE), ctypes.addressof(name))
    assert pocl.cpu_of(ctypes.addressof(memory)).startswith("skylake-avx512")
    assert name.value == b"skylake-avx512"


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_a_description_of_another_form_is_read_without_harm(words):
    alone = ctypes.create_string_buffer(b"generic")
    memory = device(*words, ctypes.addressof(alone), 5, ctypes.addressof(TRIPLE), 1)
    assert pocl.cpu_of(ctypes.addressof(memory)).split("+")[0] == ""
    assert alone.value == b"generic"


def test_memory_that_ends_early_is_read_without_harm():
    assert pocl.cpu_of(8).split("+")[0] == ""


def test_kernels_are_built_without_the_users_cache_folder(tmp_path):
    """Services may have no home; pyopencl and PoCL would keep files there."""
    pytest.importorskip("pyopencl", reason="kernels run through OpenCL: pip install 'pyopencl[pocl]'")
    code = f"""
import pathlib
from wooly_wis.pocl import cpu_of, prepare
prepare(pathlib.Path({str(tmp_path / "pocl")!r}))
import pyopencl as cl
device = [d for p in cl.get_platforms() if "Portable" in p.name for d in p.get_devices()][0]
cpu_of(device.int_ptr)
cl.Kernel(cl.Program(cl.Context([device]), "kernel void f(global int *x) {{ x[0] = 1; }}").build(cache_dir=False), "f")
"""
    (tmp_path / "a file").touch()  # no folder can be made in it, not even by root
    nowhere = {name: str(tmp_path / "a file" / "x") for name in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | nowhere, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_targets_differ_in_platform_cores_and_cpu():
    def target(cores=2, platform="a platform", cpu="znver3+avx2"):
        return pocl.pocl_target(cores, platform, ["basic-x", "pthread-x"], cpu)

    assert len({target(), target(cores=1), target(platform="another"), target(cpu="znver3+avx512f+avx2")}) == 4
