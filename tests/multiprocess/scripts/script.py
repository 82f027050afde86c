"""Runs a script as `wooly run` does, in a process that was forked: python -m script SCRIPT [ARGUMENT ...]"""

import runpy
import sys

from wooly import api

api.enable_on_use()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
