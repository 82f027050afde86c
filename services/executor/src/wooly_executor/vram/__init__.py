"""The device's memory as the device loop sees it: admission of sessions and programs, waiting for room, eviction, sharing.

The pure modules in `memory` decide. This package carries out, with the `mover` for long copies. The residence of a session's
memory:

    HERE --idle, and another session needs room--> LEAVING --> AWAY --its turn comes--> COMING --> HERE

A session in LEAVING returns to HERE at once when it has work, because its memory is not yet freed. A program is submitted to the
dispatch core if there is room for it, or alone. In the second case the core is told that the session's memory is not there. The
core then passes the session over, in the order of classes, and asks for the memory when the session's turn comes. Other sessions
do not wait.

The device loop's thread owns this package.
"""

from wooly_executor.vram.settings import SwapSettings
from wooly_executor.vram.vram import Vram

__all__ = ["SwapSettings", "Vram"]
