"""How a session gets its executors: it is opened, its devices are connected, and it is opened at other executors after a loss.

This module knows no device of PyTorch: `wooly.api` attaches the links.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from wooly_bus.access import Access
from wooly_bus.channel import (
    ChannelClient,
    ChannelClosedError,
    ChannelError,
    ChannelTlsError,
    Endpoint,
    client_context,
)

from wooly.errors import NotConnectedError, ReleaseError, WoolyError
from wooly.link import Link
from wooly.recovery import Recovery, Reopened, wanted
from wooly.reopening import Reopening
from wooly.routes import reason_not_to_try
from wooly.turn import UNANSWERED

if TYPE_CHECKING:
    from wooly_wis.messages import DirectSession, GangPlace

    from wooly.recorder import Lock
    from wooly.settings import Settings
    from wooly.traces import ClientTrace

log = logging.getLogger("wooly")
T = TypeVar("T")
#: Maximum number of sessions that `enable` opens, one after the other, if an executor ends before the client connects to it.
MAX_OPENS = 3
#: Maximum time, in seconds, for which a client asks a controller that no longer answers for another session, and the time between
#: two questions.
OUTLAST_S, AGAIN_S = 30.0, 0.5
#: Maximum time, in seconds, for which a client tries to come back to its standalone executor; and the time between two attempts.
RETURN_S, RETURN_AGAIN_S = 60.0, 0.25


@dataclass(frozen=True)
class Part:
    """Address of one device of a session.

    Attributes:
        endpoints: endpoints on which the executor listens.
        executor_id: id of the executor, for messages.
        node: node of the executor, for messages.
        token: token for the executor; empty: the session's token.
    """

    endpoints: Sequence[str]
    executor_id: str = ""
    node: str = ""
    token: str = ""


class Reach(NamedTuple):
    """How this process may reach the endpoints of executors.

    Attributes:
        channel: auto, direct (no tunnel) or tunnel (only tunnels).
        control_url: NATS for this process; empty: the host of the executor's endpoint.
        tls_ca: file with the certificate authorities for tls endpoints; None: those of the system.
        plaintext: allow plain text over a network, although the executor offers TLS.
    """

    channel: str = "auto"
    control_url: str | Access = ""
    tls_ca: Path | None = None
    plaintext: bool = False


def greeting(
    session_id: str, token: str, jit: str, trace: str, opens: DirectSession | None
) -> Callable[[ChannelClient, str], Link]:
    """Return a function that makes a link of a connected channel to an executor with a name."""

    def greet(client: ChannelClient, where: str) -> Link:
        return Link(client, session_id, token, where, jit=jit, trace=trace, opens=opens)

    return greet


def connect(part: Part, reach: Reach, greet: Callable[[ChannelClient, str], T]) -> tuple[T, Endpoint]:
    """Connect to the first endpoint that answers. Returns what `greet` makes of the channel, and the endpoint.

    Raises:
        NotConnectedError: no endpoint answers, or the executor's certificate is not trusted.
        ReleaseError: the executor's PyTorch and this process's do not work together.
    """
    control_url = reach.control_url
    who = f"the executor {part.executor_id}" if part.executor_id else "the executor"
    failures = []
    offered = [Endpoint.parse(text) for text in part.endpoints]
    for endpoint in offered:
        nats_url = (control_url.url if isinstance(control_url, Access) else control_url) or f"nats://{endpoint.host}"
        if reason := reason_not_to_try(endpoint, offered, reach.channel, nats_url, reach.plaintext):
            failures.append(f"{endpoint}: {reason}")
            continue
        try:
            client = _dial(endpoint, control_url, reach.tls_ca)
            try:
                return greet(client, f"{part.executor_id or 'executor'} ({endpoint})"), endpoint
            except BaseException:
                client.close()
                raise
        except ChannelTlsError as e:
            raise NotConnectedError(
                f"the TLS connection to {who} failed, and no other endpoint is tried, because this could be an attack: {e}"
            ) from e
        except ReleaseError:
            raise  # another endpoint leads to the same executor
        except (ChannelError, WoolyError) as e:
            failures.append(f"{endpoint}: {e}")
    raise NotConnectedError(
        f"cannot connect to any endpoint of {who}; check that it runs, and that no firewall blocks these endpoints:\n  "
        + "\n  ".join(failures)
    )


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
        raise ChannelTlsError(f"{e} (set WOOLYAI_TLS_CA to a file with the certificate authorities to trust)") from e
    return ChannelClient.connect(endpoint)


def connect_all(
    parts: Sequence[Part],
    session_id: str,
    token: str,
    reach: Reach,
    jit: str,
    trace: ClientTrace | None,
    opens: DirectSession | None,
) -> tuple[list[Link], list[Endpoint]]:
    """Connect each device of a session to its executor. Returns the links, and the endpoints that answered.

    Raises:
        NotConnectedError: as `connect`.
        ReleaseError: as `connect`.
    """
    links: list[Link] = []
    answered: list[Endpoint] = []
    try:
        for part in parts:
            connecting = (
                contextlib.nullcontext("") if trace is None else trace.step("connect", executor=part.executor_id)
            )
            with connecting as parent:
                link, endpoint = connect(part, reach, greeting(session_id, part.token or token, jit, parent, opens))
            links.append(link)
            answered.append(endpoint)
    except BaseException:
        for link in links:
            link.close()
        raise
    return links, answered


def parts_of(opened: Any) -> list[Part]:
    """The addresses of the devices of an opened session."""
    return [Part(p.endpoints, p.executor_id, p.node, p.token) for p in opened.parts]


def reach_of(settings: Settings, opened: Any) -> Reach:
    """How the client of an opened session may reach its executors."""
    return Reach(settings.channel, opened.tunnels, settings.tls_ca, settings.plaintext)


def _ask_for(settings: Settings, near: str, gang: GangPlace | None) -> Any:
    """Open a session at the standalone executor of the settings, or at the controller."""
    from wooly.control import open_session
    from wooly.direct import StandaloneSession

    return StandaloneSession(settings) if settings.executor_url else open_session(settings, near, gang)


def open_and_use(
    settings: Settings,
    near: str,
    gang: GangPlace | None,
    use: Callable[[Any, list[Recovery]], Sequence[tuple[Link, Lock]]],
    went: Callable[[int, Part, Endpoint], None],
) -> Any:
    """Open a session and connect to its executors.

    If an executor ends before the client connects to it, nothing is lost, and another session is opened.

    Args:
        settings: the client's settings.
        near: id of the executor to prefer; empty: none.
        gang: the rank that the session is; None: it is none.
        use: connects to the executors of the opened session. It gets what lets each device go on in another executor (empty: the
            session ends with its executors), and returns the links and their locks.
        went: is told the index of a device that went on in another executor, its new address, and the endpoint that answered.

    Returns:
        The session.

    Raises:
        WoolyError: no controller or no executor is available.
    """
    others, until = MAX_OPENS, time.monotonic()
    while True:
        try:
            opened = _ask_for(settings, near, gang)
        except WoolyError as e:
            if e.code != UNANSWERED or time.monotonic() >= until:  # it does not answer
                raise
            time.sleep(AGAIN_S)
            continue
        others -= 1
        reopening, recoveries = _recoveries(settings, opened, went)
        try:
            links = use(opened, recoveries)
            if recoveries:
                reopening.follow(links)
            return opened
        except BaseException as e:
            again = others and isinstance(e, NotConnectedError) and not opened.ephemeral and opened.is_over()
            opened.close()
            if not again:
                raise
            log.warning("an executor ended before the client connected to it; another session is opened: %s", e)
            until = time.monotonic() + OUTLAST_S  # the controller answered before: it may be starting again


def open_link(settings: Settings) -> tuple[Any, Link]:
    """Open a session with one device and connect to its executor, without a device of PyTorch.

    The process may have other sessions. The session ends with its executor.

    Args:
        settings: the client's settings, with `gpu_count` 1 and `recovery` off.

    Returns:
        The session and its link. The caller closes both, the link first.

    Raises:
        WoolyError: no controller or no executor is available.
    """
    opened = _ask_for(settings, "", None)
    try:
        (part,) = parts_of(opened)
        greet = greeting(opened.session_id, part.token or opened.token, settings.jit, "", opened.opens)
        link, _ = connect(part, reach_of(settings, opened), greet)
    except BaseException:
        opened.close()
        raise
    opened.when_lost(link.fail)
    return opened, link


def _recoveries(
    settings: Settings, opened: Any, went: Callable[[int, Part, Endpoint], None]
) -> tuple[Reopening, list[Recovery]]:
    """How the session goes on in other executors: for all devices, and for each; empty: it does not."""
    mode = settings.recovery if "recovery" in settings.model_fields_set else opened.recovery

    def open_elsewhere(why: str, cut: int, leaves: bool) -> list[Part]:
        opened.recover(why, cut, leaves=leaves)
        return parts_of(opened)

    def come_to(index: int, part: Part) -> Reopened:
        def greet(client: ChannelClient, where: str) -> Reopened:
            return Reopened(client, opened.session_id, part.token or opened.token, where)

        until = time.monotonic() + RETURN_S
        while True:
            try:
                there, endpoint = connect(part, reach_of(settings, opened), greet)
                break
            except ReleaseError:
                raise
            except NotConnectedError as e:
                if isinstance(e.__cause__, ChannelTlsError) or (not opened.controlled and time.monotonic() >= until):
                    raise
                if (
                    opened.controlled
                ):  # the executor may have ended since; the controller finds another one, or says why not
                    raise ChannelClosedError(str(e)) from e
            time.sleep(RETURN_AGAIN_S)
        went(index, part, endpoint)
        return there

    reopening = Reopening(open_elsewhere, come_to)

    def recovery(index: int) -> Recovery:
        return Recovery(
            lambda why, cut, leaves: reopening.reopen(index, why, cut, leaves),
            (lambda cut, why: None) if index else opened.hibernate,  # the session hibernates once
            always=mode == "on",
            every_s=settings.checkpoint_s,
            note=opened.note,
            left=lambda: reopening.left(index),
            around=lambda why: opened.trace.step("recover", reason=why),
        )

    on = wanted(settings) and mode != "off"
    return reopening, [recovery(index) for index in range(len(opened.parts))] if on else []
