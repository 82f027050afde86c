"""How much a randomised test tries: a little with each change, all of it in `make test-all`."""

import os


def examples(quick: int, thorough: int) -> int:
    """How many examples to try: `thorough` where WOOLY_THOROUGH is set."""
    return thorough if os.environ.get("WOOLY_THOROUGH") else quick
