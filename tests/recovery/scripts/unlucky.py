"""As train.py, but the executor where the session would go on first is lost, too, before the client has connected.

unlucky.py MODE STEPS EVERY     MODE "gone": the client finds nobody; "new": it finds a new process without the session
"""

import os
import runpy
import sys
import time
from pathlib import Path

import losing
import torch
from wooly import opening

mode = sys.argv.pop(1)
dial, lost = opening._dial, []


def lose_first(endpoint, *more):
    if not lost:
        lost.append(endpoint)
        named = Path(os.environ["PIDS"], Path(endpoint.path).stem)
        pid = named.read_text()
        losing.kill(int(pid))
        while mode == "new":
            time.sleep(0.01)
            if named.read_text() != pid:
                try:
                    return dial(endpoint, *more)
                except opening.ChannelError:  # it does not listen yet
                    continue
    return dial(endpoint, *more)


torch.ones(1, device="cuda").item()  # the session is open
opening._dial = lose_first
runpy.run_path(str(Path(__file__).with_name("train.py")))
assert lost, "the session did not go on elsewhere"
