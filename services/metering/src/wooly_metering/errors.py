"""Errors of the metering service."""

from __future__ import annotations


class MeteringError(Exception):
    """Root of metering's errors."""

    code = "metering.error"
    retryable = False


class OvertakenError(MeteringError):
    """Another process booked messages of the stream in the meantime. Start again from the ledger's position."""

    code = "metering.overtaken"
    retryable = True


class PlanError(MeteringError):
    """A price plan cannot be added."""

    code = "metering.plan"


class CorrectionError(MeteringError):
    """An entry cannot be corrected in this way."""

    code = "metering.correction"


class StatementError(MeteringError):
    """A statement cannot be made."""

    code = "metering.statement"
