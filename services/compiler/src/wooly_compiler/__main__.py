"""`python -m wooly_compiler`: the compiler's process."""

from __future__ import annotations

import os
import sys

# Compiling is for later, what runs is for now; and importing is most of what is done where nothing is compiled.
os.nice(10)

from wooly_compiler.app import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
