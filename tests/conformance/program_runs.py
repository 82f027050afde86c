"""Runs random programs, compares two runs, makes programs shorter and prints them as scripts.

A program is a list of steps. A step is a line of Python, or a block. A block has a head, which calls its steps where it says
BODY. A run records a trace: for each step its error or the values that it has shown, and the descriptions of all tensors.
"""

import contextlib
import re
import threading
import time
import warnings
import weakref
from pathlib import Path

import torch
from comparison import compare_values, wording

SOURCE = Path(__file__).with_name("program_names.py").read_text()
NAMES = compile(SOURCE, "program_names.py", "exec")
#: Steps of a program, without those in blocks.
STEPS = (12, 45)
LOCK = threading.Lock()
#: An index that is computed from a tensor.
BY_TENSOR = re.compile(r"\bt\d+\[[^\]]*\bt\d+")
#: Size of a dimension, and number of elements, above which a tensor is deleted after a turn of a loop.
LONGEST, MOST = 3000, 20000


def names(device):
    """The names of one run."""
    space = {"__name__": "program", "D": device}
    exec(NAMES, space)  # noqa: S102 # the text of the file beside this one
    space |= {"D": device, "LOCK": LOCK}
    return space


class Run:
    """One execution of a program.

    Args:
        device: "cpu" or "cuda".
        looks: whether to describe all tensors after each step, or only at the end.
    """

    def __init__(self, device, looks=True):
        self.space = names(device)
        self.trace = []
        self._looks = looks
        self._codes = {}
        self._turns = {}
        self._versions = True
        self._first = {}

    def step(self, step, place=""):
        """Execute a step or a block. Returns whether it raised."""
        body = step if isinstance(step, str) else step[0]
        failed = False
        if not isinstance(step, str):
            turns = self._turns[place] = [0]
            body = body.replace("BODY", f"_body{place.replace('.', '_')}()")
            if "graph(" in body:
                self._versions = False  # a replay counts no changes

            def inner():
                turns[0] += 1
                self._note_seen(place)
                kept, self._looks = self._looks, self._looks and turns[0] < 3
                said = len(self.trace)
                for n, one in enumerate(step[1]):
                    self.step(one, f"{place}.{n}")
                for name in [n for n, v in self.space.items() if isinstance(v, torch.Tensor) and is_large(v)]:
                    del self.space[name]  # each turn of a loop joins it with itself
                self._looks = kept
                if "graph(" in body:
                    del self.trace[said:]  # a capture executes the body once, and the CPU at each replay

            self.space[f"_body{place.replace('.', '_')}"] = inner
        code = self._codes.get((place, body))
        if code is None:
            code = self._codes[place, body] = compile(body, f"step{place}", "exec")
        try:
            exec(code, self.space)  # noqa: S102 # a step of `program_steps`
        except Exception as error:
            failed = True
            self.trace.append((place, "error", type(error).__name__, wording(error)))
            error.__traceback__ = None
            del error
        self._note_seen(place)
        if self._looks:
            self.trace.append((place, "tensors", self.described()))
        return failed

    def _note_seen(self, place):
        seen = self.space["SEEN"]
        self.trace += [(place, "see", value) for value in seen]
        seen.clear()

    def tensors(self):
        """(name, tensor) of all tensors of the program on the device, and of gradients and modules."""
        found = []
        for name in sorted(self.space):
            value = self.space[name]
            if not name[1:].isdigit() or value is None:
                continue
            if isinstance(value, torch.Tensor):
                found.append((name, value))
                if not value.requires_grad:
                    continue
                with contextlib.suppress(RuntimeError):  # a view whose base was changed where that is not allowed
                    value.grad_fn  # noqa: B018 # raises
                    if not value.is_leaf or value.grad is None:
                        continue
                    found.append((f"{name}.grad", value.grad))
            elif isinstance(value, torch.nn.Module):
                found += [(f"{name}.{n}", p) for n, p in value.state_dict(keep_vars=True).items()]
                found += [(f"{name}.{n}.grad", p.grad) for n, p in value.named_parameters() if p.grad is not None]
        return found

    def described(self):
        """What a script can learn about its tensors without a wait, as text."""
        storages, said = {}, []
        for name, t in self.tensors():
            if "." in name and not name.endswith(".grad"):
                continue
            parts = [str(t.dtype)[6:], tuple(t.shape), strides(t), t.storage_offset()]
            if t.untyped_storage().nbytes():
                parts.append(storages.setdefault(t.untyped_storage().data_ptr(), name))
                if t.numel():
                    parts.append(t.data_ptr() - t.untyped_storage().data_ptr())
            parts += ["requires_grad"] * t.requires_grad
            parts += ["conj"] * t.is_conj() + ["neg"] * t.is_neg()
            # How often kernels change their own results, and gradients, is up to them.
            if self._versions and not name.endswith(".grad"):
                parts.append(f"changes {self._changes(name, t)}")
            try:
                parts += [type(t.grad_fn).__name__] * (t.grad_fn is not None)
            except RuntimeError as error:
                parts.append(wording(error))
            said.append(f"{name}: {' '.join(map(str, parts))}")
        return said

    def _changes(self, name, t):
        """How often a tensor has been changed since it was described for the first time."""
        known = self._first.get(name)
        if known is None or known[0]() is not t:
            known = self._first[name] = weakref.ref(t), t._version
        return t._version - known[1]

    def end(self):
        """Note the values of all tensors, and end the program."""
        self.trace.append(("end", "tensors", self.described()))
        for name, t in self.tensors():
            try:
                self.trace.append(("end", name, self.space["host"](t)))
            except Exception as error:
                self.trace.append(("end", name, type(error).__name__, wording(error)))
        self.space.clear()


def is_large(t):
    return t.numel() > MOST or t.dim() > 8 or max(t.shape, default=0) > LONGEST


def strides(t):
    """Strides of dimensions with one element, and of empty tensors, mean nothing."""
    return tuple([s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]) if t.numel() else ()


def execute(steps, device, looks, before_step=None):
    """The trace of a program. `before_step` is called before each step that is in no block."""
    run = Run(device, looks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n, step in enumerate(steps):
            if before_step is not None:
                before_step()
            run.step(step, f".{n}")
        run.end()
    return run.trace


def make(seed):
    """A program, as a list of steps; whether its tensors are described after each step; and its trace on the CPU."""
    from program_steps import Maker

    run = Run("cpu", looks=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        maker = Maker(seed, run.step, run.space)
        steps = maker.program(maker.rng.randrange(*STEPS))
    looks = maker.rng.random() < 0.5
    run.space.clear()
    trace = execute(steps, "cpu", looks)
    while without_loose_errors(steps, trace):
        trace = execute(steps, "cpu", looks)
    return steps, looks, trace


def without_loose_errors(steps, trace):
    """Remove the first step that raises an error which a device reports later, or not. Returns whether there was one.

    Sizes and values change in loops, so a step may raise in a later turn although it did not when it was made. A device reports
    an index that is out of bounds at a later step, divides integers by zero, and has kernels that the CPU lacks. What an operator
    on a list or with `out=` has written or resized before its error is not promised. A graph without a replay has computed
    nothing, but made its names.
    """
    for place, kind, *said in trace:
        if kind != "error":
            continue
        *path, last = map(int, place.split(".")[1:])
        inside = steps
        for n in path:
            inside = inside[n][1]
        by_tensor = any(word in inside[last] for word in ("order(", "tensor(", "[[")) or BY_TENSOR.search(inside[last])
        index = "out of" in said[1] and by_tensor
        loose = (
            index
            or any(word in said[1] for word in ("ZeroDivisionError", "not implemented for", "Class values must be"))
            or any(word in inside[last] for word in ("_foreach_", "out="))
        )
        if loose or "graph(" in inside[last][0]:
            del inside[last]
            return True
    return False


def difference(ours, theirs):
    """The first difference of two traces as text; empty if there is none."""
    for a, b in zip(ours, theirs, strict=False):
        if a[:2] != b[:2] or len(a) != len(b):
            return f"step {b[0]}: {brief(a)}; on the CPU {brief(b)}"
        if a[1] == "tensors":
            found = [
                f"{x}; on the CPU {y}" for x, y in zip(a[2], b[2], strict=False) if x != y and not decomposed(x, y)
            ]
            if found or len(a[2]) != len(b[2]):
                return f"step {b[0]}: {found[0] if found else 'other tensors'}"
        elif len(a) == 4:
            if not same_words(a[2:], b[2:]):
                return f"step {b[0]}: {brief(a)}; on the CPU {brief(b)}"
        else:
            said = unlike(a[2], b[2])
            if said:
                return f"step {b[0]}: {b[1]}: {said}"
    return "" if len(ours) == len(theirs) else "one of the sides shows more"


def decomposed(x, y):
    """Whether two descriptions differ only in the function that differentiates a call.

    Attention is one call on CUDA, too; and an assignment of one element copies it there, while the CPU fills.
    """
    known = x.endswith("_WholeCallBackward") or (x.endswith("CopyBackwards") and "FillBackward" in y)
    return known and x.rpartition(" ")[0] == y.rpartition(" ")[0]


def same_words(a, b):
    """Whether two errors are the same.

    An operand that overlaps the result and does not fit it is wrong in two ways, of which each side names one.
    """
    a, b = [tuple(re.sub(r"\bCPU(\w+)Type\b", r"torch.\1Tensor", said) for said in error) for error in (a, b)]
    return a == b or (a[0] == b[0] and any("a single memory location" in said for said in (a[1], b[1])))


def unlike(a, b):
    """How two shown values differ."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype is not b.dtype or a.shape != b.shape:
            return f"{a.dtype}{tuple(a.shape)}, on the CPU {b.dtype}{tuple(b.shape)}"
        if a.numel() == 0:
            return ""
        outcome, detail = compare_values(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg())
        return "" if outcome == "pass" else f"{outcome}: {detail}"
    # equal numbers, and numbers that are not equal to themselves, have the same text
    return "" if repr(a) == repr(b) else f"{a!r}, on the CPU {b!r}"


def brief(entry):
    return " ".join([str(part) for part in entry[1:]]).replace("\n", " ")[:300]


def check(steps, looks, theirs=None):
    """The first difference between the device and the CPU, whose trace may be known."""
    ours = execute(steps, "cuda", looks)
    return difference(ours, theirs or execute(steps, "cpu", looks))


def kind_of(said):
    """A difference without its numbers and names: a shorter program must differ in the same way."""
    return re.sub(r"[0-9.]+", "", said.partition(": ")[2])[:40]


def shorter(steps, differs, until):
    """Remove steps as long as the program differs.

    Args:
        steps: the program.
        differs: tells of a program whether it differs in the same way.
        until: when to stop (`time.monotonic`).
    """
    steps = list(steps)
    size = max(1, len(steps) // 2)
    while time.monotonic() < until:
        n, removed = len(steps), False
        while n > 0 and time.monotonic() < until:
            n -= size
            rest = steps[: max(n, 0)] + steps[n + size :]
            if rest and differs(rest):
                steps, removed = rest, True
        if size == 1 and not removed:
            break
        size = max(1, size // 2)
    for n, step in enumerate(steps):  # blocks: their steps alone, or fewer of them
        if isinstance(step, str):
            continue
        if differs(steps[:n] + step[1] + steps[n + 1 :]):
            return shorter(steps[:n] + step[1] + steps[n + 1 :], differs, until)

        def inside(rest, n=n, step=step):
            return differs(steps[:n] + [[step[0], rest]] + steps[n + 1 :])

        steps[n] = [step[0], shorter(step[1], inside, until)]
        for few in (1, 2, 3, 6, 12):
            head = re.sub(r"range\(\d+\)", f"range({few})", step[0])
            if (
                head != step[0]
                and time.monotonic() < until
                and differs(steps[:n] + [[head, steps[n][1]]] + steps[n + 1 :])
            ):
                steps[n][0] = head
                break
    return steps


def script(steps, said):
    """A program as a script that runs on the device of its argument, and prints what it shows."""
    raised = set()
    run = Run("cpu", looks=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n, step in enumerate(steps):
            run.step(step, f".{n}")
    raised |= {entry[0] for entry in run.trace if entry[1] == "error"}
    lines = [f"# {said}", "# Run: python SCRIPT cpu; wooly run SCRIPT cuda", "import sys", *SOURCE.splitlines()]
    lines[lines.index('D = "cpu"')] = "D = sys.argv[1]"
    lines += ["", "", "# the program"]

    def write(step, place, indent):
        pad = "    " * indent
        guarded = place in raised
        if guarded:
            lines.append(f"{pad}with contextlib.suppress(Exception):")
            pad += "    "
        if isinstance(step, str):
            lines.extend(pad + line for line in step.splitlines())
            return
        name = f"body{place.replace('.', '_')}"
        lines.append(f"{pad}def {name}():")
        made = sorted({found for one in flat(step[1]) for found in re.findall(r"\b[thmog]\d+\b(?=[^\n]*?=)", one)})
        if made:
            lines.append(f"{pad}    global k, {', '.join(made)}")
        for n, one in enumerate(step[1]):
            write(one, f"{place}.{n}", indent + 1 + guarded)
        lines.extend(pad + line for line in step[0].replace("BODY", f"{name}()").splitlines())

    for n, step in enumerate(steps):
        write(step, f".{n}", 0)
    lines += [
        "for name, value in sorted(globals().items()):",
        "    if name[0] == 't' and name[1:].isdigit(): see(value)",
    ]
    return "\n".join([*lines, "print(*SEEN, sep='\\n')"]) + "\n"


def flat(steps):
    for step in steps:
        if isinstance(step, str):
            yield step
        else:
            yield from flat(step[1])
