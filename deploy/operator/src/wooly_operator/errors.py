"""Errors of the operator."""

from __future__ import annotations


class OperatorError(Exception):
    """Root of the operator's errors."""

    code = "operator"
    retryable = False


class UnreachableError(OperatorError):
    """The controller or the API server did not answer, refused, or gave a malformed answer. A retry may succeed."""

    code = "operator.unreachable"
    retryable = True
