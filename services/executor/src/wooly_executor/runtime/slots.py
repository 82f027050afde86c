"""What is known of a program's slots while its steps are built: their registers, their memory, and who makes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from wooly_wis.program import View

from wooly_executor.runtime.calls import LibraryCall


class Change(NamedTuple):
    """A change in what is known of a slot, or of a later act.

    Attributes:
        kind: what has changed.
        key: the slot; the later act.
        number: the new register; the operand of the later act.
        value: the register's view, or None; the dtype of the slot's memory; the later act's call.
    """

    kind: str
    key: int
    number: int
    value: Any


class Slots:
    """What is known of the slots so far.

    Attributes:
        slot_of: the slot of each register.
        register_of: the register of a view, by slot and the identity of the view: equal views are one object (`required_view`).
        registers_of: the registers of each slot that was not freed.
        adopted: slots whose memory is the result of an operator: its register and view.
        based: slots whose memory a step allocates: its dtype.
        out_of_place: acts whose `out=` operand has no value yet: the operand, and a call that makes it.
        changes: all changes, in order.
    """

    __slots__ = ("adopted", "based", "changes", "out_of_place", "register_of", "registers_of", "slot_of")

    def __init__(self) -> None:
        self.slot_of: list[int] = []
        self.register_of: dict[tuple[int, int], int] = {}
        self.registers_of: dict[int, list[int]] = {}
        self.adopted: dict[int, tuple[int, View]] = {}
        self.based: dict[int, torch.dtype] = {}
        self.out_of_place: dict[int, tuple[int, LibraryCall]] = {}
        self.changes: list[Change] = []

    def new_register(self, slot: int, view: View | None = None) -> int:
        """Allocate a register, for this view if it is given."""
        register = len(self.slot_of)
        self.change(Change("register", slot, register, view))
        return register

    def adopt(self, slot: int, view: View) -> int:
        """Allocate a register for the result that becomes the memory of a slot."""
        register = self.new_register(slot, view)
        self.change(Change("adopted", slot, register, view))
        return register

    def change(self, change: Change) -> None:
        """Make a change."""
        self.changes.append(change)
        kind, key, number, value = change
        if kind == "register":
            self.slot_of.append(key)
            if value is not None:
                self.register_of[key, id(value)] = number
                self.registers_of.setdefault(key, []).append(number)
        elif kind == "adopted":
            self.adopted[key] = number, value
        elif kind == "based":
            self.based[key] = value
        else:
            self.out_of_place[key] = number, value
