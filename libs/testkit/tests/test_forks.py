"""A fork behaves as a new process: arguments, environment, output, exit status."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from wooly_testkit import forks
from wooly_testkit.forks import Forked

SAYS = """
import os, sys
print(__name__, sys.argv[1:], os.environ["MINE"], "HOME" in os.environ, os.getcwd(), sys.stdin.read())
print("words", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def module(tmp_path):
    """Creates a module from a text. Returns the options to start it."""

    def make(text, **env):
        (tmp_path / "forked_module.py").write_text(text)
        return {"env": {"PYTHONPATH": str(tmp_path), **env}, "cwd": tmp_path}

    return make


def test_fork_gets_arguments_and_environment_and_reports_status(module, tmp_path):
    options = module(SAYS, MINE="4")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Forked("forked_module", "7", "x", text=True, **pipes, **options) as process:
        out, errors = process.communicate("said", timeout=30)
    assert out == f"__main__ ['7', 'x'] 4 False {tmp_path} said\n" and errors == "words\n"
    assert process.returncode == 7 == process.wait()


FINALIZERS = """
import sys, weakref
own = type("Own", (), {})()
weakref.finalize(own, print, "own")
found = [f for f in list(weakref.finalize._registry) if f.peek()[1].__module__ == "torch.library"]
print("torch" in sys.modules, len(found) > 100, [f for f in found if f.atexit])
"""


def test_end_of_fork_finalizes_its_own_objects_but_not_those_of_its_parents_imports(module):
    done = forks.run("forked_module", like="wooly_executor", timeout=60, **module(FINALIZERS))
    assert (done.returncode, done.stdout) == (0, "True True []\nown\n"), done.stderr


def test_fork_can_be_killed_and_terminated(module, tmp_path):
    options = module("import time; print('up', flush=True); time.sleep(60)")
    with Forked("forked_module", stdout=subprocess.PIPE, **options) as process:
        assert process.stdout.readline() == b"up\n" and process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        os.kill(process.pid, signal.SIGSTOP)
        process.kill()
        assert process.wait(30) == -signal.SIGKILL


def test_forks_from_many_threads_report_their_own_status(module):
    options, codes = module("import sys; sys.exit(int(sys.argv[1]))"), {}

    def one(n):
        codes[n] = forks.run("forked_module", str(n), timeout=60, **options).returncode

    threads = [threading.Thread(target=one, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {n: n for n in range(20)}


def test_fork_raising_prints_traceback_and_status_is_1(module):
    done = forks.run("forked_module", timeout=30, **module("raise KeyError('mine')"))
    assert done.returncode == 1 and "KeyError: 'mine'" in done.stderr


def test_fork_keeps_given_descriptors_open(module, tmp_path):
    with (tmp_path / "log").open("ab") as log:
        for _ in range(2):
            with Forked("forked_module", stdout=log, stderr=log, **module("print('here')")) as process:
                assert process.wait(30) == 0
    assert (tmp_path / "log").read_text() == "here\nhere\n"


#: Shares its parent of forks with a child, whose fork must end although the parent goes on.
SHARES = """
import os, subprocess, sys, time
from wooly_testkit import forks

if len(sys.argv) == 1:
    child = subprocess.run([sys.executable, __file__, forks.share()], stdout=subprocess.PIPE, text=True, check=True)
    until = time.monotonic() + 30
    while os.path.exists(f"/proc/{int(child.stdout)}") and time.monotonic() < until:
        time.sleep(0.02)
    print(os.path.exists(f"/proc/{int(child.stdout)}"), forks.run("mine", timeout=60, cwd=sys.path[0]).returncode)
    forks.shut_down()
else:
    forks.join(sys.argv[1])
    print(forks.Forked("mine", "stay", cwd=sys.path[0]).pid)
"""


@pytest.mark.slow
def test_forks_of_process_that_joins_end_with_it(tmp_path):
    (tmp_path / "mine.py").write_text("import sys, time; time.sleep(60 * (len(sys.argv) - 1)); sys.exit(3)")
    (tmp_path / "shares.py").write_text(SHARES)
    done = subprocess.run([sys.executable, tmp_path / "shares.py"], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["False", "3"], done.stderr
