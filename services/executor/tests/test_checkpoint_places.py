"""Where checkpoints lie: what attackers of a store can do, object stores with failures, and executors that use one at a time."""

import asyncio
import base64
import itertools
import os
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError
from wooly_bus.contents import CHUNK
from wooly_executor.checkpoints import jetstream as jetstream_module
from wooly_executor.checkpoints import objects
from wooly_executor.checkpoints.encryption import LONGER, Secret
from wooly_executor.checkpoints.files import Checkpoints, SavedBuffer
from wooly_executor.checkpoints.jetstream import JetStreamFiles
from wooly_executor.checkpoints.objects import ObjectStore
from wooly_executor.errors import CheckpointError
from wooly_executor.memory.swap import Policy
from wooly_executor.settings import ExecutorSettings
from wooly_executor.vram import SwapSettings
from wooly_testkit.nats import nats_server

from services.executor.tests.checkpoint_places import KINDS, SECRET, HookedFileSystem, Place, Steps

ENCRYPTED = [kind for kind in KINDS if kind.endswith("encrypted")]
OTHER = Secret(bytes(32))


@pytest.fixture
def place(request, tmp_path):
    found = Place(getattr(request, "param", "objects"), tmp_path / "checkpoints")
    yield found
    found.remove()


def hook(function):
    HookedFileSystem.hook = staticmethod(function)


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(objects, "PAUSES_S", (0.001, 0.001, 0.001))


def store(files, number, *contents, known=0):
    names, _ = files.keep([memoryview(c) for c in contents])
    table = {8 * (i + 1): SavedBuffer(len(c), (n,)) for i, (c, n) in enumerate(zip(contents, names, strict=True))}
    files.write(number, table, known)
    return table


def restored(files, number):
    found = {}
    for buffer, saved in files.read(number).items():
        found[buffer] = memoryview(bytearray(saved.nbytes))
        files.load([(saved.chunks[0], found[buffer])])
    return [bytes(content) for content in found.values()]


# -- encryption ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", KINDS, indirect=True)
def test_a_cut_is_restored_by_another_executor(place):
    content = os.urandom(CHUNK)
    store(place.checkpoints().of("t", "s"), 1, content, b"small")
    assert restored(place.checkpoints().of("t", "s"), 1) == [content, b"small"]


@pytest.mark.parametrize("place", ENCRYPTED, indirect=True)
def test_the_store_shows_neither_content_nor_names(place):
    content = b"a secret of the tenant" * 100
    store(place.checkpoints().of("tenant-name", "session-name"), 1, content)
    plain = Place(place.kind.split(",")[0], place.folder.parent / "plain")
    store(plain.checkpoints().of("tenant-name", "session-name"), 1, content)
    everything = b"".join([place.read(path) for path in place.paths()])
    assert content[:22] not in everything and b"buffers" not in everything
    plain_names = {part for path in plain.paths() for part in path.split("/") if len(part) >= 32}
    assert plain_names and not {name for path in place.paths() for name in plain_names if name in path}
    plain.remove()


@pytest.mark.parametrize("place", ENCRYPTED, indirect=True)
def test_equal_chunks_have_equal_names_only_within_a_tenant(place):
    checkpoints = place.checkpoints()
    for tenant, session in (("t", "a"), ("t", "b"), ("u", "c")):
        store(checkpoints.of(tenant, session), 1, b"weights")
    assert len(place.chunks()) == 2
    data = [place.read(p) for name in place.chunks() for p in place.chunk_paths(name)]
    assert len(set(data)) == 2


@settings(max_examples=30, deadline=None)
@given(at=st.integers(0, 99), bit=st.integers(0, 7), of_list=st.booleans())
@pytest.mark.parametrize("kind", ENCRYPTED)
def test_a_flipped_bit_is_an_error(tmp_path_factory, kind, at, bit, of_list):
    place = Place(kind, tmp_path_factory.mktemp("flipped") / "checkpoints")
    store(place.checkpoints().of("t", "s"), 1, b"content")
    paths = place.list_paths() if of_list else place.chunk_paths(*place.chunks())
    for path in paths:
        data = bytearray(place.read(path))
        data[at * len(data) // 100] ^= 1 << bit
        place.write(path, bytes(data))
    with pytest.raises(CheckpointError, match=r"damaged|another key"):
        restored(place.checkpoints().of("t", "s"), 1)
    place.remove()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 1, LONGER - 1, LONGER, -1])
def test_a_truncated_file_is_an_error(tmp_path_factory, kind, size):
    for paths in (Place.list_paths, lambda p: p.chunk_paths(*p.chunks())):
        place = Place(kind, tmp_path_factory.mktemp("truncated") / "checkpoints")
        store(place.checkpoints().of("t", "s"), 1, bytes(200))
        for path in paths(place):
            place.write(path, place.read(path)[:size])
        with pytest.raises(CheckpointError, match="damaged"):
            restored(place.checkpoints().of("t", "s"), 1)
        place.remove()


@pytest.mark.parametrize("place", ENCRYPTED, indirect=True)
def test_swapped_chunks_are_an_error(place):
    store(place.checkpoints().of("t", "s"), 1, b"first", b"other")
    one, other = [place.chunk_paths(name) for name in sorted(place.chunks())]
    contents = [place.read(one[0]), place.read(other[0])]
    for path in one:
        place.write(path, contents[1])
    for path in other:
        place.write(path, contents[0])
    with pytest.raises(CheckpointError, match="are those of another chunk"):
        restored(place.checkpoints().of("t", "s"), 1)


@pytest.mark.parametrize("place", ENCRYPTED, indirect=True)
@pytest.mark.parametrize(
    ("tenant", "session", "number"), [("u", "s", 1), ("t", "other", 1), ("t", "s", 2)], ids=["tenant", "session", "cut"]
)
def test_the_list_of_another_cut_is_an_error(place, tenant, session, number):
    checkpoints = place.checkpoints()
    store(checkpoints.of("t", "s"), 1, b"content")
    (mine,) = place.list_paths()
    store(checkpoints.of(tenant, session), number, b"content")
    (theirs,) = [path for path in place.list_paths() if path != mine]
    place.write(theirs, place.read(mine))
    with pytest.raises(CheckpointError, match="are those of another chunk, checkpoint or tenant"):
        checkpoints.of(tenant, session).read(number)


@pytest.mark.parametrize("place", ENCRYPTED, indirect=True)
def test_a_chunk_of_another_tenant_is_an_error(place):
    checkpoints = place.checkpoints()
    store(checkpoints.of("t", "s"), 1, b"content")
    (mine,) = place.chunks()
    store(checkpoints.of("u", "s"), 1, b"content")
    (theirs,) = place.chunks() - {mine}
    for path in place.chunk_paths(theirs):
        place.write(path, place.read(place.chunk_paths(mine)[0]))
    with pytest.raises(CheckpointError, match="are those of another chunk, checkpoint or tenant"):
        restored(checkpoints.of("u", "s"), 1)


@pytest.mark.parametrize("place", ENCRYPTED, indirect=True)
def test_another_key_is_named_and_its_files_are_swept(place):
    store(place.checkpoints(secret=SECRET).of("t", "s"), 1, b"content")
    rotated = place.checkpoints(secret=OTHER)
    with pytest.raises(CheckpointError, match=f"there are checkpoints with the key {SECRET.id}"):
        rotated.of("t", "s").read(1)
    store(rotated.of("t", "new"), 1, b"content")
    (new,) = [path for path in place.list_paths() if OTHER.id in path]
    (old,) = [path for path in place.list_paths() if SECRET.id in path]
    place.write(new, place.read(old))
    with pytest.raises(CheckpointError, match=f"is encrypted with another key \\({SECRET.id}\\)"):
        rotated.of("t", "new").read(1)
    place.age()
    assert rotated.sweep() == 2 and not place.paths()


@pytest.mark.parametrize("place", ENCRYPTED, indirect=True)
def test_a_session_goes_on_from_a_cut_under_the_earlier_key_and_is_stored_under_the_new_one(make_device, place):
    old = make_device(checkpoints=place.checkpoints(secret=SECRET))
    a = old.open("s")
    a.make(8, 1.0)
    a.make(16, 2.0)
    assert a.cut(1)["stored"] == 1
    a.channel.close()
    both = place.checkpoints(secret=OTHER, earlier=SECRET)
    b = make_device(checkpoints=both).open("s")
    b.restore(1)
    b.write(16, struct.pack("<f", 3.0))
    assert b.cut(2, known=1)["stored"] == 2
    b.channel.close()
    c = make_device(checkpoints=place.checkpoints(secret=OTHER)).open("s")  # the earlier key is gone
    c.restore(2)
    assert (c.floats(8, 1), c.floats(16, 1)) == ([1.0], [3.0])
    both.of("", "s").remove()
    assert not place.paths()


@pytest.mark.parametrize("place", ENCRYPTED, indirect=True)
def test_files_under_the_earlier_key_are_kept_as_long_as_their_session(place):
    store(place.checkpoints(secret=SECRET).of("t", "s"), 1, b"content")
    both = place.checkpoints(secret=OTHER, earlier=SECRET)
    place.age()
    both.of("t", "s").touch()
    assert both.sweep() == 0 and restored(both.of("t", "s").holder(1), 1) == [b"content"]


def test_executors_with_two_keys_name_both_places(tmp_path, monkeypatch):
    keys = {"CHECKPOINT_KEY": bytes(32).hex(), "CHECKPOINT_KEY_EARLIER": bytes(range(32)).hex()}
    found = []
    for names in (("CHECKPOINT_KEY",), ("CHECKPOINT_KEY_EARLIER",), tuple(keys)):
        for name in keys:
            monkeypatch.delenv(f"WOOLY_EXECUTOR_{name}", raising=False)
        monkeypatch.setenv("WOOLY_EXECUTOR_CHECKPOINTS", str(tmp_path))
        for name in names:
            monkeypatch.setenv(f"WOOLY_EXECUTOR_{name if len(names) > 1 else 'CHECKPOINT_KEY'}", keys[name])
        checkpoints = ExecutorSettings().checkpoint_files()
        found.append((checkpoints.identity(), *checkpoints.readable()))
    (new,), (old,), both = found
    assert both == (new, old) and new != old


def test_an_earlier_key_that_is_no_key_is_refused(monkeypatch):
    monkeypatch.setenv("WOOLY_EXECUTOR_CHECKPOINT_KEY_EARLIER", "nonsense")
    with pytest.raises(CheckpointError, match="WOOLY_EXECUTOR_CHECKPOINT_KEY_EARLIER cannot be used"):
        ExecutorSettings().checkpoint_files()


@pytest.mark.parametrize("place", ENCRYPTED, indirect=True)
def test_checkpoints_without_a_key_are_named(place):
    store(Checkpoints(place.store(), 3600.0).of("t", "s"), 1, b"content")
    with pytest.raises(CheckpointError, match="there are checkpoints without a key"):
        place.checkpoints().of("t", "s").read(1)


@pytest.mark.parametrize("place", KINDS[::2], indirect=True)
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b'{"version": 1}',
        b'{"version": 1, "buffers": 5}',
        b'{"version": 1, "buffers": [[8, -1, [], ""]]}',
        b'{"version": 1, "buffers": [[8, 5, [], ""]]}',
        b'{"version": 1, "buffers": [[8, 5, ["../../x"], ""]]}',
        b'{"version": 1, "buffers": [[8, 5, [1], ""]]}',
    ],
)
def test_a_list_that_is_no_list_is_an_error(place, text):
    store(place.checkpoints().of("t", "s"), 1, b"x")
    place.write(*place.list_paths(), text)
    with pytest.raises(CheckpointError, match="damaged"):
        place.checkpoints().of("t", "s").read(1)


def test_a_list_of_another_version_is_an_error(place):
    store(place.checkpoints().of("t", "s"), 1, b"x")
    place.write(*place.list_paths(), b'{"version": 2, "buffers": []}')
    with pytest.raises(CheckpointError, match="has version 2, not 1"):
        place.checkpoints().of("t", "s").read(1)


# -- the key -------------------------------------------------------------------------------------------------------------


def test_a_key_is_read_from_each_of_its_forms(tmp_path):
    raw = bytes(range(224, 256))
    forms = [raw.hex(), base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()]
    for i, text in enumerate(forms):
        path = tmp_path / f"{i}.key"
        path.write_text(f"{text}\n")
        assert Secret.read(text).id == Secret.read(str(path)).id == Secret(raw).id
    assert Secret(raw).id != SECRET.id


@pytest.mark.parametrize("text", ["-xyz-", "ab" * 31, "ab" * 33, base64.b64encode(bytes(31)).decode(), "g" * 64])
def test_a_text_that_is_no_key_is_refused_without_showing_it(monkeypatch, text):
    monkeypatch.setenv("WOOLY_EXECUTOR_CHECKPOINT_KEY", text)
    with pytest.raises(CheckpointError, match=r"WOOLY_EXECUTOR_CHECKPOINT_KEY cannot be used: .*64 hexadecimal") as e:
        ExecutorSettings().checkpoint_files()
    assert text not in str(e.value) and text not in repr(ExecutorSettings())


def test_a_file_that_has_no_key_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "key"
    monkeypatch.setenv("WOOLY_EXECUTOR_CHECKPOINT_KEY", str(path))
    with pytest.raises(CheckpointError, match="No such file"):
        ExecutorSettings().checkpoint_files()
    path.write_bytes(os.urandom(32))
    with pytest.raises(CheckpointError, match="does not contain a key"):
        ExecutorSettings().checkpoint_files()


@pytest.mark.parametrize("url", ["nonsense://bucket", "abfs://container/x"])
def test_an_url_that_cannot_be_used_is_refused(monkeypatch, url):
    monkeypatch.setenv("WOOLY_EXECUTOR_CHECKPOINTS", url)
    with pytest.raises(CheckpointError, match=f"checkpoints cannot be stored at {url}: "):
        ExecutorSettings().checkpoint_files()


def test_an_url_of_a_folder_is_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WOOLY_EXECUTOR_CHECKPOINTS", f"file://{tmp_path}/there")
    store(ExecutorSettings().checkpoint_files().of("t", "s"), 1, b"x")
    monkeypatch.setenv("WOOLY_EXECUTOR_CHECKPOINTS", f"{tmp_path}/there")
    assert restored(ExecutorSettings().checkpoint_files().of("t", "s"), 1) == [b"x"]


# -- object stores -------------------------------------------------------------------------------------------------------


def test_requests_that_fail_are_tried_again(place, no_pauses):
    failures = {}

    def fail(kind, path):
        failures[kind, path] = failures.get((kind, path), 0) + 1
        if failures[kind, path] <= 3:
            raise ConnectionResetError("gone")

    hook(fail)
    files = place.checkpoints().of("t", "s")
    store(files, 1, b"content")
    assert restored(place.checkpoints().of("t", "s"), 1) == [b"content"]
    files.remove()
    assert {kind for kind, _ in failures} == {"put", "get", "list", "remove"}
    hook(lambda kind, path: None)
    assert not place.paths()


@pytest.mark.parametrize("kind", ["put", "list"])
def test_a_store_that_does_not_answer_fails_the_cut_alone(make_device, place, no_pauses, kind):
    device = make_device(checkpoints=place.checkpoints())
    a = device.open("s")
    a.make(8, 1.0)
    assert a.cut(1)["stored"] == 1

    def fail(asked, path):
        if asked == kind:
            raise TimeoutError("no answer in 20 s")

    hook(fail)
    a.write(8, struct.pack("<f", 2.0))
    said = a.cut(2, known=1)
    assert said["stored"] == 1
    assert f"the object store {place.url} cannot" in said["error"] and "no answer in 20 s" in said["error"]
    hook(lambda asked, path: None)
    assert a.cut(3, known=1)["stored"] == 3
    a.channel.close()
    b = make_device(checkpoints=place.checkpoints()).open("s")
    b.restore(3)
    assert b.floats(8, 1) == [2.0]


def test_a_store_that_does_not_answer_is_an_error_of_the_restore(make_device, wis, place, no_pauses):
    store(place.checkpoints().of("", "s"), 1, b"1234")

    def fail(kind, path):
        if kind == "get" and "data-" in path:
            raise OSError("503")

    hook(fail)
    b = make_device(checkpoints=place.checkpoints()).open("s")
    with pytest.raises(wis.error, match=r"cannot read .*503 \(WOOLY_EXECUTOR_CHECKPOINTS\)"):
        b.restore(1)
    b.make(8, 5.0)  # the session is as new
    assert b.floats(8, 1) == [5.0]


def test_a_refused_request_is_not_tried_again(place):
    asked = []

    def refuse(kind, path):
        asked.append(path)
        raise PermissionError("403 Forbidden")

    hook(refuse)
    with pytest.raises(CheckpointError, match="403 Forbidden"):
        place.checkpoints().of("t", "s").keep([memoryview(b"x")])
    assert len(asked) == 1


def test_closing_a_store_ends_its_retries(place, monkeypatch):
    monkeypatch.setattr(objects, "PAUSES_S", (3600.0,))
    failing = threading.Event()

    def fail(kind, path):
        failing.set()
        raise TimeoutError("no answer")

    hook(fail)
    checkpoints, found = place.checkpoints(), []

    def keep():
        try:
            checkpoints.of("t", "s").keep([memoryview(b"x")])
        except CheckpointError as e:
            found.append(e)

    thread = threading.Thread(target=keep)
    thread.start()
    assert failing.wait(30)
    checkpoints.close()
    thread.join(30)
    assert "no answer" in str(found[0])
    with pytest.raises(CheckpointError, match="the executor stops"):
        checkpoints.of("t", "s").keep([memoryview(b"x")])


def test_a_slow_store_does_not_delay_swaps(make_device, place, tmp_path):
    """While a request hangs, another session is swapped out and comes back."""
    swap = SwapSettings(Policy(0, 1 << 20, 0), 1 << 30, 0, tmp_path, 10_000_000_000)
    device = make_device(memory=1 << 20, swap=swap, checkpoints=place.checkpoints())
    hangs, go_on = threading.Event(), threading.Event()

    def hang(kind, path):
        hangs.set()
        assert go_on.wait(60)

    slow = device.open("slow")
    slow.make(8, 1.0)
    hook(hang)
    slow.cut(1, stored=False)
    assert hangs.wait(30)
    try:
        a = device.open("a")
        a.load(8, bytes(700_000))
        b = device.open("b", priority=0)
        b.load(8, bytes(700_000))
        b.sync()
        assert device.residence()["a"] == "away"
        b.close()
        assert a.read(8, 4) == bytes(4)
        assert slow.floats(8, 1) == [1.0]
        assert slow.cut(stored=False)["stored"] == 0
    finally:
        go_on.set()
    assert slow.cut(stored=True)["stored"] == 1


def test_requests_of_a_cut_run_at_the_same_time(place):
    """Each of the first puts waits until several are under way."""
    together = threading.Barrier(4)

    def meet(kind, path):
        if kind == "put" and "/ref-" in path:
            together.wait(30)

    hook(meet)
    contents = [bytes([i]) * 10 for i in range(8)]
    store(place.checkpoints().of("t", "s"), 1, *contents)
    assert len(place.chunks()) == 8


def keeper_and_leaver(place, order):
    """One session begins to need a chunk while another gives it up, request by request in this order."""
    store(place.checkpoints().of("t", "old"), 1, b"shared", b"own")
    old, new = place.checkpoints().of("t", "old"), place.checkpoints().of("t", "new")
    steps = Steps(order)
    works = {"k": lambda: new._place.keep(name, 6, lambda: (b"shared",)), "d": lambda: old._place.drop([name])}
    (name,) = [n for n in place.chunks() if place.read(place.chunk_paths(n)[0]) == b"shared"]
    hook(steps.wait)
    # the pool's threads belong to the dropping session
    old._store._pool.submit(lambda: None).result()
    old._store.each = lambda work, items: [work(item) for item in items]
    threads = [threading.Thread(target=steps.run, args=(who, work)) for who, work in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    hook(lambda kind, path: None)
    found = bytearray(6)
    assert new._place.fill(name, memoryview(found)) == 6 and bytes(found) == b"shared"
    new._place.drop([name])
    assert not [p for p in place.paths() if name in p]
    place.remove()


def test_a_chunk_that_one_session_gives_up_while_another_begins_to_need_it_stays(tmp_path):
    """Every order of the requests of both sessions: 2 or 3 of the one, 6 of the other."""
    for number, at in enumerate(itertools.combinations(range(9), 3)):
        order = ["k" if i in at else "d" for i in range(9)]
        keeper_and_leaver(Place("objects", tmp_path / str(number)), order)


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(["k"] * 3 + ["d"] * 6 + ["e"] * 6))
def test_a_chunk_stays_while_two_others_give_it_up(tmp_path_factory, order):
    place = Place("objects", tmp_path_factory.mktemp("objects"))
    sessions = {who: place.store().session("t", who) for who in "kde"}
    for who in "de":
        sessions[who].keep("c0", 6, lambda: (b"shared",))
        sessions[who]._store.each = lambda work, items: [work(item) for item in items]
    steps = Steps(order)
    works = {
        "k": lambda: sessions["k"].keep("c0", 6, lambda: (b"shared",)),
        "d": lambda: sessions["d"].drop(["c0"]),
        "e": lambda: sessions["e"].drop(["c0"]),
    }
    hook(steps.wait)
    threads = [threading.Thread(target=steps.run, args=(who, work)) for who, work in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    hook(lambda kind, path: None)
    found = bytearray(6)
    assert sessions["k"].fill("c0", memoryview(found)) == 6 and bytes(found) == b"shared"
    sessions["k"]._store.each = lambda work, items: [work(item) for item in items]
    sessions["k"].drop(["c0"])
    assert not place.paths()
    place.remove()


@pytest.mark.parametrize("request_number", range(12))
def test_what_an_executor_leaves_that_dies_is_swept(place, no_pauses, request_number):
    """It dies at one of the requests of storing and of removing a cut."""
    store(place.checkpoints().of("t", "other"), 1, b"shared")
    count = itertools.count()

    def die(kind, path):
        if next(count) >= request_number:
            raise PermissionError("dead")

    hook(die)
    files = place.checkpoints().of("t", "s")
    with pytest.raises(CheckpointError, match="dead"):
        store(files, 1, b"shared", b"own")
        files.remove()
    hook(lambda kind, path: None)
    place.checkpoints().sweep()
    assert restored(place.checkpoints().of("t", "other"), 1) == [b"shared"]
    place.age()
    place.checkpoints().sweep()
    place.age()  # the first sweep may have found a session whose marks the dead executor had begun to remove
    place.checkpoints().sweep()
    assert not place.paths()


@pytest.mark.parametrize("place", ["folder", "folder, encrypted"], indirect=True)
@pytest.mark.parametrize("removal", range(4))
def test_what_an_executor_leaves_in_a_folder_that_dies_is_swept(place, monkeypatch, removal):
    """It dies before one of the removals of a session with two chunks, one of them shared, and a list."""
    store(place.checkpoints().of("t", "other"), 1, b"shared")
    count, unlink = itertools.count(), Path.unlink

    def die(path, missing_ok=False):
        if next(count) >= removal:
            raise PermissionError("dead")
        unlink(path, missing_ok)

    files = place.checkpoints().of("t", "s")
    store(files, 1, b"shared", b"own")
    monkeypatch.setattr(Path, "unlink", die)
    with pytest.raises(PermissionError, match="dead"):
        files.remove()
    monkeypatch.undo()
    place.checkpoints().sweep()
    assert restored(place.checkpoints().of("t", "other"), 1) == [b"shared"]
    place.age()
    place.checkpoints().sweep()
    assert not place.paths()


def test_a_sweep_during_a_cut_leaves_its_chunks(place):
    files, other = place.checkpoints().of("t", "s"), place.checkpoints()
    names, _ = files.keep([memoryview(b"content")])
    assert other.sweep() == 0
    files.write(1, {8: SavedBuffer(7, (names[0],))}, 0)
    assert restored(place.checkpoints().of("t", "s"), 1) == [b"content"]


def test_a_store_in_memory_is_found_by_its_url(tmp_path, monkeypatch):
    monkeypatch.setenv("WOOLY_EXECUTOR_CHECKPOINTS", f"memory://{tmp_path.name}/checkpoints")
    monkeypatch.setenv("WOOLY_EXECUTOR_CHECKPOINT_KEY", "ab" * 32)
    checkpoints = ExecutorSettings().checkpoint_files()
    store(checkpoints.of("t", "s"), 1, b"x")
    assert restored(ExecutorSettings().checkpoint_files().of("t", "s"), 1) == [b"x"]
    checkpoints.of("t", "s").remove()
    with pytest.raises(CheckpointError, match="does not have checkpoint 1"):
        ExecutorSettings().checkpoint_files().of("t", "s").read(1)


# -- S3 ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def s3(monkeypatch):
    """A server with the protocol of S3, and the URL of a bucket."""
    boto3, server = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    there = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    there.start()
    host, port = there.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    boto3.client("s3").create_bucket(Bucket="wooly")
    yield there
    there.stop()


@pytest.mark.slow
@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_a_session_goes_on_from_s3(make_device, s3, secret):
    key = "" if secret is None else secret.id

    def device():
        return make_device(checkpoints=Checkpoints(ObjectStore("s3://wooly/checkpoints", key), 3600.0, secret))

    a = device().open("s", tenant="t")
    content = os.urandom(3 * CHUNK)
    a.load(8, content)
    a.make(16, 1.0)
    assert a.cut(1)["stored"] == 1
    a.write(16, struct.pack("<f", 2.0))
    assert a.cut(2, known=1)["stored"] == 2
    a.channel.close()
    b = device().open("s", tenant="t")
    b.restore(2)
    assert b.read(8, len(content)) == content and b.floats(16, 1) == [2.0]
    files = ObjectStore("s3://wooly/checkpoints", key)
    assert Checkpoints(files, 3600.0, secret).sweep() == 0
    Checkpoints(files, 3600.0, secret).of("t", "s").remove()
    assert files._found(files._root) == []


@pytest.mark.slow
def test_s3_without_a_server_or_a_bucket_is_an_error(s3, no_pauses):
    files = Checkpoints(ObjectStore("s3://missing/checkpoints"), 3600.0).of("t", "s")
    with pytest.raises(CheckpointError, match=r"s3://missing/checkpoints cannot store .* bucket does not exist"):
        store(files, 1, b"x")
    s3.stop()
    files = Checkpoints(ObjectStore("s3://wooly/checkpoints"), 3600.0).of("t", "s")
    with pytest.raises(CheckpointError, match="s3://wooly/checkpoints cannot store"):
        store(files, 1, b"x")


# -- JetStream -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with nats_server() as url:
        yield url


@pytest.fixture
def jetstream(server, request):
    """Makes executors' views of one place in JetStream."""
    url, made = f"{server}/CHECKPOINTS/{request.node.name}", []

    def make(kept_s=3600.0, secret=SECRET):
        made.append(ObjectStore(url, secret.id))
        return Checkpoints(made[-1], kept_s, secret)

    yield make
    for each in made:
        each.close()


@pytest.fixture
def files(server, request):
    """What is stored in JetStream."""
    found = JetStreamFiles(f"{server}/CHECKPOINTS/{request.node.name}")
    yield found
    found.close()


def test_a_cut_in_jetstream_is_restored_by_another_executor(jetstream, files):
    content = os.urandom(CHUNK)
    first, second = jetstream(), jetstream()
    store(first.of("t", "s"), 1, content, b"small")
    assert restored(second.of("t", "s"), 1) == [content, b"small"]
    store(second.of("t", "other"), 1, content)
    assert len([path for path in files.find(files.root) if "/data-" in path]) == 2
    first.of("t", "s").remove()
    assert restored(first.of("t", "other"), 1) == [content]
    second.of("t", "other").remove()
    assert files.find(files.root) == []


def test_a_session_goes_on_from_its_cut_in_jetstream(make_device, jetstream):
    a = make_device(checkpoints=jetstream()).open("s")
    a.make(8, 1.0, 2.0)
    assert a.cut(1)["stored"] == 1
    a.write(8, struct.pack("<f", 5.0))
    assert a.cut(2, known=1)["stored"] == 2
    a.channel.close()
    b = make_device(checkpoints=jetstream()).open("s")
    b.restore(2)
    assert b.floats(8, 2) == [5.0, 2.0]


def test_names_in_jetstream_that_do_not_exist_are_missing(files):
    with pytest.raises(FileNotFoundError):
        files.cat_file(f"{files.root}/t/chunks/x/data-1-a")
    files.rm([f"{files.root}/t/chunks/x/data-1-a"])
    assert files.find(f"{files.root}/t") == []


def test_a_content_in_jetstream_whose_executor_died_is_swept(jetstream, files, monkeypatch):
    """The content is stored before its key."""
    path = f"{files.root}/{'t' * 32}/chunks/x/data-1-a"
    with monkeypatch.context() as dies:
        dies.setattr(jetstream_module, "_OBJECT", None)
        with pytest.raises(TypeError):
            files.pipe_file(path, bytes(1 << 20))
    assert files.find(files.root) == []

    def objects_there():
        try:
            return {info.name for info in files._run(files._opened[2].list(ignore_deletes=True))}
        except NotFoundError:
            return set()

    assert path.replace("/", ".") in objects_there()
    store(jetstream().of("t", "s"), 1, bytes(1 << 20))
    files.sweep(time.time() - 3600)
    assert path.replace("/", ".") in objects_there()
    jetstream(kept_s=-1).sweep()
    assert path.replace("/", ".") not in objects_there() and files.find(files.root) == []


def test_jetstream_that_does_not_answer_is_an_error(no_pauses, monkeypatch):
    monkeypatch.setattr(jetstream_module, "TIMEOUT_S", 0.05)
    with nats_server() as url:
        gone = url
    checkpoints = Checkpoints(ObjectStore(f"{gone}/CHECKPOINTS", SECRET.id), 3600.0, SECRET)
    with pytest.raises(CheckpointError, match=r"cannot store .*\(WOOLY_EXECUTOR_CHECKPOINTS\)"):
        store(checkpoints.of("t", "s"), 1, b"content")
    checkpoints.close()


def test_request_that_waits_for_its_connection_ends_when_jetstream_is_closed(monkeypatch):
    ended = []

    async def connected(self):
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(100):  # as long as it takes to close a connection
                await asyncio.sleep(0)
            ended.append("ended")

    monkeypatch.setattr(JetStreamFiles, "_connected", connected)
    monkeypatch.setattr(jetstream_module, "TIMEOUT_S", 0.05)
    before = set(threading.enumerate())
    files = JetStreamFiles("nats://127.0.0.1:1/CHECKPOINTS")
    with pytest.raises(TimeoutError, match="no answer"):
        files.pipe_file(f"{files.root}/t/data-1-a", b"content")
    (thread,) = set(threading.enumerate()) - before
    files.close()
    thread.join(10)
    assert ended == ["ended"]


@pytest.mark.parametrize("what", ["connection", "buckets"])
def test_jetstream_that_was_away_takes_checkpoints_again(server, what):
    """nats-py closes a connection for good if its credentials expired, and a server that lost its disk has no buckets."""
    files = JetStreamFiles(f"{server}/AWAY")
    path = f"{files.root}/t/data-1-a"
    files.pipe_file(path, b"before")
    if what == "connection":
        client = files._client
        asyncio.run_coroutine_threadsafe(client.close(), files._loop).result(10)
        assert client.is_closed
    else:
        for stream in ("KV_AWAY", "OBJ_AWAY"):
            files._run(files._opened[0].delete_stream(stream))
        with pytest.raises(JetStreamError):
            files.pipe_file(path, b"lost")
    files.pipe_file(path, b"after")
    assert files.cat_file(path) == b"after"
    assert files._client.options["max_reconnect_attempts"] == -1
    files.close()


def test_an_url_of_jetstream_without_a_host_is_refused(monkeypatch):
    monkeypatch.setenv("WOOLY_EXECUTOR_CHECKPOINTS", "nats:///bucket")
    with pytest.raises(CheckpointError, match="the URL has no host"):
        ExecutorSettings().checkpoint_files()
