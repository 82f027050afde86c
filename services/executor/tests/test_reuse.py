"""Memory that a program's kernels take from freed slots of the same program: which slots, and never beyond the program's peak."""

from hypothesis import given
from hypothesis import strategies as st
from wooly_executor.runtime.acts import Act
from wooly_executor.runtime.reuse import reused_memory
from wooly_wis.dtypes import DType
from wooly_wis.foreign import OPCODE
from wooly_wis.program import Form, Operand, Role, View

OTHER = "op"


def act(opcode, slot, dtype=DType.F32):
    view = None if opcode in ("alloc", "free") else View(dtype, (1,), (1,))
    return Act(0, Form(opcode, (Operand(Role.INOUT, view),)), (slot,), 0)


def found(*acts):
    """`acts`: opcode, slot, and for an `alloc` the bytes, or for a use the dtype."""
    made = [act(opcode, slot, *rest if opcode not in ("alloc", "free") else ()) for opcode, slot, *rest in acts]
    sizes = {slot: rest[0] for opcode, slot, *rest in acts if opcode == "alloc"}
    first = {}
    for i, a in enumerate(made):
        if a.form.opcode != "alloc":
            first.setdefault(a.slots[0], (i, 0))
    nbytes = [sizes.get(slot) for slot in range(1 + max(slot for _, slot, *_ in acts))]
    return reused_memory(made, nbytes, first), nbytes


def used(slot, nbytes=64, opcode=OPCODE, dtype=DType.F32):
    return ("alloc", slot, nbytes), (opcode, slot, dtype)


def test_slot_takes_the_memory_that_was_freed_last():
    acts = *used(0), *used(1), ("free", 0), ("free", 1), *used(2), *used(3), *used(4)
    assert found(*acts)[0] == {2: 1, 3: 0}


def test_memory_is_not_taken_from_slots_that_differ():
    for other in (used(0, 128), used(0, dtype=DType.I32), used(0, opcode=OTHER), ((OPCODE, 0),)):
        assert found(*used(2, 256), *other, ("free", 0), *used(1))[0] == {}
    assert found(*used(2, 256), *used(0), ("free", 0), *used(1, opcode=OTHER))[0] == {}


def test_memory_is_not_held_where_the_program_reaches_its_peak():
    between = *used(2, 256), ("free", 2)
    assert found(*used(0), ("free", 0), *between, *used(1))[0] == {}
    assert found(*used(3, 320), ("free", 3), *used(0), ("free", 0), *between, *used(1))[0] == {1: 0}


@given(st.lists(st.tuples(st.sampled_from((64, 128, 192)), st.booleans(), st.integers(0, 5)), max_size=30))
def test_program_never_holds_more_than_its_peak(steps):
    """A step makes a slot, for a kernel or not, and frees the slot at a place among those that live, if there is one."""
    acts, alive = [], []
    for slot, (nbytes, kernel, place) in enumerate(steps):
        acts += used(slot, nbytes, OPCODE if kernel else OTHER)
        alive.append(slot)
        if place < len(alive):
            acts.append(("free", alive.pop(place)))
    if not acts:
        return
    reused, nbytes = found(*acts)
    assert len(set(reused.values())) == len(reused)
    plain, held, peak, plain_peak, gone = 0, 0, 0, 0, set()
    for opcode, slot, *_ in acts:
        if opcode == "alloc":
            plain += nbytes[slot]
            held += nbytes[slot] if slot not in reused else 0
            assert slot not in reused or reused[slot] in gone
        elif opcode == "free":
            plain -= nbytes[slot]
            gone.add(slot)
            held -= nbytes[slot] if slot not in reused.values() else 0
        peak, plain_peak = max(peak, held), max(plain_peak, plain)
    assert peak <= plain_peak
