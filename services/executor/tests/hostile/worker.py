"""Tries calls in child processes of this one, in which `guarded.c` is preloaded: `python worker.py CORPUS THREADS RUNS [MODE]`.

Without CORPUS (""), tries programs of native instructions. Children have THREADS threads, and run a call RUNS times. MODE: the
mode of the programs' plans.

Jobs come on standard input, answers go to standard output, as one JSON object per line:

    {"name": operator, "seed": any, "count": n}    tries `n` mutants of its lawful calls, or `n` programs

A child tries the calls in order. If a call ends the child or takes too long, another child continues with the next call.
"""

import contextlib
import json
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import programs
import torch
from call import Call, literal
from guarded import FAULT, Guard
from mutants import Corpus, mutant
from repeated import HOT, Repeated
from shrink import simpler
from trial import Trials
from wooly_compiler.build.worker import WorkerProcess
from wooly_compiler.errors import CompilerError
from wooly_compiler.version import version
from wooly_executor.runtime.opencl import OpenClRuntime
from wooly_executor.runtime.torch_cpu import TorchCpuRuntime
from wooly_wis.artifact import key_of
from wooly_wis.errors import WisError

#: Findings that do no harm to others. A few are recorded, and the rest is ignored.
MILD = ("memory", "untidy")
#: Maximum time of a call, in seconds.
LIMIT_S = 10
#: The same for all runs of a call, if it has several.
REPEATED_S = 60
#: Number of such periods to wait for a call that has used little CPU time, because the machine is busy.
PATIENCE = 12
#: Number of findings after which an operator is finished, and maximum number of recorded findings of one kind.
ENOUGH, OF_A_KIND = 12, 2
#: Maximum number of attempts to make a finding smaller.
SHRINK = 60
#: Maximum length of a literal, in characters.
LONGEST = 4000
#: Bytes behind an argument that some kernels read without using them (ADR 32).
VECTOR = 64
_REPORT, _PLACE = 512, 8
_WRONG = 76


class Children:
    """Runs calls in child processes, and reports how they end.

    Args:
        trials: makes what tries calls, in a child, on its guarded memory.
        threads: number of threads of a child. This process has one, because a fork has no other.
        limit_s: maximum time of a call, in seconds.
    """

    def __init__(self, trials, threads, limit_s):
        self._shared, self._limit_s = mmap.mmap(-1, mmap.PAGESIZE), limit_s
        self._trials, self._threads = trials, threads

    def go(self, calls, slack, ignore=(), first=0):
        """Try calls in order, up to the first one that goes wrong in a way that is not ignored.

        `first`: the number of the first call. The position of blocks depends on a call's number.

        Returns:
            The number of tried calls, the finding of the last one, and the number of calls that succeeded.
        """
        self._shared[:] = bytes(len(self._shared))
        tells, told = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.close(tells)
                self._child(calls, slack, ignore, first, told)
            finally:
                os._exit(99)
        os.close(told)
        wrong = self._wait(child, tells)
        os.close(tells)
        tried, fine = struct.unpack_from("<QQ", self._shared, _REPORT)
        return tried, wrong, fine

    def _child(self, calls, slack, ignore, first, told):
        guard = Guard(memoryview(self._shared)[:_REPORT])
        torch.set_num_threads(self._threads)
        trials = self._trials(guard)
        fine = 0
        for k, call in enumerate(calls):
            struct.pack_into("<QQ", self._shared, _REPORT, k + 1, fine)
            os.write(told, b".")
            guard.place(at_start=(first + k) % 4 == 3, slack=slack, small=(first + k) % 8 == 6)
            wrong = ""
            try:
                fine += not trials.said(call)
            except AssertionError as e:
                wrong = f"buffer: {e}"
            except Exception as e:
                wrong = f"untidy: {type(e).__name__}: {e}"
            spoilt, refused = guard.take_spoilt(), guard.take_refused()
            if spoilt:
                wrong = f"wrote beside a block: {spoilt} bytes"
            if refused:
                wrong = f"memory: asked for {refused} bytes"
            if wrong and not wrong.startswith(ignore):
                self._shared[:_REPORT] = wrong.encode()[: _REPORT - 1].ljust(_REPORT, b"\0")
                os._exit(_WRONG)
        struct.pack_into("<QQ", self._shared, _REPORT, k + 1, fine)
        os._exit(0)

    def _wait(self, child, tells):
        begun, waited = 0.0, 0
        while True:
            ready, _, _ = select.select([tells], [], [], self._limit_s)
            if not ready:
                taken = _cpu_s(child)
                waited += 1
                if (
                    taken - begun < self._limit_s / 2 and waited < PATIENCE
                ):  # the machine is busy: the call had little CPU time
                    continue
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"hung: more than {self._limit_s} s"
            if not os.read(tells, 4096):
                break
            begun, waited = _cpu_s(child), 0
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        report = self._shared[:_REPORT].rstrip(b"\0").decode(errors="replace")
        if not status:
            return ""
        if status == _WRONG:
            return report
        return f"fault: {report}" if status == FAULT else f"ended: {_status(status)}"


def _cpu_s(process):
    with open(f"/proc/{process}/stat") as f:
        user, system = f.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _status(status):
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def kind_of(wrong):
    """Return the kind of a finding: its text without the numbers."""
    words = [w for w in wrong.replace(",", " ").split() if not w.lstrip("-").isdigit()]
    return " ".join(words)


def is_vector(wrong):
    """Whether the fault is that of a SIMD vector that begins inside of a block and ends outside."""
    words = wrong.split()
    if words[:3] != ["fault:", "reads", "byte"] or "freed" in words or "locked" in words:
        return False
    at, size = int(words[3]), int(words[-2])
    return size <= at < size + VECTOR


def examine(children, calls, job):
    """Try the calls of a job. Returns the findings: kind, count, and the smallest literals."""
    found, at, slack, fine = {}, 0, 0, 0
    while at < len(calls) and sum([len(f["calls"]) for k, f in found.items() if not k.startswith(MILD)]) < ENOUGH:
        seen = tuple([m for m in MILD if sum([k.startswith(m) for k in found]) >= OF_A_KIND])
        tried, wrong, well = children.go(calls[at:], slack, seen, at)
        at, fine = at + tried, fine + well
        if not wrong:
            continue
        known = found.setdefault(kind_of(wrong), {"wrong": wrong, "calls": [], "slack": slack})
        known["calls"].append((calls[at - 1], at - 1))
        if is_vector(wrong) and not slack:
            slack, at = VECTOR, at - 1  # try the same call again with slack, because it may have another finding
    told = []
    for kind, each in found.items():
        some = each["calls"][:OF_A_KIND]
        if not kind.startswith(MILD) and isinstance(some[0][0], Call):
            some = [(smallest(children, call, kind, each["slack"], first), first) for call, first in some]
        literals = [shown(call)[:LONGEST] for call, _ in some]
        told.append({"kind": kind, "wrong": each["wrong"], "times": len(each["calls"]), "calls": literals})
    return {"name": job["name"], "seed": job["seed"], "tried": at, "fine": fine, "found": told}


def smallest(children, call, kind, slack, first):
    """Return the smallest call found that ends with the same kind of finding."""
    tries, progress = 0, True
    while progress and tries < SHRINK:
        progress = False
        for other in simpler(call):
            tries += 1
            if tries > SHRINK:
                break
            _, wrong, _ = children.go([other], slack, first=first)
            if kind_of(wrong) == kind:
                call, progress = other, True
                break
    return call


def shown(call):
    """Return the text of a call or of a program."""
    return literal(call.tidy()) if isinstance(call, Call) else programs.text(call)


class Plans:
    """Compiles the plans of programs.

    Args:
        mode: mode of the plans.
        threads: number of threads of the process that runs them.
        folder: folder for PoCL's files and for the compiler's.
    """

    def __init__(self, mode, threads, folder):
        self._mode = mode
        self._worker = WorkerProcess(module="wooly_compiler.worker", arguments=(str(folder / "compiler"),))
        self._target = _target(threads, folder)

    def planned(self, case):
        """Return a program with its plan, or without if it has none."""
        try:
            key = key_of(case.program, self._target, self._mode, case.params)
            request = {
                "what": "artifact",
                "program": case.raw.hex(),
                "digest": key.program.hex(),
                "target": key.target,
                "mode": self._mode,
                "decided": [[k, w.hex()] for k, w in key.decided],
                "compiler": version(),
            }
            return replace(case, plan=self._worker.ask(request, key.target, f"program {case.name}"))
        except (WisError, CompilerError):
            return case


def _target(threads, folder):
    """Return the target of plans. Another process asks OpenCL, whose threads a fork would not have."""
    tells, told = os.pipe()
    child = os.fork()
    if not child:
        torch.set_num_threads(threads)
        os.write(told, OpenClRuntime(folder, sure=True).target().encode())
        os._exit(0)
    os.close(told)
    with os.fdopen(tells) as f:
        found = f.read()
    os.waitpid(child, 0)
    return found


def main():
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    path, threads, runs, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "".join(sys.argv[4:])
    corpus = plans = None
    if path:
        with open(path, "rb") as f:
            corpus = Corpus(pickle.load(f))  # noqa: S301  # written by lawful.py
    folder = Path(tempfile.gettempdir()) / f"wooly-hostile-{os.getuid()}"
    if mode:
        (folder / "compiler").mkdir(parents=True, exist_ok=True)
        plans = Plans(mode, threads, folder)

    def trials(guard):
        return Trials(TorchCpuRuntime(hot=HOT), guard, runs=runs) if path else Repeated(guard, mode, folder)

    def calls_of(job):
        numbers = range(job.get("first", 0), job.get("first", 0) + job["count"])
        if path:
            return [mutant(corpus, job["name"], job["seed"], k) for k in numbers]
        made = [programs.case(job["seed"], k) for k in numbers]
        return made if plans is None else [plans.planned(case) for case in made]

    children = Children(trials, threads, LIMIT_S if path and runs == 1 else REPEATED_S)
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            job = json.loads(line)
            print(json.dumps(examine(children, calls_of(job), job)), file=answers, flush=True)


if __name__ == "__main__":
    main()
