"""The loop in the one thread that owns the device: it takes in events and launches what the dispatch core decides.

This file connects the parts of an executor and knows their order: `intake` handles what happens to sessions, `launching` runs
programs, `vram` arranges memory. Other threads use `call` to run functions in the loop.
"""

from __future__ import annotations

import functools
import logging
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import torch
from wooly_bus.channel import (
    Acceptor,
    ChannelServer,
    Connection,
    Endpoint,
    StrangerLimits,
)
from wooly_wis.frames import WRITE_HEAD, Kind

from wooly_executor.answers import Answers
from wooly_executor.billing.busy_time import BusyTime
from wooly_executor.billing.core_speed import CoreSpeed
from wooly_executor.billing.usage import UsageBook, UsageDelta
from wooly_executor.checkpoints.cuts import Cuts
from wooly_executor.checkpoints.files import Checkpoints
from wooly_executor.collectives.service import Collectives
from wooly_executor.collector import Collector
from wooly_executor.connection_admission import ConnectionAdmission, refusal
from wooly_executor.decoding import Decoders
from wooly_executor.dispatch import Dispatch
from wooly_executor.errors import ContextLostError, LoopEndedError
from wooly_executor.frames import awaited
from wooly_executor.host_account import HostLimits
from wooly_executor.intake import Intake
from wooly_executor.interpreter import Interpreter
from wooly_executor.launching import Launcher
from wooly_executor.plans.tiers import Tiers
from wooly_executor.post import Calls, Post
from wooly_executor.processing import Processing
from wooly_executor.programs import ProgramStore
from wooly_executor.runs import Runs
from wooly_executor.runtime.protocol import Runtime
from wooly_executor.session import Session
from wooly_executor.sessions import STOPPING, Sessions
from wooly_executor.upload_targets import UploadTargets
from wooly_executor.vram import SwapSettings, Vram
from wooly_executor.weights.pinned_files import PinnedFiles

log = logging.getLogger("wooly.executor")
T = TypeVar("T")


class DeviceLoop:
    """The device loop. It runs until `stop`.

    Args:
        runtime: runs programs.
        memory: bytes of device memory for sessions; None: all memory of the device.
        dispatch: orders the runs.
        swap: settings of swapping.
        tiers: decides how programs run; None: all programs run at tier 0.
        pace: measures the speed of a core; None: all launches are priced at full speed.
        collector: collects garbage while the device is idle; None: no collector.
        strangers: limits of connections that have not sent a valid hello.
        limits: limits of the host memory that sessions use.
        pinned: where pinned weights are saved; None: nowhere.
        checkpoints: where cuts of sessions are stored; None: nowhere.
        peers_ca: certificate authorities of other executors; None: those of the system.
        failed: called first with the error if `run` fails.
        ended: called when `run` has ended.

    Attributes:
        sessions: the open sessions; use them in the device's thread only.
        lost: why the device can serve no session any more; empty while it can.
        usage: measures what sessions use.
        busy: counts how long the device has worked.
    """

    def __init__(
        self,
        runtime: Runtime,
        memory: int | None = None,
        dispatch: Dispatch | None = None,
        swap: SwapSettings | None = None,
        tiers: Tiers | None = None,
        pace: CoreSpeed | None = None,
        collector: Collector | None = None,
        strangers: StrangerLimits | None = None,
        limits: HostLimits | None = None,
        pinned: PinnedFiles | None = None,
        checkpoints: Checkpoints | None = None,
        peers_ca: Path | None = None,
        *,
        failed: Callable[[BaseException], None] | None = None,
        ended: Callable[[], object] | None = None,
    ) -> None:
        self.runtime, self.tiers, self.pace, self._collector = runtime, tiers, pace, collector
        self._on_failed, self._on_ended = failed, ended
        limits = limits or HostLimits()
        self.lost = ""
        self._stopping = threading.Event()
        self.server = server = ChannelServer(
            {int(Kind.WRITE): WRITE_HEAD.size}, self._sink, fatal=(ContextLostError,), asks=(Kind.READ, Kind.SYNC)
        )
        self.admission = ConnectionAdmission()
        self.acceptor = Acceptor(self.admission.check, refusal, server.enter, hello=int(Kind.HELLO), limits=strangers)
        self._calls, post = Calls(server.wake), Post()
        self.dispatch = dispatch = dispatch or Dispatch()
        self.memory = memory or int(runtime.facts()["total_memory"])
        self.vram = vram = Vram(
            self.memory,
            dispatch,
            swap or SwapSettings(),
            self._calls.call,
            self._calls.tell,
            post,
            device=runtime.device,
            settle=runtime.settle,
            pinned=pinned,
        )
        self.store = ProgramStore(runtime, limits.programs, None if tiers is None else tiers.forget)
        self.decoders = Decoders(limits.decode_s)
        self.usage = UsageBook()
        self._answers = Answers(server, runtime.device, post, limits, vram.changed)
        self.cuts = Cuts(vram, runtime.device, self._calls.tell, post, runtime.settle, checkpoints, limits.checkpoints)
        self.runs = Runs(runtime, vram)
        self.collectives = Collectives(
            vram,
            self.runs,
            runtime.device,
            self._calls.tell,
            post,
            lambda session_id: self.sessions.get(session_id),
            lambda session_id, why: self.sessions.close(session_id, why, passing=True),
            most=limits.session // 2,
            tls_ca=peers_ca,
        )
        self.sessions = Sessions(
            runtime,
            tiers,
            vram,
            self.cuts,
            self.collectives,
            dispatch,
            self.store,
            self.usage,
            self.admission,
            self._answers,
            post,
            server,
            limits,
        )
        self._upload_targets = UploadTargets(runtime.device, vram, self.runs)
        self.busy = BusyTime()
        self.processing = Processing(
            self.sessions, self.runs, vram, self._answers, self.busy, self.cuts, self.collectives
        )
        interpreter = Interpreter(
            self.sessions,
            self.processing,
            vram,
            self.cuts,
            self.collectives,
            dispatch,
            self.store,
            self.decoders,
            self._answers,
            post,
            self._calls,
            pace,
        )
        activity = self.decoders.activity
        self.intake = Intake(server, self.sessions, interpreter, self._answers, post, activity, dispatch)
        self.launcher = Launcher(
            runtime,
            dispatch,
            self.runs,
            vram,
            interpreter,
            self._answers,
            self.intake,
            self._calls,
            self.decoders,
            pace,
            collector,
            self.busy,
        )

        self._timeouts = [vram.timeout, self._answers.timeout, self.intake.timeout, self.collectives.timeout]
        if collector is not None:
            self._timeouts.append(collector.timeout)

    # -- from other threads ------------------------------------------------------------------------------------------

    def listen(self, endpoint: Endpoint, tls: ssl.SSLContext | None = None) -> Endpoint:
        """Listen for channels. Call it before `run`."""
        return self.acceptor.listen(endpoint, tls)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in the device's thread, even if the caller no longer waits for the result.

        After the end of `run`, the future fails with `LoopEndedError`.
        """
        return self._calls.call(function)

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()
        self.server.wake()

    # -- in the device's thread --------------------------------------------------------------------------------------

    def take_usage(self) -> list[UsageDelta]:
        """Usage of all sessions since the last call. Call it in the device's thread."""
        self.launcher.workers.look()
        return self.usage.take(self.dispatch.priority_of, self.vram.clock())

    def run(self) -> None:
        """Serve until `stop` is called or an error occurs. On an error, `failed` and the waiting clients get the error before
        this returns.
        """
        try:
            with torch.inference_mode():
                self._serve()
        except BaseException as e:
            code = e.code if isinstance(e, ContextLostError) else LoopEndedError.code
            self.lost = str(e) if isinstance(e, ContextLostError) else f"the executor failed: {type(e).__name__}: {e}"
            if self._on_failed is not None:
                self._on_failed(e)
            for session in self.sessions.all():
                self._attempt(self._report_loss, session, code)
            self._attempt(self._answers.flush)
        for session in self.sessions.all():
            self._attempt(functools.partial(self.sessions.close, session.id, self.lost or STOPPING, passing=True))
        self._calls.end(self.lost or STOPPING)
        for ending in (
            self.vram.stop,
            self.cuts.stop,
            self.decoders.stop,
            self.acceptor.close,
            self.server.close,
            self._report_end,
        ):
            self._attempt(ending)

    def _attempt(self, step: Callable[..., object], *args: object) -> None:
        """Do one step of the shutdown. An error in one step must not prevent the next steps."""
        try:
            step(*args)
        except BaseException:
            log.exception("one step of the shutdown of the device's thread failed; the other steps continue")

    def _report_end(self) -> None:
        if self._on_ended is not None:
            self._on_ended()

    def _report_loss(self, session: Session, code: str) -> None:
        """Answer the frames that a client waits for with the reason why its session cannot go on."""
        conn = session.conn
        if conn is not None and not conn.closed:
            for frame in session.flow.inbox.frames:
                if not frame.refused and awaited(frame):
                    self._answers.refuse(conn, frame, code, self.lost)

    def _serve(self) -> None:
        self.begin()
        while not self._stopping.is_set():
            self.turn()

    def begin(self) -> None:
        """Make this thread the device's thread, and accept clients."""
        self.launcher.workers.attach()
        if self._collector is not None:
            self._collector.begin()
        if self.pace is not None:
            self.pace.begin()
        self.acceptor.start()
        self.runtime.device.attach()

    def turn(self) -> None:
        """Wait until something happens, handle it, and run all launches that the core decides meanwhile."""
        dispatch, launcher, intake = self.dispatch, self.launcher, self.intake
        intake.poll(0 if self._busy() else self._timeout())
        self._run_calls()
        if dispatch.state.withheld_until:
            dispatch.end_withholding()
        if dispatch.launch is None and self._collector is not None:
            self._collector.rest(alone=not len(self.sessions))
        while dispatch.launch is not None and not self._stopping.is_set():
            launcher.launch()
            intake.settle()
            self._run_calls()

    def _busy(self) -> bool:
        """Whether there is work to do now."""
        dispatch = self.dispatch
        return (
            dispatch.launch is not None
            or bool(dispatch.wanted)
            or self.intake.posted
            or self.vram.due
            or self.collectives.due
            or not self._calls.empty()
        )

    def _timeout(self) -> float | None:
        """Seconds until there may be work without a new event. None: only an event can bring work."""
        found = self.dispatch.withheld_s() if self.dispatch.state.withheld_until else None
        for timeout in self._timeouts:
            t = timeout()
            if t is not None and (found is None or t < found):
                found = t
        return found

    def _run_calls(self) -> None:
        calls, vram, wanted = self._calls, self.vram, self.dispatch.wanted
        if not calls.empty():
            self._run_queued()
        if self.collectives.due:
            self.collectives.expire()
            self.intake.settle()
        while wanted:
            vram.ask(wanted.popleft())
        if vram.due or vram.timeout() == 0:
            vram.arrange()
            self.intake.settle()

    def _run_queued(self) -> None:
        """Run the functions that other threads have sent."""
        calls, settle = self._calls, self.intake.settle
        while not calls.empty():
            calls.run_one()
            settle()

    def _sink(self, conn: Connection, kind: int, prefix: bytes, nbytes: int) -> memoryview | None:
        return self._upload_targets.sink(conn, prefix, nbytes)
