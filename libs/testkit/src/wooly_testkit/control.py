"""Questions to the services of a stack. The command line asks the same, by a process that takes most of a second of a core."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from wooly_bus.contract_types import Q, R, Rpc
from wooly_bus.rpc import ControlClient

if TYPE_CHECKING:
    from wooly_local.stack import Stack


def ask(stack: Stack, rpc: Rpc[Q, R], message: Q) -> R:
    """What a service answers to the owner of a stack.

    Raises:
        RefusedError: an error.
        NoResponderError: nothing, for it is not there.
    """
    with closing(ControlClient(stack.access())) as control:
        return control.request(rpc, message, timeout=20)
