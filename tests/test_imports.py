"""No process imports large libraries that it does not need: an import takes up to two seconds of each start."""

import subprocess
import sys

import pytest

#: By what is imported: roots of modules that the import must not bring.
FORBIDDEN = {
    "wooly.cli": {"torch", "nats", "rich", "typer", "wooly_wis", "aiohttp", "pydantic"},
    "wooly_local.stack": {"torch", "nats", "cryptography", "wooly_wis", "aiohttp", "pydantic"},
    "wooly.local_stack": {"torch", "nats", "wooly_wis", "aiohttp"},
    "wooly_local.supervisor": {"torch", "numpy", "sqlalchemy", "fastapi", "aiohttp"},
    "wooly_scheduler.app": {"torch", "numpy", "sqlalchemy", "alembic", "fastapi", "wooly"},
    "wooly_router.app": {"torch", "numpy", "pyopencl", "fastapi", "wooly", "wooly_executor", "wooly_compiler"},
    "wooly_metering.app": {"torch", "numpy", "pyopencl", "fastapi", "wooly", "wooly_executor", "wooly_compiler"},
    "wooly_executor.app": {"sqlalchemy", "alembic", "fastapi", "transformers", "sympy", "wooly", "wooly_compiler"},
}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_process_does_not_import_what_it_does_not_need(module):
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert FORBIDDEN[module].isdisjoint(done.stdout.split())
