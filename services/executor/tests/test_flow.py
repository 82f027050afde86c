"""Tests of a session's life as a fold: exact steps, random events under all laws, and mutants that the laws must detect."""

import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from wooly_executor.flow import ClientCame, Flow, FlowError, Held, Instruction, Overdue, Residence, Signal, core, step
from wooly_executor.flow.core import note
from wooly_executor.flow.laws import Laws, waits_for
from wooly_executor.flow.state import DEFINITIONS, MOST_BYTES, MOST_FRAMES, RUN, TURN, Frame, Readiness, Stage
from wooly_executor.flow.story import story
from wooly_testkit.effort import examples
from wooly_wis.frames import Kind

CLIENTS = (
    Kind.DEFINE,
    Kind.RUN,
    Kind.WRITE,
    Kind.READ,
    Kind.SYNC,
    Kind.STATS,
    Kind.OFFER,
    Kind.SEAL,
    Kind.PIN,
    Kind.SOURCE,
    Kind.COLLECTIVE,
    Kind.IPC,
)


class Environment:
    """A fake executor: carries out instructions with outcomes that the test chooses."""

    def __init__(self, *, planned=False):
        self.flow, self.laws, self.seq = Flow(entries=[]), Laws(), 1
        self.processed, self.refused, self.runs, self.ended = [], [], [], ""
        self.later = set()  # instructions whose outcome is `_AWAITED`
        self.asked = set()  # requests whose event will follow
        self.lend = self.unread = False
        self.uses = False  # whether runs use the buffers of the collective before them
        self.did = []
        self.send(ClientCame(planned))

    def send(self, event):
        """Send an event, and carry out all instructions that follow."""
        self.did = []
        self.saw(event, step(self.flow, event))
        found = self.found
        while found is not None:
            self.did.append(found)
            outcome = getattr(self, found.name.lower())()
            if outcome is None:
                return
            self.saw(outcome, step(self.flow, outcome))
            found = self.found

    def saw(self, event, found):
        self.found = found
        self.laws.saw(self.flow, event, found)

    def note(self, signal):
        note(self.flow, signal)
        self.laws.saw(self.flow, signal, None)

    def arrive(self, kind, nbytes=10):
        self.seq += 1
        self.send(Frame(self.seq, int(kind), b"", nbytes))

    def _perhaps(self, what, now, later):
        if what in self.later:
            self.asked.add(what)
            return later
        return now

    def check_kernels(self):
        return self._perhaps("kernels", Signal.KERNELS_READY, Signal.KERNELS_AWAITED)

    def check_plan(self):
        return self._perhaps("plan", Signal.PLAN_READY, Signal.PLAN_AWAITED)

    def submit(self):
        if self.flow.residence is Residence.LEAVING:
            self.note(Signal.STAYED)
        if self.flow.aside is not None and self.uses:
            return Signal.PEERS_AWAITED
        if ("room" in self.later or self.flow.residence is not Residence.HERE) and self.flow.inbox.submitted:
            return Signal.ROOM_AWAITED
        self.runs.append(self.flow.next)
        return Signal.SUBMITTED

    def decode(self):
        return self._perhaps("decoder", Signal.DEFINITION_READY, Signal.DEFINITION_AWAITED)

    def reach(self):
        return self._reached(self.flow.next)

    def resume(self):
        return self._reached(self.flow.aside)

    def _reached(self, frame):
        if self.flow.residence is Residence.LEAVING:
            self.note(Signal.STAYED)
        if self.flow.residence is not Residence.HERE or "memory" in self.later:
            self.asked.add("memory")
            return Signal.MEMORY_AWAITED
        if frame.kind == Kind.COLLECTIVE:
            return self._perhaps("peers", Signal.MEMORY_READY, Signal.PEERS_AWAITED)
        return Signal.MEMORY_READY

    def process(self):
        frame = self.flow.current
        self.processed.append(frame.seq)
        if frame.kind == RUN:
            assert self.runs.pop(0) is frame
        if frame.kind == Kind.READ and self.lend:
            self.note(Signal.BUFFERS_LENT)
        if self.unread:
            self.note(Signal.ANSWERS_UNREAD)
        return Signal.PROCESSED

    def refuse(self):
        for frame in self.flow.refusing:
            frame.refused = True
            self.refused.append(frame.seq)
        return Signal.REFUSED

    def stop_reading(self):
        return Signal.READING_STOPPED

    def read_on(self):
        return Signal.READING

    def yield_(self):
        return Signal.YIELDED

    def end(self):
        self.ended = self.flow.overdue
        self.note(Signal.CLOSED)


setattr(Environment, "yield", Environment.yield_)


def did(environment):
    return [found.name for found in environment.did]


def test_flow_run_with_resident_memory_is_submitted_in_one_step():
    e = Environment()
    e.arrive(Kind.RUN)
    assert did(e) == ["SUBMIT"] and len(e.runs) == 1
    e.note(Signal.RUN_BEGUN)
    e.send(Signal.RUN_ENDED)
    assert did(e) == ["PROCESS"] and e.processed == [2] and e.flow.quiet


def test_flow_read_of_resident_memory_is_processed_in_one_step():
    e = Environment()
    e.arrive(Kind.READ)
    assert did(e) == ["PROCESS"] and e.processed == [2]


def test_flow_read_of_memory_that_leaves_asks_for_it():
    e = Environment()
    e.note(Signal.LEAVING)
    e.arrive(Kind.READ)
    assert did(e) == ["REACH", "PROCESS"] and e.flow.residence is Residence.HERE


def test_flow_collective_is_set_aside_and_runs_that_do_not_use_its_buffers_go_on():
    e = Environment()
    e.later = {"peers"}
    e.arrive(Kind.COLLECTIVE)
    assert did(e) == ["REACH"] and not e.flow.quiet and e.flow.parked
    e.arrive(Kind.RUN)
    assert did(e) == ["SUBMIT"] and not e.flow.parked
    e.uses = True
    e.arrive(Kind.RUN)
    assert did(e) == ["SUBMIT"] and waits_for(e.flow) == "the other ranks of its collective" and len(e.runs) == 1
    e.note(Signal.RUN_BEGUN)
    e.send(Signal.RUN_ENDED)
    assert did(e) == ["PROCESS"] and e.processed == [3] and e.flow.parked
    e.later = set()
    e.send(Signal.PEERS_CAME)
    assert did(e) == ["RESUME", "PROCESS", "SUBMIT"] and e.processed == [3, 2]


def test_flow_collective_ends_while_a_run_behind_it_is_on_the_device():
    e = Environment()
    e.later = {"peers"}
    e.arrive(Kind.COLLECTIVE)
    e.arrive(Kind.RUN)
    e.note(Signal.RUN_BEGUN)
    e.later = set()
    e.send(Signal.PEERS_CAME)
    assert did(e) == ["RESUME", "PROCESS"] and e.processed == [2]
    e.send(Signal.RUN_ENDED)
    assert did(e) == ["PROCESS"] and e.processed == [2, 3] and e.flow.quiet


@pytest.mark.parametrize("kind", sorted(set(CLIENTS) - {Kind.RUN, Kind.DEFINE, Kind.SOURCE}))
def test_flow_nothing_but_runs_and_definitions_overtakes_a_collective(kind):
    e = Environment()
    e.later = {"peers"}
    for each in (Kind.COLLECTIVE, Kind.DEFINE, Kind.SOURCE, kind):
        e.arrive(each)
    assert did(e) == [] and e.processed == [3, 4]
    assert waits_for(e.flow) == "the other ranks of its collective"
    e.later = set()
    e.send(Signal.PEERS_CAME)
    assert e.processed == [3, 4, 2, 5]


def test_flow_upload_waits_for_a_collective_that_is_set_aside():
    e = Environment()
    e.later = {"peers"}
    e.arrive(Kind.COLLECTIVE)
    assert not e.flow.quiet
    e.note(Signal.UPLOAD_WAITS)
    e.later = set()
    e.send(Signal.PEERS_CAME)
    assert did(e) == ["RESUME", "PROCESS", "READ_ON"]


def test_flow_collective_that_lacks_memory_goes_on_when_it_comes():
    e = Environment()
    e.later = {"peers"}
    e.arrive(Kind.COLLECTIVE)
    e.later = {"memory"}
    e.send(Signal.PEERS_CAME)
    assert did(e) == ["RESUME"]
    e.later = set()
    e.send(Signal.MEMORY_CAME)
    assert did(e) == ["RESUME", "PROCESS"]


def test_flow_frames_behind_a_collective_are_refused_while_their_session_is_held():
    e = Environment()
    e.later = {"peers"}
    e.arrive(Kind.COLLECTIVE)
    e.send(Held("no credits"))
    e.arrive(Kind.SYNC)
    assert e.refused == [3]
    e.later = set()
    e.send(Signal.PEERS_CAME)
    assert did(e) == []
    e.send(Held(""))
    assert did(e) == ["RESUME", "PROCESS", "PROCESS"] and e.processed == [2, 3]


def test_flow_collective_of_a_suspended_session_waits_until_it_is_resumed():
    e = Environment()
    e.send(Signal.PAUSED)
    e.arrive(Kind.COLLECTIVE)
    assert did(e) == [] and waits_for(e.flow) == "the session to be resumed"
    e.send(Signal.RESUMED)
    assert did(e) == ["REACH", "PROCESS"]


def test_flow_steps_of_a_run_allocate_nothing():
    flow, frame = Flow(), Frame(2, RUN, b"", 100)
    step(flow, ClientCame())

    def run():
        step(flow, frame)
        step(flow, Signal.SUBMITTED)
        note(flow, Signal.RUN_BEGUN)
        step(flow, Signal.RUN_ENDED)
        step(flow, Signal.PROCESSED)

    def allocated_by(times):
        before = sys.getallocatedblocks()
        for _ in range(times):
            run()
        return sys.getallocatedblocks() - before

    allocated_by(100)
    assert min(allocated_by(1000) for _ in range(5)) <= 2  # the numbers of this function


def test_flow_frame_behind_a_run_waits_for_its_end():
    e = Environment()
    for kind in (Kind.RUN, Kind.SYNC, Kind.RUN):
        e.arrive(kind)
    assert len(e.runs) == 1 and waits_for(e.flow) == "the runs before it"
    e.note(Signal.RUN_BEGUN)
    e.send(Signal.RUN_ENDED)
    assert did(e) == ["PROCESS", "PROCESS", "SUBMIT"] and e.processed == [2, 3] and len(e.runs) == 1


def test_flow_definition_behind_a_run_is_decoded_during_it():
    e = Environment()
    e.later = {"decoder"}
    for kind in (Kind.RUN, Kind.DEFINE, Kind.RUN):
        e.arrive(kind)
    assert e.flow.readiness is Readiness.DECODER
    e.send(Signal.DECODED)
    assert e.processed == []
    e.note(Signal.RUN_BEGUN)
    e.send(Signal.RUN_ENDED)
    assert e.processed == [2, 3] and len(e.runs) == 1


def test_flow_held_session_decodes_nothing_and_refuses_each_frame_once():
    e = Environment()
    e.send(Held("over budget"))
    for kind in (Kind.SYNC, Kind.DEFINE, Kind.READ):
        e.arrive(kind)
    assert e.processed == [2] and e.refused == [3, 4] and waits_for(e.flow) == "the session's hold: over budget"
    e.send(Held("over budget, still"))
    assert e.refused == [3, 4]
    e.send(Held(""))
    assert e.processed == [2, 3, 4]


def test_flow_paused_session_decodes_nothing_until_it_is_resumed():
    e = Environment()
    e.send(Signal.PAUSED)
    e.arrive(Kind.DEFINE)
    assert waits_for(e.flow) == "the session to be resumed"
    e.send(Signal.RESUMED)
    assert did(e) == ["DECODE", "PROCESS"]


def test_flow_lent_buffers_stop_all_frames_until_they_are_returned():
    e = Environment()
    e.lend = True
    for kind in (Kind.READ, Kind.SYNC, Kind.RUN):
        e.arrive(kind)
    assert e.processed == [2] and e.runs == []
    e.send(Signal.BUFFERS_RETURNED)
    assert did(e) == ["PROCESS", "SUBMIT"]


def test_flow_many_frames_yield_to_other_sessions():
    e = Environment()
    e.arrive(Kind.RUN)
    for _ in range(TURN + 3):
        e.arrive(Kind.SYNC)
    e.arrive(Kind.RUN)
    e.note(Signal.RUN_BEGUN)
    e.send(Signal.RUN_ENDED)
    assert did(e) == ["PROCESS"] * (TURN + 1) + ["YIELD"] and waits_for(e.flow) == "other sessions' turns"
    assert e.runs == []  # the run is not submitted before the waiting frames
    e.send(Signal.TURN_CAME)
    assert did(e) == ["PROCESS"] * 3 + ["SUBMIT"]


def test_flow_full_inbox_stops_reading_from_the_client():
    e = Environment()
    e.arrive(Kind.RUN, MOST_BYTES)
    e.arrive(Kind.RUN, 1)
    assert did(e) == ["SUBMIT", "STOP_READING"]
    e.note(Signal.RUN_BEGUN)
    e.send(Signal.RUN_ENDED)
    assert did(e) == ["PROCESS", "READ_ON"]


def test_flow_upload_resumes_when_earlier_frames_are_processed():
    e = Environment()
    e.arrive(Kind.RUN)
    e.note(Signal.UPLOAD_WAITS)
    e.note(Signal.RUN_BEGUN)
    e.send(Signal.RUN_ENDED)
    assert did(e) == ["PROCESS", "READ_ON"] and not e.flow.inbox.upload


def test_flow_work_does_not_keep_preempted_memory_here():
    e = Environment()
    e.arrive(Kind.RUN)
    e.note(Signal.PREEMPTED)
    e.arrive(Kind.RUN)
    e.arrive(Kind.READ)
    assert len(e.runs) == 1 and waits_for(e.flow) == "the runs before it" and e.flow.residence is Residence.PREEMPTED
    with pytest.raises(FlowError, match="its memory is preempted"):
        note(e.flow, Signal.RUN_BEGUN)
    for signal in (Signal.LEFT, Signal.COMING, Signal.ARRIVED):
        e.note(signal)
    for _ in range(2):
        e.note(Signal.RUN_BEGUN)
        e.send(Signal.RUN_ENDED)
    assert len(e.processed) == 3 and e.flow.quiet


def test_flow_upload_without_memory_requests_it_once():
    e = Environment()
    e.note(Signal.LEAVING)
    e.note(Signal.LEFT)
    e.note(Signal.UPLOAD_LACKS_MEMORY)
    e.send(Signal.TURN_CAME)
    assert did(e) == []
    e.note(Signal.COMING)
    e.note(Signal.ARRIVED)
    e.send(Signal.MEMORY_CAME)
    assert did(e) == ["READ_ON"]


def test_flow_kernels_are_checked_after_the_first_source():
    e = Environment(planned=True)
    e.arrive(Kind.RUN)
    assert did(e) == ["CHECK_PLAN", "SUBMIT"]
    e.note(Signal.RUN_BEGUN)
    e.send(Signal.RUN_ENDED)
    e.arrive(Kind.SOURCE)
    e.later = {"kernels"}
    e.arrive(Kind.RUN)
    assert did(e) == ["CHECK_KERNELS"] and waits_for(e.flow) == "kernels that are being compiled"
    e.send(Signal.KERNELS_BUILT)
    assert did(e) == ["CHECK_KERNELS"]  # another source
    e.later = set()
    e.send(Signal.KERNELS_BUILT)
    assert did(e) == ["CHECK_KERNELS", "CHECK_PLAN", "SUBMIT"]


def test_flow_overdue_session_ends_in_any_state():
    e = Environment()
    e.unread = True
    e.arrive(Kind.STATS)
    e.arrive(Kind.STATS)
    e.send(Overdue("its client has read nothing for 60 s"))
    assert e.ended and e.send(Signal.ANSWERS_READ) is None and did(e) == []


@pytest.mark.parametrize(
    ("before", "signal"),
    [
        ([], Signal.RUN_BEGUN),
        ([], Signal.RUN_ENDED),
        ([], Signal.LEFT),
        ([], Signal.ARRIVED),
        ([Signal.LEAVING, Signal.LEFT], Signal.STAYED),
        ([Signal.LEAVING], Signal.COMING),
        ([Signal.PREEMPTED], Signal.LEAVING),
        ([Signal.LEAVING], Signal.PREEMPTED),
        ([Signal.PREEMPTED, Signal.LEFT], Signal.STAYED),
    ],
)
def test_flow_impossible_event_raises_a_flow_error(before, signal):
    flow = Flow()
    step(flow, ClientCame())
    for each in before:
        note(flow, each)
    with pytest.raises(FlowError):
        step(flow, signal)


def test_flow_note_of_a_signal_that_may_lead_to_an_instruction_raises():
    flow = Flow()
    step(flow, ClientCame())
    with pytest.raises(FlowError, match="it is not to be noted"):
        note(flow, Signal.MEMORY_CAME)


def test_flow_run_without_resident_memory_raises_a_flow_error():
    e = Environment()
    e.note(Signal.LEAVING)
    e.note(Signal.LEFT)
    e.arrive(Kind.RUN)
    assert did(e) == ["SUBMIT"]
    with pytest.raises(FlowError, match="its memory is away"):
        note(e.flow, Signal.RUN_BEGUN)


def test_story_of_a_waiting_frame_names_the_cause():
    e = Environment()
    e.later = {"decoder"}
    e.arrive(Kind.DEFINE)
    e.send(Signal.DECODED)
    e.note(Signal.CLOSED)
    assert list(story(e.flow.entries)) == [
        "a client came",
        "frame 2: DEFINE of 10 bytes",
        "a decoder has the definition",
        "the definition is decoded; process",
        "closed",
    ]


class FlowMachine(RuleBasedStateMachine):
    """Random events; `Environment` raises at the first broken law."""

    def __init__(self):
        super().__init__()
        self.e = Environment(planned=True)

    @rule(
        kinds=st.lists(st.sampled_from(CLIENTS), min_size=1, max_size=8),
        nbytes=st.sampled_from([0, 10, MOST_BYTES // 2]),
    )
    def arrive(self, kinds, nbytes):
        for kind in kinds:
            if not self.e.flow.inbox.congested and not self.e.flow.inbox.upload:
                self.e.arrive(kind, nbytes)

    @rule(kind=st.sampled_from(CLIENTS), count=st.sampled_from([TURN + 2, 3 * TURN]))
    def flood(self, kind, count):
        for _ in range(count):
            if not self.e.flow.inbox.congested and not self.e.flow.inbox.upload:
                self.e.arrive(kind, 1)

    @rule(
        later=st.sets(st.sampled_from(["kernels", "plan", "room", "decoder", "memory", "peers"])),
        lend=st.booleans(),
        unread=st.booleans(),
        uses=st.booleans(),
    )
    def from_now_on(self, later, lend, unread, uses):
        self.e.later, self.e.lend, self.e.unread, self.e.uses = later, lend, unread, uses

    @precondition(lambda self: self.e.asked)
    @rule(late=st.booleans())
    def came(self, late):
        what = sorted(self.e.asked)[0]
        if not late:
            self.e.asked.discard(what)
        if what == "memory":
            self.bring()
        signals = {"kernels": Signal.KERNELS_BUILT, "plan": Signal.PLAN_KNOWN, "decoder": Signal.DECODED}
        signals |= {"peers": Signal.PEERS_CAME}
        self.e.send(signals.get(what, Signal.MEMORY_CAME))

    @precondition(lambda self: self.e.flow.residence is Residence.PREEMPTED)
    @rule()
    def memory_could_not_be_copied(self):
        self.e.note(Signal.STAYED)

    def bring(self):
        flow = self.e.flow
        if flow.residence is Residence.PREEMPTED:
            self.e.note(Signal.LEFT)
        if flow.residence is Residence.AWAY:
            self.e.note(Signal.COMING)
        if flow.residence is Residence.COMING:
            self.e.note(Signal.ARRIVED)

    @rule()
    def memory_moves(self):
        flow = self.e.flow
        if flow.residence is Residence.HERE and not flow.running and not flow.lent:
            self.e.note(Signal.LEAVING if not flow.inbox.frames else Signal.PREEMPTED)
        elif flow.residence in (Residence.LEAVING, Residence.PREEMPTED):
            self.e.note(Signal.LEFT)
        else:
            self.bring()

    @precondition(lambda self: self.e.runs and not self.e.flow.running)
    @rule(fails=st.booleans())
    def device_begins(self, fails):
        if self.e.flow.residence is Residence.LEAVING:
            self.e.note(Signal.STAYED)
        self.bring()
        self.e.note(Signal.RUN_BEGUN)
        if fails:
            self.e.send(Signal.RUN_ENDED)

    @precondition(lambda self: self.e.flow.running)
    @rule()
    def device_is_done(self):
        self.e.send(Signal.RUN_ENDED)

    @rule(how=st.sampled_from([Signal.PAUSED, Signal.RESUMED, Held("why"), Held("")]))
    def suspend(self, how):
        self.e.send(how)

    @rule(what=st.sampled_from([Signal.ANSWERS_READ, Signal.BUFFERS_RETURNED, Signal.TURN_CAME]))
    def client_reads(self, what):
        self.e.send(what)

    @precondition(lambda self: self.e.flow.inbox.frames or self.e.flow.lent)
    @rule()
    def upload(self):
        self.e.note(Signal.UPLOAD_WAITS)

    @invariant()
    def books(self):
        assert len(self.e.processed) == len(set(self.e.processed))

    def teardown(self):
        """When all outcomes have arrived, every frame is processed: no frame is lost or blocked."""
        e = self.e
        e.later, e.lend, e.unread = set(), False, False
        for _ in range(3 * MOST_FRAMES):
            if e.flow.quiet:
                break
            for event in (Held(""), Signal.RESUMED, Signal.ANSWERS_READ, Signal.BUFFERS_RETURNED, Signal.TURN_CAME):
                e.send(event)
            for event in (Signal.KERNELS_BUILT, Signal.PLAN_KNOWN, Signal.DECODED, Signal.PEERS_CAME):
                e.send(event)
            if e.flow.residence is Residence.LEAVING:
                e.note(Signal.STAYED)
            self.bring()
            e.send(Signal.MEMORY_CAME)
            if e.runs:
                if not e.flow.running:
                    e.note(Signal.RUN_BEGUN)
                e.send(Signal.RUN_ENDED)
        assert e.flow.quiet and sorted(e.processed) == list(range(2, e.seq + 1)), list(story(e.flow.entries))[-20:]
        assert not e.flow.inbox.upload and not e.flow.inbox.congested


TestFlowMachine = FlowMachine.TestCase
TestFlowMachine.settings = settings(
    max_examples=examples(40, 2000), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def broken_begin(flow, frame):
    return Instruction.SUBMIT if frame.kind == RUN else None


MUTANTS = {
    "runs are submitted while buffers are lent": ("_next", lambda flow: _next_without(flow, "lent")),
    "frames are processed past runs": ("_begin", lambda flow, frame: _begin_past_runs(flow, frame)),
    "definitions are decoded though held": ("_begin", lambda flow, frame: _begin_though_held(flow, frame)),
    "definitions are processed before they are decoded": ("DEFINITIONS", frozenset()),
    "nothing but runs is begun": ("_begin", broken_begin),
    "a client is read on for ever": ("MOST_FRAMES", 1 << 60),
    "frames overtake a collective": ("OVERTAKES", frozenset(map(int, Kind))),
}
_REAL_NEXT, _REAL_BEGIN = core._next, core._begin


def _next_without(flow, name):
    kept = getattr(flow, name)
    setattr(flow, name, False)
    try:
        return _REAL_NEXT(flow)
    finally:
        setattr(flow, name, kept)


def _begin_past_runs(flow, frame):
    if frame.kind == RUN or frame.kind in DEFINITIONS:
        return _REAL_BEGIN(flow, frame)
    inbox = flow.inbox
    del inbox.frames[inbox.submitted]
    inbox.nbytes -= frame.nbytes
    flow.current = frame
    return Instruction.PROCESS


def _begin_though_held(flow, frame):
    if frame.kind in DEFINITIONS and frame.stage is Stage.NEW and flow.readiness is Readiness.READY:
        return Instruction.DECODE
    return _REAL_BEGIN(flow, frame)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_laws_broken_rule_raises_a_flow_error(mutant, monkeypatch):
    name, broken = MUTANTS[mutant]
    monkeypatch.setattr(core, name, broken)
    with pytest.raises(FlowError):
        provoke()


def provoke():
    """A history that exercises every law."""
    for signal in (Signal.PAUSED, Signal.RESUMED):
        e = Environment()
        e.arrive(Kind.SYNC)
        e.send(signal)
        e.arrive(Kind.RUN)
        e.arrive(Kind.SYNC)
        e.arrive(Kind.DEFINE)
    e = Environment()
    e.send(Signal.PAUSED)
    e.arrive(Kind.DEFINE)
    e = Environment()
    e.lend = True
    e.arrive(Kind.READ)
    e.arrive(Kind.RUN)
    e = Environment()
    e.later = {"peers"}
    e.arrive(Kind.COLLECTIVE)
    e.arrive(Kind.SYNC)
    e = Environment()
    e.later = {"room"}
    for _ in range(MOST_FRAMES + 2):
        e.arrive(Kind.RUN, 1)


def test_laws_correct_rule_passes():
    provoke()
