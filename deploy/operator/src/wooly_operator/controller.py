"""A client of the controller's REST, with the requests that the operator needs."""

from __future__ import annotations

import json
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wooly_operator.core.fleet import ControllerConfig, DeviceRoom, FleetDevice
from wooly_operator.errors import UnreachableError
from wooly_operator.tracing import headers as trace_headers

#: Timeout of a request, in seconds.
TIMEOUT_S = 10.0


class _Answer(BaseModel):
    """Base of the answers: declares required fields; further fields of a newer controller are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


A = TypeVar("A", bound=_Answer)


class _Facts(_Answer):
    name: str = ""
    vendor: str = ""
    arch: str = ""
    total_memory: int = Field(ge=0)


class _Memory(_Answer):
    fixed: int = 0
    movable: int = 0


class _Room(_Answer):
    takes: bool
    takes_exclusive: bool
    swappable: int
    fixed: int


class _Gpu(_Answer):
    executor_id: str
    state: str
    device: _Facts
    sessions: int = 0
    memory_used: int = 0
    memory: _Memory | None = None
    room: _Room | None = None


class _Node(_Answer):
    node_id: str
    overcommit_vram_percent: int | None
    effective_overcommit_vram_percent: int
    groups: tuple[str, ...] = ()
    gpus: tuple[_Gpu, ...] = ()


class _Nodes(_Answer):
    nodes: tuple[_Node, ...]


class _Config(_Answer):
    default_vram_overcommit_percent: int
    default_vram_claim: int = 0


class Controller:
    """A client of the router's REST.

    Args:
        session: HTTP session, which may have an authorization header.
        url: base URL of the router's REST.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url.rstrip("/")

    async def devices(self) -> list[FleetDevice]:
        """All devices that the controller knows.

        Raises:
            UnreachableError: the controller does not answer, refuses, or gives a malformed answer.
        """
        answer = _parsed(_Nodes, await self._ask("GET", "/api/v1/nodes"))
        return [
            FleetDevice(
                id=g.executor_id,
                node=n.node_id,
                total=g.device.total_memory,
                used=g.memory_used,
                fixed=g.memory.fixed if g.memory else 0,
                promised=g.memory.fixed + g.memory.movable if g.memory else 0,
                sessions=g.sessions,
                name=g.device.name,
                vendor=g.device.vendor,
                arch=g.device.arch,
                alive=g.state == "alive",
                overcommit=n.effective_overcommit_vram_percent,
                own=n.overcommit_vram_percent,
                groups=n.groups,
                room=DeviceRoom(g.room.takes, g.room.takes_exclusive, g.room.swappable, g.room.fixed)
                if g.room
                else None,
            )
            for n in answer.nodes
            for g in n.gpus
        ]

    async def config(self) -> ControllerConfig:
        """The settings of the cluster that the operator needs.

        Raises:
            UnreachableError: as `devices`.
        """
        answer = _parsed(_Config, await self._ask("GET", "/api/v1/config"))
        return ControllerConfig(answer.default_vram_overcommit_percent, answer.default_vram_claim)

    async def set_cluster_percent(self, percent: int) -> None:
        """Set `default_vram_overcommit_percent`.

        Raises:
            UnreachableError: as `devices`.
        """
        await self._ask("PUT", "/api/v1/config", {"default_vram_overcommit_percent": percent})

    async def set_node_percent(self, node: str, percent: int | None) -> None:
        """Set the overcommit percentage of a node; None: use the percentage of the cluster.

        Raises:
            UnreachableError: as `devices`.
        """
        body = {"overcommit_vram_percent": percent}
        await self._ask("PUT", f"/api/v1/nodes/{quote(node, safe='')}/config", body)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        where = f"{method} {self._url}{path}"
        try:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            async with self._session.request(
                method, self._url + path, json=body, timeout=timeout, headers=trace_headers()
            ) as response:
                text = await response.text()
                if response.status >= 400:
                    raise UnreachableError(f"{where}: {response.status} {text[:500]}")
                return json.loads(text) if text else None
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            raise UnreachableError(f"{where}: {e or type(e).__name__}") from e


def _parsed(model: type[A], answer: Any) -> A:
    try:
        return model.model_validate(answer)
    except ValidationError as e:
        raise UnreachableError(f"the controller gave a malformed answer: {e.errors()[0]['msg']}") from e
