"""Messages about traces: spans that services and clients send to the router, and the traces that the router returns.

Every field has a limit, because clients write some of the messages. Times are nanoseconds since 1970.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from wooly_wis.messages import Message, Name, SessionId

#: Maximum number of spans in one message, and in one stored trace.
MAX_SPANS: Final = 256
MAX_TRACE_SPANS: Final = 2048
MAX_ATTRIBUTES: Final = 32
MAX_TEXT: Final = 256
MAX_NAME: Final = 128


def _not_zero(text: str) -> str:
    if not text.strip("0"):
        raise ValueError("a trace id or span id must not be all zeros")
    return text


TraceId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$"), AfterValidator(_not_zero)]
SpanId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$"), AfterValidator(_not_zero)]
Nanoseconds = Annotated[int, Field(ge=0, lt=1 << 63)]
#: No control characters, so that a terminal can show the text safely.
Printable = r"^[^\x00-\x1f\x7f-\x9f]*$"
SpanName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME, pattern=Printable)]
Key = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=Printable)]
Value = (
    bool
    | Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
    | Annotated[float, Field(allow_inf_nan=False)]
    | Annotated[str, StringConstraints(max_length=MAX_TEXT, pattern=Printable)]
)


class SpanRecord(BaseModel):
    """One finished span."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    trace_id: TraceId
    span_id: SpanId
    parent_id: SpanId | None = None
    name: SpanName
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    error: bool = False
    attributes: dict[Key, Value] = Field(default={}, max_length=MAX_ATTRIBUTES)

    @model_validator(mode="after")
    def _ends_after_its_start(self) -> SpanRecord:
        if self.end_ns < self.start_ns:
            raise ValueError("end_ns must not be less than start_ns")
        return self


class SpansRecorded(Message):
    """Spans of a service (event). `dropped`: number of spans that the service dropped since its previous message."""

    service: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$", max_length=64)]
    dropped: int = Field(default=0, ge=0, lt=1 << 62)
    spans: tuple[SpanRecord, ...] = Field(default=(), max_length=MAX_SPANS)


class AddSpansRequest(Message):
    """Spans that a client recorded for a task of its tenant (to the router). The router drops spans of other traces."""

    task_id: SessionId
    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    spans: tuple[SpanRecord, ...] = Field(max_length=MAX_SPANS)


class AddSpansReply(Message):
    """Number of spans that the router stores."""

    taken: int


class TracesRequest(Message):
    """Ask the router for traces, newest first."""

    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    limit: int = Field(default=50, ge=1, le=200)


class TraceInfo(BaseModel):
    """A trace in a list.

    Attributes:
        task_id: first task of the trace.
        spans: number of stored spans.
        error: whether any span failed.
    """

    model_config = ConfigDict(frozen=True)

    trace_id: str
    name: str
    task_id: str | None
    start_ns: int
    duration_ns: int
    spans: int
    error: bool


class TracesReply(Message):
    """Traces, newest first."""

    traces: tuple[TraceInfo, ...]


class TraceRequest(Message):
    """Ask the router for one trace, by trace id or by the id of one of its tasks. `offset`: number of spans to skip."""

    trace_id: TraceId | None = None
    task_id: SessionId | None = None
    tenant: Name | None = None
    credential: str = Field(default="", max_length=65536)
    offset: int = Field(default=0, ge=0, lt=1 << 31)


class SpanInfo(BaseModel):
    """A stored span, with the service that recorded it."""

    model_config = ConfigDict(frozen=True)

    span_id: str
    parent_id: str | None
    name: str
    service: str
    start_ns: int
    end_ns: int
    error: bool
    attributes: dict[str, bool | int | float | str]


class TraceReply(Message):
    """A trace's spans, ordered by start time. `more`: further spans exist."""

    trace_id: str
    spans: tuple[SpanInfo, ...]
    more: bool = False
