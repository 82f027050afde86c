"""The dispatch core: decides the order of all tenants' work on one device, without I/O and clock. README.md describes the
rule.
"""

from wooly_dispatch.core import step as step
from wooly_dispatch.state import DispatchState as DispatchState
from wooly_dispatch.state import restore as restore
from wooly_dispatch.state import snapshot as snapshot
