"""Builds a text as the compiler service does, and returns what its code needs of a chip: registers, spills, shared memory."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from wooly_compiler.build.toolchains import BUILDERS, nvrtc
from wooly_wis.foreign import UNCHECKED
from wooly_wis.languages import Request

from libs.triton.tests.texts import signature
from services.compiler.tests.chips.texts import Text


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel needs.

    Attributes:
        registers: registers of a thread (on AMD: vector registers).
        spilled: on NVIDIA, bytes that spills store and load; on AMD, registers that are spilled.
        stack: bytes of a thread's local memory, spills included.
        shared: bytes of memory of a work-group.
    """

    registers: int
    spilled: int
    stack: int
    shared: int


def usages(text: Text, target: str) -> list[Usage]:
    """Build a text for a target. TTIR has two codes: for aligned addresses, and for all addresses.

    Raises:
        WisError: a compiler rejects the text.
    """
    toolchain, _, arch = target.partition(":")
    if text.dialect == "ttir":
        return _of_ttir(text, target)
    if toolchain == "cuda":
        return of_messages(nvrtc(text.text, arch, "--ptxas-options=-v")[1])
    return [of_code(BUILDERS["hip"](with_stubs(text.text), arch))]


def unchecked(text: Text) -> Text:
    """The same text in TTIR, to be built without guards."""
    return replace(text, options=(*text.options, (UNCHECKED, True)))


def _of_ttir(text: Text, target: str) -> list[Usage]:
    from triton import knobs
    from wooly_triton import chips

    entry, args = signature(text.text)
    request = Request(text.text, entry, args, (1, 1, 1), dict(text.options))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True
        images = chips.build(request, target)[2]
    found = [of_code(i.code) for i in images] if target.startswith("hip") else of_messages(said.getvalue())
    # The code does not have the size of the shared memory: it is an argument of the launch.
    assert len(found) == len(images), said.getvalue()
    return [Usage(u.registers, u.spilled, u.stack, i.shared) for u, i in zip(found, images, strict=True)]


def of_messages(said: str) -> list[Usage]:
    """Read the report of `ptxas -v`, one usage per kernel."""
    found = []
    for part in said.split("Compiling entry function")[1:]:
        stack, stores, loads = (
            _number(rf"(\d+) bytes {what}", part) for what in ("stack frame", "spill stores", "spill loads")
        )
        registers = re.search(r"Used (\d+) registers", part)
        assert registers, said
        found.append(Usage(int(registers[1]), stores + loads, stack, _number(r"(\d+) bytes smem", part)))
    return found


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def of_code(code: bytes) -> Usage:
    """Read the metadata of an AMD code object, which has one kernel."""
    known = {name: _entry(code, name) for name in _KEYS}
    spilled = known[".vgpr_spill_count"] + known[".sgpr_spill_count"]
    stack, shared = known[".private_segment_fixed_size"], known[".group_segment_fixed_size"]
    return Usage(known[".vgpr_count"], spilled, stack, shared)


_KEYS = (".vgpr_count", ".vgpr_spill_count", ".sgpr_spill_count", ".private_segment_fixed_size",
         ".group_segment_fixed_size")  # fmt: skip
#: Types of MessagePack's unsigned numbers, with their sizes in bytes.
_UNSIGNED: Mapping[int, int] = {0xCC: 1, 0xCD: 2, 0xCE: 4}


def _entry(code: bytes, name: str) -> int:
    """Read a number from the MessagePack text of the metadata. The key stands before it, with its length."""
    key = (bytes([0xA0 + len(name)]) if len(name) < 32 else bytes([0xD9, len(name)])) + name.encode()
    _, found, rest = code.partition(key)
    assert found, f"the code object has no {name}"
    size = _UNSIGNED.get(rest[0])
    return rest[0] if size is None else int.from_bytes(rest[1 : 1 + size], "big")


def with_stubs(text: str) -> str:
    """Define the functions of AMD's device library that a text calls, because this machine may lack the library.

    The functions do nothing useful. So the test shows that the rest of the text is right.
    """
    found = sorted(set(re.findall(r"__ocml_(\w+)_(f32|f64)", text)))
    lines = []
    for name, kind in found:
        c = {"f32": "float", "f64": "double"}[kind]
        arguments = f"{c} a, {c} b" if name in ("pow", "fmod", "atan2") else f"{c} a"
        head = f'extern "C" __attribute__((device, noinline)) {c} __ocml_{name}_{kind}'
        lines.append(f"{head}({arguments}) {{ return a; }}\n")
    return "".join(lines) + text
