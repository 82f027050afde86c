"""Looks, plans, acts; again whenever something changed, and now and then because the controller's side changes unasked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from wooly_operator.controller import Controller
from wooly_operator.core.fleet import FleetDevice
from wooly_operator.core.objects import Sight, understood
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

log = logging.getLogger("wooly.operator")


class Reconciler:
    """Owns what was seen last. Several replicas may run: they do the same, and doing it twice changes nothing.

    Attributes:
        sight: Kubernetes as last seen; None before the first look.
        devices: the controller's devices as last seen.
    """

    def __init__(self, kubernetes: Kubernetes, controller: Controller, interval_s: float) -> None:
        self._kubernetes, self._controller, self._interval_s = kubernetes, controller, interval_s
        self._changed = asyncio.Event()
        self._seen = asyncio.Event()
        self._complaints: tuple[str, ...] = ()
        self.sight: Sight | None = None
        self.devices: Sequence[FleetDevice] = ()

    def changed(self) -> None:
        """Something happened in the cluster: look soon."""
        self._changed.set()

    async def first_look(self, patience_s: float) -> Sight:
        """What was seen last; waits for the first time.

        Raises:
            UnreachableError: nothing was seen in time.
        """
        try:
            await asyncio.wait_for(self._seen.wait(), patience_s)
        except TimeoutError as e:
            raise UnreachableError("the operator has not seen the cluster yet; try again") from e
        assert self.sight is not None
        return self.sight

    async def run(self) -> None:
        """For ever. What is out of reach is tried again at the next look."""
        while True:
            self._changed.clear()
            try:
                await self.once()
            except UnreachableError as e:
                self._complain((str(e),))
            except Exception:
                log.exception("reconciliation failed")
            try:
                await asyncio.wait_for(self._changed.wait(), self._interval_s)
                await asyncio.sleep(min(1.0, self._interval_s / 5))  # changes come in flocks
            except TimeoutError:
                pass

    async def once(self) -> int:
        """One look and all that follows. How many actions it took.

        Raises:
            UnreachableError: the API server or the controller is out of reach.
        """
        self.sight = understood(await self._kubernetes.look())
        self._seen.set()
        self.devices = await self._controller.devices()
        percent = await self._controller.cluster_percent()
        todo = plan(self.sight.world(self.devices, percent))
        self._complain(self.sight.complaints + todo.complaints)
        for action in todo.actions:
            await self._do(action)
        return len(todo.actions)

    async def _do(self, action: Action) -> None:
        match action:
            case SetClusterOvercommit(percent):
                log.info("cluster: VRAM overcommit %d %%", percent)
                await self._controller.set_cluster_percent(percent)
            case SetNodeOvercommit(node, own):
                log.info("node %s: VRAM overcommit %s", node, "as the cluster" if own is None else f"{own} %")
                await self._controller.set_node_percent(node, own)
            case LabelNode(node, labels):
                await self._kubernetes.label_node(node, labels)
            case WriteStatus(node, status, exists):
                await self._kubernetes.write_status(node, status, exists)
            case DeleteStatus(node):
                await self._kubernetes.delete_status(node)

    def _complain(self, complaints: tuple[str, ...]) -> None:
        """Each only once in a row: it would come again with every look."""
        for text in complaints:
            if text not in self._complaints:
                log.warning("%s", text)
        self._complaints = complaints
