"""The journal: canonical, chained, replayable; a replay finds every manipulation and its place."""

import json
import os
import random
import subprocess
import sys

import pytest
from wooly_dispatch.core import step
from wooly_dispatch.decisions import LaunchDecision
from wooly_dispatch.errors import GapError, JournalError, ReplayError
from wooly_dispatch.events import (
    Config,
    ConfigChangedEvent,
    EpochEndedEvent,
    ExclusiveBegunEvent,
    ExclusiveEndedEvent,
    Policy,
    PolicyChangedEvent,
    ProgramSubmittedEvent,
    SessionResumedEvent,
    SessionSuspendedEvent,
    SwappedInEvent,
    SwappedOutEvent,
)
from wooly_dispatch.journal import GENESIS, Batch, Journal, Replayer, decode_entry, encode_entry
from wooly_dispatch.state import snapshot
from wooly_testkit.dispatch import Rig
from wooly_testkit.effort import examples
from wooly_testkit.story import story

US = 1_000


def history(seed=0, events=300):
    """A rig after many events of every kind."""
    stream = random.Random(seed)
    rig = Rig(books=False)
    rig.send(ConfigChangedEvent(0, Config(floor_permille=50)))
    names = [f"s{n}" for n in range(8)]
    for n, name in enumerate(names):
        rig.open(name, n % 5, weight=1 + n % 3, rate_permille=300 * (n == 0), burst_ns=2_000 * US)
    for _ in range(events):
        name = stream.choice(names)
        choice = stream.randrange(12)
        if choice < 4:
            rig.submit(name, *(stream.randrange(1, 400) * US for _ in range(stream.randrange(1, 9))))
        elif choice < 9 and rig.in_flight:
            rig.finish(rig.in_flight[0].estimate_ns * stream.randrange(700, 1400) // 1000)
        elif choice == 9:
            rig.send(
                stream.choice([SwappedInEvent, SwappedOutEvent, SessionSuspendedEvent, SessionResumedEvent])(
                    rig.now, name
                )
            )
        elif choice == 10:
            rig.send(PolicyChangedEvent(rig.now, name, Policy(stream.randrange(5), stream.randrange(1, 5))))
        else:
            rig.send(
                stream.choice(
                    [
                        EpochEndedEvent(rig.now, 1100, 0),
                        ExclusiveBegunEvent(rig.now, name),
                        ExclusiveEndedEvent(rig.now),
                    ]
                )
            )
    return rig


def batches(rig, size=37, name="gpu"):
    journal, found = Journal(name), []
    for n, (event, decisions) in enumerate(rig.entries, 1):
        journal.record(event, decisions)
        if n % size == 0:
            found.append(journal.cut())
    found.append(journal.cut())
    return [b for b in found if b is not None]


def test_entry_of_every_kind_round_trips():
    rig = history()
    kinds = {type(e) for e, _ in rig.entries} | {type(d) for _, ds in rig.entries for d in ds}
    assert len(kinds) >= 14
    for event, decisions in rig.entries:
        assert decode_entry(encode_entry(event, decisions)) == (event, decisions)


def test_replay_of_all_batches_gives_the_same_state_and_link():
    rig = history()
    replayer = Replayer("gpu")
    found = [entry for batch in batches(rig) for entry in replayer.feed(Batch.decode(batch.encode()))]
    assert found == rig.entries
    assert snapshot(replayer.state) == snapshot(rig.state)


def test_chain_does_not_depend_on_where_batches_are_cut():
    rig = history()
    assert batches(rig, 37)[-1].digest == batches(rig, 5)[-1].digest == batches(rig, 10_000)[-1].digest
    assert batches(rig)[0].previous == GENESIS


def test_replay_in_processes_of_other_hash_seeds_gives_the_same_link():
    program = (
        "import sys, importlib.util as u\n"
        "s = u.spec_from_file_location('t', sys.argv[1]); t = u.module_from_spec(s); s.loader.exec_module(t)\n"
        "rig = t.history(3, 500)\n"
        "import hashlib\n"
        "print(t.batches(rig)[-1].digest, hashlib.sha256(t.snapshot(rig.state)).hexdigest(), hash('x'))\n"
    )
    outputs = []
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program, __file__], env=env, capture_output=True, text=True, check=True
        )
        outputs.append(done.stdout.split())
    assert outputs[0][:2] == outputs[1][:2]
    assert outputs[0][2] != outputs[1][2]  # the hash seeds differed
    assert batches(history(3, 500))[-1].digest == outputs[0][0]


def test_duplicated_and_reordered_batches_are_taken_once_in_order():
    rig = history()
    found, replayer = batches(rig), Replayer("gpu")
    assert len(replayer.feed(found[0])) == 37
    with pytest.raises(GapError) as gap:
        replayer.feed(found[2])
    assert (gap.value.expected, gap.value.first) == (38, 75)
    assert replayer.feed(found[0]) == []
    for batch in found[1:]:
        assert replayer.feed(batch)
    assert replayer.link == found[-1].digest


def test_replay_of_a_wrong_decision_names_the_entry():
    rig = history()
    at = next(n for n, (_, ds) in enumerate(rig.entries) if n > 60 and any(isinstance(d, LaunchDecision) for d in ds))
    event, decisions = rig.entries[at]
    rig.entries[at] = (event, decisions[:-1])
    replayer = Replayer("gpu")
    with pytest.raises(ReplayError) as error:
        for batch in batches(rig):
            replayer.feed(batch)
    assert error.value.entry == at + 1


def test_replay_of_changed_bytes_is_refused():
    rig = history()
    batch = batches(rig, 10_000)[0]
    for at in range(0, len(batch.entries), examples(389, 97)):
        changed = bytearray(batch.entries)
        changed[at] ^= 1
        with pytest.raises((ReplayError, JournalError)):
            Replayer("gpu").feed(Batch.decode(Batch(**_fields(batch) | {"entries": bytes(changed)}).encode()))


def _fields(batch):
    return {name: getattr(batch, name) for name in batch.__slots__}


def test_replay_of_a_consistent_forgery_is_refused_by_the_hash():
    """The journal was made by a replay of other events: its decisions match the rule, but its chain does not match."""
    first, *_ = batches(history(1), 50)
    forged, *_ = batches(history(2), 50)
    with pytest.raises(ReplayError, match="an entry was changed"):
        Replayer("gpu").feed(Batch("gpu", 1, 50, GENESIS, first.digest, forged.entries))


@pytest.mark.parametrize(
    "data", [b"", b"[]\n", b"{}", b'["gpu",1,2,"0","0"]\n[]\n', b"\xff\n", b'["gpu",0,0,"0","0"]\n[]\n']
)
def test_decode_batch_invalid_bytes_are_refused(data):
    with pytest.raises(JournalError):
        Batch.decode(data)


def test_batch_of_another_journal_is_refused():
    with pytest.raises(JournalError, match="not to other"):
        Replayer("other").feed(batches(history())[0])


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9])
def test_replayer_continues_from_the_checkpoint_after_a_crash_within_a_batch(cut):
    """The executor dies while it writes a batch. Complete batches are kept; later events are delivered again."""
    rig = history(5, 400)
    found = batches(rig)
    torn = int(len(found) * cut)
    with pytest.raises(JournalError):
        Batch.decode(found[torn].encode()[:-20])
    replayer = Replayer("gpu")
    for batch in found[:torn]:
        replayer.feed(batch)
    resumed = Replayer.resume(replayer.checkpoint())
    journal = Journal("gpu", resumed.next, resumed.link)
    for event, decisions in rig.entries[resumed.next - 1 :]:
        resumed.state, again = step(resumed.state, event)
        assert again == decisions
        journal.record(event, again)
    assert journal.cut().digest == found[-1].digest
    assert snapshot(resumed.state) == snapshot(rig.state)


def test_entries_are_readable_lines():
    (batch,) = batches(history(events=0), 100)
    event, decisions = json.loads(batch.lines()[1])
    assert event[:3] == ["SessionOpened", 0, "s0"] and decisions == []


def test_story_of_a_session_names_the_launches_that_it_waited_for():
    rig = Rig()
    rig.open("a", 2)
    rig.open("b", 3)
    rig.submit("b", 9_000 * US)
    rig.submit("a", 100 * US)
    rig.finish()
    rig.submit("b", 100 * US)
    rig.finish()
    rig.send(ProgramSubmittedEvent(rig.now, "a", 1, (5,)))
    told = "\n".join(story(rig.entries, "a"))
    assert "opened as P2, weight 1" in told
    assert "program 1: 1 kernels, 100.0 us estimated" in told
    assert "launch 2: program 1, kernels 0 to 0, as P2" in told
    assert "launch 2 done, 100.0 us" in told
    assert "refused, program 1 of a came before" in told
    assert "launch 2" not in "\n".join(story(rig.entries, "b"))
