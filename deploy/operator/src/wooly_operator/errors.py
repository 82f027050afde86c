"""What can go wrong with the operator's neighbours."""

from __future__ import annotations


class OperatorError(Exception):
    """Root of the operator's errors."""

    code = "operator"
    retryable = False


class UnreachableError(OperatorError):
    """The controller or the API server gave no usable answer; it may later."""

    code = "operator.unreachable"
    retryable = True
