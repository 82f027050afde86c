"""Scripts whose executor ends go on in another one, with the bits of an undisturbed run."""

import contextlib
import json
import signal
import threading
from concurrent import futures
from pathlib import Path

import pytest
from wooly_bus.access import Access
from wooly_bus.contracts import METERING_CREDITS_SHOW, METERING_ENTRY_LIST
from wooly_bus.credentials import Credentials
from wooly_bus.rpc import ControlClient
from wooly_testkit import forks
from wooly_wis.credits import CreditsRequest, EntriesRequest

pytestmark = pytest.mark.connected
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 300
GONE_ON = "the session goes on in the executor"
LIBRARY = {"LIBRARIES": "counting_operators"}, {"PYTHONPATH": str(SCRIPTS)}
EXECUTORS = (LIBRARY, LIBRARY)

CASES = {
    "train": (("train.py", 24, 5), "0,6,13"),
    "generate": (("generate.py", 12), "1,7,15"),
    "lora": (("lora.py", 20), "0,5,12"),
    "triton": (("triton_loop.py", 20), "3,12"),
    "large": (("large.py",), "1,5"),
}


@pytest.fixture(scope="module")
def undisturbed():
    """The output of undisturbed runs, by case."""
    return {}


@pytest.fixture
def expect(run, undisturbed):
    """The output of an undisturbed run."""

    def expect(case):
        if case not in undisturbed:
            undisturbed[case] = run(*CASES[case][0], WOOLYAI_RECOVERY="off")[0]
        return undisturbed[case]

    return expect


def losing(case):
    command, lose = CASES[case]
    return command, {"LOSE": lose, "WOOLYAI_CHECKPOINT_S": "0"}


def cases():
    """Each case with a cut after each program ("0"), and with kept frames alone ("10")."""
    quick = {("train", "0"), ("train", "10")}
    for case in CASES:
        for checkpoint_s, name in (("0", "cuts"), ("10", "frames")):
            marks = () if (case, checkpoint_s) in quick else pytest.mark.slow
            yield pytest.param(case, checkpoint_s, id=f"{case}-{name}", marks=marks)


@pytest.mark.parametrize(("case", "checkpoint_s"), list(cases()))
def test_a_script_goes_on_after_the_death_of_its_executor(run, expect, case, checkpoint_s):
    command, env = losing(case)
    found, said = run(*command, **env | {"WOOLYAI_CHECKPOINT_S": checkpoint_s})
    assert found == expect(case)
    assert said.count(GONE_ON) >= 2, said


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"ROUTER": "1"}, id="router", marks=pytest.mark.slow),
        pytest.param({"CUT": "1"}, id="link"),
        pytest.param({"WOOLYAI_CHANNEL": "tunnel"}, id="tunnel", marks=pytest.mark.slow),
    ],
)
def test_a_training_goes_on_after_other_losses(run, expect, how):
    """The router dies as well; only the connection breaks; the connection goes through NATS."""
    command, env = losing("train")
    found, said = run(*command, **env | how)
    assert found == expect("train")
    assert said.count(GONE_ON) >= 2, said


@pytest.mark.parametrize("mode", ["gone", "new"])
def test_a_script_goes_on_if_the_next_executor_is_lost_before_it_connects(run, expect, mode):
    (_, *arguments), _ = CASES["train"]
    found, said = run("unlucky.py", mode, *arguments, LOSE="6")
    assert found == expect("train") and GONE_ON in said


def test_without_recovery_the_loss_is_an_error(run):
    _, said = run(*CASES["train"][0], LOSE="6", WOOLYAI_RECOVERY="off", code=1)
    assert "ExecutorLostError" in said and GONE_ON not in said


def test_a_script_whose_process_is_killed_ends_its_session(cluster, run):
    """The session must not wait until its lease is over for a client that cannot come back."""
    assert run("dying.py", code=-signal.SIGKILL)[0] == "3.0\n"

    def newest():
        return cluster.rest("GET", "tasks?limit=1")["tasks"][0]

    cluster.wait(lambda: newest()["state"] == "failed")
    story = cluster.rest("GET", f"tasks/{newest()['task_id']}")["story"]
    assert "its client's process has ended" in story[-1]["reason"]
    assert all(step["state"] != "pending" for step in story[2:]), story


def test_an_error_after_a_loss_names_its_line(run):
    found, said = run("mistake.py", LOSE="0")
    line = next(
        i for i, text in enumerate((SCRIPTS / "mistake.py").read_text().splitlines(), 1) if "the mistake" in text
    )
    assert f"mistake.py:{line}" in found and said.count(GONE_ON) == 1


@pytest.mark.parametrize(
    "real", [pytest.param(True, id="executor"), pytest.param(False, id="link", marks=pytest.mark.slow)]
)
def test_what_a_script_repeats_is_free_only_after_a_real_loss(cluster, run, tmp_path, real):
    """If only the connection breaks, the client may have broken it."""
    before = {task["task_id"] for task in cluster.rest("GET", "tasks?limit=50")["tasks"]}
    booked_something = tmp_path / "booked"  # what was not booked before the loss is not repeated for the bill
    env = {"LOSE": "9", "UNTIL": str(booked_something), "WOOLYAI_CHECKPOINT_S": "1000"} | ({} if real else {"CUT": "1"})
    metering = ControlClient(
        Access(cluster.nats_url, lambda: Credentials.parse(cluster.keys.service_creds.read_text()))
    )

    def begun():
        return [t["task_id"] for t in cluster.rest("GET", "tasks?limit=50")["tasks"] if t["task_id"] not in before]

    def booked():
        return metering.request(METERING_ENTRY_LIST, EntriesRequest(session_id=task, limit=1000)).entries

    def ended():
        rows = metering.request(METERING_CREDITS_SHOW, CreditsRequest(session_id=task)).rows
        return bool(rows) and rows[0].ended

    with contextlib.closing(metering), futures.ThreadPoolExecutor(1) as pool:
        script = pool.submit(run, "train.py", 12, 5, **env)
        try:
            cluster.wait(begun)
            (task,) = begun()
            cluster.wait(lambda: any(e.core_ns for e in booked()))
        finally:
            booked_something.touch()
        script.result()
        cluster.wait(lambda: ended() or (real and any(e.repeated_core_ns for e in booked())))
        entries = booked()
    assert all(e.core_ucr == (e.core_ns - e.repeated_core_ns) * e.pace_ppm // 1_000_000 for e in entries)
    assert any(e.repeated_core_ns for e in entries) == real


@pytest.mark.parametrize(("mode", "said"), [("on", 1), pytest.param("auto", 0, marks=pytest.mark.slow)])
def test_a_session_says_which_native_operator_may_keep_values_and_stays(cluster, alice, run, mode, said):
    cluster.rest("PUT", "tenants/alice", {"opaque_kernels": True})
    why = "the operator counting_operators.count.default is native code of counting_operators"
    counted, seen = [cluster.keeper.pids / name for name in ("counted", "seen")]
    counted.unlink(missing_ok=True)
    seen.unlink(missing_ok=True)
    found, env = [], {"WOOLYAI_RECOVERY": mode, "PYTHONPATH": str(SCRIPTS)}
    thread = threading.Thread(target=lambda: found.append(run("counting.py", **env)))
    thread.start()
    try:
        cluster.wait(counted.exists)
        task = cluster.rest("GET", "tasks?limit=1")["tasks"][0]["task_id"]

        def told():
            return [step["reason"] for step in cluster.rest("GET", f"tasks/{task}")["story"] if why in step["reason"]]

        cluster.wait(told)
        assert len(told()) == 1
        refused = alice.wooly("tasks", "move", task, code=1)
        assert "cannot go on in another executor" in refused and why in refused
    finally:
        seen.touch()
        thread.join()
    output, lines = found[0]
    assert output == "1.0\n" and lines.count(why) == said


@pytest.mark.slow
def test_a_recording_goes_on_after_a_loss_and_replays(cluster, alice, expect, tmp_path):
    """The frames that are sent again to another executor are recorded once."""
    command, env = losing("train")
    bundle = tmp_path / "train.wooly"
    more = {"OMP_NUM_THREADS": "1", "PIDS": str(cluster.keeper.pids), **env}
    argv = ["record", "-o", bundle, SCRIPTS / command[0], *command[1:]]
    done = forks.run("wooly", *map(str, argv), env=alice.env() | more, timeout=TIMEOUT_S)
    assert done.returncode == 0 and done.stdout == expect("train"), done.stderr
    assert done.stderr.count(GONE_ON) >= 2
    report = json.loads(alice.wooly("replay", bundle, "--json"))
    assert report["different"] == 0 and report["errors"] == [] and report["frames"] == report["of"] > 0
    assert report["compared"] == 11  # five losses, and six tensors of the model
