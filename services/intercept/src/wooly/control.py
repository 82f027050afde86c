"""The client's side of a session: find the controller, open the session, renew its lease, close it."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import json
import logging
import os
import socket
import ssl
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wooly_bus import contracts
from wooly_bus.access import Access
from wooly_bus.contract_types import Q, R, Rpc
from wooly_bus.errors import BusConnectError, BusError, NoResponderError, RefusedError, shown
from wooly_bus.rpc import ControlClient
from wooly_bus.supervision import start_call, start_thread
from wooly_wis.messages import (
    ClientFacts,
    CloseSessionRequest,
    DirectSession,
    ExplainProgramRequest,
    GangPlace,
    GpusRequest,
    GpuState,
    HibernateSessionRequest,
    JitMode,
    NodesReply,
    NodesRequest,
    OpenSessionReply,
    OpenSessionRequest,
    PeerSessionRequest,
    QueuePlace,
    RecoveryMode,
    RenewSessionReply,
    RenewSessionRequest,
    SessionPart,
    SteerSessionReply,
    SteerSessionRequest,
)
from wooly_wis.messages.sessions import MAX_NOTE

from wooly import recovery
from wooly.access import access_of
from wooly.departures import STAYS
from wooly.errors import WoolyError
from wooly.local_stack import local_stack, take
from wooly.settings import Settings
from wooly.turn import DATABASE_AWAY, Turn, outlast_database

if TYPE_CHECKING:
    from wooly.departures import Departures
    from wooly.traces import ClientTrace

log = logging.getLogger("wooly")
#: Maximum size, in bytes, of a program that `wooly disasm --passes` sends. In base64, the program must fit into one NATS message,
#: which has at most 1 MiB by default.
LARGEST_PROGRAM = 640 << 10
#: Minimum time, in seconds, for which a session that lost its executor waits for another one.
RECOVERY_S = 60.0
#: Maximum size, in bytes, of the compiler's decompressed answer.
LARGEST_TEXT = 256 << 20


class ControlError(WoolyError):
    """The controller cannot be reached, or it refuses a request. The message says what to do."""

    code = "wooly.control"


class Controller:
    """A connection to the controller.

    Args:
        there: URL of its NATS, or URL and credentials.
        ephemeral_stack: local stack that was started for this process; `close` stops it.
        reach: see Attributes.

    Attributes:
        access: URL and credentials of its NATS.
        reach: settings by which child processes find the controller, if they differ from the settings of this process.

    Raises:
        ControlError: no controller answers at this address.
    """

    def __init__(
        self, there: str | Access, ephemeral_stack: Any = None, reach: Mapping[str, Any] | None = None
    ) -> None:
        self.access = Access.of(there)
        self.reach = dict(reach or {})
        self.url = self.access.url
        self._stack = ephemeral_stack
        try:
            self._client = ControlClient(self.access)
        except BusConnectError as e:
            if isinstance(e.__cause__, ssl.SSLCertVerificationError):
                raise ControlError(
                    f"the controller's NATS has a certificate that is not trusted: {e} (set WOOLYAI_TLS_CA to a file with the "
                    "certificate authorities to trust)"
                ) from e
            raise ControlError(
                f"no controller answers: {e}. Start a local stack with `wooly up`, or set WOOLYAI_CONTROLLER_URL to the URL of "
                "your controller. If its NATS requires credentials, use the URL of its REST (https://…) and your API token "
                "(WOOLYAI_CREDENTIAL), or a .creds file (WOOLYAI_NATS_CREDS)"
            ) from e
        except BusError as e:
            raise ControlError(f"cannot get credentials for the controller: {e}") from e

    def ask(self, rpc: Rpc[Q, R], message: Q, timeout: float = 4.0) -> R:
        """Send a request to the router or another service, and return the reply.

        Raises:
            ControlError: the service refuses the request, or does not answer.
        """
        try:
            return self._client.request(rpc, message, timeout=timeout)
        except RefusedError as e:
            error = ControlError(f"the controller at {shown(self.url)} refuses: {e}")
            error.code, error.retryable = e.code, e.retryable
            raise error from e
        except NoResponderError as e:
            raise ControlError(
                f"NATS answers at {shown(self.url)}, but the service {rpc.service} is not connected to it; start it with "
                f"`wooly up`, or with `python -m wooly_{rpc.service}`"
            ) from e
        except BusError as e:
            raise ControlError(f"the controller at {shown(self.url)} does not answer: {e}") from e

    @property
    def ephemeral(self) -> bool:
        """Whether the controller was started for this process only, and stops when this process ends."""
        return self._stack is not None

    def nodes(self) -> NodesReply:
        """All executors that the controller knows."""
        return self.ask(contracts.ROUTER_NODE_LIST, NodesRequest())

    def gpus(self) -> list[GpuState]:
        """The state of every GPU and its sessions, from the scheduler.

        Raises:
            ControlError: the scheduler does not answer.
        """
        found: list[GpuState] = []
        while True:
            after = found[-1].executor_id if found else ""
            reply = self.ask(contracts.SCHEDULER_GPU_LIST, GpusRequest(after=after))
            found += reply.gpus
            if not reply.more:
                return found

    def steer(self, request: SteerSessionRequest) -> SteerSessionReply:
        """Change class, weight or state of a running session.

        Raises:
            ControlError: the session does not exist, the change is refused, or the scheduler does not answer.
        """
        return self.ask(contracts.SCHEDULER_SESSION_STEER, request)

    def passes(self, program: bytes, target: str, mode: JitMode) -> list[tuple[str, str]]:
        """The program after each pass of the compiler, as pairs of pass name and text.

        Raises:
            ControlError: the compiler does not answer, or it refuses the program.
        """
        if len(program) > LARGEST_PROGRAM:
            raise ControlError(
                f"the program has {len(program):,} bytes, but the compiler accepts at most {LARGEST_PROGRAM:,}; use "
                "`wooly disasm` without --passes"
            )
        request = ExplainProgramRequest(program=base64.b64encode(program).decode(), target=target, mode=mode)
        reply = self.ask(contracts.COMPILER_PROGRAM_EXPLAIN, request, timeout=120.0)
        packed = zlib.decompressobj()
        text = packed.decompress(base64.b64decode(reply.stages), LARGEST_TEXT)
        if packed.unconsumed_tail:
            raise ControlError(
                f"the compiler's answer has more than {LARGEST_TEXT:,} bytes; use `wooly disasm` without --passes"
            )
        return [(str(name), str(stage)) for name, stage in json.loads(text)]

    def close(self) -> None:
        """Close the connection, and the stack if it was started for this process."""
        self._client.close()
        if self._stack is not None:
            self._stack.stop()


#: A lease is renewed this often, so that a program learns within a tenth of the lease that its session has ended: its connection
#: may not show it (a cut link).
RENEWALS_PER_LEASE = 10
#: A failed renewal is tried again after 1/15 of the lease, so that one lost answer does not end the session.
RETRY_DIVISOR = 15
#: Maximum time, in seconds, that closing a session waits for spans that are being sent.
SPANS_TIMEOUT_S = 2.0
#: Number of attempts to tell the last note of a session when it is closed, and seconds between two of them.
NOTE_ATTEMPTS, NOTE_AGAIN_S = 4, 0.1
#: Maximum time, in seconds, to ask a router that does not answer whether a session is over, and the time between two questions.
OVER_S, OVER_AGAIN_S = 30.0, 0.25
#: Maximum number of characters of the reason with which a session ends.
MAX_REASON = 1024
#: Timeout for opening a session, in seconds. The router asks executors and writes to its database, which takes long on a busy
#: disk.
OPEN_TIMEOUT_S = 20.0


def connect(settings: Settings, *, start: bool = False) -> Controller:
    """Connect to the controller in the settings, or else to the local stack.

    Args:
        settings: the client's settings.
        start: if no local stack runs, start one for this process only.

    Raises:
        ControlError: no controller answers; the message says what to start.
    """
    if settings.executor_url:
        raise ControlError(
            "this needs a controller, and WOOLYAI_EXECUTOR_URL names an executor without one; unset WOOLYAI_EXECUTOR_URL to "
            "use a controller or the local stack"
        )
    if settings.controller_url:
        try:
            return Controller(access_of(settings))
        except BusError as e:
            error = ControlError(str(e))
            if e.code == DATABASE_AWAY:
                error.code, error.retryable = e.code, e.retryable
            raise error from e
    begun = take()
    stack_module = local_stack()
    if stack_module is None:
        raise ControlError(
            "no controller is configured, and the local stack (wooly-local) is not installed; set WOOLYAI_CONTROLLER_URL to the "
            "URL of your controller"
        )
    running = None if begun is not None else stack_module.read_stack(settings.state_dir)
    if running is not None:
        return Controller(running.access(), reach=_reach(running))
    if not start:
        raise ControlError("no local stack is running; start one with `wooly up`")
    try:
        begun = begun or stack_module.begin_stack(None, ephemeral=True, gpus=settings.gpu_count)
        stack = begun.wait()
    except RuntimeError as e:
        raise ControlError(f"the local stack did not start: {e}") from e
    return Controller(stack.access(), stack, _reach(stack))


def _reach(stack: Any) -> dict[str, Any]:
    return {"controller_url": stack.nats_url, "nats_creds": stack.creds}


class OpenedSession:
    """An open session. A thread renews its lease.

    Attributes:
        session_id: id of the session.
        token: token for the session's data channels.
        parts: executor and endpoints of each device.
        tunnels: URL and credentials of NATS, for tunnels of this session.
        reach: see `Controller`.
        trace: spans of this process for this session.
        traced: whether the router keeps the session's trace.
        ephemeral: whether the controller stops when this process ends.
        recovery: whether the session goes on in another executor: off, auto, on.
        opens: what the client's hello asks for, to open the session; None, because the controller has opened it.
        controlled: whether a controller has the session, so that commands can show it.
        departures: does what the router asks the session for; None: the session cannot leave its executor.
        on_closed: called after the session is closed, before the connection to the controller is closed.
    """

    opens: DirectSession | None = None
    controlled = True
    departures: Departures | None = None

    def __init__(
        self,
        controller: Controller,
        opened: OpenSessionReply,
        trace: ClientTrace,
        request: OpenSessionRequest,
        credential: str = "",
        queue_s: float = 0.0,
    ) -> None:
        self.trace = trace
        self._credential = credential
        self.traced = bool(opened.trace_id) and opened.trace_id == trace.trace_id
        self.ephemeral = controller.ephemeral
        self.on_closed: Callable[[Controller], None] | None = None
        self.session_id = opened.session_id
        self.token = opened.token
        self.parts = opened.parts
        self.reach = controller.reach
        self.tunnels = _tunnels(controller.access, opened.credentials)
        self._controller = controller
        self._lease_s = opened.lease_s
        self._request, self._queue_s = request, queue_s
        self.recovery: RecoveryMode = opened.recovery
        self._closing = threading.Event()
        self._ends = False
        #: Set when nothing needs the session any more: after a loss, it does not wait for another executor.
        self._unneeded = threading.Event()
        #: Set while the lease may be renewed: not between the loss of the executor and the opening at another one.
        self._hosted = threading.Event()
        self._hosted.set()
        self._call_lost: Callable[[str], None] | None = None
        self._was_lost = ""
        self._recoveries = 0
        self._hibernates, self._cut = False, 0
        #: What the next renewal adds to the story of the session's task.
        self._note = ""
        self._lock = threading.Lock()
        self._sending: concurrent.futures.Future[None] | None = None
        self._thread = start_thread(self._keep, "wooly-lease")

    def is_over(self) -> bool:
        """Ask whether the session has ended at the router or at one of its executors. While no router answers, ask again."""
        request = RenewSessionRequest(session_id=self.session_id, token=self.token)
        until = time.monotonic() + OVER_S
        while not self._was_lost:
            try:
                self._controller.ask(contracts.ROUTER_SESSION_RENEW, request)
            except ControlError as e:
                if e.code in ("router.no_session", "router.executor_lost"):
                    return True
                if not (e.retryable or e.code == ControlError.code) or time.monotonic() >= until:
                    return False
            else:
                return False
            time.sleep(OVER_AGAIN_S)
        return True

    def when_lost(self, call: Callable[[str], None]) -> None:
        """Call `call` with the reason when the session ends unexpectedly, or now if it has ended.

        The session ends so if the router no longer has it, or if one of its executors was silent for the length of the lease. An
        executor answers renewals while it computes, so a silent executor is frozen. The thread that renews the lease makes the
        call.
        """
        with self._lock:
            self._call_lost, lost = call, self._was_lost
        if lost:
            call(lost)

    def recover(self, why: str, cut: int, *, leaves: bool) -> tuple[SessionPart, ...]:
        """Open the session at another executor. It waits in the queue if there is no room.

        Args:
            why: why the session leaves or left its own.
            cut: number of the checkpoint that the executor must have; 0: none.
            leaves: the session still has its executor, and was asked to leave it.

        Returns:
            The new parts.

        Raises:
            ControlError: no controller answers, the session cannot go on, it stays where it is, or `stop_recovering` was called.
                A session that hibernated still does.
        """
        self._hosted.clear()
        request = self._request.model_copy(update={"lost": why[:4096], "cut": cut, "leaves": leaves})
        try:
            opened = Turn(
                request,
                max(self._queue_s, RECOVERY_S),
                self._open_again,
                self._leave_queue,
                sleep=self._sleep_while_needed,
                place=QueuePlace(session_id=self.session_id, token=self.token),
            ).open()
        except BaseException as e:
            if self._hibernates or getattr(e, "code", "") == STAYS:
                self._hosted.set()
            raise
        self.parts, self._lease_s = opened.parts, opened.lease_s
        self.tunnels = _tunnels(self._controller.access, opened.credentials)
        self._recoveries += 1
        self._hibernates = False
        self._hosted.set()
        return self.parts

    def stop_recovering(self) -> None:
        """Let `recover` fail, now and later: the script has ended, and nothing waits for the results of its last work."""
        self._unneeded.set()

    def expect_end(self) -> None:
        """Say nothing of renewals that fail from now on: the connections to the session's executors close."""
        self._ends = True

    def _open_again(self, request: OpenSessionRequest) -> OpenSessionReply:
        self._sleep_while_needed(0.0)
        return self._controller.ask(contracts.ROUTER_SESSION_OPEN, request, timeout=OPEN_TIMEOUT_S)

    def _sleep_while_needed(self, seconds: float) -> None:
        if self._unneeded.wait(seconds):
            error = ControlError("its script has ended, so the session does not go on in another executor")
            error.code = "wooly.ended"  # `Turn` does not ask again
            raise error

    def _leave_queue(self, place: CloseSessionRequest) -> None:
        """Leave the queue: a session that hibernated does so again, any other session ends."""
        if self._hibernates:
            self.hibernate(self._cut, "no device was free")
        else:
            self._controller.ask(contracts.ROUTER_SESSION_CLOSE, place, timeout=2.0)

    def hibernate(self, cut: int, why: str) -> None:
        """Tell the router that the session needs no executor.

        Args:
            cut: number of its checkpoint.
            why: the reason.

        Raises:
            ControlError: no controller answers, or the session cannot hibernate.
        """
        request = HibernateSessionRequest(session_id=self.session_id, token=self.token, cut=cut, reason=why[:4096])
        self._controller.ask(contracts.ROUTER_SESSION_HIBERNATE, request)
        self._recoveries += 1
        self._hibernates, self._cut = True, cut

    def peer_ticket(self, executor_id: str, peer: str, peer_executor_id: str) -> str:
        """The router's ticket with which an executor of this session works with the executor of another one.

        Args:
            executor_id: the executor of this session.
            peer: id of the other session.
            peer_executor_id: its executor.

        Raises:
            ControlError: no controller answers, or it refuses.
        """
        request = PeerSessionRequest(
            session_id=self.session_id,
            token=self.token,
            executor_id=executor_id,
            peer=peer,
            peer_executor_id=peer_executor_id,
        )
        return self._controller.ask(contracts.ROUTER_SESSION_PEER, request, timeout=OPEN_TIMEOUT_S).ticket

    def note(self, line: str) -> None:
        """Add a line to the story of the session's task, now or with the next renewal of the lease."""
        self._note = line[:MAX_NOTE]
        with contextlib.suppress(ControlError):
            self._ask_renewal(timeout=2.0)

    def _tell_rest(self) -> None:
        """Tell what no renewal has told: the note, and how the session went on elsewhere. The router refuses it while it answers
        another renewal of this session.
        """
        for _ in range(NOTE_ATTEMPTS):
            if not self._note and (self.departures is None or self.departures.resumed is None):
                return
            try:
                self._ask_renewal()
            except ControlError as e:
                unanswered = e.code == ControlError.code
                if not (e.retryable or (unanswered and self._note)):
                    return
                time.sleep(NOTE_AGAIN_S)

    def _ask_renewal(self, timeout: float = 4.0) -> RenewSessionReply:
        request = self._renewal()
        reply = self._controller.ask(contracts.ROUTER_SESSION_RENEW, request, timeout=timeout)
        if self._note == request.note:
            self._note = ""
        if request.resumed is not None and self.departures is not None:
            self.departures.told_resumed()
        return reply

    def _keep(self) -> None:
        over = self._keep_on()
        while over:
            if self._hosted.is_set():  # else the thread that recovers the session knows already
                self._hosted.clear()
                with self._lock:
                    self._was_lost, call = over, self._call_lost
                if call is not None:
                    call(over)
            if not self._request.recovers:
                return
            while not self._hosted.wait(1.0):
                if self._closing.is_set():
                    return
            self._was_lost = ""
            over = self._keep_on()

    def _keep_on(self) -> str:
        try:
            return self._renew()
        except Exception as e:
            log.exception("session %s: the thread that renews the lease failed, so the session ends", self.session_id)
            return f"the thread that renews the session's lease failed: {type(e).__name__}: {e}"

    def _renew(self) -> str:
        """Renew the lease until the session ends. This thread waits only for the router's answers.

        Returns:
            The reason why the session ended; empty if `close` ended it.
        """
        renewed, pause, told = time.monotonic(), self._lease_s / RENEWALS_PER_LEASE, ""
        while not self._closing.wait(pause):
            if not self._hosted.is_set():
                return "the session's executor is lost"
            asked, pause = time.monotonic(), self._lease_s / RENEWALS_PER_LEASE
            recoveries = self._recoveries
            try:
                reply = self._ask_renewal()
                renewed, told = time.monotonic(), ""
                if self.departures is not None and recoveries == self._recoveries:
                    self.departures.heed(reply)
                self._begin_sending()
            except ControlError as e:
                if self._closing.is_set():
                    return ""
                if self._ends:
                    continue
                if recoveries != self._recoveries or not self._hosted.is_set():
                    renewed = time.monotonic()
                    continue  # this answer is about an executor that the session has left
                if told != str(e):  # else each attempt of a long time would say so
                    told = str(e)
                    log.warning("a renewal of the session's lease failed and is tried again: %s", e)
                silent = e.code == "router.executor_lost" and time.monotonic() - renewed >= self._lease_s
                if silent or e.code == "router.no_session":
                    return str(e)
                pause = self._lease_s / RETRY_DIVISOR
            pause = max(asked + pause - time.monotonic(), 0.01)
        return ""

    def _renewal(self) -> RenewSessionRequest:
        """The next renewal, with what the router should know."""
        request = RenewSessionRequest(session_id=self.session_id, token=self.token, note=self._note)
        departures = self.departures
        if departures is None:
            return request
        stays = departures.take_stays()[:4096]
        told = {
            "stays": stays,
            "refused": departures.asked if stays else None,
            "recovers": departures.recovers,
            "resumed": departures.resumed,
        }
        return request.model_copy(update=told)

    def _begin_sending(self) -> None:
        """Start to send spans in another thread, so that the next renewal does not wait for them."""
        if self.traced and (self._sending is None or self._sending.done()):
            self._sending = start_call(self._send_spans, "wooly-spans")

    def _send_spans(self) -> None:
        if self.traced:
            self.trace.send(self._controller, self.session_id, self._credential)

    def close(self, why: str = "") -> bool:
        """Close the session and the connection to the controller. Returns whether the controller knows the end.

        Args:
            why: the failure that ends it; empty: it ends normally.
        """
        if self._closing.is_set():
            return True
        self._closing.set()
        self._tell_rest()
        request = CloseSessionRequest(session_id=self.session_id, token=self.token, reason=why[:MAX_REASON])
        self.trace.end()
        if self._sending is None or concurrent.futures.wait((self._sending,), SPANS_TIMEOUT_S).done:
            self._send_spans()
        try:
            with self.trace.current():
                self._controller.ask(contracts.ROUTER_SESSION_CLOSE, request, timeout=2.0)
        except ControlError as e:
            log.info("the router did not confirm that the session is closed; its executor tells it later: %s", e)
            return False
        else:
            if self.on_closed is not None:
                self.on_closed(self._controller)
            return True
        finally:
            self._controller.close()
            self.trace.flush()


def _tunnels(access: Access, credentials: str) -> Access:
    if not credentials:
        return access
    from wooly_bus.credentials import Credentials

    held = Credentials.parse(credentials)
    return replace(access, credentials=lambda: held)


def open_session(settings: Settings, near: str = "", gang: GangPlace | None = None) -> OpenedSession:
    """Open a session at the controller. If no controller is configured or running, start a local stack for this process.

    On a full cluster, this function waits until the session's turn comes (`turn`). It also waits while the database of the
    controller is away.

    Args:
        settings: the client's settings.
        near: id of the executor to prefer; empty: none.
        gang: the rank that the session is; None: it is none.

    Raises:
        ControlError: no controller answers, or it refuses the session. The message says what to do.
        QueueTimeoutError: the session waited for `settings.queue_s` seconds.
    """
    from wooly.traces import ClientTrace  # imported here, because only sessions need OpenTelemetry

    trace = ClientTrace("session")
    try:
        with trace.step("find_controller"):
            controller = outlast_database(lambda: connect(settings, start=True), settings.queue_s)
        return _open_session(settings, near, controller, trace, gang)
    except BaseException as e:
        trace.end(type(e).__name__)
        trace.flush()
        raise


def _open_session(
    settings: Settings, near: str, controller: Controller, trace: ClientTrace, gang: GangPlace | None
) -> OpenedSession:
    request = OpenSessionRequest(
        tenant=settings.tenant,
        credential=settings.credential,
        priority=settings.priority,
        weight=settings.weight,
        service_ns=round(settings.service_ms * 1e6),
        objective_ns=round(settings.latency_objective_ms * 1e6),
        interval_ns=round(settings.interval_ms * 1e6),
        recovers=recovery.wanted(settings),
        asks_recovery="recovery" not in settings.model_fields_set,
        required_vram=settings.required_vram,
        gpu_count=settings.gpu_count,
        gpu_mode=settings.gpu_mode,
        node_groups=settings.node_groups,
        node=settings.node,
        near=near,
        swap=settings.swap_from_vram,
        dedup=settings.dedup,
        model=settings.model,
        gang=gang,
        client=ClientFacts(host=socket.gethostname(), pid=os.getpid(), program=" ".join(sys.argv[:1])),
    )
    try:
        with trace.step("open_session"):
            opened = Turn(
                request,
                settings.queue_s,
                lambda asked: controller.ask(contracts.ROUTER_SESSION_OPEN, asked, timeout=OPEN_TIMEOUT_S),
                lambda place: controller.ask(contracts.ROUTER_SESSION_CLOSE, place, timeout=2.0),
            ).open()
        trace.root.set_attribute("task_id", opened.session_id)
        return OpenedSession(controller, opened, trace, request, settings.credential, settings.queue_s)
    except BaseException:
        controller.close()
        raise
