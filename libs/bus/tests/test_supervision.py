"""If a thread or task of a service ends unexpectedly, the process ends within a second, whatever its other threads do."""

import ast
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from wooly_bus.supervision import BROKEN

ROOT = Path(__file__).parents[3]
#: Extra seconds for a busy machine.
PATIENCE_S = 20.0
HEAD = """
import asyncio, ctypes, logging, os, threading, time
from wooly_bus import supervision
from wooly_bus.supervision import run_for_ever, start_call, start_errand, start_task, start_thread, supervised, run

logging.basicConfig(format="%(levelname)s %(message)s")
broken = []
supervision.os._exit, real_exit = lambda status: (print(time.monotonic() - broken[0], flush=True), real_exit(status)), os._exit

def fail():
    broken.append(time.monotonic())
    raise KeyError("left")

async def fail_soon():
    fail()

async def for_ever():
    await asyncio.Event().wait()
"""


#: Replaces `GRACE_S` and `STUCK_S`, in seconds, in tests that do not measure the time until the end of the process.
SOON = HEAD + "supervision.GRACE_S, supervision.STUCK_S = 0.1, 0.5\n"


def ran(body, head=SOON):
    """Run a service whose `main` is `body`. Returns its exit status, its output, and its log."""
    main = f"@supervised('tester')\ndef main() -> int:\n{textwrap.indent(textwrap.dedent(body), '    ')}\nreal_exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", head + main], capture_output=True, text=True, timeout=60 + PATIENCE_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("thread worker", "start_thread(fail, 'worker'); threading.Event().wait()"),
        ("thread worker", "threading.Thread(target=fail, name='worker').start(); threading.Event().wait()"),
        ("thread worker", "start_thread(lambda: (broken.append(time.monotonic()), exit(0)), 'worker'); time.sleep(60)"),
        (
            "task reader",
            "asyncio.run(run_for_ever({'reader': fail_soon, 'other': for_ever}, for_ever)); time.sleep(60)",
        ),
        (
            "task reader",
            """
            async def works():
                start_task(fail_soon(), 'reader')
                await asyncio.sleep(0.1)
                time.sleep(60)  # the event loop hangs
            asyncio.run(works())
            """,
        ),
        (
            "the main thread",
            """
            async def works():
                asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)  # the end of a loop waits for this thread
                fail()
            run(works())
            """,
        ),
    ],
    ids=["thread", "thread of a library", "thread that exits", "task", "task beside a loop that hangs", "main"],
)
def test_unexpected_end_of_part_ends_process_within_a_second(what, body, request):
    status, out, log = ran(body, HEAD if request.node.callspec.id == "main" else SOON)
    assert status == BROKEN
    assert f"CRITICAL {what} ended unexpectedly: " in log and "the tester's process ends with status 4" in log
    assert "Traceback" in log
    assert float(out) < 1 + PATIENCE_S / 10


def test_task_that_returns_is_a_failure():
    status, _, log = ran("asyncio.run(run_for_ever({'reader': lambda: asyncio.sleep(0)}, for_ever))\nreturn 0")
    assert status == BROKEN and "task reader ended unexpectedly: it returned" in log


def test_failure_while_library_holds_interpreter_ends_process():
    begun = time.monotonic()
    status, _, log = ran(
        """
        start_thread(lambda: (time.sleep(0.2), fail()), 'worker')
        time.sleep(0.4)
        ctypes.PyDLL(None).sleep(60)
        """,
        HEAD + "supervision.GRACE_S, supervision.STUCK_S = 20, 0.8\n",
    )
    assert status == 1 and "Timeout" in log and time.monotonic() - begun < PATIENCE_S


def test_requested_end_returns_status_of_main():
    assert ran("asyncio.run(run_for_ever({'reader': for_ever}, lambda: asyncio.sleep(0)))\nreturn 7")[0] == 7


def test_cancellation_in_same_turn_as_result_is_not_lost():
    body = """
    async def reader():
        while True:
            await asyncio.wait_for(came[0], 60)
            came[0] = asyncio.get_running_loop().create_future()

    def later(turns):
        loop = asyncio.get_running_loop()
        loop.call_soon(later, turns - 1) if turns else came[0].set_result(None)

    async def once(turns):
        came[:] = [asyncio.get_running_loop().create_future()]

        async def ending():
            await asyncio.sleep(0.01)
            later(turns)

        await run_for_ever({'reader': reader}, ending)

    came = []
    for turns in range(8):
        asyncio.run(asyncio.wait_for(once(turns), 10))
    return 7
    """
    assert ran(body)[0] == 7


def test_service_not_ending_in_time_is_ended_with_log():
    body = """
    supervision.END_S = 0.2
    broken.append(time.monotonic())

    async def deaf():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

    asyncio.run(run_for_ever({'reader': deaf}, lambda: asyncio.sleep(0)))
    return 7
    """
    status, _, log = ran(body)
    assert status == BROKEN and "not complete after 0.2 s; still running: task reader" in log


def test_library_thread_failing_during_shutdown_is_only_logged():
    body = """
    asyncio.run(run_for_ever({'reader': for_ever}, lambda: asyncio.sleep(0)))
    thread = threading.Thread(target=fail, name='worker')
    thread.start()
    thread.join()
    time.sleep(0.1)
    return 7
    """
    status, _, log = ran(body)
    assert (
        status == 7
        and "WARNING thread worker ended with an error during the shutdown of the tester" in log
        and "Traceback" in log
    )


def test_errand_failing_is_only_logged():
    status, _, log = ran(
        """
        async def works():
            start_errand(fail_soon(), 'the closing of s')
            await asyncio.sleep(0.1)
        asyncio.run(works())
        return 7
        """
    )
    assert status == 7 and "ERROR the closing of s failed: KeyError: 'left'" in log and "Traceback" in log


def test_start_call_returns_result_or_error():
    body = """
    assert start_call(lambda: 5, 'sum').result(9) == 5
    try:
        start_call(fail, 'sum').result(9)
    except KeyError:
        return 7
    """
    assert ran(body)[0] == 7


def test_thread_failing_outside_service_is_only_logged():
    script = HEAD + "thread = start_thread(fail, 'worker')\nthread.join()\ntime.sleep(0.1)\nprint('goes on')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "goes on" in done.stdout and "ERROR thread worker ended unexpectedly: KeyError: 'left'" in done.stderr


# -- all use of supervision -------------------------------------------------------------------------------------------

#: Calls that start a thread or a task, whose end may stay undetected.
STARTERS = {"Thread", "Timer", "create_task", "ensure_future", "start_new_thread"}
#: Files that may have such calls: their number, and the reason.
REASONED = {
    "libs/bus/src/wooly_bus/supervision.py": (6, "starts all other threads and tasks"),
    "libs/bus/src/wooly_bus/http_listener.py": (2, "a failed listener ends the server; connections log their errors"),
    "deploy/operator/src/wooly_operator/app.py": (2, "imports no bus; waits for both tasks, and ends with the first"),
    "services/compiler/src/wooly_compiler/actor.py": (2, "the caller takes the result"),
    "services/executor/src/wooly_executor/plans/compilation.py": (2, "a TaskGroup: an error ends the supervised task around it"),
    "services/router/src/wooly_router/modules.py": (1, "the task that submitted the module takes the result"),
    "services/metering/src/wooly_metering/app.py": (1, "uvicorn; a supervised task waits for it"),
    "services/metering/src/wooly_metering/follower.py": (1, "the supervised task around it takes the result"),
    "services/router/src/wooly_router/front.py": (1, "uvicorn; a supervised task waits for it"),
    "deploy/local/src/wooly_local/processes.py": (1, "waits for the end of other processes, and ends this one"),
}  # fmt: skip


def test_every_service_main_is_supervised():
    services = [p for p in ROOT.glob("services/*/src/*/app.py") if "intercept" not in p.parts]
    assert len(services) == 5
    for path in services:
        main = next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == "main")
        assert [getattr(getattr(d, "func", None), "id", "") for d in main.decorator_list] == ["supervised"], path


def test_threads_and_tasks_are_started_by_supervision():
    found = {}
    for path in sorted(
        p for part in ("libs", "services", "deploy", "integrations") for p in ROOT.glob(f"{part}/*/src/**/*.py")
    ):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        if name.startswith("libs/testkit/") or not any(starter in text for starter in STARTERS):
            continue
        calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
        names = [getattr(c.func, "attr", getattr(c.func, "id", "")) for c in calls]
        if count := sum(n in STARTERS for n in names):
            found[name] = count
    assert found == {name: count for name, (count, _) in REASONED.items()}, (
        "start threads and tasks by wooly_bus.supervision, or say here why not"
    )
