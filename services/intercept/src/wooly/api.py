"""What users call: `enable`, `disable`, `session_stats`. Puts device, session and facade together."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from wooly_bus.channel import ChannelClient, ChannelError, ChannelTlsError, Endpoint, client_context

from wooly import children
from wooly.device import Device, register
from wooly.errors import NotConnectedError, WoolyError
from wooly.facade import Facade
from wooly.link import Link

log = logging.getLogger("wooly")
_IDLE_CHECK_S = 0.002


@dataclass
class _Attached:
    """The process's one session."""

    device: Device
    link: Link
    executor_id: str
    node: str
    endpoint: Endpoint
    close_session: Any = None
    started: float = field(default_factory=time.monotonic)


_lock = threading.RLock()
_attached: _Attached | None = None
_facade: Facade | None = None
_flusher: threading.Thread | None = None


def attach(
    endpoints: list[str],
    session_id: str,
    token: str,
    *,
    flush_instructions: int = 128,
    flush_interval_s: float = 0.005,
    executor_id: str = "",
    node: str = "",
    channel: str = "auto",
    control_url: str = "",
    tls_ca: Path | None = None,
) -> Device:
    """Connect the device to an executor's data channel: the first of `endpoints` that answers.

    Args:
        endpoints: where the executor says that it listens.
        session_id: the session, as the router named it.
        token: what the executor wants to see.
        flush_instructions: instructions after which a program is sent.
        flush_interval_s: seconds after which an idle executor gets what there is.
        executor_id: for messages.
        node: for messages.
        channel: auto, direct (no tunnel) or tunnel (nothing else).
        control_url: NATS as this process reaches it; empty: as the executor does.
        tls_ca: authorities for tls endpoints; None: the system's.

    Raises:
        NotConnectedError: none does.
    """
    global _attached
    with _lock:
        if _attached is not None:
            return _attached.device
        device = register(flush_instructions)
        failures = []
        for text in endpoints:
            endpoint = Endpoint.parse(text)
            if channel != "auto" and (channel == "tunnel") != (endpoint.scheme == "nats"):
                failures.append(f"{text}: not tried, WOOLYAI_CHANNEL is {channel}")
                continue
            try:
                client = _dial(endpoint, control_url, tls_ca)
                try:
                    link = Link(client, session_id, token, f"{executor_id or 'executor'} ({endpoint})")
                except BaseException:
                    client.close()
                    raise
            except (ChannelError, WoolyError) as e:
                if isinstance(e, ChannelTlsError):  # the next way may do, but this one should have
                    log.warning("%s", e)
                failures.append(f"{text}: {e}")
                continue
            break
        else:
            raise NotConnectedError("no endpoint of the executor could be reached:\n  " + "\n  ".join(failures))
        recorder = device.recorder
        link.name_of = recorder.name_of
        with recorder.lock:
            recorder.forget_session()
            recorder.link = link
        _attached = _Attached(device, link, executor_id, node, endpoint)
        _start_flusher(device, flush_interval_s)
        return device


def _dial(endpoint: Endpoint, control_url: str, tls_ca: Path | None) -> ChannelClient:
    if endpoint.scheme == "nats":
        from wooly_bus.channel.tunnel import open_tunnel

        return ChannelClient(open_tunnel(control_url or f"nats://{endpoint.host}:{endpoint.port}", endpoint.path))
    if endpoint.scheme == "tls":
        try:
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
            from wooly.control import open_session
            from wooly.settings import Settings

            settings = settings or Settings()
            if settings.programs_dir is not None:
                settings.programs_dir.mkdir(parents=True, exist_ok=True)
            opened = open_session(settings)
            try:
                attach(
                    opened.endpoints,
                    opened.session_id,
                    opened.token,
                    flush_instructions=settings.flush_instructions,
                    flush_interval_s=settings.flush_interval_ms / 1e3,
                    executor_id=opened.executor_id,
                    node=opened.node,
                    channel=settings.channel,
                    control_url=opened.control_url,
                    tls_ca=settings.tls_ca,
                )
            except BaseException:
                opened.close()
                raise
            assert _attached is not None
            _attached.close_session = opened.close
            _attached.device.recorder.programs_dir = settings.programs_dir
            children.settings = settings.model_copy(update={"controller_url": opened.control_url})
        install_facade()


def install_facade() -> None:
    """Make "cuda" mean the attached device."""
    global _facade
    with _lock:
        if _attached is None:
            raise NotConnectedError("no session; call wooly.enable()")
        if _facade is None:
            _facade = Facade(device_facts)
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
        recorder = attached.device.recorder
        with recorder.lock:
            attached.link.close()
            recorder.forget_session()
        if attached.close_session is not None:
            attached.close_session()


atexit.register(disable)


def _after_fork() -> None:
    """The session belongs to the process that opened it: a fork of it neither ends nor renews it."""
    global _attached, _lock
    _lock = threading.RLock()
    _attached = None


os.register_at_fork(after_in_child=_after_fork)


def device_facts() -> dict[str, Any]:
    """The executor's facts of the attached device."""
    return _attached.link.device if _attached is not None else {}


def attached_device() -> Device:
    """The device of this process's session.

    Raises:
        NotConnectedError: there is none.
    """
    if _attached is None:
        raise NotConnectedError("no session; call wooly.enable()")
    return _attached.device


def session_stats() -> dict[str, Any]:
    """What this session has done so far.

    Raises:
        NotConnectedError: there is none.
    """
    if _attached is None:
        raise NotConnectedError("no session; call wooly.enable()")
    recorder, link = _attached.device.recorder, _attached.link
    return {
        "executor_id": _attached.executor_id,
        "node": _attached.node,
        "device": link.device.get("name", ""),
        "endpoint": str(_attached.endpoint),
        "operations": recorder.operations,
        "instructions": recorder.instructions,
        "programs": recorder.programs,
        "bytes_sent": link.bytes_sent,
        "bytes_received": link.bytes_received,
        "syncs": link.syncs,
        "seconds": time.monotonic() - _attached.started,
    }


def _start_flusher(device: Device, interval_s: float) -> None:
    """The timer: what is recorded reaches an idle executor within a few milliseconds, without a sync."""
    global _flusher
    if _flusher is not None and _flusher.is_alive():
        return

    def watch() -> None:
        recorder = device.recorder
        seen, quiet = -1, 0
        while True:
            time.sleep(interval_s if quiet < 200 else interval_s * 10)
            quiet += 1
            if not recorder.open or recorder.link is None:
                continue
            if recorder.generation != seen:
                seen, quiet = recorder.generation, 0
                continue
            with recorder.lock:
                link = recorder.link
                if link is not None and recorder.open and recorder.generation == seen and link.poll():
                    recorder.try_flush()

    _flusher = threading.Thread(target=watch, name="wooly-flusher", daemon=True)
    _flusher.start()


def is_enabled() -> bool:
    """Whether "cuda" means the Wooly device now."""
    return _attached is not None and torch.cuda.is_available()
