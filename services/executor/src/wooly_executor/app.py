"""Wires the executor's process: settings, runtime, device loop in a thread of its own, control side in the main thread."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading

import torch

from wooly_bus.channel import Endpoint
from wooly_executor.device_loop import DeviceLoop
from wooly_executor.runtime.protocol import Runtime
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime

RUNTIMES: dict[str, type] = {"cpu": TorchCpuRuntime}


def make_runtime(name: str) -> Runtime:
    """The runtime called `name`.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in RUNTIMES:
        raise ValueError(f"unknown runtime {name!r}; there are {', '.join(RUNTIMES)}")
    runtime: Runtime = RUNTIMES[name]()
    return runtime


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="wooly_executor", description="Serve one device.")
    parser.add_argument("--standalone", action="store_true", help="no control plane: one session, given by --token")
    parser.add_argument("--listen", help="comma separated endpoints (unix:///path, tcp://host:port)")
    parser.add_argument("--token", default="", help="with --standalone: the session's token")
    parser.add_argument("--runtime", choices=sorted(RUNTIMES), default="cpu")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    loop = DeviceLoop(make_runtime(args.runtime))
    for text in args.listen.split(","):
        loop.listen(Endpoint.parse(text))
    loop.open_session("standalone", args.token, None)
    thread = threading.Thread(target=loop.run, name="device-loop", daemon=True)
    thread.start()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    loop.stop()
    thread.join(5)
    return 0
