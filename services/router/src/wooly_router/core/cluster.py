"""The devices that placement can choose from: heartbeats, node settings and cluster settings together. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field
from wooly_wis.messages import ExecutorHeartbeat, RecoveryMode

from wooly_router.core.placement import EMPTY, Gpu
from wooly_router.core.queue import Patience
from wooly_router.core.registry import Registry

DAY_S = 86400.0


class ClusterConfig(BaseModel):
    """Settings of the cluster. Operators can change them at run time.

    Attributes:
        default_vram_overcommit_percent: how much device memory may be promised beyond the physical memory, in percent; for
            nodes without their own value.
        default_vram_claim: bytes with which a session that declares no memory counts at least on each of its devices; what it
            uses counts if it is more.
        queue_patience_s: seconds for which later tasks may overtake a waiting task; after that, devices are held for the
            waiting task.
        queue_aging_s: seconds of waiting after which a task rises by one class in the queue.
        recovery: which sessions go on in another executor after the loss of their own, if their clients do not say it: none
            (off), those whose buffers have at most 2 GiB (auto), all (on).
        hibernate_after_s: seconds without an operation after which a session hibernates; 0: never.
        job_attempts: number of attempts of a job whose executors are lost.
        task_retention_s: seconds for which ended tasks are kept.
        history_retention_s: seconds for which samples of devices are kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    default_vram_overcommit_percent: int = Field(default=0, ge=0, le=1000)
    default_vram_claim: int = Field(default=0, ge=0, lt=1 << 63)
    queue_patience_s: float = Field(default=30.0, ge=0, le=DAY_S, allow_inf_nan=False)
    queue_aging_s: float = Field(default=600.0, ge=1, le=30 * DAY_S, allow_inf_nan=False)
    recovery: RecoveryMode = "auto"
    hibernate_after_s: float = Field(default=0.0, ge=0, le=365 * DAY_S, allow_inf_nan=False)
    job_attempts: int = Field(default=5, ge=1, le=100)
    task_retention_s: float = Field(default=30 * DAY_S, ge=60, le=3650 * DAY_S, allow_inf_nan=False)
    history_retention_s: float = Field(default=7 * DAY_S, ge=60, le=3650 * DAY_S, allow_inf_nan=False)

    def patience(self) -> Patience:
        """Return the settings that the queue uses."""
        return Patience(self.queue_patience_s, self.queue_aging_s)


def configured(defaults: ClusterConfig, written: Mapping[str, Any]) -> ClusterConfig:
    """Return the settings in force: the written values, and the defaults for the others. Unknown names are ignored."""
    known = {k: v for k, v in written.items() if k in ClusterConfig.model_fields}
    return ClusterConfig(**defaults.model_dump() | known)


class NodeSettings(Protocol):
    """The settings of a node that an administrator has set."""

    @property
    def wish(self) -> str: ...
    @property
    def overcommit_vram_percent(self) -> int | None: ...
    @property
    def groups(self) -> frozenset[str]: ...


def overcommit_of(node: NodeSettings | None, config: ClusterConfig) -> int:
    """Return the overcommit percentage in force on a node (None: a node without a record)."""
    percent = None if node is None else node.overcommit_vram_percent
    return config.default_vram_overcommit_percent if percent is None else percent


def gpus_of(
    registry: Registry,
    nodes: Mapping[str, NodeSettings],
    config: ClusterConfig,
    now: float,
    starvation: Mapping[str, int] | None = None,
) -> list[Gpu]:
    """Return all known devices with their state. Devices that are silent for too long are no longer known.

    Args:
        registry: heartbeats.
        nodes: node records, by node id.
        config: settings in force.
        now: seconds, on the registry's clock.
        starvation: starvation in permille, by executor; only for executors that the scheduler reports.
    """
    alive = {h.executor_id for h in registry.alive(now)}
    return [
        _gpu(h, h.executor_id in alive, nodes.get(h.node), config, (starvation or {}).get(h.executor_id, 0))
        for h in registry.all()
    ]


def _gpu(
    heartbeat: ExecutorHeartbeat, alive: bool, node: NodeSettings | None, config: ClusterConfig, starvation: int
) -> Gpu:
    wish = "draining" if heartbeat.leaving else "active" if node is None else node.wish
    return Gpu(
        executor_id=heartbeat.executor_id,
        node=heartbeat.node,
        total=heartbeat.device.total_memory,
        vendor=heartbeat.device.vendor,
        arch=heartbeat.device.arch,
        groups=EMPTY if node is None else node.groups,
        overcommit=overcommit_of(node, config),
        state=wish if alive else "lost",
        utilization=round(1000 * heartbeat.utilization),
        starvation=starvation,
        weights=frozenset(heartbeat.weights),
        stores=frozenset({heartbeat.checkpoints, *heartbeat.checkpoints_read} - {""}),
    )
