"""The functions that users call: `enable`, `disable`, `session_stats`. They connect device, session and facade."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from wooly_bus.access import Access
from wooly_bus.channel import Endpoint
from wooly_bus.supervision import start_call, start_thread

from wooly import capture, children, native, ranks
from wooly.connection import Connection
from wooly.contents import OfferPolicy
from wooly.departures import Departures
from wooly.device import RegisteredDevice, register
from wooly.errors import NotConnectedError, WoolyError
from wooly.facade import Facade
from wooly.facade.build import CUDA_VERSION
from wooly.hops import Hops
from wooly.link import Link
from wooly.opening import Part, Reach, connect_all, open_and_use, parts_of, reach_of
from wooly.program_limits import MOST, SHORT
from wooly.recovery import Recovery
from wooly.room import first_grant
from wooly.storage import MAX_DEVICES, NO_LIMIT
from wooly.waits import top

if TYPE_CHECKING:
    from wooly_wis.messages import DirectSession

    from wooly.recorder import Lock
    from wooly.settings import Settings
    from wooly.traces import ClientTrace

#: Interval, in seconds, at which the timer checks all links of a session with several devices. A link may break while the program
#: uses only another device.
_CHECK_INTERVAL_S = 0.25
#: Number of timer ticks during which the timer does not send a program that grows.
_GROWTH_TICKS = 4
_COUNTED = ("operations", "instructions", "programs", "bytes_sent", "bytes_received", "syncs")


@dataclass
class _Attached:
    """The session of this process: per device a link, its part, and the endpoint that answered."""

    device: RegisteredDevice
    links: list[Link]
    parts: list[Part]
    endpoints: list[Endpoint]
    opened: Any = None
    started: float = field(default_factory=time.monotonic)

    @property
    def link(self) -> Link:
        """Link of the first device."""
        return self.links[0]

    def locked_links(self) -> list[tuple[Link, Lock]]:
        """Each link and the lock of its recorder."""
        return [
            (link, recorder.lock) for link, recorder in zip(self.links, self.device.devices.recorders, strict=False)
        ]

    def link_of(self, index: int) -> Link:
        """Link of a device. The devices of a rank of torchrun share one."""
        return self.links[index if index < len(self.links) else 0]


#: Protects the state of this module. A thread that waits for it may hold a recorder's lock (`_first_use`). So a thread that has
#: it takes no recorder's lock while a first use may wait.
_lock = threading.RLock()
_attached: _Attached | None = None
#: Settings of the session that the first use of a device opens; None: there is none to open.
_pending: Settings | None = None
#: Id of the executor that this session prefers; empty: none.
_near = ""
_facade: Facade | None = None
#: The version that `torch.version.cuda` reports from the first `enable` on.
_cuda_version = CUDA_VERSION
#: Who carries collectives from the first `enable` on: the setting WOOLYAI_COLLECTIVES.
_collectives = "executor"
_flusher: threading.Thread | None = None


def attach(
    endpoints: Sequence[str],
    session_id: str,
    token: str,
    *,
    more: Sequence[Part] = (),
    flush_instructions: int = MOST,
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
    opens: DirectSession | None = None,
    recoveries: Sequence[Recovery] = (),
) -> RegisteredDevice:
    """Connect the devices of a session to their executors.

    Each link uses the first endpoint that `wooly.routes` allows and that answers.

    Args:
        endpoints: endpoints on which the executor of cuda:0 listens.
        session_id: id of the session.
        token: token for the executor.
        more: addresses of the session's other devices, cuda:1 first.
        flush_instructions: maximum number of instructions before a program is sent.
        flush_interval_s: seconds after which an idle executor gets the open program.
        executor_id: id of the executor, for messages.
        node: node of the executor, for messages.
        channel: auto, direct (no tunnel) or tunnel (only tunnels).
        control_url: NATS for this process; empty: the host of the executor's endpoint.
        tls_ca: file with the certificate authorities for tls endpoints; None: those of the system.
        plaintext: allow plain text over a network, although the executor offers TLS.
        dedup: sessions with which this session shares equal contents: off, tenant, shared.
        jit: generated kernels that the executor may use: "0", "exact" or "full".
        trace: the session's trace.
        opens: opens the session at a standalone executor; None: a controller has opened it.
        recoveries: lets each device go on in another executor; empty: the session ends with its executors.

    Raises:
        NotConnectedError: no endpoint answers, or an executor's certificate is not trusted.
        ReleaseError: an executor's PyTorch and this process's do not work together.
    """
    global _attached
    with _lock:
        if _attached is not None:
            return _attached.device
        parts = [Part(endpoints, executor_id, node), *more]
        if len(parts) > MAX_DEVICES:
            raise NotConnectedError(
                f"the session has {len(parts)} devices, but a process can have at most {MAX_DEVICES}; ask for fewer devices"
            )
        device = register(flush_instructions)
        reach = Reach(channel, control_url, tls_ca, plaintext)
        links, answered = connect_all(parts, session_id, token, reach, jit, trace, opens)
        for link, endpoint in zip(links, answered, strict=True):
            link.waits.near = endpoint.scheme == "unix"
        for link in links:
            link.siblings = [other for other in links if other is not link]
            link.offers = OfferPolicy() if dedup != "off" else None
        for link, recovery in zip(links, recoveries, strict=bool(recoveries)):
            link.recovery = recovery
        _adopt(device, links)
        _attached = _Attached(device, links, parts, answered)
        _start_flusher(device, flush_interval_s)
        return device


def attach_link(link: Any) -> RegisteredDevice:
    """Attach the device to an existing link, for example to the recording of `wooly.export`.

    Raises:
        WoolyError: the process has an open session.
    """
    global _attached
    with _lock:
        if _attached is not None:
            raise WoolyError("this process has an open session; close it first with wooly.disable()")
        device = register(SHORT)
        _adopt(device, [link])
        _attached = _Attached(device, [link], [Part(())], [])
        return device


def _adopt(device: RegisteredDevice, links: list[Link]) -> None:
    """Give each recorder its link. If the first use of a device opens the session, its operation is being recorded."""
    shared = len(links) == 1 and _pending is not None and _shown(_pending) > 1
    device.set_count(device.devices.count if shared else len(links))
    if _pending is None:
        _forget_sessions(device)
    for index, recorder in enumerate(device.devices.active()):
        link = links[0 if shared else index]
        link.name_of = recorder.name_of
        recorder.link = link
        recorder.heap.granted = first_grant(link) or NO_LIMIT


def _forget_sessions(device: RegisteredDevice) -> None:
    for recorder in device.devices.recorders:
        with recorder.lock:
            recorder.forget_session()


def enable(settings: Any = None) -> None:
    """Open a session at the controller, and redirect "cuda" to the session's device.

    If CUDA_VISIBLE_DEVICES hides all devices, "cuda" is not available and no session is opened.

    Args:
        settings: `wooly.settings.Settings`; None: read the environment and the configuration file.

    Raises:
        WoolyError: no controller or no executor is available. The message says what to start.
    """
    enable_on_use(settings)
    with _lock:
        if _attached is None and register().devices.look():
            try:
                _open()
            except BaseException:
                disable()
                raise


def enable_on_use(settings: Any = None, near: str = "") -> None:
    """Redirect "cuda". The first use of a device opens the session, so a process that uses none occupies none.

    Args:
        settings: as for `enable`.
        near: id of the executor that the session prefers; empty: none.

    Raises:
        SettingsError: a setting is invalid.
    """
    global _pending, _near, _cuda_version, _collectives
    with _lock:
        if _attached is None:
            from wooly.settings import load

            again, _near = _pending is not None, near
            _pending = children.settings = settings or load()
            _cuda_version, _collectives = _pending.cuda_version, _pending.collectives
            native.switch(_pending.native)
            device = register(_pending.flush_instructions)
            device.devices.offered = _shown(_pending)
            device.devices.look()
            if not again:
                _forget_sessions(device)
            shares = _pending.gpu_count == 1 or ranks.own() is not None
            device.devices.share(on=shares and device.devices.offered > 1)
            device.set_opener(_first_use)
        install_facade()


def _shown(settings: Settings) -> int:
    """Number of devices that the process sees, before CUDA_VISIBLE_DEVICES chooses.

    A rank sees as many as ranks are on its machine.
    """
    rank = ranks.own()
    return max(settings.gpu_count, min(1 if rank is None else rank.here, MAX_DEVICES))


def _first_use(where: str = "") -> None:
    """Open the session, if it is not open: at this node or executor, if one is named and the settings name none."""
    with _lock:
        device = register()
        device.devices.require_any()
        if _attached is None and _pending is not None:
            _open(where)
        device.set_opener(None)
        device.devices.offered = None


def open_near(executor_id: str, node: str) -> None:
    """Open the pending session at an executor, or with several devices on its node. Do nothing if a session is open.

    Raises:
        WoolyError: the session cannot be opened there.
    """
    if _attached is None:
        single = _pending is None or min(register().devices.count, _pending.gpu_count) == 1
        _first_use(executor_id if single else node)


def place_of(link: Link) -> tuple[str, str]:
    """Id and node of the executor of a link, as the controller knows them; empty without a controller."""
    attached = _attached
    if attached is None or attached.opened is None or not attached.opened.controlled:
        return "", ""
    part = attached.parts[attached.links.index(link)]
    return part.executor_id, part.node


def _own_executor() -> str:
    """Id of the executor of cuda:0, as the controller knows it; empty: there is no session, or no controller."""
    attached = _attached
    return place_of(attached.link)[0] if attached is not None and attached.links else ""


children.where = _own_executor


def _open(where: str = "") -> None:
    """Open the pending session. `where`: a node or an executor; it holds if the settings name neither."""
    global _pending
    assert _pending is not None
    rank = ranks.own()
    # A process that received a tensor needs that tensor's executor, whatever the other ranks get.
    gang = None if rank is None or where or _pending.executor_url else _gang(rank, _pending.gpu_count)
    count = 1 if rank is not None else min(register().devices.count, _pending.gpu_count)
    settings = _pending.model_copy(update={"gpu_count": count})
    if where and not (settings.node or settings.executor_url):
        settings = settings.model_copy(update={"node": where})
    Connection.look_ns = settings.busy_wait_us * 1000
    if settings.programs_dir is not None:
        settings.programs_dir.mkdir(parents=True, exist_ok=True)
    opened = open_and_use(
        settings, _near, gang, lambda opened, recoveries: _attach(settings, opened, recoveries), _went
    )
    assert _attached is not None
    _attached.opened = opened
    opened.when_lost(_on_lost)
    devices = _attached.device.devices
    devices.hops = Hops(devices, opened) if opened.controlled and len(opened.parts) > 1 else None
    if _attached.link.recovery is not None:
        opened.departures = Departures(_attached.locked_links())
    for recorder in _attached.device.devices.recorders:
        recorder.programs_dir = settings.programs_dir
    children.settings = _pending.model_copy(update=opened.reach)
    children.close_at_exit(close_at_end)
    _pending = None


def _on_lost(why: str) -> None:
    """The session has lost its executor, or has ended, as the thread that renews the lease knows."""
    attached = _attached
    if attached is None:
        return
    link, lock = attached.locked_links()[0]
    for each in attached.links:
        each.fail(why)
    if link.recovery is not None:

        def go_on() -> None:  # a thread that waits for an answer does it first
            with lock, contextlib.suppress(WoolyError):
                link.continuation.go_on()

        start_call(go_on, "wooly-recovery")


def _gang(rank: ranks.Rank, devices: int) -> Any:
    from wooly_wis.messages import GangPlace

    return GangPlace(gang_id=rank.gang_id, rank=rank.rank, size=rank.size, devices=devices)


def _attach(settings: Settings, opened: Any, recoveries: Sequence[Recovery]) -> list[tuple[Link, Lock]]:
    """Connect the devices of an opened session. Returns their links, and the locks of their recorders."""
    first, *more = parts_of(opened)
    reach = reach_of(settings, opened)
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
        channel=reach.channel,
        control_url=reach.control_url,
        tls_ca=reach.tls_ca,
        plaintext=reach.plaintext,
        dedup=settings.dedup,
        trace=opened.trace,
        opens=opened.opens,
        recoveries=recoveries,
    )
    return [] if _attached is None else _attached.locked_links()


def _went(index: int, part: Part, endpoint: Endpoint) -> None:
    """A device of the session has gone on in another executor."""
    if _attached is not None:
        _attached.parts[index], _attached.endpoints[index] = part, endpoint
        _attached.links[index].waits.near = endpoint.scheme == "unix"


def install_facade() -> None:
    """Redirect "cuda" to the attached device."""
    global _facade
    with _lock:
        if _attached is None and _pending is None:
            raise NotConnectedError("no session is open; call wooly.enable()")
        if _facade is None:
            device = register()
            _facade = Facade(
                device.devices,
                device_facts,
                device.launches,
                device.determinism,
                device.flags,
                _lose_session,
                _cuda_version,
                lambda: _collectives,
                opened_session,
            )
        _facade.install()


def _lose_session(why: str) -> None:
    if _attached is not None and _attached.links:
        _attached.link.fail(why)


def disable() -> None:
    """Close the session, and stop redirecting "cuda". All tensors on the device are lost."""
    _close("")


def close_at_end(code: int = 0) -> None:
    """Close the session at the end of the script. If a rank of a program ends with a failure, the other ranks get it.

    Args:
        code: the exit code, if it is known.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    if hasattr(sys, "ps1"):  # in an interactive Python, errors end nothing
        error = None
    elif error is None and children.is_child():  # it closes its session while the exception passes
        error = children.failure(sys.exc_info()[1])
    why = ""
    if error is not None:
        why = f"its script ended with {type(error).__name__}: {error}"
    elif code:
        why = f"its script ended with exit code {code}"
    _close(why if ranks.own() is not None else "")


def _close(why: str) -> None:
    """As `disable`. `why`: the failure that ends the session; empty: it ends normally."""
    global _attached, _pending
    with _lock:
        if _facade is not None:
            _facade.uninstall()
        children.settings = None
        attached, _attached = _attached, None
        if attached is not None or _pending is not None:
            device = register()
            device.set_opener(None)
            device.devices.offered = _pending = None
        if attached is None:
            return
        attached.device.devices.hops = None
        stats = _stats(attached) if attached.opened is not None else {}
        for link in attached.links:
            link.siblings = []
    opened = attached.opened
    # Another thread may wait for an executor, with the recorder's lock. Of a rank, others may need the last work.
    if opened is not None and opened.controlled and ranks.own() is None:
        opened.stop_recovering()
    for recorder, link in zip(attached.device.devices.recorders, attached.links, strict=False):
        with recorder.lock:
            if link.shares:  # the other processes see the last work, too
                recorder.settle()
            if not why:  # other ranks may need the parts of this one, but they wait for it in vain after a failure
                link.await_collectives()
            if opened is not None and opened.controlled:
                opened.expect_end()
            link.say_end(why)
            for each in [recorder, *[r for r in attached.device.devices.recorders if r.lock is recorder.lock]]:
                if each.link is link:  # otherwise another thread has opened the next session
                    each.forget_session()
    known = True
    try:
        known = attached.opened is None or attached.opened.close(why)
    finally:
        for link in attached.links:
            link.hang_up(known=known)
    if attached.opened is not None:
        capture.report_session(attached.opened.session_id, stats)


atexit.register(close_at_end)


def _after_fork() -> None:
    """Detach the session in a forked process. Only the process that opened the session renews and closes it."""
    global _attached, _lock
    _lock = threading.RLock()
    _attached = None


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_after_fork)


def device_facts(index: int = 0) -> dict[str, Any]:
    """Properties of an attached device, from its executor; empty if no session is open. Opens a session that is pending."""
    if _attached is None and _pending is not None:
        _first_use()
    return _attached.link_of(index).device if _attached is not None else {}


def _require_session() -> _Attached:
    """The session of this process.

    Raises:
        NotConnectedError: no session is open. The message says why not, if the environment hides all devices.
    """
    if _attached is None:
        if _pending is not None:
            try:
                register().devices.require_any()
            except RuntimeError as e:
                raise NotConnectedError(f"no session is open. {e}") from None
        raise NotConnectedError("no session is open; call wooly.enable()")
    return _attached


def attached_links() -> list[Link]:
    """The links of this process's session, one per device.

    Raises:
        NotConnectedError: no session is open.
    """
    return _require_session().links


def attached_device() -> RegisteredDevice:
    """The device of this process's session.

    Raises:
        NotConnectedError: no session is open.
    """
    return _require_session().device


def session_stats() -> dict[str, Any]:
    """Counters of this session: the sums over all devices, and under "devices" the counters of each device.

    "waiting_s" are seconds for which the script waited for answers and for sending data, "network_s" the network's part of them,
    "trip_s" the shortest time from a question to its answer, and "lines" the Python lines that waited longest for the network.

    Raises:
        NotConnectedError: no session is open.
    """
    return _stats(_require_session())


def _stats(attached: _Attached) -> dict[str, Any]:
    active, links = attached.device.devices.active(), attached.links
    recorders = [active if len(links) < len(active) else active[k : k + 1] for k in range(len(links))]
    devices = [
        {
            "executor_id": part.executor_id,
            "node": part.node,
            "device": link.device.get("name", ""),
            "endpoint": str(endpoint),
            "operations": sum([recorder.operations for recorder in own]),
            "instructions": sum([recorder.instructions for recorder in own]),
            "programs": sum([recorder.programs for recorder in own]),
            "bytes_sent": link.bytes_sent,
            "bytes_received": link.bytes_received,
            "syncs": link.syncs,
        }
        for part, link, endpoint, own in zip(attached.parts, links, attached.endpoints, recorders, strict=True)
    ]
    sums = {name: sum([d[name] for d in devices]) for name in _COUNTED}
    waits = [link.waits for link in links]
    waited = {
        "waiting_s": sum([w.waiting_s for w in waits]),
        "network_s": sum([w.network_s for w in waits]),
        "trip_s": max([w.trip_s for w in waits]),
        "lines": top(waits),
    }
    return sums | waited | {"seconds": time.monotonic() - attached.started, "devices": devices}


def opened_session() -> Any:
    """The session that the controller opened (`wooly.control.OpenedSession`); None if it was attached without a controller.

    Raises:
        NotConnectedError: no session is open.
    """
    return _require_session().opened


def has_session() -> bool:
    """Whether a session is open in this process. It may be redirected without one: see `enable_on_use`."""
    return _attached is not None


def synchronize() -> None:
    """Wait for all devices. Raises the errors of operations whose results nothing else has read."""
    if _attached is not None:
        for index in range(_attached.device.devices.count):
            torch.wooly.synchronize(index)  # type: ignore[attr-defined]


def _start_flusher(device: RegisteredDevice, interval_s: float) -> None:
    """Start the timer thread, which sends open programs to idle executors within a few milliseconds, without a sync."""
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
                    if new or held[index] < _GROWTH_TICKS:
                        continue  # a program that is cut while it grows would not repeat
                if not recorder.lock.acquire(blocking=False):
                    continue  # the device is in use; do not wait, so that the other devices are served
                try:
                    link = recorder.link
                    if link is not None and recorder.open and recorder.generation == at[0] and link.poll():
                        recorder.try_flush()
                finally:
                    recorder.lock.release()
            if len(active) > 1 and time.monotonic() - looked > _CHECK_INTERVAL_S:
                looked = time.monotonic()
                for recorder in active:
                    if recorder.link is not None:
                        recorder.link.check_open()

    _flusher = start_thread(watch, "wooly-flusher")


def is_enabled() -> bool:
    """Whether "cuda" is redirected to a Wooly device."""
    return (_attached is not None or _pending is not None) and torch.cuda.is_available()
