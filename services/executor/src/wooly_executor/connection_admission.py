"""Who may enter: the open sessions' passes, and the check of a hello against them.

The device's thread says which sessions are open; the acceptor's thread checks what strangers show, signatures included. A pass
lets one connection in, whatever comes at the same time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from wooly_bus.channel import ProtocolError
from wooly_bus.channel.token import Pass
from wooly_wis.errors import DecodeError
from wooly_wis.frames import PROTOCOL, Kind, pack_json, unpack_json

from wooly_executor.frames import Failure
from wooly_executor.tiers import Jit


class HelloRefusedError(ProtocolError):
    """A hello opens no channel; the message says why."""

    code = "executor.turned_away"


@dataclass(frozen=True, slots=True)
class Hello:
    """What a client may say of itself, checked.

    Attributes:
        session_id: its session.
        entry: the pass that let it in.
        jit: which kernels it wants: "0", "exact" or "full".
        trace: the `traceparent` that it names, unchecked.
    """

    session_id: str
    entry: Pass
    jit: Jit
    trace: Any


class ConnectionAdmission:
    """The passes of the open sessions. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: dict[str, Pass] = {}
        self._connected: set[str] = set()

    def open(self, session_id: str, entry: Pass) -> None:
        """Let one client in at a session."""
        with self._lock:
            self._passes[session_id] = entry
            self._connected.discard(session_id)

    def close(self, session_id: str) -> None:
        """Let nobody in there any more."""
        with self._lock:
            self._passes.pop(session_id, None)
            self._connected.discard(session_id)

    def check(self, payload: bytearray) -> Hello:
        """What a hello says, if its client may enter; nobody else may from then on.

        Raises:
            HelloRefusedError: it may not.
        """
        try:
            said = unpack_json(payload)
            if said.get("protocol") != PROTOCOL:
                raise ProtocolError(f"protocol {said.get('protocol')!r:.100} is not spoken here, {PROTOCOL} is")
            jit = said.get("jit", "exact")
            if jit not in ("0", "exact", "full"):
                raise ProtocolError(f"WOOLYAI_JIT={jit!r:.100} is not known here; 0, exact and full are")
            session_id = str(said.get("session_id"))
            with self._lock:
                entry = self._passes.get(session_id)
            if entry is None:
                raise ProtocolError("the session is not open here")
            entry.check(str(said.get("token")))  # outside of the lock: it may verify a signature
            self._connect(session_id, entry)
        except (ProtocolError, DecodeError, ValueError) as e:
            raise HelloRefusedError(str(e)) from e
        return Hello(session_id, entry, jit, said.get("trace"))

    def _connect(self, session_id: str, entry: Pass) -> None:
        with self._lock:
            if self._passes.get(session_id) is not entry:
                raise ProtocolError("the session is not open here")
            if session_id in self._connected:
                raise ProtocolError("the session has its client already; a token opens one channel")
            self._connected.add(session_id)


def refusal(code: str, message: str) -> tuple[int, bytes]:
    """The frame that tells a stranger why it may not enter: kind and payload."""
    return Kind.ERROR, pack_json(Failure(code, message, 1, None).to_json())
