"""Questions to the services of a stack. The command line asks the same, by a process that takes most of a second of a core."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from wooly_bus.rpc import ControlClient
from wooly_wis.messages import Message

if TYPE_CHECKING:
    from wooly_local.stack import Stack

M = TypeVar("M", bound=Message)


def ask(stack: Stack, subject: str, message: Message, reply: type[M]) -> M:
    """What a service answers to the owner of a stack.

    Raises:
        RefusedError: an error.
        NoResponderError: nothing, for it is not there.
    """
    with closing(ControlClient(stack.access())) as control:
        return control.request(subject, message, reply, timeout=20)
