"""What users call: `enable`, `disable`, `session_stats`. Puts device, session and facade together."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from wooly_bus.access import Access
from wooly_bus.channel import ChannelClient, ChannelError, ChannelTlsError, Endpoint, client_context
from wooly_bus.supervision import start_thread

from wooly import children
from wooly.device import RegisteredDevice, register
from wooly.errors import NotConnectedError, WoolyError
from wooly.facade import Facade
from wooly.link import Link
from wooly.routes import why_not
from wooly.storage import MAX_DEVICES

if TYPE_CHECKING:
    from wooly.traces import ClientTrace

log = logging.getLogger("wooly")
#: Sessions that are opened until the executors of one are reached.
OPENS = 3
#: Seconds after which all links of a session with several devices are looked at: one may break while only another is used.
_LOOK_EVERY_S = 0.25
#: Ticks of the timer for which a program that grows is let grow.
_GROWING = 4
_COUNTED = ("operations", "instructions", "programs", "bytes_sent", "bytes_received", "syncs")


@dataclass(frozen=True)
class Part:
    """Where one device of a session is.

    Attributes:
        endpoints: where its executor says that it listens.
        executor_id: for messages.
        node: for messages.
        token: what it wants to see; empty: the session's.
    """

    endpoints: Sequence[str]
    executor_id: str = ""
    node: str = ""
    token: str = ""


@dataclass
class _Attached:
    """The process's one session: a link per device, the part that each serves, and the endpoint that answered."""

    device: RegisteredDevice
    links: list[Link]
    parts: Sequence[Part]
    endpoints: list[Endpoint]
    opened: Any = None
    started: float = field(default_factory=time.monotonic)

    @property
    def link(self) -> Link:
        """That of the first device."""
        return self.links[0]


_lock = threading.RLock()
_attached: _Attached | None = None
_facade: Facade | None = None
_flusher: threading.Thread | None = None


def attach(
    endpoints: Sequence[str],
    session_id: str,
    token: str,
    *,
    more: Sequence[Part] = (),
    flush_instructions: int = 128,
    flush_interval_s: float = 0.005,
    executor_id: str = "",
    node: str = "",
    channel: str = "auto",
    control_url: str | Access = "",
    tls_ca: Path | None = None,
    plaintext: bool = False,
    dedup: str = "off",
    jit: str = "exact",
    trace: ClientTrace | None = None,
) -> RegisteredDevice:
    """Connect the device to an executor's data channel: the first of `endpoints` that may be tried (`wooly.routes`) and answers.

    Args:
        endpoints: where the executor says that it listens.
        session_id: the session, as the router named it.
        token: what the executor wants to see.
        more: where the session's further devices are, cuda:1 first.
        flush_instructions: instructions after which a program is sent.
        flush_interval_s: seconds after which an idle executor gets what there is.
        executor_id: for messages.
        node: for messages.
        channel: auto, direct (no tunnel) or tunnel (nothing else).
        control_url: NATS as this process reaches it; empty: as the executor does.
        tls_ca: authorities for tls endpoints; None: the system's.
        plaintext: an executor that offers TLS may be reached without, over a network.
        dedup: with whom the session shares equal contents: off, tenant, shared.
        jit: which kernels there may be in place of the library's: "0", "exact" or "full".
        trace: the trace that the session is in.

    Raises:
        NotConnectedError: none does, or one has a certificate that is not to be trusted.
    """
    global _attached
    with _lock:
        if _attached is not None:
            return _attached.device
        parts = [Part(endpoints, executor_id, node), *more]
        if len(parts) > MAX_DEVICES:
            raise NotConnectedError(f"{len(parts)} devices; a process can have {MAX_DEVICES}")
        device = register(flush_instructions)
        links: list[Link] = []
        answered: list[Endpoint] = []
        try:
            for part in parts:
                connecting = (
                    contextlib.nullcontext("") if trace is None else trace.step("connect", executor=part.executor_id)
                )
                with connecting as parent:
                    link, endpoint = _connect(
                        part, session_id, token, channel, control_url, tls_ca, plaintext, jit, parent
                    )
                links.append(link)
                answered.append(endpoint)
        except BaseException:
            for link in links:
                link.close()
            raise
        for link in links:
            link.siblings = [other for other in links if other is not link]
            link.sharing = dedup != "off"
        _adopt(device, links)
        _attached = _Attached(device, links, parts, answered)
        _start_flusher(device, flush_interval_s)
        return device


def attach_link(link: Any) -> RegisteredDevice:
    """Make the device that of a link which is there already, and which may be a recording (`wooly.export`).

    Raises:
        WoolyError: the process has a session.
    """
    global _attached
    with _lock:
        if _attached is not None:
            raise WoolyError("this process has a session on a device; end it first (wooly.disable())")
        device = register(128)
        _adopt(device, [link])
        _attached = _Attached(device, [link], [Part(())], [])
        return device


def _adopt(device: RegisteredDevice, links: list[Link]) -> None:
    device.set_count(len(links))
    for recorder, link in zip(device.devices.active(), links, strict=True):
        link.name_of = recorder.name_of
        with recorder.lock:
            recorder.forget_session()
            recorder.link = link


def _connect(
    part: Part,
    session_id: str,
    token: str,
    channel: str,
    control_url: str | Access,
    tls_ca: Path | None,
    plaintext: bool,
    jit: str,
    trace: str,
) -> tuple[Link, Endpoint]:
    who = f"the executor {part.executor_id}" if part.executor_id else "the executor"
    failures = []
    offered = [Endpoint.parse(text) for text in part.endpoints]
    for endpoint in offered:
        nats_url = (control_url.url if isinstance(control_url, Access) else control_url) or f"nats://{endpoint.host}"
        if reason := why_not(endpoint, offered, channel, nats_url, plaintext):
            failures.append(f"{endpoint}: {reason}")
            continue
        try:
            client = _dial(endpoint, control_url, tls_ca)
            try:
                where = f"{part.executor_id or 'executor'} ({endpoint})"
                return Link(client, session_id, part.token or token, where, jit=jit, trace=trace), endpoint
            except BaseException:
                client.close()
                raise
        except ChannelTlsError as e:
            raise NotConnectedError(f"{who} cannot be trusted, and no other way to it is tried: {e}") from e
        except (ChannelError, WoolyError) as e:
            failures.append(f"{endpoint}: {e}")
    raise NotConnectedError(f"no endpoint of {who} could be reached:\n  " + "\n  ".join(failures))


def _dial(endpoint: Endpoint, control_url: str | Access, tls_ca: Path | None) -> ChannelClient:
    try:
        if endpoint.scheme == "nats":
            from wooly_bus import contracts
            from wooly_bus.channel.tunnel import open_tunnel

            tunnel = contracts.EXECUTOR_TUNNEL_OPEN.on(endpoint.path)
            return ChannelClient(open_tunnel(control_url or f"nats://{endpoint.host}:{endpoint.port}", tunnel))
        if endpoint.scheme == "tls":
            return ChannelClient.connect(endpoint, tls=client_context(tls_ca))
    except ChannelTlsError as e:
        raise ChannelTlsError(f"{e} (WOOLYAI_TLS_CA names the authorities to trust)") from e
    return ChannelClient.connect(endpoint)


def enable(settings: Any = None) -> None:
    """Open a session with the controller and make "cuda" mean the device that it gives.

    Args:
        settings: `wooly.settings.Settings`, or None for environment and configuration file.

    Raises:
        WoolyError: there is no controller or no executor; the message says what to start.
    """
    global _facade
    with _lock:
        if _attached is None:
            from wooly.settings import load

            settings = settings or load()
            if settings.programs_dir is not None:
                settings.programs_dir.mkdir(parents=True, exist_ok=True)
            opened = _open_and_attach(settings)
            assert _attached is not None
            _attached.opened = opened
            links = _attached.links
            opened.on_lost = lambda why: links[0].lose(why)
            for recorder in _attached.device.devices.recorders:
                recorder.programs_dir = settings.programs_dir
            children.settings = settings.model_copy(update=opened.reach)
        install_facade()


def _open_and_attach(settings: Any) -> Any:
    """Open a session and connect to its executors. Returns the session.

    An executor may end after the session was opened, before it is reached: nothing is lost then, and another session is opened.
    """
    from wooly.control import open_session

    others = OPENS
    while True:
        others -= 1
        opened = open_session(settings)
        try:
            first, *more = [Part(p.endpoints, p.executor_id, p.node, p.token) for p in opened.parts]
            attach(
                first.endpoints,
                opened.session_id,
                first.token or opened.token,
                more=more,
                flush_instructions=settings.flush_instructions,
                flush_interval_s=settings.flush_interval_ms / 1e3,
                jit=settings.jit,
                executor_id=first.executor_id,
                node=first.node,
                channel=settings.channel,
                control_url=opened.tunnels,
                tls_ca=settings.tls_ca,
                plaintext=settings.plaintext,
                dedup=settings.dedup,
                trace=opened.trace,
            )
            return opened
        except BaseException as e:
            again = others and isinstance(e, NotConnectedError) and not opened.ephemeral and opened.is_over()
            opened.close()
            if not again:
                raise
            log.warning("another session is opened, as an executor ended before it was reached: %s", e)


def install_facade() -> None:
    """Make "cuda" mean the attached device."""
    global _facade
    with _lock:
        if _attached is None:
            raise NotConnectedError("no session; call wooly.enable()")
        if _facade is None:
            _facade = Facade(_attached.device.devices, device_facts, _attached.device.launches)
        _facade.install()


def disable() -> None:
    """End the session and give "cuda" back. Tensors on the device are lost."""
    global _attached
    with _lock:
        if _facade is not None:
            _facade.uninstall()
        children.settings = None
        attached, _attached = _attached, None
        if attached is None:
            return
        for link in attached.links:
            link.siblings = []
        for recorder, link in zip(attached.device.devices.active(), attached.links, strict=True):
            with recorder.lock:
                link.close()
                recorder.forget_session()
        if attached.opened is not None:
            attached.opened.close()


atexit.register(disable)


def _after_fork() -> None:
    """The session belongs to the process that opened it: a fork of it neither ends nor renews it."""
    global _attached, _lock
    _lock = threading.RLock()
    _attached = None


os.register_at_fork(after_in_child=_after_fork)


def device_facts(index: int = 0) -> dict[str, Any]:
    """The executor's facts of an attached device."""
    return _attached.links[index].device if _attached is not None else {}


def attached_links() -> list[Link]:
    """The links of this process's session, one per device.

    Raises:
        NotConnectedError: there is none.
    """
    if _attached is None:
        raise NotConnectedError("no session; call wooly.enable()")
    return _attached.links


def attached_device() -> RegisteredDevice:
    """The device of this process's session.

    Raises:
        NotConnectedError: there is none.
    """
    if _attached is None:
        raise NotConnectedError("no session; call wooly.enable()")
    return _attached.device


def session_stats() -> dict[str, Any]:
    """What this session has done so far: counters of all its devices together, and under "devices" those of each.

    Raises:
        NotConnectedError: there is none.
    """
    if _attached is None:
        raise NotConnectedError("no session; call wooly.enable()")
    devices = [
        {
            "executor_id": part.executor_id,
            "node": part.node,
            "device": link.device.get("name", ""),
            "endpoint": str(endpoint),
            "operations": recorder.operations,
            "instructions": recorder.instructions,
            "programs": recorder.programs,
            "bytes_sent": link.bytes_sent,
            "bytes_received": link.bytes_received,
            "syncs": link.syncs,
        }
        for part, link, endpoint, recorder in zip(
            _attached.parts, _attached.links, _attached.endpoints, _attached.device.devices.active(), strict=True
        )
    ]
    sums = {name: sum([d[name] for d in devices]) for name in _COUNTED}
    return sums | {"seconds": time.monotonic() - _attached.started, "devices": devices}


def opened_session() -> Any:
    """The session as the controller gave it (`wooly.control.OpenedSession`); None if it was given by nobody.

    Raises:
        NotConnectedError: there is none.
    """
    if _attached is None:
        raise NotConnectedError("no session; call wooly.enable()")
    return _attached.opened


def synchronize() -> None:
    """Wait for all devices; errors of operations that nothing else waited for surface here."""
    if _attached is not None:
        for index in range(len(_attached.links)):
            torch.wooly.synchronize(index)  # type: ignore[attr-defined]


def _start_flusher(device: RegisteredDevice, interval_s: float) -> None:
    """The timer: what is recorded reaches an idle executor within a few milliseconds, without a sync."""
    global _flusher
    if _flusher is not None and _flusher.is_alive():
        return

    def watch() -> None:
        seen, held, quiet, looked = [(-1, 0)] * MAX_DEVICES, [0] * MAX_DEVICES, 0, 0.0
        while True:
            time.sleep(interval_s if quiet < 200 else interval_s * 10)
            quiet += 1
            active = device.devices.active()
            for index, recorder in enumerate(active):
                if not recorder.open or recorder.link is None:
                    continue
                at = recorder.generation, len(recorder.origins)
                new, grown = at[0] != seen[index][0], at != seen[index]
                held[index] = 0 if new else held[index] + 1
                if grown:
                    seen[index], quiet = at, 0
                    if new or held[index] < _GROWING:
                        continue  # where a program that is being recorded is cut hangs on chance: others like it will not come
                if not recorder.lock.acquire(blocking=False):
                    continue  # in use; and who waits for one device must not hide what happens to another
                try:
                    link = recorder.link
                    if link is not None and recorder.open and recorder.generation == at[0] and link.poll():
                        recorder.try_flush()
                finally:
                    recorder.lock.release()
            if len(active) > 1 and time.monotonic() - looked > _LOOK_EVERY_S:
                looked = time.monotonic()
                for recorder in active:
                    if recorder.link is not None:
                        recorder.link.look()

    _flusher = start_thread(watch, "wooly-flusher")


def is_enabled() -> bool:
    """Whether "cuda" means the Wooly device now."""
    return _attached is not None and torch.cuda.is_available()
