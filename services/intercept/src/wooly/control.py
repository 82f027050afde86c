"""A session with the controller: find it, ask for a device, keep the lease, give it back."""

from __future__ import annotations

import base64
import concurrent.futures
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
from importlib.metadata import entry_points
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
    ExplainProgramRequest,
    GpusRequest,
    GpuState,
    JitMode,
    NodesReply,
    NodesRequest,
    OpenSessionReply,
    OpenSessionRequest,
    RenewSessionRequest,
    SteerSessionReply,
    SteerSessionRequest,
)

from wooly.access import access_of
from wooly.errors import WoolyError
from wooly.settings import Settings

if TYPE_CHECKING:
    from wooly.traces import ClientTrace

log = logging.getLogger("wooly")
LARGEST_PROGRAM = 640 << 10
LARGEST_TEXT = 256 << 20


class ControlError(WoolyError):
    """The controller cannot be reached or refuses; the message says what to do."""

    code = "wooly.control"


def local_stack() -> Any:
    """The module of the local stack, if it is installed here (it is an optional part of a client)."""
    for point in entry_points(group="wooly.local_stack"):
        return point.load()
    return None


class Controller:
    """A connection to the controller.

    Attributes:
        access: the way into its NATS.
        reach: settings by which other processes find it, where they are not this process's own.

    Raises:
        ControlError: there is none at that address.
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
                    f"the controller's NATS has a certificate that is not trusted: {e} (WOOLYAI_TLS_CA names the authorities "
                    "to trust)"
                ) from e
            raise ControlError(
                f"no controller answers: {e}. Start a local stack with `wooly up`, or point WOOLYAI_CONTROLLER_URL at "
                "your controller; where its NATS asks for credentials, name its REST (https://…) and your API token "
                "(WOOLYAI_CREDENTIAL), or a .creds file (WOOLYAI_NATS_CREDS)"
            ) from e
        except BusError as e:
            raise ControlError(f"there are no credentials to show to the controller: {e}") from e

    def ask(self, rpc: Rpc[Q, R], message: Q, timeout: float = 4.0) -> R:
        """Ask the router, or another service.

        Raises:
            ControlError: it refuses, or is not there.
        """
        try:
            return self._client.request(rpc, message, timeout=timeout)
        except RefusedError as e:
            error = ControlError(f"the controller at {shown(self.url)} refuses: {e}")
            error.code, error.retryable = e.code, e.retryable
            raise error from e
        except NoResponderError as e:
            raise ControlError(
                f"NATS answers at {shown(self.url)}, but no {rpc.service} is connected to it; start one with `wooly up`, or with "
                f"`python -m wooly_{rpc.service}`"
            ) from e
        except BusError as e:
            raise ControlError(f"the controller at {shown(self.url)} does not answer: {e}") from e

    @property
    def ephemeral(self) -> bool:
        """Whether it was started for this process, and ends with it."""
        return self._stack is not None

    def nodes(self) -> NodesReply:
        """All executors that the controller knows."""
        return self.ask(contracts.ROUTER_NODE_LIST, NodesRequest())

    def gpus(self) -> list[GpuState]:
        """What every GPU and session does, as the scheduler follows it.

        Raises:
            ControlError: there is no scheduler.
        """
        found: list[GpuState] = []
        while True:
            after = found[-1].executor_id if found else ""
            reply = self.ask(contracts.SCHEDULER_GPU_LIST, GpusRequest(after=after))
            found += reply.gpus
            if not reply.more:
                return found

    def steer(self, request: SteerSessionRequest) -> SteerSessionReply:
        """Treat a running session otherwise from now on.

        Raises:
            ControlError: there is no such session, it is refused, or there is no scheduler.
        """
        return self.ask(contracts.SCHEDULER_SESSION_STEER, request)

    def passes(self, program: bytes, target: str, mode: JitMode) -> list[tuple[str, str]]:
        """A program after every pass of the compiler: names of passes, and texts.

        Raises:
            ControlError: there is no compiler, or it refuses the program.
        """
        if len(program) > LARGEST_PROGRAM:
            raise ControlError(f"the program has {len(program):,} bytes, at most {LARGEST_PROGRAM:,} can be sent")
        request = ExplainProgramRequest(program=base64.b64encode(program).decode(), target=target, mode=mode)
        reply = self.ask(contracts.COMPILER_PROGRAM_EXPLAIN, request, timeout=120.0)
        packed = zlib.decompressobj()
        text = packed.decompress(base64.b64decode(reply.stages), LARGEST_TEXT)
        if packed.unconsumed_tail:
            raise ControlError(f"the compiler's answer has more than {LARGEST_TEXT:,} bytes")
        return [(str(name), str(stage)) for name, stage in json.loads(text)]

    def close(self) -> None:
        """Close the connection, and the stack if it was started for this process."""
        self._client.close()
        if self._stack is not None:
            self._stack.stop()


#: A renewal that failed is tried again after this part of the lease, so that one lost answer costs no session.
AGAIN = 12
#: Seconds that the end of a session waits for spans that are being sent.
SPANS_S = 2.0
#: Seconds in which a session is opened: the router asks others, and writes it down, which a busy disk may put off.
OPEN_S = 20.0
#: A stack for this process alone that was begun, and which nobody has waited for yet.
_begun: Any = None


def begin(settings: Settings) -> None:
    """Begin a stack for this process alone, if `connect` will have to start one: it comes up while torch is imported.

    What goes wrong is said by `connect`.
    """
    global _begun
    stack_module = None if settings.controller_url else local_stack()
    if stack_module is None or stack_module.read_stack(settings.state_dir) is not None:
        return
    try:
        _begun = stack_module.begin_stack(None, ephemeral=True, gpus=settings.gpu_count)
    except (RuntimeError, OSError):
        log.debug("no stack could be begun", exc_info=True)


def connect(settings: Settings, *, start: bool = False) -> Controller:
    """The controller that the settings name; else the local stack; else, with `start`, one for this process alone.

    Raises:
        ControlError: there is none; the message says what to start.
    """
    if settings.controller_url:
        try:
            return Controller(access_of(settings))
        except BusError as e:
            raise ControlError(str(e)) from e
    global _begun
    begun, _begun = _begun, None
    stack_module = local_stack()
    if stack_module is None:
        raise ControlError("no controller is configured; set WOOLYAI_CONTROLLER_URL to your controller's NATS")
    running = None if begun is not None else stack_module.read_stack(settings.state_dir)
    if running is not None:
        return Controller(running.access(), reach=_reach(running))
    if not start:  # `begin` is for those who do
        raise ControlError("no stack is running here; start one with `wooly up`")
    try:
        begun = begun or stack_module.begin_stack(None, ephemeral=True, gpus=settings.gpu_count)
        stack = begun.wait()
    except RuntimeError as e:
        raise ControlError(f"a local stack could not be started: {e}") from e
    return Controller(stack.access(), stack, _reach(stack))


def _reach(stack: Any) -> dict[str, Any]:
    return {"controller_url": stack.nats_url, "nats_creds": stack.creds}


class OpenedSession:
    """A session, kept alive by a thread that renews its lease.

    Attributes:
        session_id: name of the session.
        token: what the data channels want to see.
        parts: who serves each device, and where.
        tunnels: NATS, as this process opens tunnels through it.
        reach: see `Controller`.
        trace: this process's spans of it.
        traced: the controller keeps its trace.
        ephemeral: its controller ends with this process.
        on_closed: called when the session was given back, before the controller is left.
        on_lost: called, by the thread that renews, when the session is over: the router has it no more, or an executor of its was
            silent for as long as the lease. An executor that computes for long still answers; one that is frozen does not.
    """

    def __init__(
        self, controller: Controller, opened: OpenSessionReply, trace: ClientTrace, credential: str = ""
    ) -> None:
        self.trace = trace
        self._credential = credential
        self.traced = bool(opened.trace_id) and opened.trace_id == trace.trace_id
        self.ephemeral = controller.ephemeral
        self.on_lost: Callable[[str], None] | None = None
        self.on_closed: Callable[[Controller], None] | None = None
        self.session_id = opened.session_id
        self.token = opened.token
        self.parts = opened.parts
        self.reach = controller.reach
        self.tunnels = _tunnels(controller.access, opened.credentials)
        self._controller = controller
        self._lease_s = opened.lease_s
        self._closing = threading.Event()
        self._sending: concurrent.futures.Future[None] | None = None
        self._thread = start_thread(self._keep, "wooly-lease")

    def is_over(self) -> bool:
        """Whether the router, or an executor of the session, has it no more."""
        request = RenewSessionRequest(session_id=self.session_id, token=self.token)
        try:
            self._controller.ask(contracts.ROUTER_SESSION_RENEW, request)
        except ControlError as e:
            return e.code in ("router.no_session", "router.executor_lost")
        return False

    def _keep(self) -> None:
        try:
            over = self._renew()
        except Exception as e:
            over = f"its lease is renewed no more: {type(e).__name__}: {e}"
            log.exception("session %s: its lease is renewed no more", self.session_id)
        if over and self.on_lost is not None:
            self.on_lost(over)

    def _renew(self) -> str:
        """Renew the lease until the session is closed. This thread waits for the router's answers, and for nothing else.

        Returns:
            Why the session is over; empty if it was closed here.
        """
        request = RenewSessionRequest(session_id=self.session_id, token=self.token)
        renewed, pause = time.monotonic(), self._lease_s / 3
        while not self._closing.wait(pause):
            asked, pause = time.monotonic(), self._lease_s / 3
            try:
                self._controller.ask(contracts.ROUTER_SESSION_RENEW, request)
                renewed = time.monotonic()
                self._begin_sending()
            except ControlError as e:
                if self._closing.is_set():
                    return ""
                log.warning("the session's lease could not be renewed: %s", e)
                silent = e.code == "router.executor_lost" and time.monotonic() - renewed >= self._lease_s
                if silent or e.code == "router.no_session":
                    return str(e)
                pause = self._lease_s / AGAIN
            pause = max(asked + pause - time.monotonic(), 0.01)
        return ""

    def _begin_sending(self) -> None:
        """Have spans sent by another thread: the next renewal does not wait for them."""
        if self.traced and (self._sending is None or self._sending.done()):
            self._sending = start_call(self._send_spans, "wooly-spans")

    def _send_spans(self) -> None:
        if self.traced:
            self.trace.send(self._controller, self.session_id, self._credential)

    def close(self) -> None:
        """Give the session back."""
        if self._closing.is_set():
            return
        self._closing.set()
        request = CloseSessionRequest(session_id=self.session_id, token=self.token)
        self.trace.end()
        if self._sending is None or concurrent.futures.wait((self._sending,), SPANS_S).done:
            self._send_spans()
        try:
            with self.trace.current():
                self._controller.ask(contracts.ROUTER_SESSION_CLOSE, request, timeout=2.0)
        except ControlError as e:
            log.info("the session was not closed in order: %s", e)
        else:
            if self.on_closed is not None:
                self.on_closed(self._controller)
        finally:
            self._controller.close()
            self.trace.flush()


def _tunnels(access: Access, credentials: str) -> Access:
    if not credentials:
        return access
    from wooly_bus.credentials import Credentials

    held = Credentials.parse(credentials)
    return replace(access, credentials=lambda: held)


def open_session(settings: Settings) -> OpenedSession:
    """Ask the controller for a session, starting a local stack for this process if nothing else is there.

    Raises:
        ControlError: within five seconds, with what to start.
    """
    from wooly.traces import ClientTrace  # what it imports is only needed where there is a session

    trace = ClientTrace("session")
    try:
        with trace.step("find_controller"):
            controller = connect(settings, start=True)
        return _open_session(settings, controller, trace)
    except BaseException as e:
        trace.end(type(e).__name__)
        trace.flush()
        raise


def _open_session(settings: Settings, controller: Controller, trace: ClientTrace) -> OpenedSession:
    request = OpenSessionRequest(
        tenant=settings.tenant,
        credential=settings.credential,
        priority=settings.priority,
        weight=settings.weight,
        service_ns=round(settings.service_ms * 1e6),
        objective_ns=round(settings.latency_objective_ms * 1e6),
        interval_ns=round(settings.interval_ms * 1e6),
        required_vram=settings.required_vram,
        gpu_count=settings.gpu_count,
        gpu_mode=settings.gpu_mode,
        node_groups=settings.node_groups,
        swap=settings.swap_from_vram,
        dedup=settings.dedup,
        model=settings.model,
        client=ClientFacts(host=socket.gethostname(), pid=os.getpid(), program=" ".join(sys.argv[:1])),
    )
    try:
        with trace.step("open_session"):
            opened = controller.ask(contracts.ROUTER_SESSION_OPEN, request, timeout=OPEN_S)
        trace.root.set_attribute("task_id", opened.session_id)
        return OpenedSession(controller, opened, trace, settings.credential)
    except BaseException:
        controller.close()
        raise
