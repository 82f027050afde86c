"""Buffers that sessions share for writing: what each sees, who holds them, how they end, and hostile frames."""

import itertools
import struct

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from wooly_executor import ipc
from wooly_executor.memory.book import Scope
from wooly_executor.memory.swap import Policy
from wooly_executor.vram import SwapSettings
from wooly_testkit.effort import examples
from wooly_wis.collectives import What
from wooly_wis.dtypes import DType
from wooly_wis.frames import IPC_HEAD, Kind

from services.executor.tests.fake_gpu import FakeDriver, gpu_runtime

KIB = 1 << 10


def pair(device, *values, **how):
    """Two sessions that share a buffer: 1 of the exporter is 7 of the importer."""
    exporter, importer = device.open("exporter", **how), device.open("importer", **how)
    exporter.make(1, *values)
    importer.import_buffer(7, 4 * len(values), exporter.export_buffer(1))
    return exporter, importer


def refused(wis, match, call, *args):
    with pytest.raises(wis.error, match=match) as caught:
        call(*args)
    return caught.value.code


def double(wis, client, buffer, n):
    at = wis.at(DType.F32, n)
    client.run(wis.body().call("aten.add_.Tensor", ("inout", "x", at), args=(wis.ref(0), wis.ref(0))), {"x": buffer})


# -- sharing -------------------------------------------------------------------------------------------------------------


def test_each_session_sees_what_the_other_writes(device, wis):
    exporter, importer = pair(device, 1.0, 2.0)
    assert importer.floats(7, 2) == [1.0, 2.0]
    double(wis, importer, 7, 2)
    importer.sync()
    assert exporter.floats(1, 2) == [2.0, 4.0]
    exporter.write(1, struct.pack("<f", 50.0), offset=4)
    exporter.sync()
    assert importer.floats(7, 2) == [2.0, 50.0]
    device.check()


def test_shared_bytes_are_charged_in_equal_parts_and_count_in_full_in_both_quotas(device):
    pair(device, *[1.0] * 1024)
    facts = device.call(lambda: device.loop.vram.ledger.facts())
    assert (facts.own, facts.contents) == (0, 4 * KIB)
    book = device.loop.vram.ledger.book
    assert device.call(lambda: (book.bears("exporter"), book.bears("importer"))) == (2 * KIB, 2 * KIB)
    assert {name: held for name, (held, _) in device.held().items()} == {"exporter": 4 * KIB, "importer": 4 * KIB}


def test_buffer_stays_until_the_last_session_frees_it(device, wis):
    exporter, importer = pair(device, 1.0, 2.0)
    exporter.run(wis.body().free("x"), {"x": 1})
    exporter.sync()
    assert importer.floats(7, 2) == [1.0, 2.0]
    device.check()
    importer.run(wis.body().free("x"), {"x": 7})
    importer.sync()
    assert device.held() == {"exporter": (0, 0), "importer": (0, 0)}
    assert device.call(lambda: device.loop.vram.ledger.facts()).contents == 0


@pytest.mark.parametrize("dies", [0, 1])
def test_buffer_survives_the_end_of_either_session(device, wis, dies):
    clients = pair(device, 1.0, 2.0)
    clients[dies].channel.close()
    device.wait_closed(("exporter", "importer")[dies])
    left, buffer = clients[1 - dies], (7, 1)[dies]
    double(wis, left, buffer, 2)
    assert left.floats(buffer, 2) == [2.0, 4.0]
    device.check()
    assert device.call(lambda: device.loop.vram.ledger.facts()).contents == 0  # it is the other's own now


def test_exported_buffer_is_kept_for_its_importer_after_the_exporter_frees_it(device, wis):
    exporter, importer = device.open("exporter"), device.open("importer")
    exporter.make(1, 4.0)
    name = exporter.export_buffer(1)
    exporter.run(wis.body().free("x"), {"x": 1})
    exporter.make(1, 5.0)  # the id is used again
    exporter.sync()
    assert device.held()["exporter"] == (8, 1)
    importer.import_buffer(7, 4, name)
    assert (importer.floats(7, 1), exporter.floats(1, 1)) == ([4.0], [5.0])
    assert device.held() == {"exporter": (4, 1), "importer": (4, 1)}
    device.check()


def test_buffer_exported_twice_has_one_name_until_both_exports_are_used(device, wis):
    exporter, importer, third = [device.open(name) for name in ("exporter", "importer", "third")]
    exporter.make(1, 4.0)
    name = exporter.export_buffer(1)
    assert exporter.export_buffer(1) == name
    importer.import_buffer(7, 4, name)
    third.import_buffer(8, 4, name)
    double(wis, third, 8, 1)
    third.sync()
    assert importer.floats(7, 1) == exporter.floats(1, 1) == [8.0]
    for client, buffer in ((importer, 7), (third, 8)):
        client.run(wis.body().free("x"), {"x": buffer})
        client.sync()
    assert exporter.export_buffer(1) != name


def test_export_that_is_taken_back_ends_the_sharing(device, wis):
    exporter, importer = device.open("exporter"), device.open("importer")
    exporter.make(1, 4.0)
    name = exporter.export_buffer(1)
    assert importer.release_export(name)
    assert not importer.release_export(name)
    assert refused(wis, "no buffer of this size", importer.import_buffer, 7, 4, name) == "executor.ipc"
    device.check()


def test_importer_sees_the_work_that_was_sent_before_the_export(device, wis):
    exporter, importer = device.open("exporter"), device.open("importer")
    exporter.make(1, *[1.0] * KIB)
    for _ in range(50):
        double(wis, exporter, 1, KIB)
    importer.import_buffer(7, 4 * KIB, exporter.export_buffer(1))
    assert importer.floats(7, KIB) == [2.0**50] * KIB


def test_importer_on_a_gpu_sees_work_that_was_in_flight_at_the_export(make_device, wis):
    device, n = make_device(runtime=gpu_runtime(FakeDriver())), 1 << 16
    exporter, importer = device.open("exporter"), device.open("importer")
    exporter.run(wis.body().alloc("x", 4 * n).fill("x", wis.at(DType.F32, n), 1.0), {"x": 1})
    for _ in range(20):  # known programs may be in flight
        double(wis, exporter, 1, n)
    importer.import_buffer(7, 4 * n, exporter.export_buffer(1))
    double(wis, importer, 7, n)
    importer.sync()
    assert exporter.floats(1, n) == importer.floats(7, n) == [2.0**21] * n
    device.check()


# -- memory --------------------------------------------------------------------------------------------------------------


def test_buffer_with_content_of_others_is_copied_before_the_export(device, wis):
    data = bytes(range(256)) * 80
    first, second, importer = [device.open(name, scope=Scope.TENANT) for name in ("first", "second", "importer")]
    for client in (first, second):
        client.load(1, data)
        client.sealed()
    importer.import_buffer(7, len(data), second.export_buffer(1))
    importer.write(7, b"\xff" * 4)
    importer.sync()
    assert second.read(1, 4) == b"\xff" * 4
    assert first.read(1, len(data)) == data
    device.check()


def test_content_of_a_shared_buffer_is_not_given_to_sessions_that_load_it(device, wis):
    data = bytes(range(256)) * 80
    exporter, importer, loader = [device.open(name, scope=Scope.TENANT) for name in ("exporter", "importer", "loader")]
    exporter.run(wis.body().alloc("x", len(data)), {"x": 1})
    importer.import_buffer(7, len(data), exporter.export_buffer(1))
    assert not exporter.offer(1, data)
    exporter.write(1, data)
    exporter.seal(1, data)
    exporter.sync()
    exporter.sealed()
    assert not loader.load(1, data)
    assert "nothing to pin" in exporter.pin("add", "weights")["error"]
    device.check()


def test_shared_buffer_is_not_hashed_and_a_write_after_a_seal_does_not_make_a_copy(device, wis, monkeypatch):
    exporter, importer = pair(device, *[1.0] * KIB, scope=Scope.TENANT)
    data = struct.pack(f"<{KIB}f", *[2.0] * KIB)
    jobs = []
    monkeypatch.setattr(device.loop.vram.mover, "submit", jobs.append)
    exporter.write(1, data)
    exporter.seal(1, data)
    exporter.write(1, struct.pack("<f", 3.0))
    exporter.sync()
    assert not jobs and importer.floats(7, 2) == [3.0, 2.0]
    device.check()


def test_sessions_that_share_stay_on_the_device_and_others_leave(make_device, wis):
    device = make_device(memory=1 << 20, swap=SwapSettings(host=1 << 24, policy=Policy(reserve=0, idle_ns=0)))
    exporter, importer = pair(device, *[1.0] * (64 * KIB))  # 256 KiB
    idle = device.open("idle")
    idle.make(1, *[2.0] * (64 * KIB))
    idle.sync()
    busy = device.open("busy")
    busy.make(1, *[3.0] * (160 * KIB))  # 640 KiB
    assert busy.floats(1, 1) == [3.0]
    assert device.residence() == {"exporter": "here", "importer": "here", "idle": "away", "busy": "here"}
    importer.run(wis.body().free("x"), {"x": 7})
    importer.sync()
    assert device.call(lambda: device.loop.sessions["exporter"].holdings.swappable)
    assert exporter.floats(1, 1) == [1.0]


def test_memory_that_is_promised_to_others_cannot_be_shared(make_device, wis):
    device = make_device(memory=1 << 20)
    device.call(lambda: setattr(device.loop.vram, "overcommit_percent", 100))
    exporter = device.open("exporter", 512 * KIB)
    device.open("other", 1 << 20)
    exporter.make(1, 1.0)
    assert refused(wis, "promised to other sessions, too", exporter.export_buffer, 1) == "executor.ipc"
    assert exporter.floats(1, 1) == [1.0]


def test_import_beyond_the_quota_is_refused(device, wis):
    exporter, importer = device.open("exporter"), device.open("importer", 4 * KIB)
    exporter.make(1, *[1.0] * 2 * KIB)
    name = exporter.export_buffer(1)
    code = refused(wis, "The session's quota is", importer.import_buffer, 7, 8 * KIB, name)
    assert code == "executor.out_of_memory" and device.held()["importer"] == (0, 0)


def test_failed_write_poisons_the_buffer_of_its_session_only_and_a_new_content_is_shared_again(device, wis):
    exporter, importer = pair(device, 1.0, 2.0)
    two, wrong = wis.at(DType.F32, 2), wis.at(DType.F32, 1, 2)
    body = wis.body().call("aten.mm.out", ("in", "x", wrong), ("in", "x", wrong), ("out", "x", two))
    exporter.run(body, {"x": 1})
    with pytest.raises(wis.error):
        exporter.sync()
    refused(wis, "missing value for argument", exporter.export_buffer, 1)
    assert importer.floats(7, 2) == [1.0, 2.0]
    exporter.write(1, struct.pack("<2f", 8.0, 9.0))
    exporter.sync()
    assert importer.floats(7, 2) == exporter.floats(1, 2) == [8.0, 9.0]
    device.check()


def test_collective_cannot_write_a_shared_buffer(device, wis):
    """Another thread does large collectives, and a program of the other session may read the buffer at the same time."""
    exporter, importer = pair(device, 1.0, 2.0)
    common = {"group": b"g" * 16, "sequence": 1, "timeout_ms": 60_000, "size": 2, "dtype": DType.F32}
    exporter.collective(What.BROADCAST, rank=0, reads=[(1, 0, 2)], **common)
    importer.collective(What.BROADCAST, rank=1, writes=[(7, 0, 2)], **common)
    for client in (exporter, importer):
        refused(wis, "buffer 7 is shared with another process", client.sync)
    assert exporter.floats(1, 2) == [1.0, 2.0]


# -- hostile frames ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (b"", "has 0 bytes"),
        (b"\xff" * (IPC_HEAD.size + 1), "bytes, not"),
        (b"\xff" * IPC_HEAD.size, "asks for 4294967295, which is unknown"),
        (IPC_HEAD.pack(0, 1, 4, b""), "asks for 0"),
        (IPC_HEAD.pack(1, 1 << 63, 0, b""), "does not exist"),
        (IPC_HEAD.pack(2, 7, 4, b"\xff" * 16), "no buffer of this size"),
        (IPC_HEAD.pack(2, 7, (1 << 64) - 1, b""), "quota"),
    ],
)
def test_malformed_frame_fails_only_its_sender(device, wis, frame, error):
    exporter, importer = pair(device, 1.0)
    hostile = device.open("hostile")

    def send():
        hostile.channel.send(Kind.IPC, frame)
        hostile.answer()

    refused(wis, error, send)
    hostile.make(1, 3.0)
    assert hostile.floats(1, 1) == [3.0]
    assert importer.floats(7, 1) == exporter.floats(1, 1) == [1.0]
    device.check()


def test_session_of_another_tenant_cannot_use_a_name(device, wis):
    exporter = device.open("exporter", tenant="a")
    stranger, friend = device.open("stranger", tenant="b"), device.open("friend", tenant="a")
    exporter.make(1, 1.0)
    name = exporter.export_buffer(1)
    refused(wis, "belongs to another tenant", stranger.import_buffer, 7, 4, name)
    assert not stranger.release_export(name)
    friend.import_buffer(7, 4, name)
    assert friend.floats(7, 1) == [1.0]


def test_import_with_wrong_size_or_into_an_existing_buffer_changes_nothing(device, wis):
    exporter, importer = device.open("exporter"), device.open("importer")
    exporter.make(1, 1.0, 2.0)
    importer.make(7, 9.0)
    name = exporter.export_buffer(1)
    for nbytes in (0, 4, 12):
        refused(wis, "no buffer of this size", importer.import_buffer, 8, nbytes, name)
    refused(wis, "already exists", importer.import_buffer, 7, 8, name)
    assert importer.floats(7, 1) == [9.0]
    importer.import_buffer(8, 8, name)
    assert importer.floats(8, 2) == [1.0, 2.0]
    device.check()


def test_session_has_a_shared_buffer_once(device, wis):
    exporter, importer = pair(device, 1.0)
    name = exporter.export_buffer(1)
    refused(wis, "has this buffer already", importer.import_buffer, 8, 4, name)
    refused(wis, "cannot receive what it has sent", exporter.import_buffer, 8, 4, name)
    refused(wis, "received from another process", importer.export_buffer, 7)
    device.check()


def test_name_ends_with_the_session_that_exported_it(device, wis):
    exporter, importer, late = [device.open(name) for name in ("exporter", "importer", "late")]
    exporter.make(1, 1.0)
    name = exporter.export_buffer(1)
    assert exporter.export_buffer(1) == name
    importer.import_buffer(7, 4, name)
    exporter.close()
    device.wait_closed("exporter")
    refused(wis, "has ended", late.import_buffer, 7, 4, name)
    assert importer.floats(7, 1) == [1.0]
    device.check()


def test_session_may_share_a_limited_number_of_buffers(device, wis, monkeypatch):
    monkeypatch.setattr(ipc, "IPC_BUFFERS_AT_MOST", 3)
    exporter = device.open("exporter")
    for buffer in range(1, 5):
        exporter.make(buffer, 1.0)
    names = [exporter.export_buffer(buffer) for buffer in (1, 2, 3)]
    refused(wis, "which is the limit", exporter.export_buffer, 4)
    assert exporter.export_buffer(1) == names[0]
    exporter.run(wis.body().free("x"), {"x": 1})  # kept, because it is exported: no way around the limit
    refused(wis, "which is the limit", exporter.export_buffer, 4)


def test_held_bytes_of_freed_exports_count_in_the_quota(device, wis):
    exporter = device.open("exporter", 4 * KIB)
    for _ in range(3):
        exporter.make(1, *[1.0] * 256)
        exporter.export_buffer(1)
        exporter.run(wis.body().free("x"), {"x": 1})
    exporter.make(1, *[1.0] * 256)
    exporter.sync()
    exporter.make(2, 1.0)
    with pytest.raises(wis.error, match="quota"):
        exporter.sync()


class Histories(RuleBasedStateMachine):
    """Sessions export, import, free, take back, write and end, in any order. A model has the value of each buffer."""

    def __init__(self):
        super().__init__()
        self.sessions, self.values, self.names = {}, {}, []

    def _session(self, data):
        return data.draw(st.sampled_from(sorted(self.sessions)))

    def _buffer(self, data):
        name, buffer = data.draw(st.sampled_from(sorted((n, b) for n, (_, of) in self.sessions.items() for b in of)))
        return name, buffer, *self.sessions[name]

    has_sessions = precondition(lambda self: self.sessions)
    has_buffers = precondition(lambda self: any(of for _, of in self.sessions.values()))
    has_names = precondition(lambda self: self.names and self.sessions)

    @precondition(lambda self: len(self.sessions) < 4)
    @rule()
    def open(self):
        name = f"session {next(self.numbers)}"
        self.sessions[name] = self.device.open(name), {}

    @has_sessions
    @rule(data=st.data())
    def make(self, data):
        client, buffers = self.sessions[self._session(data)]
        buffer = next(b for b in range(1, 100) if b not in buffers)
        cell = len(self.values)
        buffers[buffer], self.values[cell] = cell, float(cell)
        client.make(buffer, float(cell))

    @has_buffers
    @rule(data=st.data())
    def export(self, data):
        name, buffer, client, buffers = self._buffer(data)
        try:
            self.names.append((client.export_buffer(buffer), buffers[buffer], name))
        except self.error as e:
            assert "received from another process" in e.message

    @has_names
    @rule(data=st.data())
    def receive(self, data):
        name, cell, exporter = data.draw(st.sampled_from(self.names))
        client, buffers = self.sessions[self._session(data)]
        buffer = next(b for b in range(1, 100) if b not in buffers)
        try:
            client.import_buffer(buffer, 4, name)
        except self.error as e:
            assert e.code == "executor.ipc"
        else:
            assert exporter in self.sessions
            buffers[buffer] = cell

    @has_names
    @rule(data=st.data())
    def take_back(self, data):
        self.sessions[self._session(data)][0].release_export(data.draw(st.sampled_from(self.names))[0])

    @has_buffers
    @rule(data=st.data())
    def write(self, data):
        _, buffer, client, buffers = self._buffer(data)
        self.values[buffers[buffer]] += 100.0
        client.write(buffer, struct.pack("<f", self.values[buffers[buffer]]))
        client.sync()

    @has_buffers
    @rule(data=st.data())
    def free(self, data):
        _, buffer, client, buffers = self._buffer(data)
        client.run(self.body().free("x"), {"x": buffer})
        client.sync()
        del buffers[buffer]

    @has_sessions
    @rule(data=st.data())
    def end(self, data):
        self._end(self._session(data))

    def _end(self, name):
        self.sessions.pop(name)[0].close()
        self.device.wait_closed(name)

    @invariant()
    def every_session_sees_the_last_write(self):
        for client, buffers in self.sessions.values():
            assert [client.floats(b, 1)[0] for b in buffers] == [self.values[cell] for cell in buffers.values()]
        self.device.check()

    def teardown(self):
        for name in list(self.sessions):
            self._end(name)
        facts = self.device.call(lambda: self.device.loop.vram.ledger.facts())
        assert facts.own == facts.contents == 0


def test_any_history_of_sharing_keeps_values_and_accounts(device, wis):
    given = {"device": device, "error": wis.error, "body": wis.body, "numbers": itertools.count()}
    quick = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        type("Histories", (Histories,), given),
        settings=settings(
            max_examples=examples(20, 400), stateful_step_count=30, deadline=None, suppress_health_check=quick
        ),
    )
