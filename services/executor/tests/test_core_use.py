"""The cores of a GPU that a program occupies: from occupancy and profiles to the bill."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly_executor.billing.core_comparison import PERIOD_NS, CoreComparison
from wooly_executor.billing.cores import occupied
from wooly_executor.errors import OperationError
from wooly_executor.runtime import core_use
from wooly_executor.runtime.buffers import Buffer, Buffers
from wooly_executor.runtime.core_use import (
    PROFILED_EVERY,
    PROFILED_FIRST,
    UNKNOWN,
    CoreUse,
    KernelRecord,
    kernel_records,
    read_profile,
)
from wooly_executor.runtime.nvml import Nvml
from wooly_testkit.effort import examples
from wooly_testkit.tape import Tape
from wooly_wis.dtypes import DType

from services.executor.tests.fake_gpu import LAUNCH_NS, MARK_NS, FakeDriver, gpu_runtime
from services.executor.tests.test_gpu_runtime import Side, chain

CORES = 4
COUNTS = st.integers(0, 1 << 32)


@pytest.mark.parametrize(
    ("blocks", "per_core", "cores"),
    [
        (0, 2, 0),
        (1, 2, 1000),
        (3, 2, 3000),
        (8, 2, 4000),
        (9, 2, 2500),
        (17, 2, 3000),
        (3, None, 3000),
        (900, None, 4000),
        (5, 0, 4000),
    ],
)
def test_occupied_cores_follow_from_waves_of_blocks(blocks, per_core, cores):
    assert occupied(blocks, per_core, CORES) == cores


@given(COUNTS, st.none() | st.integers(0, 64), st.integers(1, 200))
def test_occupied_cores_are_at_most_all_cores_and_blocks(blocks, per_core, cores):
    assert 0 <= occupied(blocks, per_core, cores) <= 1000 * min(blocks, cores)


RECORDS = st.lists(st.builds(KernelRecord, st.sampled_from(["w_1", "gemm"]), COUNTS, COUNTS), max_size=6)


@settings(max_examples=examples(100, 1000))
@given(
    st.lists(st.tuples(COUNTS, RECORDS), max_size=4),
    st.lists(st.tuples(COUNTS, COUNTS), max_size=3),
    st.lists(st.tuples(COUNTS, st.integers(0, 1000)), max_size=6),
    st.integers(1, 200),
)
def test_bill_is_at_most_all_cores_whatever_the_records_say(profiles, kernels, parts, cores):
    bills = []
    for _ in range(2):
        use = CoreUse()
        for ns, records in profiles:
            use.profiled(ns, records, {"w_1"}, cores)
        for ns, core_ns in kernels:
            use.measured(ns, core_ns, cores)
        bills.append([use.core_ns(ns, permille) for ns, permille in parts])
        assert all(0 <= bill <= ns * cores for bill, (ns, _) in zip(bills[-1], parts, strict=True))
    assert bills[0] == bills[1], "equal records give equal bills"


def test_profile_divides_time_of_library_and_gaps_by_blocks():
    use = CoreUse()
    assert use.core_ns(10_000, 0) == 10_000, "without a profile, device time is billed as one core"
    use.profiled(10_000, [KernelRecord("gemm", 4000, 100), KernelRecord("small", 2000, 2)], {"w_1"}, CORES)
    assert use.library == 2000  # 4 us on 4 cores, 2 us on 2 cores, 4 us idle
    use.profiled(10_000, [KernelRecord("w_1", 9000, 1), KernelRecord("gemm", 1000, 100)], {"w_1"}, CORES)
    assert use.library == 1000 * (20_000 + 4000) // 11_000  # the second part of the same run
    use.measured(8000, 24_000, CORES)
    assert use.core_ns(1000, 500) == 500 * 3 + 500 * use.library // 1000


def test_profile_begins_anew_with_each_profiled_run():
    use, due = CoreUse(), []
    for k in range(1, 3 * PROFILED_EVERY):
        if use.due():
            due.append(k)
            use.profiled(1000, [KernelRecord("gemm", 1000, len(due))], set(), CORES)
            assert use.library == 1000 * len(due)
    assert due == [PROFILED_FIRST, PROFILED_EVERY + PROFILED_FIRST, 2 * PROFILED_EVERY + PROFILED_FIRST]


# -- the profiler's file -------------------------------------------------------------------------------------------------

KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "void gemm<float>(float*)",
    "ts": 17.0,
    "dur": 12.345,
    "args": {"device": 0, "stream": 7, "grid": [8, 4, 2], "block": [256, 1, 1], "est. achieved occupancy %": 25},
}


def changed(**how):
    return KERNEL | how


def test_profile_file_has_the_kernels(tmp_path):
    path = tmp_path / "trace.json"
    others = [{"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "dur": 3.0}, {"ph": "M"}, "text"]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*others, KERNEL]}))
    assert read_profile(path) == [KernelRecord("void gemm<float>(float*)", 12345, 64)]


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {},
        {"traceEvents": {}},
        {"traceEvents": [changed(name=3)]},
        {"traceEvents": [changed(dur="long")]},
        {"traceEvents": [changed(dur=-1.0)]},
        {"traceEvents": [changed(dur=float("nan"))]},
        {"traceEvents": [changed(dur=float("inf"))]},
        {"traceEvents": [changed(args=[])]},
        {"traceEvents": [changed(args={"grid": [1, 2]})]},
        {"traceEvents": [changed(args={"grid": [1, 2, 3.5]})]},
        {"traceEvents": [changed(args={"grid": [1, 2, 1 << 60]})]},
        {"traceEvents": [changed(args={"grid": [1, 2, True]})]},
    ],
)
def test_profile_of_another_form_is_refused(found):
    with pytest.raises(OperationError, match="profile"):
        kernel_records(found)


@pytest.mark.parametrize("content", [b"", b"{", b'{"traceEvents": [', b"\xff\xfe", b"[" * 100_000])
def test_profile_file_that_is_cut_short_or_no_json_is_refused(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(OperationError, match="the profile cannot be read"):
        read_profile(path)


def test_profile_that_is_too_large_or_missing_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [KERNEL] * 3}))
    monkeypatch.setattr(core_use, "KERNELS", 2)
    with pytest.raises(OperationError, match="more than 2 kernels"):
        read_profile(path)
    monkeypatch.setattr(core_use, "PROFILE_BYTES", 10)
    with pytest.raises(OperationError, match="the profile has more than"):
        read_profile(path)
    with pytest.raises(OperationError, match="the profile cannot be read"):
        read_profile(tmp_path / "absent.json")


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # PyTorch 2.11 says so of every profile
def test_profile_that_torch_writes_without_a_gpu_can_be_read(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(4).add_(1)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert read_profile(tmp_path / "trace.json") == []


# -- runs on a fake GPU --------------------------------------------------------------------------------------------------


def tanh(gpu, n=4):
    t = Tape()
    held = x = t.input(DType.F32, 16)
    for _ in range(n):
        held = t.op("tanh", held)
    program, slots = t.program()
    return Side(gpu).ready(program).prepared, slots[x.slot]


def bill(gpu, prepared, owner, contents, params=(), edges=(), ahead_ns=0):
    """Run, and return the device time and the core time."""
    owner.clear()
    owner.update({k: Buffer(v.nbytes, v.clone()) for k, v in contents.items()})
    before = gpu.extra_core_ns
    with torch.inference_mode():
        execution = gpu.begin(prepared, owner, list(range(prepared.program.n_slots)), list(params))
        ns = sum(execution.advance((*edges, prepared.end), ahead_ns))
    assert execution.outcome.failed_at is None
    return ns, ns + gpu.extra_core_ns - before


def test_gpu_library_is_billed_by_profiled_run():
    driver = FakeDriver()
    gpu = gpu_runtime(driver)
    prepared, x = tanh(gpu)
    driver.library_kernels = [KernelRecord("tanh", MARK_NS // 2, 3)]
    bills = [bill(gpu, prepared, Buffers(), {x: torch.ones(16)}) for _ in range(2 + PROFILED_EVERY)]
    assert bills[0] == (MARK_NS, MARK_NS) and bills[1:] == [(MARK_NS, MARK_NS * 3 // 2)] * (1 + PROFILED_EVERY)
    assert driver.profiles == 2


def test_gpu_generated_kernels_are_billed_by_occupancy():
    program, params, contents, _ = chain()
    bills = {}
    for per_core in (1, 8):
        driver = FakeDriver()
        driver.occupancy = per_core
        gpu = gpu_runtime(driver)
        gpu.profiles = False
        prepared = Side(gpu).plan(program, params)
        for _ in range(17):
            ns, core_ns = bill(gpu, prepared, Buffers(), contents, params)
        grids = [grid[0] for _, grid, _ in driver.launches[-prepared.by_kernel :]]
        assert prepared.core_use.library is None and prepared.core_use.kernels >= UNKNOWN
        launched = [occupied(n, per_core, CORES) for n in grids]
        assert min(launched) <= prepared.core_use.kernels <= max(launched)
        assert core_ns == prepared.core_use.core_ns(ns, prepared.kernel_permille) <= ns * CORES
        bills[per_core] = core_ns
    assert all(bills.values())


def test_gpu_profile_of_plan_does_not_count_its_kernels_as_library():
    driver = FakeDriver()
    gpu = gpu_runtime(driver)
    program, params, contents, _ = chain()
    prepared = Side(gpu).plan(program, params)
    for _ in range(3):
        bill(gpu, prepared, Buffers(), contents, params)
    assert driver.profiles == 1 and gpu.own_kernels and prepared.core_use.library == 0


def test_gpu_profiler_that_fails_is_not_tried_again(caplog):
    driver = FakeDriver()
    driver.fail_profile = True
    gpu = gpu_runtime(driver)
    for _ in range(2):
        prepared, x = tanh(gpu)
        assert [bill(gpu, prepared, Buffers(), {x: torch.ones(16)}) for _ in range(4)] == [(MARK_NS, MARK_NS)] * 4
    assert not gpu.profiles
    (said,) = [r.getMessage() for r in caplog.records if "no longer profiled" in r.getMessage()]
    assert "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in said and "WOOLY_EXECUTOR_CORE_PROFILES=0" in said


def test_gpu_occupancy_that_driver_refuses_is_an_error_of_the_plan():
    driver = FakeDriver()
    driver.occupancy = None
    program, params, *_ = chain()
    with pytest.raises(OperationError, match=r"the driver refuses the code of kernel .*CUDA_ERROR_INVALID_VALUE"):
        Side(gpu_runtime(driver)).plan(program, params)


@settings(max_examples=examples(10, 100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), RECORDS), min_size=1, max_size=12),
)
def test_gpu_tenants_together_pay_at_most_all_cores(launches):
    """In any window of launches of several tenants, with work in flight and whatever profiles say."""
    driver = FakeDriver()
    gpu = gpu_runtime(driver)
    programs, owners = [tanh(gpu, n) for n in (1, 3)], [Buffers() for _ in range(3)]
    billed, charged = 0, 0
    for who, which, records in launches:
        driver.library_kernels = records
        prepared, x = programs[which]
        prepared.core_use._runs = PROFILED_FIRST - 1 if records else PROFILED_FIRST
        ns, core_ns = bill(gpu, prepared, owners[who], {x: torch.ones(16)}, ahead_ns=1 << 40)
        assert 0 <= core_ns <= ns * CORES
        billed, charged = billed + core_ns, charged + ns
    gpu.settle()
    assert billed <= CORES * charged and charged + sum([o.owed_ns for o in owners]) <= driver.now


def test_gpu_usage_record_has_cores_of_the_device(make_device, wis):
    driver = FakeDriver()
    driver.library_kernels = [KernelRecord("fill", LAUNCH_NS, 1 << 20)]
    device = make_device(runtime=gpu_runtime(driver))
    client = device.open("a", tenant="t")
    client.make(1, *[0.0] * 64)
    name = client.define(wis.body().fill("x", wis.at(DType.F32, 64), 1.0))
    for _ in range(4):
        client.start(name, [1])
    client.sync()
    device.call(device.loop.take_usage)
    client.start(name, [1])
    client.sync()
    ((used,),) = [device.call(device.loop.take_usage)]
    assert used.gpu_ns > 0 and used.core_ns == CORES * used.gpu_ns


# -- comparison with the vendor's figures --------------------------------------------------------------------------------


def test_comparison_says_what_was_billed_and_measured():
    found = CoreComparison(CORES, 0)
    found.add(PERIOD_NS)
    assert not found.due(PERIOD_NS - 1) and found.due(PERIOD_NS)
    assert (
        found.text(0.5, PERIOD_NS) == "cores: 25.0 % of the device's core time was billed in 60 s, 50.0 % were measured"
    )
    assert found.text(None, 2 * PERIOD_NS) == (
        "cores: 0.0 % of the device's core time was billed in 60 s, nothing was measured"
    )


def nvml(monkeypatch, samples):
    module, asked = ModuleType("pynvml"), []

    def utilisation(handle, since):
        asked.append((handle, since))
        if isinstance(samples, Exception):
            raise samples
        return samples

    module.nvmlInit = lambda: asked.append("init")
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    module.nvmlDeviceGetProcessUtilization = utilisation
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr("os.getpid", lambda: 7)
    return asked


def test_nvml_gives_mean_share_of_this_process(monkeypatch):
    samples = [SimpleNamespace(pid=p, smUtil=u, timeStamp=t) for p, u, t in ((7, 40, 5), (8, 99, 9), (7, 60, 8))]
    asked, found = nvml(monkeypatch, samples), Nvml()
    assert found.utilisation("abc") == 0.5 and found.utilisation("GPU-abc") == 0.5
    assert asked == ["init", ("GPU-abc", 0), ("GPU-abc", 9)]


@pytest.mark.parametrize(
    ("samples", "share"),
    [
        ([SimpleNamespace(pid=8, smUtil=9, timeStamp=1)], None),
        ([], 0.0),
        (RuntimeError("Not Found"), 0.0),
        (RuntimeError("Not Supported"), None),
    ],
)
def test_nvml_without_figures_of_this_process_says_so(monkeypatch, samples, share):
    nvml(monkeypatch, samples)
    assert Nvml().utilisation("abc") == share


def test_nvml_that_is_not_installed_is_not_asked_again(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = Nvml()
    assert found.utilisation("abc") is None
    asked = nvml(monkeypatch, [])
    assert found.utilisation("abc") is None and not asked
