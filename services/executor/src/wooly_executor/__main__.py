"""Runs the process of one device: `python -m wooly_executor`."""

from __future__ import annotations

import sys

from wooly_executor.app import main

if __name__ == "__main__":
    sys.exit(main())
