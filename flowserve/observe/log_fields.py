"""The fields of a log record about a request, which the format `json` writes besides its text.

Decides the names of the fields and how a record carries them: `log.error("...", extra=of_request(request))`. The other
formats do not show them. Does not know the log's format, and writes nothing. Callers: every package that logs about a
request, a batch or a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from flowserve.observe.trace import ids_of
from flowserve.values import Request

FIELDS: Final = "fields"  # the attribute of the record
TRACES_MAX: Final = 32  # of one record: a batch may have thousands of members
ID_CHARS_MAX: Final = 200  # of a request's id, which is its client's text


def of(**fields: Any) -> Mapping[str, Any]:
    """`extra` of a record: fields, without those that are ""."""
    return {FIELDS: {name: value for name, value in fields.items() if value != ""}}


def of_context(context: str, **fields: Any) -> Mapping[str, Any]:
    """`extra` of a record about a request with this `traceparent`; none if it is "" or invalid."""
    return of(**_ids(context), **fields)


def of_request(request: Request | None, **fields: Any) -> Mapping[str, Any]:
    """`extra` of a record about one request. None: one of the server's own."""
    if request is None:
        return of(**fields)
    return of_context(request.trace_context, request_id=request.id[:ID_CHARS_MAX], **fields)


def of_requests(requests: Iterable[Request | None], **fields: Any) -> Mapping[str, Any]:
    """`extra` of a record about the members of a batch: as of one request if there is one, else the list of traces."""
    members = [request for request in requests if request is not None]
    if len(members) == 1:
        return of_request(members[0], **fields)
    contexts = dict.fromkeys(request.trace_context for request in members)
    traces = [ids for context in contexts if (ids := _ids(context))]
    return of(**fields, **({"traces": traces[:TRACES_MAX]} if traces else {}))


def _ids(context: str) -> dict[str, str]:
    found = ids_of(context) if context else None
    return {} if found is None else dict(zip(("trace_id", "span_id"), found, strict=True))
