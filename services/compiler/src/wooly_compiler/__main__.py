"""Entry point of the compiler's process: `python -m wooly_compiler`."""

from __future__ import annotations

import os
import sys

# Compile at low priority: a compiled plan is needed later, but running programs need the cores now. The priority is lowered
# before the imports, because an idle compiler spends most of its time on imports.
os.nice(10)

from wooly_compiler.app import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
