"""All stores of one database, and the data that placement reads from several of them."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncSession

from wooly_router.core.cluster import ClusterConfig, configured, gpus_of
from wooly_router.core.placement import Pool
from wooly_router.core.registry import Registry
from wooly_router.state.brought import BroughtStore
from wooly_router.state.config import AuditLog, ConfigStore
from wooly_router.state.database import Database
from wooly_router.state.nodes import NodeRecord, NodeStore
from wooly_router.state.tasks import TaskStore
from wooly_router.state.tenants import TenantStore
from wooly_router.state.traces import TraceStore


class World:
    """The state that all routers share.

    Attributes:
        starvation: starvation in permille, by executor, from the scheduler's last answer to this router.
    """

    def __init__(self, database: Database, defaults: ClusterConfig) -> None:
        self.database = database
        self.defaults = defaults
        self.tasks = TaskStore(database)
        self.nodes = NodeStore(database)
        self.tenants = TenantStore(database)
        self.config = ConfigStore(database)
        self.audit = AuditLog(database)
        self.traces = TraceStore(database)
        self.brought = BroughtStore(database)
        self.starvation: Mapping[str, int] = {}

    async def settings(self, s: AsyncSession | None = None) -> tuple[ClusterConfig, dict[str, NodeRecord]]:
        """Return the cluster's settings in force, and its nodes."""
        if s is None:
            async with self.database.reading() as s:
                return await self.settings(s)
        return configured(self.defaults, await self.config.read(s)), await self.nodes.nodes(s)

    async def pool(
        self, s: AsyncSession, registry: Registry, now: float, *, without: str = ""
    ) -> tuple[ClusterConfig, dict[str, NodeRecord], Pool]:
        """Return the settings, the nodes, and all devices with their claims.

        Args:
            s: a session of `Database.deciding`.
            registry: the known executors.
            now: the time.
            without: a task whose claims do not count.
        """
        config, nodes = await self.settings(s)
        gpus = gpus_of(registry, nodes, config, now, self.starvation)
        return config, nodes, Pool(gpus, await self.tasks.claims(s, registry.counted(), without=without))

    async def close(self) -> None:
        """Close the connections."""
        await self.database.close()
