"""Keeps the products of compilers on the local disk: artifacts of programs and code of kernels."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
from pathlib import Path

log = logging.getLogger("wooly.executor")
#: Maximum size, in bytes, of all artifacts on disk. Above it, the oldest artifacts are deleted first.
DISK_BYTES = 4 << 30
_VERSION = "compiler"


class ArtifactCache:
    """A cache of artifacts on disk. A read error counts as a miss. A folder that other users own or may write also counts as
    empty.

    Args:
        folder: the folder of the cache.
        disk_bytes: maximum size of all artifacts together.
        release: release of the executor.
    """

    def __init__(
        self, folder: Path, disk_bytes: int = DISK_BYTES, release: str = importlib.metadata.version("wooly-executor")
    ) -> None:
        self._release = release
        self._folder = folder
        self._disk_bytes = disk_bytes
        self._written = 0

    def read(self, name: str) -> bytes | None:
        """The bytes of an artifact, or None if the cache does not have it."""
        try:
            found = self._folder.stat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o002:
                return None
            return (self._folder / name).read_bytes()
        except OSError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Store the bytes of an artifact. The file appears complete or not at all."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = self._folder / f"{name}.{os.getpid()}.{id(data):x}.part"
            part.write_bytes(data)
            part.rename(self._folder / name)
        except OSError as e:
            log.warning(
                "cannot store an artifact in %s: %s; check the folder's permissions and free space", self._folder, e
            )
            return
        self._written += len(data)
        if self._written > self._disk_bytes // 16:
            self._written = 0
            self._shrink()

    def drop(self, name: str) -> None:
        """Delete an artifact."""
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()

    def _shrink(self) -> None:
        with contextlib.suppress(OSError):
            found = sorted(
                (p.stat().st_mtime, p.stat().st_size, p) for p in self._folder.iterdir() if p.name != _VERSION
            )
            total = sum(size for _, size, _ in found)
            for _, size, path in found:
                if total <= self._disk_bytes:
                    return
                path.unlink()
                total -= size

    @property
    def compiler(self) -> str:
        """Version of the compiler that answered last.

        Empty if no compiler has answered this release of the executor: the compilers may be newer than the artifacts here.
        """
        found = self.read(_VERSION)
        if found is None or len(found) > 256:
            return ""
        version, _, release = found.decode("ascii", "replace").partition(" ")
        return version if release == self._release else ""

    @compiler.setter
    def compiler(self, version: str) -> None:
        if version != self.compiler:
            self.write(_VERSION, f"{version} {self._release}".encode())
