"""The devices as placement sees them: heartbeats, what operators wish of nodes, and the cluster's settings together. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field
from wooly_wis.messages import ExecutorHeartbeat

from wooly_router.core.placement import NOBODY, Gpu
from wooly_router.core.queue import Patience
from wooly_router.core.registry import Registry

DAY_S = 86400.0


class ClusterConfig(BaseModel):
    """Settings of the cluster. Operators change them while it runs.

    Attributes:
        default_vram_overcommit_percent: how much memory of a device may be promised beyond what it has, where its node has no
            number of its own.
        queue_patience_s: how long a waiting task is overtaken by later ones that fit before devices are held for it.
        queue_aging_s: how long a waiting task takes to rise by a class in the queue.
        job_attempts: how often a job is tried whose executors are lost.
        task_retention_s: how long ended tasks are remembered.
        history_retention_s: how long samples of devices are kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    default_vram_overcommit_percent: int = Field(default=0, ge=0, le=1000)
    queue_patience_s: float = Field(default=30.0, ge=0, le=DAY_S, allow_inf_nan=False)
    queue_aging_s: float = Field(default=600.0, ge=1, le=30 * DAY_S, allow_inf_nan=False)
    job_attempts: int = Field(default=5, ge=1, le=100)
    task_retention_s: float = Field(default=30 * DAY_S, ge=60, le=3650 * DAY_S, allow_inf_nan=False)
    history_retention_s: float = Field(default=7 * DAY_S, ge=60, le=3650 * DAY_S, allow_inf_nan=False)

    def patience(self) -> Patience:
        """What of it the queue goes by."""
        return Patience(self.queue_patience_s, self.queue_aging_s)


def configured(defaults: ClusterConfig, written: Mapping[str, Any]) -> ClusterConfig:
    """The settings in force: what was written, else the defaults. Names that this version does not know are passed over."""
    known = {k: v for k, v in written.items() if k in ClusterConfig.model_fields}
    return ClusterConfig(**defaults.model_dump() | known)


class NodeSettings(Protocol):
    """What an administrator has set for a node."""

    @property
    def wish(self) -> str: ...
    @property
    def overcommit_vram_percent(self) -> int | None: ...
    @property
    def groups(self) -> frozenset[str]: ...


def overcommit_of(node: NodeSettings | None, config: ClusterConfig) -> int:
    """The percentage in force on a node (None: one that nobody configured)."""
    percent = None if node is None else node.overcommit_vram_percent
    return config.default_vram_overcommit_percent if percent is None else percent


def gpus_of(
    registry: Registry,
    nodes: Mapping[str, NodeSettings],
    config: ClusterConfig,
    now: float,
    starvation: Mapping[str, int] | None = None,
) -> list[Gpu]:
    """All devices that were heard of lately enough to be known, with their state.

    Args:
        registry: heartbeats.
        nodes: records by node .
        config: settings in force.
        now: seconds, of the registry's clock.
        starvation: permille by executor, where the scheduler told it.
    """
    alive = {h.executor_id for h in registry.alive(now)}
    return [
        _gpu(h, h.executor_id in alive, nodes.get(h.node), config, (starvation or {}).get(h.executor_id, 0))
        for h in registry.all()
    ]


def _gpu(
    heartbeat: ExecutorHeartbeat, alive: bool, node: NodeSettings | None, config: ClusterConfig, starvation: int
) -> Gpu:
    wish = "active" if node is None else node.wish
    return Gpu(
        executor_id=heartbeat.executor_id,
        node=heartbeat.node,
        total=heartbeat.device.total_memory,
        vendor=heartbeat.device.vendor,
        arch=heartbeat.device.arch,
        groups=NOBODY if node is None else node.groups,
        overcommit=overcommit_of(node, config),
        state=wish if alive else "lost",
        utilization=round(1000 * heartbeat.utilization),
        starvation=starvation,
        weights=frozenset(heartbeat.weights),
    )
