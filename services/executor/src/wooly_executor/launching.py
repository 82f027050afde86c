"""Runs what the dispatch core decides, piece by piece, and bills it. The device loop's thread owns this module."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from wooly_bus.channel import Connection
from wooly_wis.frames import unpack_run

from wooly_executor.answers import Answers
from wooly_executor.billing.busy_time import BusyTime
from wooly_executor.billing.core_speed import FASTEST, FULL, CoreSpeed
from wooly_executor.billing.cores import WorkerClock
from wooly_executor.billing.pricing import PriceBook
from wooly_executor.collector import Collector
from wooly_executor.decoding import Decoders, Decoding
from wooly_executor.dispatch import Dispatch
from wooly_executor.errors import ContextLostError
from wooly_executor.estimates import Cut
from wooly_executor.flow import Signal, note
from wooly_executor.frames import Frame
from wooly_executor.intake import Intake
from wooly_executor.interpreter import Interpreter
from wooly_executor.post import Calls
from wooly_executor.runs import Runs
from wooly_executor.runtime.prepared import Combination
from wooly_executor.runtime.protocol import Execution, Runtime
from wooly_executor.session import Session
from wooly_executor.vram import Vram

#: Size, in bytes, of a RUN frame from which looking up and freeing its buffers counts as device time, because it has many.
MANY_BUFFERS = 16 << 10
#: Maximum device time of earlier work in flight on a GPU, in ns, while the host prepares the next launch. It is less where the
#: window of the class in flight is smaller.
AHEAD_NS = 2_000_000
#: Members of enumerations on the way of every run: looked up on its class, a member costs as much as a call.
_RUN_BEGUN = Signal.RUN_BEGUN
_RUN_ENDED = Signal.RUN_ENDED


class Launcher:
    """Carries out launches.

    Args:
        runtime: runs programs.
        dispatch: decides what runs next.
        runs: begins and ends programs.
        vram: the device's memory.
        interpreter: continues sessions whose runs have ended.
        answers: queued answers; they are sent after each launch.
        intake: handles frames that have arrived.
        calls: functions of other threads; they run between launches.
        decoders: combine the steps of programs that run often, outside this thread.
        pace: measures the speed of a core; None: full speed.
        collector: collects garbage while the device is idle; None: no collector.
        busy: counts the device time of all launches.

    Attributes:
        occupied: the session that runs now, and its start by `time.perf_counter_ns`; None: no session runs.
        prices: mean prices of known programs.
        workers: measures the CPU time of the library's worker threads.
    """

    def __init__(
        self,
        runtime: Runtime,
        dispatch: Dispatch,
        runs: Runs,
        vram: Vram,
        interpreter: Interpreter,
        answers: Answers,
        intake: Intake,
        calls: Calls,
        decoders: Decoders,
        pace: CoreSpeed | None,
        collector: Collector | None,
        busy: BusyTime,
    ) -> None:
        self._runtime, self._dispatch, self._runs, self._vram = runtime, dispatch, runs, vram
        self._interpreter, self._answers, self._intake, self._calls = interpreter, answers, intake, calls
        self._decoders, self._activity = decoders, decoders.activity
        self._pace, self._collector = pace, collector
        self._on_host = runtime.device.host
        runtime.defers = self._on_host  # graphs of a GPU are captured from combined steps, in this thread
        self._busy = busy
        self.occupied: tuple[str, int] | None = None
        self.prices = PriceBook()
        self.workers = WorkerClock()

    def launch(self) -> None:
        """Carry out the core's decision. Frames that arrived meanwhile are handled before the core decides again."""
        dispatch, intake, runtime = self._dispatch, self._intake, self._runtime
        launch = dispatch.launch
        pieces, gpu_ns, core_ns, stopped, left = dispatch.take(), 0, 0, None, 0
        if launch is not None:
            self._activity.priority = launch.priority
            left = len(pieces)
        for piece in pieces:
            session, frame, first, end = piece
            left -= 1
            if not left:
                dispatch.going = ""
            workers, beyond, used = self._workers_ns() if self._on_host else 0, runtime.extra_core_ns, session.used
            used.launches()
            took, last = self._run_piece(session, frame, first, end)
            self._answers.flush()  # before the bill: the client may wait
            core_took = took + runtime.extra_core_ns - beyond
            if self._on_host:
                core_took += self._workers_ns() - workers
            now = time.perf_counter_ns()
            self._busy.add(took, now)
            used.launched(took, core_took, self._vram.clock(), self._pace_of(session, frame, last, core_took))
            if self._pace is not None:
                self._pace.worked(took)
            running = frame.running
            if running is not None and running.prepared.later:
                self._combine(session, running.prepared.later)
            gpu_ns += took
            core_ns += core_took
            if now - intake.polled_ns > dispatch.patience_ns():
                intake.poll()
            if last < end or (left and self._stops(session)):
                stopped = piece, last
                break
        if self._collector is not None:
            self._collector.worked()
        if left:  # stopped between two frames: the session may be preempted, as after the last one
            dispatch.going = ""
            self._vram.run_ended()
        dispatch.done(gpu_ns, stopped, core_ns)

    def _stops(self, session: Session) -> bool:
        """Whether a launch stops between two frames of a session: somebody else waits, or the session has ended."""
        return (
            self._dispatch.others_wait()
            or session.conn is None
            or not self._calls.empty()
            or self._vram.due
            or self._vram.preempting
        )

    def _combine(self, session: Session, later: list[Combination]) -> None:
        """Let a decoder combine the steps of a program. The session whose run is the first of many pays for it."""
        priority = self._dispatch.priority_of(session.id)
        for combination in later:
            self._decoders.submit(
                Decoding(
                    session.tenant or session.id,
                    priority,
                    0,
                    functools.partial(_in_inference_mode, combination.make),
                    functools.partial(self._combined_elsewhere, session, combination),
                )
            )
        later.clear()

    def _combined_elsewhere(
        self, session: Session, combination: Combination, made: Any, error: Exception | None, core_ns: int
    ) -> None:
        def take() -> None:
            session.used.decoded(core_ns, self._interpreter.ppm())
            if error is None:  # otherwise the program keeps its single steps
                combination.take(made)

        self._calls.call(take)

    def _workers_ns(self) -> int:
        """CPU time of the library's threads, which are cores of the device if the device is the CPU."""
        workers = self.workers
        return workers.read() if workers.any else 0

    def running_s(self, session_id: str) -> float:
        """Seconds for which a session has occupied the device without a poll; 0: the session does not run. Any thread may call
        this.
        """
        occupied = self.occupied
        if occupied is None or occupied[0] != session_id:
            return 0.0
        return (time.perf_counter_ns() - occupied[1]) / 1e9

    def _pace_of(self, session: Session, frame: Frame, last: int, core_ns: int) -> int:
        """The pace at which a launch is priced, in millionths: the measured pace, corrected to the mean price of such runs."""
        running, kernels = frame.running, frame.cut.kernels
        if self._pace is None:
            return FULL
        if running is None or core_ns <= 0:
            return self._pace.ppm
        running.core_ns += core_ns
        took = core_ns * self._pace.ppm // FULL
        running.paced_ns += took
        mean = self.prices.of(session.tenant, running.ready.digest, running.prepared)
        whole = sum(kernels)
        part = whole if last == len(kernels) else sum(kernels[:last])
        price = mean.price(running.paced_ns, running.core_ns, part, whole)
        piece = max(price - running.priced_ns, 0)
        running.priced_ns += piece
        if last == len(kernels) and running.execution.outcome.failed_at is None:
            mean.ran(running.paced_ns, running.core_ns)
        return min(max(self.prices.bill(session.tenant, took, piece) * FULL // core_ns, 1), FASTEST)

    def _run_piece(self, session: Session, frame: Frame, first: int, last: int) -> tuple[int, int]:
        """Run some kernels of a frame, until a session of a higher class arrives.

        Returns:
            Their device time in ns, and the first kernel that did not run.
        """
        conn = session.conn
        if conn is None or conn.closed or frame.ended:
            return 0, last
        gpu_ns = beside_ns = 0
        many = frame.nbytes > MANY_BUFFERS
        since = time.perf_counter_ns() if many else 0
        try:
            if not first:
                if session.spans is not None and session.spans.fresh:
                    frame.begun_ns = time.time_ns()
                note(session.flow, _RUN_BEGUN)
                self._vram.begun(session, frame)
                frame.running = self._runs.begin(session, unpack_run(frame.payload), frame.seq)
            if many:
                beside_ns = time.perf_counter_ns() - since
            if frame.running is not None:
                running = frame.running
                self.occupied = session.id, time.perf_counter_ns()
                times = self._advance(conn, running.execution, frame.cut, first, last)
                self.occupied = None
                gpu_ns = sum(times)
                running.gpu_ns += gpu_ns
                if conn.closed:
                    return gpu_ns + beside_ns, last
                last = first + len(times)
                if running.execution.outcome.failed_at is None and not running.measured:
                    running.ready.observe(frame.cut, first, times, running.execution.host_bound[first:last])
                    if running.trial is not None and last == len(frame.cut.kernels):
                        running.trial.ran(running.prepared, running.gpu_ns)
        except ContextLostError:
            raise
        except Exception as e:
            frame.error, self.occupied = e, None
            if many and not beside_ns:
                beside_ns = time.perf_counter_ns() - since
            if frame.running is not None:
                self._runs.abandon(session, frame.running)
                frame.running = None
        if last == len(frame.cut.kernels) or frame.error is not None:
            since = time.perf_counter_ns() if many else 0
            self._interpreter.go_on(session, _RUN_ENDED)
            self._vram.run_ended()
            if many:
                beside_ns += time.perf_counter_ns() - since
        return gpu_ns + beside_ns, last

    def _advance(self, conn: Connection, execution: Execution, cut: Cut, first: int, last: int) -> list[int]:
        """Run kernels `first` to `last` - 1, or up to an edge at which a higher class waits. Returns the time of each kernel in
        ns.

        The launcher polls for frames at the edges, as often as the class in flight requires.
        """
        dispatch, intake = self._dispatch, self._intake
        patience = dispatch.patience_ns()
        if last - first == 1:
            return execution.advance(cut.edges[first:last], min(patience, AHEAD_NS))
        times: list[int] = []
        begin, looked, ahead = first, intake.polled_ns, min(patience, AHEAD_NS)
        for end in cut.ends.get((first, last, patience)) or cut.turns(first, last, patience):
            times += execution.advance(cut.edges[begin:end], ahead)
            begin = end
            if begin < last and (now := time.perf_counter_ns()) - looked > patience:
                looked = now
                if intake.waiting:
                    intake.poll()
                    if dispatch.should_stop() or conn.closed:
                        break
                if not self._calls.empty() or self._vram.due:
                    break
        return times


def _in_inference_mode(make: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return make()
