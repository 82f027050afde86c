"""`python -m wooly_scheduler`: the scheduler's process."""

from __future__ import annotations

import sys

from wooly_scheduler.app import main

if __name__ == "__main__":
    sys.exit(main())
