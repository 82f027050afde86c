"""Python interface of the library in `guarded.c`, which is built with the C compiler of the machine and preloaded."""

import contextlib
import ctypes
import os
import subprocess
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).with_name("guarded.c")
#: Exit status of a process that a memory fault ended.
FAULT = 77
#: Maximum size of a block in bytes; larger ones are refused. No call in the corpus needs a larger one.
MOST = 256 << 20


def compiler():
    """Return the C compiler, or None."""
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
    """The preloaded library in this process.

    Args:
        report: a shared writable buffer, in which a fault of this process is reported.
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
        """Set the position of new blocks: at the start of their pages, or at the end, `slack` readable bytes before it.

        `small`: guard all blocks, not only those of tensors. This takes three times as long.
        """
        self._at_start.value, self._slack.value, self._all.value = at_start, slack, small

    @contextlib.contextmanager
    def armed(self, align=0):
        """Guard the blocks that are allocated in this context; `align`: with exactly this alignment."""
        self._exact.value = align
        self._armed.value = 1
        try:
            yield
        finally:
            self._armed.value = 0

    def read_only(self, address):
        """Make this block read-only."""
        assert self._library.guard_read_only(address) == 0

    def writable(self, address):
        """Make this block writable again, before it is freed: the check of the bytes next to the block may write."""
        assert self._library.guard_writable(address) == 0

    def take_refused(self):
        """Return the size of the largest block that was refused since the last call."""
        found, self._refused.value = self._refused.value, 0
        return found

    def take_spoilt(self):
        """Return the number of changed bytes next to blocks, found since the last call."""
        found, self._spoilt.value = self._spoilt.value, 0
        return found
