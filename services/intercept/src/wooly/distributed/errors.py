"""The error of a collective that failed on the executor. `wooly.errors` does not import torch, so it cannot have it."""

from __future__ import annotations

from torch.distributed import DistBackendError

from wooly.errors import RemoteOperationError


class RemoteCollectiveError(RemoteOperationError, DistBackendError):
    """A collective of several ranks failed. It is torch.distributed's error of a backend."""

    code = "wooly.remote_collective"
