"""The life of one session on an executor, as a fold: events in, instructions out. Pure: no clock, no I/O, no threads.

    instruction = step(flow, event)      the state takes the event in, and says what to do next
    event = carry_out(instruction)       the device's thread does it; the outcome is the next event
    note(flow, signal)                   what forbids something, or tells where memory is: there is nothing to do next

`core` has the rule, `state` what it remembers, `laws` what always holds, `story` tells one session's steps to people.
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
