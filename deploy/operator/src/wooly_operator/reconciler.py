"""The reconciliation loop: reads the cluster, plans, acts.

The loop runs after every change in Kubernetes, and periodically, because changes in the controller cause no event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from wooly_operator.controller import Controller
from wooly_operator.core.fleet import ControllerConfig, FleetDevice
from wooly_operator.core.objects import ClusterView, parse_objects
from wooly_operator.core.plan import (
    Action,
    DeleteStatus,
    LabelNode,
    SetClusterOvercommit,
    SetNodeOvercommit,
    WriteStatus,
    plan,
)
from wooly_operator.errors import UnreachableError
from wooly_operator.kubernetes import Kubernetes
from wooly_operator.tracing import tracer

log = logging.getLogger("wooly.operator")


class Reconciler:
    """Owns the last read state. Several replicas may run, because all actions are idempotent.

    Attributes:
        view: the objects of Kubernetes at the last read; None before the first read.
        devices: the devices of the controller at the last read.
        config: the controller's settings at the last read.
    """

    def __init__(self, kubernetes: Kubernetes, controller: Controller, interval_s: float) -> None:
        self._kubernetes, self._controller, self._interval_s = kubernetes, controller, interval_s
        self._changed = asyncio.Event()
        self._seen = asyncio.Event()
        self._logged_warnings: tuple[str, ...] = ()
        self.view: ClusterView | None = None
        self.devices: Sequence[FleetDevice] = ()
        self.config = ControllerConfig()

    def changed(self) -> None:
        """Reconcile soon, because the cluster has changed."""
        self._changed.set()

    async def first_view(self, patience_s: float) -> ClusterView:
        """The objects at the last read. Before the first read, wait at most `patience_s` seconds.

        Raises:
            UnreachableError: the first read was not complete in time.
        """
        try:
            async with asyncio.timeout(patience_s):
                await self._seen.wait()
        except TimeoutError as e:
            raise UnreachableError("the operator has not read the cluster yet; try again") from e
        assert self.view is not None
        return self.view

    async def run(self) -> None:
        """Reconcile until cancelled. After an error, retry at the next reconciliation."""
        while True:
            self._changed.clear()
            try:
                await self.once()
            except UnreachableError as e:
                self._log_warnings((str(e),))
            except Exception:
                log.exception("reconciliation failed")
            try:
                async with asyncio.timeout(self._interval_s):  # `wait_for` of Python 3.11 may lose a cancellation
                    await self._changed.wait()
                await asyncio.sleep(
                    min(1.0, self._interval_s / 5)
                )  # changes often come in groups: handle them together
            except TimeoutError:
                pass

    async def once(self) -> int:
        """Reconcile once. Returns the number of actions.

        Raises:
            UnreachableError: the API server or the controller does not answer or refuses.
        """
        self.view = parse_objects(await self._kubernetes.list_objects())
        self._seen.set()
        self.devices = await self._controller.devices()
        self.config = await self._controller.config()
        todo = plan(self.view.world(self.devices, self.config.overcommit))
        self._log_warnings(self.view.warnings + todo.warnings)
        if todo.actions:
            with tracer.start_as_current_span("operator.reconcile", attributes={"actions": len(todo.actions)}):
                for action in todo.actions:
                    with tracer.start_as_current_span(f"operator.{type(action).__name__}"):
                        await self._do(action)
        return len(todo.actions)

    async def _do(self, action: Action) -> None:
        match action:
            case SetClusterOvercommit(percent):
                log.info("setting the VRAM overcommit of the cluster to %d %%", percent)
                await self._controller.set_cluster_percent(percent)
            case SetNodeOvercommit(node, own):
                log.info(
                    "setting the VRAM overcommit of node %s to %s",
                    node,
                    "that of the cluster" if own is None else f"{own} %",
                )
                await self._controller.set_node_percent(node, own)
            case LabelNode(node, labels):
                await self._kubernetes.label_node(node, labels)
            case WriteStatus(node, status, exists):
                await self._kubernetes.write_status(node, status, exists)
            case DeleteStatus(node):
                await self._kubernetes.delete_status(node)

    def _log_warnings(self, warnings: tuple[str, ...]) -> None:
        """Log new warnings. A warning that is repeated at each reconciliation is logged once."""
        for text in warnings:
            if text not in self._logged_warnings:
                log.warning("%s", text)
        self._logged_warnings = warnings
