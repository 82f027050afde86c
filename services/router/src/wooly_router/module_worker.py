"""`python -m wooly_router.module_worker BYTES`: decodes and checks jobs' modules in a process with limits; see `modules`.

A harmful module harms only this process: if a module takes too long, the process is killed and another one starts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from wooly_bus.worker import serve
from wooly_wis.errors import WisError
from wooly_wis.module import ModuleError, check_module, decode_module


def check(request: dict[str, Any]) -> bytes:
    """Check the module in the file `path`.

    Returns JSON: `peak` in bytes, or `code` and `message`; and the processor time `cpu_ns`.
    """
    began = time.process_time_ns()
    found: dict[str, Any]
    try:
        found = {"peak": check_module(decode_module(Path(request["path"]).read_bytes())).peak}
    except WisError as e:
        found = {"code": e.code, "message": str(e)[:4096]}
    except (MemoryError, RecursionError) as e:
        found = {
            "code": ModuleError.code,
            "message": f"the module needs too much memory to be checked ({type(e).__name__})",
        }
    return json.dumps(found | {"cpu_ns": time.process_time_ns() - began}).encode()


if __name__ == "__main__":
    serve(int(sys.argv[1]), check)
