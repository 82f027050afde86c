"""`python -m wooly_metering`: the metering service's process."""

from __future__ import annotations

import sys

from wooly_metering.app import main

if __name__ == "__main__":
    sys.exit(main())
