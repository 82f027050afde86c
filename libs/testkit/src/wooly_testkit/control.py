"""Requests to the services of a stack from this process. A process of the command line would take most of a second of a core."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from wooly_bus.contract_types import Q, R, Rpc
from wooly_bus.rpc import ControlClient

if TYPE_CHECKING:
    from wooly_local.stack import Stack


def ask(stack: Stack, rpc: Rpc[Q, R], message: Q) -> R:
    """Send a request to a service as the owner of a stack, and return the reply.

    Raises:
        RefusedError: the service answered with an error.
        NoResponderError: the service does not run.
    """
    with closing(ControlClient(stack.access())) as control:
        return control.request(rpc, message, timeout=20)
