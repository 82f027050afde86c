"""What users call: `enable`, `disable`, `session_stats`. Puts device, session and facade together."""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Any

from wooly.device import Device, register
from wooly.link import Link
from wooly_bus.channel import ChannelClient, Endpoint


class _State:
    device: Device | None = None
    link: Link | None = None
    session: Any = None
    started = 0.0
    facts: dict[str, Any] = {}


_state = _State()


def attach(endpoint: str, session_id: str, token: str, *, flush_instructions: int = 128, where: str = "") -> Device:
    """Connect the device to an executor's data channel. `enable` does this and everything around it."""
    device = register(flush_instructions)
    channel = ChannelClient.connect(Endpoint.parse(endpoint))
    link = Link(channel, session_id, token, where or endpoint)
    link.name_of = device.recorder.name_of
    device.recorder.forget_session()
    device.recorder.link = link
    _state.device, _state.link = device, link
    return device
