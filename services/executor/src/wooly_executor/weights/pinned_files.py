"""Files of pinned weights, so that they survive the executor's process: contents by their id, and a list for each name.

Writing takes seconds, so one thread does it, in the order of the calls. A content is checked against its id when it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from wooly_bus.contents import CHUNK, chunk_digest, content_id
from wooly_bus.supervision import start_thread

from wooly_executor.errors import LoopEndedError

log = logging.getLogger("wooly.executor")
#: Bytes of the disk that must stay free.
LEFT_FREE = 1 << 30


@dataclass(frozen=True, slots=True)
class PinnedContent:
    """One content: its id in hexadecimal digits, and its size in bytes."""

    content: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PinnedList:
    """The pinned weights of a tenant under one name. `scope`: the value of a `memory.book.Scope`."""

    tenant: str
    name: str
    scope: str
    contents: tuple[PinnedContent, ...]


class PinnedFiles:
    """The files of one executor's pinned weights. Any thread may use it. `save` and `remove` do not wait.

    Args:
        folder: folder of the files.
        limit: maximum bytes of all contents.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._lists, self._contents, self._limit = folder / "names", folder / "contents", limit
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def save(self, wanted: PinnedList, source: Callable[[str], Tensor | None], done: Callable[[str], None]) -> None:
        """Write pinned weights.

        Args:
            wanted: what is pinned.
            source: returns the bytes of a content as a flat tensor; None: it is no longer pinned.
            done: called with the reason why the weights are not saved; empty if they are.
        """
        self._add(lambda: done(self._save(wanted, source)))

    def _add(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = start_thread(self._work, "pinned-files")

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def _save(self, wanted: PinnedList, source: Callable[[str], Tensor | None]) -> str:
        try:
            self._contents.mkdir(parents=True, exist_ok=True)
            self._lists.mkdir(parents=True, exist_ok=True)
            new = {c.content: c.nbytes for c in wanted.contents if not self._path(c.content).exists()}
            kept = sum([p.stat().st_size for p in self._contents.iterdir()])
            if kept + sum(new.values()) > self._limit:
                return f"they have {sum(new.values()):,} bytes, and {self._limit - kept:,} bytes of the limit on disk are left"
            if shutil.disk_usage(self._contents).free < sum(new.values()) + LEFT_FREE:
                return "the disk is almost full"
            for content in new:
                tensor = source(content)
                if tensor is None:
                    return "they are no longer pinned"
                _write(self._path(content), _chunks(tensor))
            _write(self._list_of(wanted.tenant, wanted.name), [json.dumps(asdict(wanted)).encode()])
        except OSError as e:
            return f"they cannot be written: {e}"
        except LoopEndedError:
            return "the executor ends"
        return ""

    def remove(self, tenant: str, name: str) -> None:
        """Delete the list of a name, and the contents that no list has any more."""
        self._add(lambda: self._remove(tenant, name))

    def has(self, tenant: str, name: str) -> bool:
        """Whether a name is saved."""
        return self._list_of(tenant, name).exists()

    def _remove(self, tenant: str, name: str) -> None:
        with contextlib.suppress(OSError):
            self._list_of(tenant, name).unlink(missing_ok=True)
            used = {c.content for found in self.lists() for c in found.contents}
            for path in self._contents.glob("*"):
                if path.name not in used:
                    path.unlink(missing_ok=True)

    def lists(self) -> list[PinnedList]:
        """What is saved. A file that cannot be read is left out, with a warning."""
        found = []
        for path in sorted(self._lists.glob("*.json")):
            try:
                said = json.loads(path.read_text())
                contents = tuple([PinnedContent(str(c["content"]), int(c["nbytes"])) for c in said.pop("contents")])
                found.append(PinnedList(contents=contents, **said))
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
                log.warning("the list of pinned weights %s cannot be read, so they are not restored: %s", path, e)
        return found

    def read(self, wanted: PinnedContent) -> tuple[Tensor, bytes]:
        """The bytes of a content as a flat tensor in host memory, and the digest of its first chunk.

        Raises:
            OSError: the file is missing, or does not have this content.
        """
        memory = torch.empty(wanted.nbytes, dtype=torch.uint8)
        digests, view = [], memory.numpy().data
        with self._path(wanted.content).open("rb", buffering=0) as file:
            for at in range(0, wanted.nbytes, CHUNK):
                part = view[at : at + CHUNK]
                done = 0
                while done < len(part):
                    n = file.readinto(part[done:])
                    if not n:
                        raise OSError(f"the file of content {wanted.content} ends at byte {at + done}")
                    done += n
                digests.append(chunk_digest(part))
        if content_id(digests, wanted.nbytes).hex() != wanted.content:
            raise OSError(f"the file of content {wanted.content} has changed")
        return memory, digests[0]

    def _path(self, content: str) -> Path:
        return self._contents / content

    def _list_of(self, tenant: str, name: str) -> Path:
        key = f"{tenant}\0{name}".encode()
        return self._lists / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.json"


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    for at in range(0, len(tensor), CHUNK):
        yield tensor[at : at + CHUNK].numpy().data


def _write(path: Path, parts: Sequence[bytes] | Iterator[memoryview]) -> None:
    """Write a file that is complete or does not exist."""
    part = path.with_name(path.name + ".part")
    with part.open("wb", buffering=0) as file:
        for each in parts:
            view, done = memoryview(each), 0
            while done < len(view):
                done += file.write(view[done:])
        os.fsync(file.fileno())
    part.rename(path)
