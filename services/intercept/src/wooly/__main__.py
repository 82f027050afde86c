"""`python -m wooly`: the same as `wooly`."""

from wooly.cli import main

main()
