"""Errors of metering."""

from __future__ import annotations


class MeteringError(Exception):
    """Root of what metering refuses."""

    code = "metering.error"
    retryable = False


class OvertakenError(MeteringError):
    """Another process booked from the stream meanwhile; begin again from where it is."""

    code = "metering.overtaken"
    retryable = True


class PlanError(MeteringError):
    """A price plan cannot be added."""

    code = "metering.plan"


class CorrectionError(MeteringError):
    """An entry cannot be corrected like this."""

    code = "metering.correction"


class StatementError(MeteringError):
    """A statement cannot be made."""

    code = "metering.statement"
