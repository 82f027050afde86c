"""The order of all tenants' work on one device, decided without I/O or clock. README.md tells the rule."""

from wooly_dispatch.core import step as step
from wooly_dispatch.state import DispatchState as DispatchState
from wooly_dispatch.state import restore as restore
from wooly_dispatch.state import snapshot as snapshot
