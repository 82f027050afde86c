"""CUDA_VISIBLE_DEVICES: the devices that a process may use. This file does not import torch, because commands use it."""

from __future__ import annotations

import os
import re

#: Variable that lists the devices that a process may use, by number.
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(count: int) -> int:
    """How many of `count` devices the variable CUDA_VISIBLE_DEVICES names; all of them if it is not set.

    As in CUDA, an entry that names no device ends the list, and a list that names a device twice is empty. All devices of a
    session are alike, so only their number matters.
    """
    listed = os.environ.get(VISIBLE)
    if listed is None:
        return count
    named: list[int] = []
    for entry in listed.split(","):
        number = re.match(r"\+?(\d+)", entry.strip())
        if number is None:
            break
        if int(number[1]) in named:
            return 0
        named.append(int(number[1]))
    return next((i for i, number in enumerate(named) if number >= count), len(named))
