"""`python -m wooly_operator`."""

import sys

from wooly_operator.app import main

if __name__ == "__main__":
    sys.exit(main())
