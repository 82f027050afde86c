"""Runs the cases of one side of a section, or of a part of it, and writes the results. `check` starts this script.

After a crash it is started again. Then it counts the case of the crash as one result and continues after it. An error from
which CUDA does not recover ends the process, too; the next process has a new context.
"""

import argparse
import contextlib
import importlib
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from cases import RUNTIME, UNKNOWN, VISIBLE, Raises, Selection
from records import append, digest, plain, read

#: Exit status of a process whose CUDA context no longer works.
AGAIN = 75
_FLUSH_EVERY_S = 2.0


@contextlib.contextmanager
def our_device(runtime):
    """ "cuda" on an executor that computes on the CPU, or on the GPU that this process does not see."""
    from wooly import api
    from wooly_testkit.executor import executor_process

    if runtime == "cuda":
        # `check` hides these from the client
        visible = {"CUDA_VISIBLE_DEVICES": os.environ.get(VISIBLE) or None}
        started = executor_process(runtime="cuda", threads=1, environment=visible)
    else:
        started = executor_process(threads=1)
    with started as running:
        api.attach(running.endpoints, running.session_id, running.token)
        api.install_facade()
        yield
        api.disable()


def settle(device):
    if device == "cuda":
        torch.cuda.synchronize()


def do(case, device, by_heart):
    """Run one case and return its record.

    Args:
        case: the case.
        device: the device.
        by_heart: use CUDA's known answer, if the case states one.
    """
    record = {"name": case.name, "kind_only": case.kind_only, "exact_text": case.exact_text}
    record["tolerances"] = {str(dtype): list(pair) for dtype, pair in case.tolerances.items()}
    known = None
    if case.known is not UNKNOWN:
        known = {"error": [case.known.type, case.known.text, False]} if isinstance(case.known, Raises) else None
        known = known or {"value": plain(case.known)}
    if by_heart and known:
        return record | known
    if known:
        record["known"] = known
    started = time.perf_counter()
    try:
        record["inputs"] = digest(case.inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record["value"] = plain(case.run(device))
            settle(device)
    except Exception as e:
        record.pop("value", None)
        record["error"] = [type(e).__name__, str(e)[:2000], isinstance(e, NotImplementedError)]
        with contextlib.suppress(Exception):
            settle(device)  # further errors belong to this case
    record["seconds"] = time.perf_counter() - started
    return record


def beyond_use(device):
    """Whether CUDA's context only repeats its last error."""
    try:
        torch.zeros(1, device=device).item()
    except Exception:
        return True
    return False


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("truth", "ours"))
    parser.add_argument("section")
    parser.add_argument("--truth", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--runtime", choices=("cpu", "cuda"), default="cpu", help="device on which our side computes")
    parser.add_argument("--died", default="", help="how the process before this one ended")
    options = parser.parse_args()
    os.environ[RUNTIME] = options.runtime
    torch.set_num_threads(1)
    # The truth is float32, not TF32, and deterministic.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    selection = Selection(
        options.truth, options.side, options.samples, tuple(options.only), options.part, options.parts
    )
    section = importlib.import_module(options.section)
    results = options.out.with_suffix(".records")
    current = options.out.with_suffix(".current")
    done = set(read(results))
    if options.died and current.exists() and (name := current.read_text()) not in done:
        append(results, [{"name": name, "error": ["crash", options.died, False]}])
        done.add(name)
    device = "cpu" if selection.from_fakes else "cuda"
    status = 0
    with contextlib.ExitStack() as stack:
        if options.side == "ours":
            stack.enter_context(our_device(options.runtime))
        new, flushed = [], time.monotonic()
        for case in section.cases(selection):
            if case.name in done:
                continue
            done.add(case.name)
            current.write_text(case.name)
            record = do(case, device, selection.from_fakes)
            new.append(record)
            # an executor of ours ends when its context is lost
            lost = options.side == "ours" and options.runtime == "cuda" and "error" in record
            broken = (lost or "CUDA error" in record.get("error", ("", ""))[1]) and beyond_use(device)
            if broken or time.monotonic() - flushed > _FLUSH_EVERY_S:
                append(results, new)
                new, flushed = [], time.monotonic()
            if broken:
                status = AGAIN
                break
        append(results, new)
        current.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        if status:
            os._exit(status)  # the context's own clean-up may hang
    return status


if __name__ == "__main__":
    sys.exit(main())
