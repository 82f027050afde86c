"""Places for checkpoints in tests: a folder or an object store in memory, encrypted or not."""

import os
import threading
from pathlib import Path

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from wooly_executor.checkpoints.encryption import Secret
from wooly_executor.checkpoints.files import Checkpoints
from wooly_executor.checkpoints.folder import FolderStore
from wooly_executor.checkpoints.objects import ObjectStore

SECRET = Secret(bytes(range(32)))
KINDS = ("folder", "folder, encrypted", "objects", "objects, encrypted")


class HookedFileSystem(MemoryFileSystem):
    """An object store in memory. `hook` is called before each request, with its kind and path."""

    protocol = "hooked"
    store, pseudo_dirs = {}, [""]
    hook = staticmethod(lambda kind, path: None)

    def pipe_file(self, path, value, **more):
        self.hook("put", path)
        super().pipe_file(path, value, **more)

    def cat_file(self, path, **more):
        self.hook("get", path)
        return super().cat_file(path, **more)

    def find(self, path, **more):
        self.hook("list", path)
        return super().find(path, **more)

    def rm(self, path, **more):
        self.hook("remove", path[0])
        super().rm(path, **more)


fsspec.register_implementation("hooked", HookedFileSystem, clobber=True)


class Place:
    """One place. Each call of `checkpoints` is another executor's view of it."""

    def __init__(self, kind, folder: Path):
        self.kind, self.folder = kind, folder
        self.encrypted, self.objects = kind.endswith("encrypted"), kind.startswith("objects")
        self.url = f"hooked://{folder.parent.name}-{folder.name}"
        self.files, self.root = fsspec.url_to_fs(self.url)

    def store(self, key=""):
        return ObjectStore(self.url, key) if self.objects else FolderStore(self.folder, key)

    def checkpoints(self, kept_s=3600.0, secret=SECRET, earlier=None):
        secret = secret if self.encrypted else None
        return Checkpoints(self.store("" if secret is None else secret.id), kept_s, secret, earlier)

    def paths(self):
        """The paths of everything that is stored."""
        if self.objects:
            return list(self.files.find(self.root))
        # not `rglob`, which fails if an executor removes a folder meanwhile
        return [str(Path(folder, name)) for folder, _, names in os.walk(self.folder) for name in names]

    def chunks(self):
        """The names of the stored chunks."""
        if self.objects:
            return {p.split("/")[-2] for p in self.paths() if "/data-" in p}
        return {p.split("/")[-1] for p in self.paths() if "/chunks/" in p}

    def chunk_paths(self, name):
        """The files with the bytes of a chunk."""
        return [p for p in self.paths() if name in p and "/ref-" not in p]

    def list_paths(self):
        return [p for p in self.paths() if "/cut-" in p]

    def sessions(self):
        return {p.split("/sessions/")[1].split("/")[0] for p in self.paths() if "/sessions/" in p}

    def read(self, path):
        return self.files.cat_file(path) if self.objects else Path(path).read_bytes()

    def write(self, path, data):
        if self.objects:
            self.files.pipe_file(path, data)
        else:
            Path(path).unlink()  # the other links to the file keep their bytes
            Path(path).write_bytes(data)

    def age(self):
        """Make everything so old that `sweep` removes it."""
        if not self.objects:
            for path in [*self.folder.glob("*/sessions/*"), *self.folder.glob("key-*/*/sessions/*")]:
                os.utime(path, (0, 0))
            return
        for path in self.paths():
            head, name = path.rsplit("/", 1)
            parts = [("0" if part.isdigit() and len(part) == 10 else part) for part in name.split("-")]
            if "-".join(parts) != name:
                self.files.pipe_file(f"{head}/{'-'.join(parts)}", self.files.cat_file(path))
                self.files.rm_file(path)

    def remove(self):
        HookedFileSystem.hook = staticmethod(lambda kind, path: None)
        for path in self.paths() if self.objects else ():
            self.files.rm_file(path)


class Steps:
    """Lets threads go on one request at a time, in a given order."""

    def __init__(self, order):
        self._order, self._changed = list(order), threading.Condition()
        self._over = set()
        self.names = threading.local()

    def _whose(self):
        while self._order and self._order[0] in self._over:
            self._order.pop(0)
        return self._order[0] if self._order else None

    def wait(self, kind, path):
        name = getattr(self.names, "name", None)
        if name is None:
            return
        with self._changed:
            assert self._changed.wait_for(lambda: self._whose() in (name, None), 30)
            if self._order:
                self._order.pop(0)
            self._changed.notify_all()

    def run(self, name, work):
        self.names.name = name
        try:
            work()
        finally:
            with self._changed:
                self._over.add(name)
                self._changed.notify_all()
