"""A client of the Kubernetes API server: reads six lists, writes labels of nodes and statuses."""

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

#: Timeout of a request, in seconds.
TIMEOUT_S = 30.0
MERGE = "application/merge-patch+json"
STATUSES = f"/apis/{GROUP}/{VERSION}/nodegpustatuses"


class Kubernetes:
    """A client of the API server.

    Args:
        login: returns URL and credentials of the API server. Called for each request, because tokens are rotated.
    """

    def __init__(self, login: Callable[[], kopf.ConnectionInfo]) -> None:
        self._login = login
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def list_objects(self) -> Objects:
        """List all objects that the operator uses.

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
        """Set labels of a node; the value None removes a label. If the node does not exist, do nothing.

        Raises:
            UnreachableError: as `list_objects`.
        """
        await self._ask("PATCH", f"/api/v1/nodes/{node}", {"metadata": {"labels": dict(labels)}}, absent=True)

    async def write_status(self, node: str, status: Mapping[str, Any], exists: bool) -> None:
        """Write a NodeGPUStatus. Create the object first if it does not exist.

        Raises:
            UnreachableError: as `list_objects`.
        """
        if not exists:
            body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "NodeGPUStatus", "metadata": {"name": node}}
            await self._ask("POST", STATUSES, body, conflict=True)
        await self._ask("PATCH", f"{STATUSES}/{node}/status", {"status": dict(status)})

    async def delete_status(self, node: str) -> None:
        """Remove a NodeGPUStatus.

        Raises:
            UnreachableError: as `list_objects`.
        """
        await self._ask("DELETE", f"{STATUSES}/{node}", None, absent=True)

    async def _ask(
        self, method: str, path: str, body: Any, *, absent: bool = False, conflict: bool = False
    ) -> dict[str, Any]:
        """Send a request.

        `absent`: status 404 is a success; `conflict`: status 409 is a success, because another replica was faster.
        """
        try:
            connection = self._login()
            if self._session is None:
                # The certificate authority of the API server does not change while the operator runs.
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
