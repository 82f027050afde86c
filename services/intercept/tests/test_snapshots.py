"""Histories and snapshots of the device's memory, and memory pools."""

import gc
import pickle

import pytest
import torch
import torch.cuda._memory_viz as viewer
from wooly import storage


@pytest.fixture
def history(cuda):
    gc.collect()
    torch.cuda.memory._record_memory_history(clear_history=True)
    yield
    torch.cuda.memory._record_memory_history(None)


def trace_of(snapshot, device=0):
    return [entry for entry in snapshot["device_traces"][device] if entry["action"] in ("alloc", "free_completed")]


def test_memory_snapshot_lists_each_live_storage(cuda, no_garbage):
    def sizes():
        return sum(s["allocated_size"] for s in torch.cuda.memory_snapshot()), torch.cuda.memory_allocated()

    listed, allocated = sizes()  # of earlier tests, and of earlier sessions, which no snapshot lists
    x = torch.empty(1000, device="cuda")
    assert sizes() == (listed + 4000, allocated + 4000)
    found = {s["address"]: s for s in torch.cuda.memory_snapshot()}
    segment = found[x.untyped_storage().data_ptr()]
    assert (segment["total_size"], segment["segment_type"], segment["device"]) == (4000, "small", 0)
    (block,) = segment["blocks"]
    assert (block["size"], block["state"], block["frames"]) == (4000, "active_allocated", [])
    del x
    assert segment["address"] not in {s["address"] for s in torch.cuda.memory_snapshot()}


def test_history_has_lines_of_allocations_and_frees(history):
    x = torch.empty(500, device="cuda")
    address = x.untyped_storage().data_ptr()
    del x
    y = torch.ones(3, device="cuda")
    snapshot = torch.cuda.memory._snapshot()
    entries = trace_of(snapshot)
    assert [(e["action"], e["size"]) for e in entries] == [("alloc", 2000), ("free_completed", 2000), ("alloc", 12)]
    assert entries[0]["addr"] == entries[1]["addr"] == address and entries[0]["time_us"] <= entries[1]["time_us"]
    for entry in entries:
        assert any(f["name"] == "test_history_has_lines_of_allocations_and_frees" for f in entry["frames"])
    (segment,) = [s for s in snapshot["segments"] if s["address"] == y.untyped_storage().data_ptr()]
    frames = segment["blocks"][0]["frames"]
    assert any(f["filename"] == __file__ and f["line"] > 0 for f in frames)
    assert torch.cuda.memory._snapshot()["device_traces"][0][-1]["action"] == "snapshot"


def test_dumped_snapshot_opens_in_pytorchs_viewer(history, tmp_path):
    kept = [torch.empty(100 * k, device="cuda") for k in range(1, 5)]
    kept.pop()
    torch.cuda.memory._dump_snapshot(str(tmp_path / "memory.pickle"))
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())  # noqa: S301  # written by this test
    shown = viewer.trace(snapshot)
    assert "cudaMalloc" in shown and "cudaFree" in shown
    assert f"segments: {len(snapshot['segments'])}\n" in viewer.segsum(snapshot)
    for plot in (viewer.trace_plot, viewer.segment_plot):
        assert "MemoryViz" in plot(snapshot)


def test_history_keeps_last_entries_and_skips_actions(cuda):
    torch.cuda.memory._record_memory_history(
        max_entries=3, context=None, skip_actions=["segment_alloc", "segment_free"]
    )
    try:
        for k in range(1, 6):
            torch.empty(k, device="cuda")
        entries = list(torch.cuda.memory._snapshot()["device_traces"][0])
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert [(e["action"], e["size"]) for e in entries] == [
        ("free_requested", 20),
        ("free_completed", 20),
        ("snapshot", 0),
    ]
    assert all(e["frames"] == [] for e in entries)


def test_history_state_only_has_lines_of_live_storages(cuda):
    torch.cuda.memory._record_memory_history("state")
    try:
        x = torch.empty(10, device="cuda")
        assert torch.cuda.memory._snapshot()["device_traces"] == [[]]
        look_up = getattr(torch.cuda.memory, "_allocation_traceback", None)  # torch 2.11 has no such function
        frames = look_up and look_up(x.untyped_storage().data_ptr())
        assert look_up is None or frames[0]["filename"] == __file__
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert look_up is None or look_up(x.untyped_storage().data_ptr()) is None
    with pytest.raises(RuntimeError, match="expected state"):
        torch.cuda.memory._record_memory_history("some")


def test_history_notes_out_of_memory(history):
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 50, device="cuda", dtype=torch.uint8)
    (entry,) = [e for e in torch.cuda.memory._snapshot()["device_traces"][0] if e["action"] == "oom"]
    assert entry["size"] == 1 << 50 and "addr" not in entry and entry["device_free"] >= 0


def test_history_off_costs_nothing(cuda):
    heap = storage.heaps[0]
    plain, free, room = heap.owner, heap.owner.__del__, heap.make_room
    torch.cuda.memory._record_memory_history()
    assert heap.owner is not plain
    torch.cuda.memory._record_memory_history(None)
    assert (heap.owner, heap.owner.__del__, heap.make_room) == (plain, free, room)


def test_pool_labels_storages_made_in_its_block(cuda):
    pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
    assert pool.id != other.id and pool.use_count() == 1
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(100, device="cuda")
        assert pool.use_count() == 2
        with torch.cuda.use_mem_pool(other):
            y = torch.empty(50, device="cuda")
    z = torch.empty(25, device="cuda")
    assert [s["total_size"] for s in pool.snapshot()] == [400] and [s["total_size"] for s in other.snapshot()] == [200]
    pools = {s["address"]: s["segment_pool_id"] for s in torch.cuda.memory_snapshot()}
    assert [pools[t.untyped_storage().data_ptr()] for t in (x, y, z)] == [pool.id, other.id, (0, 0)]
    del x
    assert pool.snapshot() == [] and pool.use_count() == 1 and storage.heaps[0].observers
    del y
    assert not storage.heaps[0].observers
    with pytest.raises(NotImplementedError, match="allocator"):
        torch.cuda.MemPool(object())
