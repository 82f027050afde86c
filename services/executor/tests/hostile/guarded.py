"""The library in `guarded.c` from Python: built with the machine's C compiler, preloaded, told what to do with blocks."""

import contextlib
import ctypes
import os
import subprocess
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).with_name("guarded.c")
#: Status of a process that a fault has ended.
FAULT = 77
#: Blocks of more bytes than this are refused: no call in the corpus needs one.
MOST = 256 << 20


def compiler():
    """The C compiler, or None where there is none."""
    found = (sysconfig.get_config_var("CC") or "cc").split()[0]
    for name in (found, "cc", "gcc", "clang"):
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            if (Path(folder) / name).exists():
                return name
    return None


def build(folder):
    """Compile the library into a folder. Returns its path."""
    out = Path(folder) / "guarded.so"
    subprocess.run([compiler(), "-O1", "-g", "-shared", "-fPIC", "-o", str(out), str(SOURCE)], check=True)
    return out


class Guard:
    """What is preloaded in this process.

    Args:
        report: where a fault of this process is written down: a shared writable buffer.
    """

    def __init__(self, report):
        self._library = library = ctypes.CDLL(None)
        where = (ctypes.c_char * len(report)).from_buffer(report)
        library.guard_begin.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        library.guard_read_only.argtypes = library.guard_writable.argtypes = [ctypes.c_void_p]
        library.guard_begin(ctypes.addressof(where), len(report), MOST)
        self._armed = ctypes.c_int.in_dll(library, "guard_armed")
        sizes = ("exact", "refused", "spoilt", "slack")
        self._exact, self._refused, self._spoilt, self._slack = [
            ctypes.c_size_t.in_dll(library, f"guard_{name}") for name in sizes
        ]
        self._at_start, self._all = [ctypes.c_int.in_dll(library, f"guard_{name}") for name in ("at_start", "all")]

    def place(self, *, at_start=False, slack=0, small=False):
        """Where blocks lie from now on: at their pages' start, or at their end but for some bytes that may be read.

        `small`: not only tensors are guarded, which takes three times as long.
        """
        self._at_start.value, self._slack.value, self._all.value = at_start, slack, small

    @contextlib.contextmanager
    def armed(self, align=0):
        """Blocks that are allocated here are guarded; `align`: they are so aligned, and no more."""
        self._exact.value = align
        self._armed.value = 1
        try:
            yield
        finally:
            self._armed.value = 0

    def read_only(self, address):
        """Nobody may write this block."""
        assert self._library.guard_read_only(address) == 0

    def writable(self, address):
        """Whoever frees a block looks at what lies beside it, and may write that, too."""
        assert self._library.guard_writable(address) == 0

    def take_refused(self):
        """Bytes of the largest block that was refused since the last time."""
        found, self._refused.value = self._refused.value, 0
        return found

    def take_spoilt(self):
        """Bytes beside blocks that were written, found since the last time."""
        found, self._spoilt.value = self._spoilt.value, 0
        return found
