"""Tests of pinned weights that survive the executor's process: saved, checked, restored, removed."""

import json
import os
import shutil
import time

import pytest
from wooly_executor.dispatch import Dispatch
from wooly_executor.memory.book import Scope
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_executor.weights import pinned_files
from wooly_executor.weights.pinned_files import PinnedFiles

TENANT = Scope.TENANT
MIB = 1 << 20


@pytest.fixture
def started(tmp_path, wis):
    """Starts device loops with the same files, one after the other."""
    running = []

    def start(limit=1 << 30, memory=64 * MIB):
        for device in running:
            if device.thread.is_alive():
                device.stop()
        files = PinnedFiles(tmp_path / "pins", limit)
        device = wis.device(tmp_path / f"s{len(running)}", TorchCpuRuntime(), memory, Dispatch(), pinned=files)
        running.append(device)
        device.loop.vram.pins.restore()
        return device

    yield start
    if running[-1].thread.is_alive():
        running[-1].stop()


def content(n, seed=1):
    return (bytes(range(seed, 256)) * (n * 4400))[: n * MIB]


def pinned(device, *data, name="base", tenant="acme"):
    client = device.open(f"of {name} {tenant}", scope=TENANT, tenant=tenant)
    for buffer, each in enumerate(data, 1):
        client.load(buffer, each)
    client.sealed()
    assert client.pin("add", name) == {"bytes": sum(map(len, data))}
    return saved(client, name)


def saved(client, name):
    """What the executor says about a name when it has written it, or has given up."""
    deadline = time.monotonic() + 60
    while True:
        (found,) = [p for p in client.pin("list")["pins"] if p["name"] == name]
        if found["unsaved"] != "they are being saved":
            return found["unsaved"]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pinned_weights_survive_a_restart_and_are_not_sent_again(started):
    big, small = content(5), content(1, seed=3)
    assert pinned(started(), big, small) == ""
    device = started()
    user, stranger = [device.open(t, scope=TENANT, tenant=t) for t in ("acme", "other")]
    (found,) = user.pin("list")["pins"]
    assert (found["name"], found["bytes"], found["tensors"], found["unsaved"]) == ("base", 6 * MIB, 2, "")
    assert user.load(1, big) and user.load(2, small)
    assert user.read(1, len(big)) == big and user.read(2, len(small)) == small
    assert not stranger.load(1, big) and stranger.pin("list") == {"pins": []}


def test_pinned_content_of_two_names_is_stored_once(started, tmp_path):
    device, data = started(), content(4)
    assert pinned(device, data, name="a") == pinned(device, data, name="b") == ""
    assert len(list((tmp_path / "pins" / "contents").iterdir())) == 1
    device = started()
    user = device.open("u", scope=TENANT, tenant="acme")
    assert {p["name"] for p in user.pin("list")["pins"]} == {"a", "b"}
    assert device.call(lambda: device.loop.vram.ledger.facts().contents) == 4 * MIB


def test_removed_weights_do_not_come_back_and_leave_no_file(started, tmp_path):
    device = started()
    assert pinned(device, content(4)) == ""
    user = device.open("u", scope=TENANT, tenant="acme")
    assert user.pin("remove", "base") == {"removed": True}
    deadline = time.monotonic() + 60
    while list((tmp_path / "pins" / "contents").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert started().open("v", scope=TENANT, tenant="acme").pin("list") == {"pins": []}


@pytest.mark.parametrize("damage", ["changed", "short", "missing"])
def test_damaged_file_is_not_restored_and_the_others_are(started, tmp_path, damage, caplog):
    first, second = content(2), content(1, seed=7)
    assert pinned(started(), first, second) == ""
    path = max((tmp_path / "pins" / "contents").iterdir(), key=lambda p: p.stat().st_size)
    if damage == "changed":
        with path.open("r+b") as file:
            file.write(b"\xff")
    elif damage == "short":
        os.truncate(path, 100)
    else:
        path.unlink()
    user = started().open("u", scope=TENANT, tenant="acme")
    assert not user.load(1, first) and user.load(2, second)
    assert "a tensor of the pinned weights 'base' is not restored" in caplog.text


def test_damaged_list_is_left_out(started, tmp_path, caplog):
    assert pinned(started(), content(1)) == ""
    (path,) = (tmp_path / "pins" / "names").iterdir()
    path.write_text(json.dumps({"tenant": "acme"}))
    assert started().open("u", scope=TENANT, tenant="acme").pin("list") == {"pins": []}
    assert "cannot be read, so they are not restored" in caplog.text


def test_weights_above_the_limit_on_disk_are_pinned_and_say_that_they_are_not_saved(started):
    assert "bytes of the limit on disk are left" in pinned(started(limit=3 * MIB), content(4))
    assert started().open("u", scope=TENANT, tenant="acme").pin("list") == {"pins": []}


def test_weights_on_a_full_disk_are_pinned_and_say_that_they_are_not_saved(started, monkeypatch):
    monkeypatch.setattr(pinned_files, "LEFT_FREE", 1 << 62)
    assert shutil.disk_usage("/").free < 1 << 62
    assert pinned(started(), content(1)) == "the disk is almost full"


def test_weights_larger_than_the_new_device_are_not_restored(started, caplog):
    assert pinned(started(), content(5)) == ""
    user = started(memory=2 * MIB).open("u", scope=TENANT, tenant="acme")
    assert not user.load(1, content(1))
    assert "is not restored: " in caplog.text
