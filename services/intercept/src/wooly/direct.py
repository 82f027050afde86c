"""A session at a standalone executor (`wooly serve`), without a controller: the hello on the data channel opens it.

The session ends with its connection, so there is no lease to renew. With WOOLYAI_RECOVERY=auto or on, the client comes back to
the same address if the connection breaks or the executor is started again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from wooly_bus.access import Access
from wooly_bus.channel import Endpoint, EndpointError
from wooly_wis.messages import DirectSession

from wooly.errors import WoolyError
from wooly.settings import Settings
from wooly.traces import ClientTrace


class ExecutorUrlError(WoolyError, ValueError):
    """WOOLYAI_EXECUTOR_URL is not valid, or another setting needs a controller."""

    code = "wooly.executor_url"


@dataclass(frozen=True, slots=True)
class ExecutorUrl:
    """The address of a standalone executor and its token: tcp://TOKEN@host:port, tls://TOKEN@host:port, unix://TOKEN@/path."""

    endpoint: Endpoint
    token: str

    @classmethod
    def parse(cls, text: str) -> ExecutorUrl:
        """Parse a URL.

        Raises:
            ExecutorUrlError: it has no token, or no valid address. The message does not contain the token.
        """
        scheme, separator, rest = text.partition("://")
        token, at, where = rest.rpartition("@")
        try:
            endpoint = Endpoint.parse(f"{scheme}{separator}{where}")
        except EndpointError as e:
            raise ExecutorUrlError(f"WOOLYAI_EXECUTOR_URL: {e}; `wooly serve` prints the URL") from e
        if not at or not token:
            raise ExecutorUrlError(
                f"WOOLYAI_EXECUTOR_URL has no token: it must look like {scheme}://TOKEN@{where}; `wooly serve` prints the URL"
            )
        if endpoint.scheme == "nats":
            raise ExecutorUrlError("WOOLYAI_EXECUTOR_URL must start with tcp://, tls:// or unix://")
        return cls(endpoint, token)


@dataclass(frozen=True, slots=True)
class _Part:
    """See `wooly_wis.messages.SessionPart`."""

    endpoints: tuple[str, ...]
    executor_id: str
    node: str
    token: str


class StandaloneSession:
    """A session that the client's hello opens. It has the attributes and methods of `wooly.control.OpenedSession`.

    Raises:
        ExecutorUrlError: `settings.executor_url` is not valid, or another setting needs a controller.
    """

    traced: Final = False
    ephemeral: Final = False
    controlled: Final = False
    #: Unless the user asks for it: a script would wait for an executor that its user has stopped.
    recovery: Final = "off"
    tunnels: Final[str | Access] = ""

    def __init__(self, settings: Settings) -> None:
        _refuse_what_needs_a_controller(settings)
        there = ExecutorUrl.parse(settings.executor_url)
        self.session_id = secrets.token_hex(8)
        self.token = there.token
        where = there.endpoint
        self.parts = (_Part((str(where),), "executor", where.host or "this machine", there.token),)
        self.opens: DirectSession | None = DirectSession(
            tenant=settings.tenant,
            priority=settings.priority,
            weight=settings.weight,
            quota=settings.required_vram,
            swap=settings.swap_from_vram,
            dedup=settings.dedup,
        )
        self.reach: dict[str, Any] = {}
        self.trace = ClientTrace("session")

    def is_over(self) -> bool:
        """Whether the session has ended although its executor answers: never, because it ends with the connection."""
        return False

    def when_lost(self, call: Callable[[str], None]) -> None:
        """Call nothing: the connection tells that the session has ended."""

    def recover(self, why: str, cut: int, *, leaves: bool) -> tuple[_Part, ...]:
        """The address, which is the same again."""
        return self.parts

    def hibernate(self, cut: int, why: str) -> None:
        """Refuse: nobody asks for it.

        Raises:
            WoolyError: always.
        """
        raise WoolyError("a session at a standalone executor does not hibernate")

    def note(self, line: str) -> None:
        """Tell nobody: no controller has a story of the session."""

    def close(self, why: str = "") -> bool:
        """End the trace. Closing the connection ends the session. Returns True: no controller needs to know it."""
        self.trace.end()
        self.trace.flush()
        return True


def _refuse_what_needs_a_controller(settings: Settings) -> None:
    unusable = {
        "WOOLYAI_CONTROLLER_URL": bool(settings.controller_url),
        "WOOLYAI_GPU_COUNT": settings.gpu_count > 1,
        "WOOLYAI_GPU_MODE": settings.gpu_mode == "exclusive",
        "WOOLYAI_NODE_GROUPS": bool(settings.node_groups),
        "WOOLYAI_NODE": bool(settings.node),
        "WOOLYAI_LATENCY_OBJECTIVE_MS": bool(settings.latency_objective_ms),
        "WOOLYAI_CHANNEL": settings.channel == "tunnel",
    }
    names = [name for name, is_set in unusable.items() if is_set]
    if names:
        raise ExecutorUrlError(
            f"these settings need a controller: {', '.join(names)}; but WOOLYAI_EXECUTOR_URL names one executor without a "
            "controller: unset them, or unset WOOLYAI_EXECUTOR_URL"
        )
