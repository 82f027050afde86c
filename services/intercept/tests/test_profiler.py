"""PyTorch's profiler shows the device's work as CUDA activity, in its lists and in its files."""

import gzip
import json
import threading
from collections import Counter

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler
from wooly import device, storage
from wooly.profiling.device_events import DeviceEvent, in_turn
from wooly.profiling.enclosing import enclosing

# torch 2.11 warns at the first profile of a process
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")
BOTH = [ProfilerActivity.CPU, ProfilerActivity.CUDA]


def step(x):
    return ((x @ x) + 1).relu()


@pytest.fixture
def x(cuda):
    made = torch.rand(32, 32, device="cuda")
    step(made)
    torch.cuda.synchronize()
    return made


def kernels(events):
    return [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]


def by_category(trace, category):
    return [e for e in trace["traceEvents"] if e.get("cat") == category]


def test_device_events_of_one_stream_follow_each_other():
    """The first kernel seemed to begin before its launch, because clocks differ, and was moved into the second one's time."""

    def event(begin, ns, stream):
        return DeviceEvent("k", "kernel", 8, 0, stream, begin, ns, 0, 0, "", (), (), 0)

    found = list(in_turn([event(100, 50, 7), event(120, 30, 7), event(110, 5, 8), event(500, 1, 7)]))
    assert [(e.begin_ns, e.stream) for e in found] == [(100, 7), (150, 7), (110, 8), (500, 7)]


def test_profile_table_has_rows_with_device_time(x):
    with profile(activities=BOTH) as prof:
        step(x)
    rows = {(row.key, row.device_type): row for row in prof.key_averages()}
    assert rows["wis.mm", DeviceType.CUDA].self_device_time_total > 0
    taken = pytest.approx(rows["wis.mm", DeviceType.CUDA].device_time_total)
    assert rows["aten::mm", DeviceType.CPU].device_time_total == taken
    assert rows["aten::matmul", DeviceType.CPU].device_time_total == taken
    table = prof.key_averages().table(sort_by="cuda_time_total")
    assert "Self CUDA" in table and "wis.relu" in table and "CUDA time total" in table


def test_profile_events_have_shapes_lines_and_order(x):
    with profile(activities=BOTH, record_shapes=True, with_stack=True) as prof:
        step(x)
    found = kernels(prof.events())
    assert [e.name for e in found] == ["wis.mm", "wis.add", "wis.relu"]
    assert [e.input_shapes for e in found] == [[[32, 32], [32, 32]], [[32, 32]], [[32, 32]]]
    assert all("test_profiler.py" in e.stack[0] and e.stack[0].endswith(": step") for e in found)
    ends = [0.0, *[e.time_range.end for e in found]]
    assert all(e.time_range.start >= before for e, before in zip(found, ends, strict=False))
    by_shape = prof.key_averages(group_by_input_shape=True)
    assert [row.count for row in by_shape if row.key == "wis.mm"] == [1]


def test_profile_results_have_same_bits_and_device_returns_to_normal(x):
    expected = step(x).cpu()
    recorder = device.current().recorder
    with profile(activities=BOTH):
        assert torch.equal(step(x).cpu(), expected)
        assert "emit" in recorder.__dict__ and recorder.link.observer is not None
    assert "emit" not in recorder.__dict__ and recorder.link.observer is None
    assert torch.equal(step(x).cpu(), expected)


def test_profile_replayed_programs_have_an_event_per_instruction(x):
    for _ in range(40):  # hot, so that its steps are combined
        step(x)
        torch.cuda.synchronize()
    with profile(activities=BOTH) as prof:
        for _ in range(3):
            step(x)
            torch.cuda.synchronize()
    assert Counter(e.name for e in kernels(prof.events())) == {"wis.mm": 3, "wis.add": 3, "wis.relu": 3}


def test_profile_backward_and_optimizer_are_shown(cuda):
    model = torch.nn.Linear(8, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=BOTH) as prof:
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
    total = sum(e.time_range.elapsed_us() for e in kernels(prof.events()))
    assert total > 0
    rows = {row.key: row for row in prof.key_averages() if row.device_type == DeviceType.CPU}
    assert rows["Optimizer.step#SGD.step"].device_time_total > 0
    assert any(row.device_time_total > 0 for key, row in rows.items() if "Backward" in key)


def test_trace_file_connects_kernels_with_operators(x, tmp_path):
    with profile(activities=BOTH, record_shapes=True) as prof, record_function("block"):
        step(x)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    found = by_category(trace, "kernel")
    assert [e["name"] for e in found] == ["wis.mm", "wis.add", "wis.relu"]
    assert {(e["pid"], e["tid"], e["args"]["stream"]) for e in found} == {(0, 7, 7)}
    assert found[0]["args"]["Input Dims"] == [[32, 32], [32, 32]]
    operators = {e["args"]["External id"]: e for e in by_category(trace, "cpu_op")}
    assert [operators[e["args"]["External id"]]["name"] for e in found] == ["aten::mm", "aten::add", "aten::relu"]
    flows = by_category(trace, "ac2g")
    launches = {e["args"]["correlation"]: e for e in by_category(trace, "cuda_runtime")}
    for kernel in found:
        operator, number = operators[kernel["args"]["External id"]], kernel["args"]["correlation"]
        begin, end = [e for e in flows if e["id"] == number]
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert operator["ts"] <= begin["ts"] <= operator["ts"] + operator["dur"] and begin["tid"] == operator["tid"]
        assert (end["ts"], end["tid"]) == (kernel["ts"], kernel["tid"]) and launches[number][
            "name"
        ] == "cudaLaunchKernel"
        assert kernel["ts"] >= begin["ts"]
    (block,) = by_category(trace, "gpu_user_annotation")
    assert block["name"] == "block" and block["ts"] == found[0]["ts"] and block["dur"] >= found[0]["dur"]
    named = {e["name"]: e["args"] for e in trace["traceEvents"] if e.get("ph") == "M" and e["pid"] == 0}
    assert named["process_labels"] == {"labels": "GPU 0"} and trace["deviceProperties"][0]["id"] == 0


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_trace_handler_writes_a_file_per_cycle(x, tmp_path):
    handler = tensorboard_trace_handler(str(tmp_path), "worker", use_gzip=True)
    cycles = schedule(wait=1, warmup=1, active=2, repeat=2)
    with profile(activities=BOTH, schedule=cycles, on_trace_ready=handler) as prof:
        for _ in range(8):
            step(x)
            prof.step()
    files = sorted(tmp_path.glob("worker.*.pt.trace.json.gz"))
    assert len(files) == 2
    for path in files:
        trace = json.loads(gzip.decompress(path.read_bytes()))
        assert Counter(e["name"] for e in by_category(trace, "kernel"))["wis.mm"] == 2


def test_copies_are_shown_with_their_bytes(cuda, tmp_path):
    with profile(activities=BOTH) as prof:
        y = torch.ones(20_000).cuda()
        z = torch.empty_like(y).copy_(y)
        z.cpu()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    found = [(e["name"].split(" (")[0], e["args"]["bytes"]) for e in by_category(trace, "gpu_memcpy")]
    assert found == [("Memcpy HtoD", 80_000), ("Memcpy DtoD", 80_000), ("Memcpy DtoH", 80_000)]


def test_profile_memory_counts_storages_of_the_device(cuda, tmp_path):
    with profile(activities=BOTH, profile_memory=True) as prof:
        kept = torch.ones(1000, device="cuda")
        torch.ones(500, device="cuda")
    rows = {row.key: row for row in prof.key_averages()}
    assert rows["aten::ones"].device_memory_usage == 6000 and rows["[memory]"].device_memory_usage == -2000
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    sizes = [e["args"]["Bytes"] for e in by_category(trace, "cpu_instant_event") if e["args"].get("Device Type") == 1]
    assert sizes == [4000, 2000, -2000] and kept.numel() == 1000


def test_profile_threads_get_their_own_kernels(x):
    with profile(activities=BOTH) as prof:
        thread = threading.Thread(target=step, args=(x,))
        thread.start()
        thread.join()
        x.relu()
    assert Counter(e.name for e in kernels(prof.events())) == {"wis.mm": 1, "wis.add": 1, "wis.relu": 2}


def test_profile_without_cuda_activity_leaves_device_alone(x):
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        assert "emit" not in device.current().recorder.__dict__
        step(x)
    assert not kernels(prof.events())


def test_profile_cuda_activity_alone_has_kernels_only(x):
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        step(x)
    assert [e.name for e in kernels(prof.events())] == ["wis.mm", "wis.add", "wis.relu"]
    assert not [e for e in prof.events() if e.name.startswith("aten::")]


def test_supported_activities_are_cudas(cuda):
    assert ProfilerActivity.CUDA in torch.profiler.supported_activities()
    with profile() as prof:
        step(torch.rand(4, 4, device="cuda"))
    assert len(kernels(prof.events())) == 4


def test_toggle_collection_leaves_kernels_out(x):
    with profile(activities=BOTH) as prof:
        x.relu()
        prof.toggle_collection_dynamic(False, [ProfilerActivity.CUDA])
        x.exp()
        prof.toggle_collection_dynamic(True, [ProfilerActivity.CUDA])
        x.sin()
    assert [e.name for e in kernels(prof.events())] == ["wis.relu", "wis.sin"]


@pytest.mark.parametrize("options", [{"use_device": "cuda"}, {"use_device": "cuda", "use_kineto": True}])
def test_autograd_profiler_has_kernels(x, options):
    with torch.autograd.profiler.profile(**options) as prof:
        step(x)
    assert [e.name for e in kernels(prof.function_events)] == ["wis.mm", "wis.add", "wis.relu"]
    assert "wis.mm" in prof.table(sort_by="device_time_total")


def test_nvtx_ranges_are_annotations_with_device_time(x):
    with profile(activities=BOTH) as prof:
        torch.cuda.nvtx.range_push("outer")
        with torch.cuda.nvtx.range("inner"):
            step(x)
        assert torch.cuda.nvtx.range_pop() == 0 and torch.cuda.nvtx.range_pop() == -2
    rows = {(row.key, row.device_type) for row in prof.key_averages() if row.device_time_total > 0}
    assert {(name, kind) for name in ("outer", "inner") for kind in (DeviceType.CPU, DeviceType.CUDA)} <= rows


def test_emit_nvtx_changes_nothing(x):
    with torch.autograd.profiler.emit_nvtx(record_shapes=True) as emitting:
        assert torch.equal(step(x).cpu(), step(x.cpu()))
        with pytest.raises(RuntimeError, match="not reentrant"):
            emitting.__enter__()


def test_profile_failed_operation_raises_and_profiler_stops(x):
    with pytest.raises(RuntimeError, match="index out of range"), profile(activities=BOTH):
        torch.nn.functional.embedding(torch.full((1,), 99, device="cuda"), x)
    with profile(activities=BOTH) as prof:
        step(x)
    assert len(kernels(prof.events())) == 3


def test_heap_without_observers_uses_plain_owners(cuda):
    heap = storage.heaps[0]
    before = heap.owner, heap.owner.__del__
    with profile(activities=BOTH, profile_memory=True):
        assert heap.observers and heap.owner is not before[0]
    assert (heap.owner, heap.owner.__del__) == before and not heap.observers


def test_enclosing_finds_nested_spans_of_points_in_any_order():
    spans = [(0, 10, "a"), (1, 4, "b"), (2, 3, "c"), (5, 9, "d"), (20, 30, "e")]
    assert enclosing(spans, [25, 2.5, 4.5, 15, 6]) == [["e"], ["a", "b", "c"], ["a"], [], ["a", "d"]]
