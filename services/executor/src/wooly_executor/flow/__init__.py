"""The life of one session on an executor as a fold: events in, instructions out. Pure: no clock, no I/O, no threads.

    instruction = step(flow, event)      updates the state and returns the next instruction
    event = carry_out(instruction)       the device's thread carries it out; the outcome is the next event
    note(flow, signal)                   feeds a signal after which no instruction can follow

`core` has the rule, `state` the state, `laws` the invariants, `story` prints one session's steps for people.
"""

from wooly_executor.flow.core import note, step
from wooly_executor.flow.errors import FlowError
from wooly_executor.flow.events import ClientCame, Event, Held, Overdue, Signal
from wooly_executor.flow.instructions import Instruction
from wooly_executor.flow.state import Flow, Frame, Link, Readiness, Residence

__all__ = [
    "ClientCame",
    "Event",
    "Flow",
    "FlowError",
    "Frame",
    "Held",
    "Instruction",
    "Link",
    "Overdue",
    "Readiness",
    "Residence",
    "Signal",
    "note",
    "step",
]
