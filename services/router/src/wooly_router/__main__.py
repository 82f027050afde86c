"""`python -m wooly_router`: the router's process."""

from __future__ import annotations

import sys

from wooly_router.app import main

if __name__ == "__main__":
    sys.exit(main())
