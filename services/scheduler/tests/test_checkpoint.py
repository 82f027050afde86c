"""The checkpoint's encoding: it restores an equal follower, and refuses all other values."""

import json
import pickle
import random
import zlib
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wooly_bus.app import ServiceApp
from wooly_dispatch.events import (
    Config,
    ConfigChangedEvent,
    EpochEndedEvent,
    ExclusiveBegunEvent,
    ExclusiveEndedEvent,
    Policy,
    PolicyChangedEvent,
    SessionClosedEvent,
    SessionResumedEvent,
    SessionSuspendedEvent,
    SwappedInEvent,
    SwappedOutEvent,
)
from wooly_dispatch.journal import Journal
from wooly_scheduler import actor as scheduler_actor
from wooly_scheduler import checkpoint
from wooly_scheduler.actor import SchedulerActor
from wooly_scheduler.checkpoint import CheckpointError, decode, decode_follower, encode, encode_follower
from wooly_scheduler.core.follower import Follower
from wooly_scheduler.settings import SchedulerSettings
from wooly_testkit.dispatch import Rig
from wooly_testkit.effort import examples

US = 1_000
TOGGLES = [SwappedInEvent, SwappedOutEvent, SessionSuspendedEvent, SessionResumedEvent, SessionClosedEvent]


def history(chance, events, flights=1 << 20):
    """A rig after events of every kind: sessions close with launches in flight, and open again under the same name."""
    rig = Rig(books=False)
    stoppable = flights == 1
    rig.send(ConfigChangedEvent(0, Config(floor_permille=50, max_flights=flights, stoppable=stoppable)))
    names = [f"s{n}" for n in range(5)]
    for _ in range(events):
        name = chance.choice(names)
        if name not in rig.state.sessions:
            rig.open(name, chance.randrange(5), weight=chance.randrange(1, 4), objective_ns=900 * US,
                     rate_permille=chance.choice([0, 300]), burst_ns=2_000 * US)  # fmt: skip
        choice = chance.randrange(14)
        if choice < 6:
            rig.submit(name, *(chance.randrange(1, 400) * US for _ in range(chance.randrange(1, 9))))
        elif choice < 10 and rig.in_flight:
            launch = rig.in_flight[0]
            last = chance.randrange(launch.first + 1, launch.last + 1) if stoppable else -1
            rig.finish(launch.estimate_ns * chance.randrange(700, 1400) // 1000, -1 if last == launch.last else last)
        elif choice < 12:
            rig.send(chance.choice(TOGGLES)(rig.now, name))
        elif choice == 12:
            rig.send(PolicyChangedEvent(rig.now, name, Policy(chance.randrange(5), chance.randrange(1, 5))))
        else:
            rig.now += chance.randrange(1_500_000 * US)
            exclusive = [ExclusiveBegunEvent(rig.now, name), ExclusiveEndedEvent(rig.now)]
            rig.send(chance.choice([EpochEndedEvent(rig.now, 1100, 0), *exclusive]))
    return rig


def batches(rig, size=13):
    journal, found = Journal("gpu-0/1"), []
    for n, (event, decisions) in enumerate(rig.entries, 1):
        journal.record(event, decisions)
        if n % size == 0:
            found.append(journal.cut().encode())
    return found


def fed(follower, found):
    return [v for data in found for v in follower.feed(data) if v is not None]


def busy(events=200):
    follower = Follower("gpu-0")
    assert fed(follower, batches(history(random.Random(4), events))) == []
    return follower


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 3, 1 << 20]), st.floats(0, 1), st.booleans())
def test_follower_restored_from_a_checkpoint_continues_unchanged(seed, flights, part, reordered):
    found = batches(history(random.Random(seed), 150, flights))
    at = int(part * len(found))
    if reordered and at + 2 < len(found):  # at the checkpoint, a batch waits for the batch before it
        found[at], found[at + 1] = found[at + 1], found[at]
        at += 1
    straight, stopped = Follower("gpu-0"), Follower("gpu-0")
    fed(stopped, found[:at])
    data = encode_follower(stopped)
    resumed = decode_follower(data)
    assert encode_follower(resumed) == data and resumed.waiting == stopped.waiting
    assert fed(resumed, found[at:]) == fed(straight, found) == [] and not resumed.lost
    assert encode_follower(resumed) == encode_follower(straight)
    assert resumed.meters.recent() == straight.meters.recent()


def test_encoded_follower_is_a_copy():
    follower = busy()
    data = encode_follower(follower)
    again = decode_follower(data)
    fed(follower, batches(history(random.Random(4), 600)))
    assert encode_follower(again) == data != encode_follower(follower)


def test_follower_with_a_lost_journal_is_restored_with_its_violations():
    follower, found = Follower("gpu-0"), batches(history(random.Random(1), 100))
    fed(follower, [found[0], found[1].replace(b'"s1"', b'"s2"', 1), b"\xff\xfe"])
    resumed = decode_follower(encode_follower(follower))
    assert resumed.lost == follower.lost and resumed.lost
    assert (resumed.counts, resumed.last) == (follower.counts, follower.last)


class Trap:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("content", [Trap(), [1], len])
def test_pickle_is_refused_and_not_executed(content, capsys):
    head = json.dumps([checkpoint.VERSION, 7, [["gpu-0", 7, 0]]]).encode() + b"\n"
    for data in (pickle.dumps(content), head + pickle.dumps(content), head + zlib.compress(pickle.dumps(content))):
        with pytest.raises(CheckpointError):
            decode(data)
    assert capsys.readouterr().out == ""


def test_whole_checkpoint_of_another_version_or_damaged_is_refused():
    data = encode(9, [("gpu-0", 9, encode_follower(busy())), ("gpu-1", 3, encode_follower(Follower("gpu-1")))])
    sequence, followers = decode(data)
    assert sequence == 9 and [(name, position) for name, position, _ in followers] == [("gpu-0", 9), ("gpu-1", 3)]
    other = data.replace(b"[%d," % checkpoint.VERSION, b"[%d," % (checkpoint.VERSION + 1), 1)
    renamed = data.replace(b'"gpu-1"', b'"gpu-7"', 1)
    for bad in (other, renamed, b"", data[:-1], data + b"x", data[: len(data) // 2], b"wooly follower 1\n" + data):
        with pytest.raises(CheckpointError):
            decode(bad)


@settings(max_examples=examples(50, 150), deadline=None)
@given(st.data())
def test_decode_checkpoint_flipped_bytes_are_refused_or_harmless(data):
    whole = bytearray(encode_follower(KEPT))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_follower(bytes(whole))
    except CheckpointError:
        return
    assert encode_follower(found) == encode_follower(KEPT)


KEPT = busy()


def leaves(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))
    if not items:
        yield path


def test_decode_checkpoint_value_of_another_type_is_refused():
    """About a hundred fields, one after the other, get a value of another type; the lines are record, link and state."""
    lines = [json.loads(line) for line in zlib.decompress(encode_follower(KEPT)).split(b"\n")]
    paths = list(leaves(lines))
    assert len(paths) > 500
    for path in random.Random(0).sample(paths, 300):
        changed = json.loads(json.dumps(lines))
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = {"surprise": [1]}
        with pytest.raises(CheckpointError):
            decode_follower(zlib.compress(b"\n".join(json.dumps(line).encode() for line in changed)))


def test_follower_larger_than_the_limit_is_neither_encoded_nor_decoded(monkeypatch):
    bomb = zlib.compress(b"0" * (1 << 20))
    data = encode_follower(KEPT)
    monkeypatch.setattr(checkpoint, "MAX_FOLLOWER_BYTES", 10_000)
    with pytest.raises(CheckpointError, match="is incomplete, or larger than 10000"):
        decode_follower(bomb)
    with pytest.raises(CheckpointError, match="is incomplete, or larger than 10000"):
        decode_follower(data)
    with pytest.raises(CheckpointError, match="the limit is 10000"):
        encode_follower(KEPT)
    monkeypatch.setattr(checkpoint, "MAX_BYTES", 100)
    with pytest.raises(CheckpointError, match="the limit is 100"):
        encode(1, [("gpu-0", 1, b"x" * 100)])


async def test_gpu_that_comes_back_while_a_checkpoint_is_made_is_in_it(monkeypatch):
    actor = SchedulerActor(SchedulerSettings(), ServiceApp("scheduler", "nats://127.0.0.1:1"))
    actor.read_until = 10
    actor._quiet["back"] = 0.0, 5, b"state"

    async def checkpoint():
        del actor._quiet["back"]  # as `gpu` does, if its executor is heard
        return 10, b"other"

    actor.gpus["gpu-0"] = SimpleNamespace(caught_up=True, checkpoint=checkpoint)
    found = []

    def encode(sequence, whole):
        found.extend([sequence, *whole])
        raise CheckpointError("enough")

    monkeypatch.setattr(scheduler_actor, "encode", encode)
    assert not await actor.checkpoint()
    assert found == [10, ("gpu-0", 10, b"other"), ("back", 5, b"state")]
