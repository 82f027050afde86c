"""Tests of plans on trial: a plan of mode `exact` stays only if it is not slower than the library."""

import logging

import pytest
from wooly_executor.plans.tiers import OFTEN, SLOWER, TRIAL, State, Tiers
from wooly_executor.programs import ProgramStore
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_wis.dtypes import DType
from wooly_wis.program import Form

MS = 1_000_000


def doubled(wis, sleep_ns):
    """A program that adds its buffer to itself, after a pause."""
    body = wis.body().add(Form("sleep", (), (), (("ns", sleep_ns),)))
    view = wis.at(DType.F32, 4)
    return body.call("aten.add_.Tensor", ("inout", "x", view), args=(wis.ref(0), wis.ref(0)))


@pytest.fixture
def on_trial(make_device, wis):
    """A session whose program has a plan, by the pauses of both in ns: its client, the plan's request, and a function that runs
    the program once.
    """

    def start(library_ns, plan_ns, **more):
        tiers = Tiers(**more)
        device = make_device(runtime=TorchCpuRuntime(), tiers=tiers)
        device.admit("s")
        client = wis.client(device.endpoint, "s", "token of s", jit="exact")
        device.clients.append(client)
        client.make(1, 1.0, 1.0, 1.0, 1.0)
        program = doubled(wis, library_ns)

        def run():
            client.run(program, {"x": 1}, reply=True)

        for _ in range(OFTEN):
            run()
        request = tiers.wanted.get(timeout=30)
        plan = device.call(lambda: device.loop.store.define(doubled(wis, plan_ns).raw)).prepared
        device.call(lambda: tiers.deliver(request, plan))
        return client, request, run

    return start


def test_plan_that_is_slower_than_the_library_is_given_up(on_trial, caplog):
    caplog.set_level(logging.INFO, "wooly_executor.plans.tiers")
    client, request, run = on_trial(1, 5 * MS)
    for _ in range(2 * TRIAL):
        assert request.state is State.READY
        run()
    assert request.state is State.NONE and request.prepared is None and request.trial is None
    assert f"the plan of program {request.digest.hex()[:12]} is not used: it is slower than the library" in caplog.text
    run()
    assert client.floats(1, 4) == [2.0 ** (OFTEN + 2 * TRIAL + 1)] * 4
    assert request.state is State.NONE


def test_plan_that_is_faster_than_the_library_stays(on_trial):
    client, request, run = on_trial(5 * MS, 1)
    for _ in range(2 * TRIAL + 1):
        run()
    assert request.state is State.READY and request.prepared is not None and request.trial is None
    assert client.floats(1, 4) == [2.0 ** (OFTEN + 2 * TRIAL + 1)] * 4


def test_plan_without_trial_is_used_at_once(on_trial):
    _, request, run = on_trial(1, 5 * MS, trials=False)
    assert request.trial is None
    for _ in range(2 * TRIAL + 1):
        run()
    assert request.state is State.READY


@pytest.fixture
def tiers_with_plan(wis):
    """Tiers, a program, its request, and its plan."""
    tiers, store = Tiers(), ProgramStore(TorchCpuRuntime())
    ready = store.define(doubled(wis, 1).raw)
    for _ in range(OFTEN):
        assert tiers.choose(ready, "exact", []) == (ready.prepared, None)
    request = tiers.wanted.get_nowait()
    plan = store.define(doubled(wis, 2).raw).prepared
    tiers.deliver(request, plan)
    return tiers, ready, request, plan


def test_trial_runs_both_sides_in_turn_and_the_best_runs_decide(tiers_with_plan):
    tiers, ready, request, plan = tiers_with_plan
    used = []
    for k in range(2 * TRIAL):
        prepared, trial = tiers.choose(ready, "exact", [])
        assert trial is request
        used.append(prepared is plan)
        # noise hits the plan in all runs but one
        request.ran(prepared, 1000 if prepared is not plan else int(1000 * SLOWER) if k == 8 else 9000)
    assert used == [True, False] * TRIAL
    assert tiers.choose(ready, "exact", []) == (plan, None)


def test_runs_in_flight_when_a_trial_ends_are_ignored(tiers_with_plan):
    tiers, ready, request, plan = tiers_with_plan
    prepared, trial = tiers.choose(ready, "exact", [])
    for _ in range(TRIAL):
        request.ran(plan, 2000)
        request.ran(ready.prepared, 1000)
    assert request.state is State.NONE
    trial.ran(prepared, 1)
    assert tiers.choose(ready, "exact", []) == (ready.prepared, None)


def test_plan_of_mode_full_is_never_on_trial(wis):
    tiers, store = Tiers(), ProgramStore(TorchCpuRuntime())
    ready = store.define(doubled(wis, 1).raw)
    assert tiers.awaits(ready, [], lambda: None)
    request = tiers.wanted.get_nowait()
    plan = store.define(doubled(wis, 2).raw).prepared
    tiers.deliver(request, plan)
    assert tiers.choose(ready, "full", []) == (plan, None)
