"""Number of examples of randomized tests: few in `make test`, many in `make test-all`."""

import os


def examples(quick: int, thorough: int) -> int:
    """The number of examples: `thorough` if WOOLY_THOROUGH is set, else `quick`."""
    return thorough if os.environ.get("WOOLY_THOROUGH") else quick
