"""Builds the executor's process: settings, runtime, the device loop in its own thread, the control plane in the main thread."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ValidationError
from wooly_bus import host
from wooly_bus.access import Access
from wooly_bus.app import ServiceApp, until_signalled
from wooly_bus.channel import ChannelError, ChannelTlsError, Endpoint, EndpointError, server_context
from wooly_bus.channel.busy_wait import BusyWait
from wooly_bus.channel.tunnel import TunnelListener, tunnel_endpoint
from wooly_bus.channel.tunnel_places import TunnelLimits
from wooly_bus.errors import BusError
from wooly_bus.other_names import EXECUTOR, translated
from wooly_bus.private import keep_private
from wooly_bus.supervision import BROKEN, fail, failure, run, run_for_ever, start_call, start_thread, supervised
from wooly_bus.tracing import setup_tracing

from wooly_executor.billing.memory_publisher import MemoryPublisher
from wooly_executor.billing.usage_publisher import UsagePublisher
from wooly_executor.bounds import Bounds
from wooly_executor.bounds.limits import default_limits
from wooly_executor.collector import Collector
from wooly_executor.control import ExecutorActor
from wooly_executor.device_loop import DeviceLoop
from wooly_executor.dispatch import Dispatch
from wooly_executor.errors import CheckpointError, ContextLostError, ExecutorError, MissingDriverError
from wooly_executor.heap import give_back, keep_freed
from wooly_executor.journal import JournalPublisher
from wooly_executor.plans.compilation import PlanSource
from wooly_executor.plans.compilers import CompilerServices, KernelSource
from wooly_executor.plans.tiers import Tiers
from wooly_executor.runtime import cuda, extensions, hip, opencl
from wooly_executor.runtime.cuda import CudaRuntime
from wooly_executor.runtime.gpu import GpuRuntime
from wooly_executor.runtime.guards import EXTENSION_LAWS
from wooly_executor.runtime.hip import HipRuntime
from wooly_executor.runtime.opencl import OpenClRuntime
from wooly_executor.runtime.protocol import PlanRuntime, Runtime
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.settings import PREFIX, ExecutorSettings, complaints
from wooly_executor.standalone import announce, serve_standalone, token_of, urls

log = logging.getLogger("wooly.executor")
#: Maximum time, in seconds, to publish the last entries of the journal when the process stops normally.
LAST_WORDS_S = 1.0
#: The same limit, in seconds, after a failure. A failed process must end within a second (`wooly_bus.supervision`).
LAST_WORDS_OF_FAILED_S = 0.4
RUNTIMES = ("auto", "cuda", "hip", "opencl", "torch_cpu")
#: Exit status when the device is lost; the supervisor then starts another executor. If the executor's own code fails, the status
#: is `wooly_bus.supervision.BROKEN` (4).
LOST = 3


def make_runtime(name: str, state_dir: Path | None = None, device: int = 0) -> Runtime:
    """Create the runtime called `name`.

    `auto` selects the first that is available: CUDA, HIP, OpenCL (needs pyopencl), torch on the CPU.

    Args:
        name: one of `RUNTIMES`.
        state_dir: folder for the files of drivers.
        device: number of the GPU.

    Raises:
        ValueError: `name` is unknown.
        MissingDriverError: the runtime cannot run on this machine. The message says what is missing.
    """
    if name == "cuda":
        return CudaRuntime(device, cache=state_dir)
    if name == "hip":
        return HipRuntime(device, cache=state_dir)
    cache = state_dir / "pocl" if state_dir is not None else None
    if name == "opencl":
        return OpenClRuntime(cache, sure=True)
    if name == "auto":
        no_cuda, no_hip = cuda.missing(cuda.find(), device), hip.missing(hip.find(), device)
        if not no_cuda:
            return CudaRuntime(device, cache=state_dir)
        if not no_hip:
            return HipRuntime(device, cache=state_dir)
        log.info("CUDA is not available: %s", no_cuda)
        log.info("HIP is not available: %s", no_hip)
        why = opencl.missing()
        if not why:
            return OpenClRuntime(cache)
        log.info("OpenCL is not available, so programs run without generated kernels: %s", why)
    elif name != "torch_cpu":
        raise ValueError(f"unknown runtime {name!r}; use one of {', '.join(RUNTIMES)}")
    return TorchCpuRuntime()


async def serve(settings: ExecutorSettings, loop: DeviceLoop, bound: list[Endpoint], alive: Callable[[], bool]) -> None:
    """Serve the control plane until a signal arrives. `alive` says whether the device's thread runs."""
    app = ServiceApp("executor", settings.nats_url)
    app.live["device"] = alive
    tunnels = TunnelListener(
        Access.of_service(settings.nats_url),
        loop.acceptor.adopt,
        limits=TunnelLimits(settings.tunnels, settings.tunnels_per_tenant),
    )
    endpoints = [*settings.advertised(bound), str(tunnel_endpoint(settings.nats_url, settings.id))]
    actor = ExecutorActor(settings, app, loop, endpoints, tunnels)
    async with app.running(), contextlib.aclosing(tunnels):
        actor.jobs.start(app.jetstream())
        process = f"{settings.id}/{time.time_ns()}"
        journal = actor.journal = JournalPublisher(app.jetstream(), loop, settings.id, process)
        memory = MemoryPublisher(app.jetstream(), loop, settings.id)
        measured = loop.runtime.driver.sm_utilisation if isinstance(loop.runtime, GpuRuntime) else None
        usage = UsagePublisher(app.jetstream(), loop, settings.id, process, measured)
        works = actor.works() | {"journal": journal.run, "memory": memory.run, "usage": usage.run}
        loop.runtime.foreign.remote = KernelSource(app, settings.compiler_timeout_s)
        if isinstance(loop.runtime, PlanRuntime) and loop.tiers is not None:
            compilers = CompilerServices(app, settings.id, settings.compiler_timeout_s)
            works["plans"] = PlanSource(compilers, loop, loop.runtime, settings.state_dir / "artifacts").run
        log.info("executor %s serves %s on %s", settings.id, loop.runtime.facts()["name"], ", ".join(endpoints))

        async def until_left() -> None:
            await until_signalled()
            await actor.leave()

        await run_for_ever(works, until_left)
        failed = failure()

        async def say_end() -> None:
            with contextlib.suppress(BusError):  # without NATS it is lost, and routers notice the missing heartbeats
                await actor.say_end("it received a signal to stop" if failed is None else failed.reason)

        if failed is None:  # clients hear it from this executor, also while NATS does not take the message
            await asyncio.gather(say_end(), actor.end_clients(), actor.jobs.stop())
        else:
            await say_end()
        last_words_s = LAST_WORDS_S if failed is None else LAST_WORDS_OF_FAILED_S
        with contextlib.suppress(BusError, ExecutorError, TimeoutError):
            async with asyncio.timeout(last_words_s):
                await asyncio.gather(journal.publish(), memory.publish(), usage.publish(), return_exceptions=True)
                # the calls above have returned, so all sessions that the device's thread ended are known
                await actor.report_last_closed()


def listen_on(loop: DeviceLoop, endpoint: Endpoint, settings: ExecutorSettings) -> Endpoint:
    """Listen at `endpoint`, with TLS if its scheme is `tls`. Returns the endpoint with its real port.

    Raises:
        ChannelError: the address or the certificate cannot be used.
    """
    if endpoint.scheme != "tls":
        return loop.listen(endpoint)
    try:
        context = server_context(settings.tls_cert, settings.tls_key)
    except ChannelTlsError as e:
        raise ChannelTlsError(f"cannot listen at {endpoint}: {e} (see {PREFIX}TLS_CERT and {PREFIX}TLS_KEY)") from e
    return loop.listen(endpoint, context)


def _device_failed(error: BaseException) -> None:
    fail("the device's thread", error, LOST if isinstance(error, ContextLostError) else BROKEN)


class _CannotStartError(Exception):
    """The executor cannot run with these settings on this machine. Each argument is one line of the reason."""


@supervised("executor", (BusError,))
def main(argv: list[str] | None = None) -> int:
    """Serve one device until SIGTERM or SIGINT."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    faulthandler.enable()  # if a library of the device crashes, the log shows where
    try:
        settings = _read_settings()
        setup_tracing("executor")
        loop = _make_loop(settings, _prepare_runtime(settings, args.runtime or settings.runtime))
        token = ""
        if args.standalone:
            token = args.token or token_of(settings)
            loop.admission.open_for_token(token, opaque=args.opaque_kernels)  # before the first client can arrive
        listen = args.listen.split(",") if args.listen else settings.endpoints()
        bound = [listen_on(loop, Endpoint.parse(text), settings) for text in listen]
    except _CannotStartError as e:
        for line in e.args:
            log.error("%s", line)
        return 2
    except (
        CheckpointError,
        MissingDriverError,
        extensions.ExtensionLibraryError,
        ChannelError,
        EndpointError,
        OSError,
    ) as e:
        log.error("%s", e)
        return 2
    thread = start_thread(loop.run, "device-loop")
    start_call(loop.vram.pins.restore, "wooly-pins")
    try:
        if args.standalone:
            announce(loop.runtime.facts(), urls(token, settings.advertised(bound)), as_json=args.json)
            run(serve_standalone(settings, loop))
        else:
            run(serve(settings, loop, bound, thread.is_alive))
    finally:
        loop.stop()
        thread.join(5)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wooly_executor", description="Serve one device to Wooly clients.")
    parser.add_argument(
        "--standalone",
        action="store_true",
        help="run without a control plane, and open a session for each client that has the token",
    )
    parser.add_argument("--listen", help="comma separated endpoints (unix:///path, tcp://host:port, tls://host:port)")
    parser.add_argument(
        "--token", default="", help="the token (with --standalone); other users of this machine can see it"
    )
    parser.add_argument("--json", action="store_true", help="print the addresses as JSON (with --standalone)")
    parser.add_argument(
        "--opaque-kernels", action="store_true", help="allow kernels that cannot be checked (with --standalone)"
    )
    parser.add_argument("--runtime", choices=RUNTIMES)
    return parser


def _read_settings() -> ExecutorSettings:
    """Read the settings from the environment, and make the state folder private.

    Raises:
        _CannotStartError: a setting is invalid.
        OSError: the state folder cannot be made.
    """
    try:
        others, warnings = translated(os.environ, EXECUTOR)
        os.environ.update(others)
        settings = ExecutorSettings()
    except ValidationError as e:
        raise _CannotStartError(*complaints(e)) from e
    except ValueError as e:
        raise _CannotStartError(str(e)) from e
    for text in warnings:
        log.warning("%s", text)
    keep_private(settings.state_dir)
    return settings


def _prepare_runtime(settings: ExecutorSettings, name: str) -> Runtime:
    """Create the runtime `name`, load the extension libraries, and set the limits of work per call.

    Raises:
        MissingDriverError: the runtime cannot run on this machine.
        ExtensionLibraryError: an extension library cannot be loaded.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or min(torch.get_num_threads(), host.cores())))
    runtime = make_runtime(name, settings.state_dir, settings.device)
    key = "CPU" if runtime.device.host else "CUDA"
    laws, stateless = frozenset(EXTENSION_LAWS), settings.without_state()
    extensions.load(settings.extension_libraries(), device_key=key, laws=laws, stateless=stateless)
    runtime.bounds = Bounds(
        default_limits(
            host=runtime.device.host,
            cores=torch.get_num_threads(),
            elements=settings.max_elements,
            flops=settings.max_flops,
        )
    )
    if isinstance(runtime, PlanRuntime):
        runtime.kernel_s = settings.kernel_s
    if isinstance(runtime, GpuRuntime) and not settings.graphs:
        runtime.leave_out_graphs()
    if isinstance(runtime, GpuRuntime):
        runtime.profiles = settings.core_profiles
    return runtime


def _bound_memory(nbytes: int) -> None:
    """Keep the memory of this process within `nbytes` bytes, and within what other processes leave of the machine."""

    def keep_bounding() -> None:
        while True:
            time.sleep(host.BOUND_S)
            with contextlib.suppress(MemoryError):  # of the reading itself
                host.bound(nbytes)

    host.bound(nbytes)
    start_thread(keep_bounding, "memory-bound")


def _make_loop(settings: ExecutorSettings, runtime: Runtime) -> DeviceLoop:
    """Create the device loop: how it dispatches, swaps, compiles and limits, by the settings."""
    dispatch = Dispatch(
        fifo=settings.dispatch == "fifo",
        undeclared_permille=10 * settings.undeclared_percent,
        withheld_permille=10 * settings.withheld_percent,
    )
    tiers = None
    if (
        isinstance(runtime, PlanRuntime) and settings.plans
    ):  # on a GPU, the time of a run is known only after the next has begun
        tiers = Tiers(exact=runtime.exact, trials=settings.plan_trials and runtime.device.host)
    memory = settings.device_memory(runtime.capacity() if isinstance(runtime, GpuRuntime) else None)
    taken, pace = 0, None
    if runtime.device.host:  # a GPU measures its own work with events
        keep_freed(memory)
        taken, pace = memory, settings.paced()
        _bound_memory(settings.host_memory)
    loop = DeviceLoop(
        runtime,
        memory,
        dispatch,
        settings.swap(taken),
        tiers,
        pace,
        Collector(give_back=give_back if runtime.device.host else lambda: None),
        settings.stranger_limits(),
        settings.limits(),
        settings.pinned_files(),
        settings.checkpoint_files(),
        settings.peers_ca,
        failed=_device_failed,
    )
    loop.vram.overcommit_percent = settings.overcommit_percent
    loop.server.busy = BusyWait(settings.busy_wait_us * 1000)
    return loop
