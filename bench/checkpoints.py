"""Measures how long a checkpoint takes in each place: storing, storing again, and restoring, in a folder and in object
stores, encrypted and not.

Each row is the best of some rounds, beside the same without encryption. `s3` is a server with the protocol of S3 in another
process of this machine (moto, in Python), whose own speed is a large part of the figures. `memory` is an object store in this
process that answers each request `--latency` seconds later: it shows what parallel requests save.

Run: .venv/bin/python bench/checkpoints.py [--json] [--mib N] [--rounds N] [--only folder,memory,s3]
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fsspec
import torch
from figures import row, show
from fsspec.implementations.memory import MemoryFileSystem
from wooly_bus.contents import chunk_digest
from wooly_executor.checkpoints.encryption import Secret
from wooly_executor.checkpoints.files import Checkpoints
from wooly_executor.checkpoints.folder import FolderStore
from wooly_executor.checkpoints.jobs import Copied, FillJob, StoreJob
from wooly_executor.checkpoints.objects import ObjectStore
from wooly_executor.runtime.device import HOST

MIB = 1 << 20
SECRET = Secret(bytes(range(32)))
#: Maximum encrypted / plain: encryption may cost 30 % of storing.
GOAL = 1.3


class SlowFileSystem(MemoryFileSystem):
    """An object store in memory whose answers take some time."""

    protocol = "slow"
    latency = 0.02

    def pipe_file(self, path, value, **more):
        time.sleep(self.latency)
        super().pipe_file(path, value, **more)

    def cat_file(self, path, **more):
        time.sleep(self.latency)
        return super().cat_file(path, **more)

    def find(self, path, **more):
        time.sleep(self.latency)
        folder = self._strip_protocol(path) + "/"
        return [name for name in tuple(self.store) if name.startswith(folder)]


fsspec.register_implementation("slow", SlowFileSystem, clobber=True)


def finish(job):
    for _ in job.steps():
        pass
    return job


def measured(work):
    """The result of a function, and the seconds and core seconds that it took."""
    wall, cores = time.perf_counter(), time.process_time()
    return work(), (time.perf_counter() - wall, time.process_time() - cores)


def one_round(checkpoints, buffers, number):
    """Seconds and core seconds to store, to store again in another session, and to restore."""
    sessions = [checkpoints.of("tenant", f"{name}-{number}") for name in ("first", "second")]
    took = []
    for session in sessions:
        copies = [Copied(i, None, b) for i, b in enumerate(buffers)]
        job = StoreJob(5, print, files=session, number=1, buffers=copies)
        took.append(measured(lambda job=job: finish(job))[1])
    filled, last = measured(
        lambda: finish(FillJob(5, print, files=sessions[0], table=sessions[0].read(1), device=HOST))
    )
    assert all(chunk_digest(filled.made[i].numpy().data) == chunk_digest(buffers[i].numpy().data) for i in (0, 1))
    for session in sessions:
        session.remove()
    return [*took, last]


@contextlib.contextmanager
def s3():
    """A server of S3's protocol in another process."""
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "DEFAULT_REGION": "us-east-1"}.items():
        os.environ[f"AWS_{name}"] = value
    code = (
        "from moto.server import ThreadedMotoServer; import sys, logging; logging.disable();"
        "s = ThreadedMotoServer('127.0.0.1', 0, verbose=False); s.start(); print(s.get_host_and_port()[1], flush=True);"
        "sys.stdin.read(); s.stop()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{int(server.stdout.readline())}"
        fsspec.filesystem("s3").mkdir("wooly")
        yield
        server.stdin.close()


def measure(only, mib, count, latency):
    SlowFileSystem.latency = latency
    buffers = [torch.randint(0, 256, (16 * MIB,), dtype=torch.uint8) for _ in range(mib // 16)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wooly-")))
        if "s3" in only:
            stack.enter_context(s3())
        places = {
            "folder": lambda key: FolderStore(folder, key),
            "memory": lambda key: ObjectStore("slow://checkpoints", key),
            "s3": lambda key: ObjectStore("s3://wooly/checkpoints", key),
        }
        for name in only:
            stores = [places[name](key) for key in ("", SECRET.id)]
            views = [Checkpoints(stores[0], 3600.0), Checkpoints(stores[1], 3600.0, SECRET)]
            found = [[one_round(view, buffers, number) for view in views] for number in range(count)]
            for step, what in enumerate(("store", "store again", "restore")):
                for at, unit in enumerate(("s", "core s")):
                    plain, encrypted = (min(r[kind][step][at] for r in found) for kind in (0, 1))
                    goal = GOAL if (name, what, unit) == ("folder", "store", "s") else None
                    yield row(f"{name}: {what} {mib} MiB, encrypted", unit, encrypted, plain, goal)
            for store in stores:
                store.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds of each request of `memory`")
    parser.add_argument("--only", default="folder,memory,s3")
    args = parser.parse_args()
    rows = list(measure(args.only.split(","), args.mib, args.rounds, args.latency))
    show(rows, args.json, baseline="plain")


if __name__ == "__main__":
    main()
