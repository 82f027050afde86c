"""The process that compiles programs, with limits. If a program or a vendor's compiler crashes it, the service goes on.

    python -m wooly_compiler.worker BYTES CACHE

A request is one of `artifact` (the answer is the artifact), `passes` (the text after every pass), `targets` (the targets that
this machine can build) and `foreign` (the code of a kernel in another language).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from wooly_wis.artifact import Key, decided_values
from wooly_wis.codec import decode_program
from wooly_wis.verifier import verify_program

from wooly_compiler.build.worker import serve

#: Passes of the current request, with start and end in ns since 1970.
STEPS: list[tuple[str, int, int]] = []


def answer(request: dict[str, Any]) -> bytes:
    """Compute the answer to a request."""
    from wooly_compiler import artifacts
    from wooly_compiler.pipeline import Trace

    if request["what"] == "targets":
        return json.dumps(artifacts.families()).encode()
    if request["what"] == "missing":
        return artifacts.missing_for(request["target"]).encode()
    if request["what"] == "foreign":
        from wooly_compiler import foreign

        return foreign.build(request)
    raw = bytes.fromhex(request["program"])
    decided = tuple([(int(k), bytes.fromhex(w)) for k, w in request["decided"]])
    if request["what"] == "passes":
        program = decode_program(raw)
        verify_program(program)
        trace = Trace()
        target = request["target"] or artifacts.ANY_CPU
        known = decided_values(program, decided) if decided else None
        artifacts.plan_of(program, target, request["mode"], known, trace)
        return json.dumps(trace.stages).encode()
    key = Key(bytes.fromhex(request["digest"]), request["target"], request["mode"], decided)
    timed = Trace(texts=False, steps=STEPS)
    return artifacts.make(raw, key, request["compiler"], Path(sys.argv[2]) / "kernels", timed)


if __name__ == "__main__":
    from wooly_wis.pocl import prepare

    prepare(Path(sys.argv[2]) / "pocl")
    serve(int(sys.argv[1]), answer, STEPS)
