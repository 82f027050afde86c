"""Admits connections: checks a hello against the passes of the open sessions.

The device's thread opens and closes sessions here. The acceptor's thread checks hellos, including signatures. A pass admits one
connection, even if several arrive at the same time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError
from wooly_bus.channel import ProtocolError
from wooly_bus.channel.token import Pass, SharedPass
from wooly_wis.errors import DecodeError
from wooly_wis.frames import PROTOCOL, Kind, pack_json, unpack_json
from wooly_wis.messages import DirectSession
from wooly_wis.messages.base import SessionId

from wooly_executor.errors import UnknownSessionError
from wooly_executor.frames import Failure
from wooly_executor.plans.tiers import Jit


class HelloRefusedError(ProtocolError):
    """A hello was refused. The message says why."""

    code = "executor.turned_away"


class UnknownHelloError(HelloRefusedError):
    """The hello names a session that is not open here: this process may be new, or the session has just ended."""

    code = UnknownSessionError.code

    def __init__(self) -> None:
        super().__init__("the session is not open here")


@dataclass(frozen=True, slots=True)
class Hello:
    """The checked content of a hello.

    Attributes:
        session_id: id of the client's session.
        entry: the pass that admitted the client.
        jit: the kernels that the client wants: "0", "exact" or "full".
        trace: the client's `traceparent`, not checked.
        opens: the session that the hello opens (standalone), also if the client comes back to it after its connection broke;
            None: the session is open already.
        opaque: a session that the hello opens may launch kernels that cannot be checked.
    """

    session_id: str
    entry: Pass
    jit: Jit
    trace: Any
    opens: DirectSession | None = None
    opaque: bool = False


class _Opening(BaseModel):
    """The part of a hello that opens a session."""

    session_id: SessionId
    session: Annotated[DirectSession, Field(default_factory=DirectSession)]


class ConnectionAdmission:
    """The passes of the open sessions. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: dict[str, Pass] = {}
        self._connected: set[str] = set()
        self._shared_token: str | None = None
        self._opaque = False

    @property
    def direct(self) -> bool:
        """Whether clients open their sessions themselves (standalone)."""
        return self._shared_token is not None

    def open_for_token(self, token: str, *, opaque: bool = False) -> None:
        """From now on, admit every client that has this token. Its hello opens its session (standalone).

        Args:
            token: the token.
            opaque: the sessions may launch kernels that cannot be checked.
        """
        self._shared_token, self._opaque = token, opaque

    def open(self, session_id: str, entry: Pass) -> None:
        """Admit one client to a session. If the client's hello opens the session, it is connected already."""
        with self._lock:
            if self._passes.get(session_id) is not entry:
                self._passes[session_id] = entry
                self._connected.discard(session_id)

    def close(self, session_id: str) -> None:
        """Admit no client to a session any more."""
        with self._lock:
            self._passes.pop(session_id, None)
            self._connected.discard(session_id)

    def check(self, payload: bytearray) -> Hello:
        """Check a hello. If it is valid, the session's pass is used up.

        Raises:
            HelloRefusedError: the hello is not valid.
        """
        try:
            said = unpack_json(payload)
            if said.get("protocol") != PROTOCOL:
                raise ProtocolError(
                    f"the client's protocol is {said.get('protocol')!r:.100}, the executor's is {PROTOCOL}; "
                    "install the same version of Wooly"
                )
            jit = said.get("jit", "exact")
            if jit not in ("0", "exact", "full"):
                raise ProtocolError(f"WOOLYAI_JIT={jit!r:.100} is unknown; use 0, exact or full")
            session_id = str(said.get("session_id"))
            with self._lock:
                entry = self._passes.get(session_id)
            opens = None
            if entry is not None and self._shared_token is not None and said.get("returns") is True:
                entry.check(str(said.get("token")))
                entry, opens = SharedPass(self._shared_token), _opened(said)
            elif entry is None:
                if self._shared_token is None:
                    raise UnknownHelloError
                entry = SharedPass(self._shared_token)
                entry.check(str(said.get("token")))
                opens = _opened(said)
                self._connect_new(session_id, entry)
            else:
                entry.check(str(said.get("token")))  # outside of the lock: it may verify a signature
                self._connect(session_id, entry)
        except ValidationError as e:
            wrong = e.errors()[0]
            where = ".".join([str(part) for part in wrong["loc"]])
            raise HelloRefusedError(f"the client's {where} is not valid: {wrong['msg']}") from e
        except UnknownHelloError:
            raise
        except (ProtocolError, DecodeError, ValueError) as e:
            raise HelloRefusedError(str(e)) from e
        return Hello(session_id, entry, jit, said.get("trace"), opens, self._opaque)

    def _connect_new(self, session_id: str, entry: Pass) -> None:
        with self._lock:
            if session_id in self._passes:
                raise ProtocolError("another client has just opened a session with this id; open a new session")
            self._passes[session_id] = entry
            self._connected.add(session_id)

    def _connect(self, session_id: str, entry: Pass) -> None:
        with self._lock:
            if self._passes.get(session_id) is not entry:
                raise UnknownHelloError
            if session_id in self._connected:
                raise ProtocolError("the session already has a client; a token opens one channel only")
            self._connected.add(session_id)


def _opened(said: dict[str, Any]) -> DirectSession:
    """The session that a hello opens."""
    return _Opening.model_validate({k: said[k] for k in ("session_id", "session") if k in said}).session


def refusal(code: str, message: str) -> tuple[int, bytes]:
    """The frame that tells a client why its hello was refused: kind and payload."""
    return Kind.ERROR, pack_json(Failure(code, message, 1, None).to_json())
