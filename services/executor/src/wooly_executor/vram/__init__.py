"""The device's memory as the device loop sees it: who may begin, who must wait for room, who leaves for whom, who shares what.

The pure parts (`memory`) decide; this carries out, with the `mover` for what takes long. A session's memory is

    HERE --idle, and another needs the room--> LEAVING --> AWAY --its turn comes--> COMING --> HERE

A session that is LEAVING comes back at once when it has work: nothing was taken from it yet. A program is submitted to the
dispatch core when there is room for it, or alone: then the core is told that the session's memory is not there, and asks for it
when its turn comes. So whoever lacks memory is passed over, in the order of classes, and nobody else waits.

Owned by the device loop's thread.
"""

from wooly_executor.vram.settings import SwapSettings
from wooly_executor.vram.vram import Vram

__all__ = ["SwapSettings", "Vram"]
