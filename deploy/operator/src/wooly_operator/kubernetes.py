"""What the operator reads and writes of Kubernetes: six lists, labels of nodes, statuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import kopf
from yarl import URL

from wooly_operator.core.names import GROUP, RUNTIME, RUNTIME_LABEL, VERSION
from wooly_operator.core.objects import Objects
from wooly_operator.errors import UnreachableError

TIMEOUT_S = 30.0
MERGE = "application/merge-patch+json"
STATUSES = f"/apis/{GROUP}/{VERSION}/nodegpustatuses"


class Kubernetes:
    """A client of the API server.

    Args:
        login: says where it is and who we are; asked at every request, because tokens are replaced while we run.
    """

    def __init__(self, login: Callable[[], kopf.ConnectionInfo]) -> None:
        self._login = login
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Let go of connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def look(self) -> Objects:
        """All objects that matter, as the API server has them now.

        Raises:
            UnreachableError: the API server refused or did not answer.
        """
        group = f"/apis/{GROUP}/{VERSION}"
        return Objects(
            nodes=await self._list("/api/v1/nodes"),
            pods=await self._list(f"/api/v1/pods?labelSelector={RUNTIME_LABEL}%3D{RUNTIME}"),
            cluster_policies=await self._list(f"{group}/clustergpupolicies"),
            node_policies=await self._list(f"{group}/woolynodepolicies"),
            classes=await self._list(f"{group}/gpuclasses"),
            statuses=await self._list(STATUSES),
        )

    async def _list(self, path: str) -> list[dict[str, Any]]:
        answer = await self._ask("GET", path, None)
        return list(answer.get("items") or [])

    async def label_node(self, node: str, labels: Mapping[str, str | None]) -> None:
        """Set labels; None removes one. A node that is gone needs none.

        Raises:
            UnreachableError: the API server refused or did not answer.
        """
        await self._ask("PATCH", f"/api/v1/nodes/{node}", {"metadata": {"labels": dict(labels)}}, absent=True)

    async def write_status(self, node: str, status: Mapping[str, Any], exists: bool) -> None:
        """Write a NodeGPUStatus, and make the object first where there is none.

        Raises:
            UnreachableError: as above.
        """
        if not exists:
            body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "NodeGPUStatus", "metadata": {"name": node}}
            await self._ask("POST", STATUSES, body, conflict=True)
        await self._ask("PATCH", f"{STATUSES}/{node}/status", {"status": dict(status)})

    async def delete_status(self, node: str) -> None:
        """Remove a NodeGPUStatus.

        Raises:
            UnreachableError: as above.
        """
        await self._ask("DELETE", f"{STATUSES}/{node}", None, absent=True)

    async def _ask(
        self, method: str, path: str, body: Any, *, absent: bool = False, conflict: bool = False
    ) -> dict[str, Any]:
        """`absent`: 404 is as good as done; `conflict`: 409 is (another replica was faster)."""
        try:
            connection = self._login()
            if self._session is None:
                # Whether the server is checked against the right authority does not change while we run.
                trust = connection.as_ssl_context() if connection.server.startswith("https:") else True
                self._session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(ssl=trust), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
                )
            headers = connection.as_http_headers()
            headers["Content-Type"] = MERGE if method == "PATCH" else "application/json"
            data = None if body is None else json.dumps(body)
            url = connection.server.rstrip("/") + path
            async with self._session.request(method, URL(url, encoded=True), data=data, headers=headers) as response:
                text = await response.text()
                if (absent and response.status == 404) or (conflict and response.status == 409):
                    return {}
                if response.status >= 400:
                    raise UnreachableError(f"{method} {path}: {response.status} {text[:500]}")
                answer = json.loads(text) if text else {}
                return answer if isinstance(answer, dict) else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
            raise UnreachableError(f"{method} {path}: {e or type(e).__name__}") from e
