"""Fields of a log record about requests."""

from __future__ import annotations

import pytest

from flowserve.observe.log_fields import FIELDS, ID_CHARS_MAX, TRACES_MAX, of_requests
from flowserve.values import Request

SPAN = "00f067aa0ba902b7"


def _request(trace: int, name: str = "") -> Request:
    return Request({}, id=name, trace_context=f"00-{trace:032x}-{SPAN}-01" if trace else "")


def _ids(trace: int) -> dict[str, str]:
    return {"trace_id": f"{trace:032x}", "span_id": SPAN}


@pytest.mark.parametrize(
    ("requests", "fields"),
    [
        ([], {}),
        ([None], {}),
        ([_request(0)], {}),
        ([_request(1, "a")], {**_ids(1), "request_id": "a"}),
        ([_request(0), _request(0)], {}),
        ([_request(2), None, _request(0), _request(1), _request(2)], {"traces": [_ids(2), _ids(1)]}),
    ],
)
def test_a_batch_has_the_fields_of_its_request_or_the_traces_of_its_requests(
    requests: list[Request | None], fields: dict[str, object]
) -> None:
    assert of_requests(requests, model="m", instance="")[FIELDS] == {"model": "m", **fields}


def test_the_traces_of_a_large_batch_and_the_text_of_a_client_are_bounded() -> None:
    assert of_requests([_request(0, "x" * 1_000_000)])[FIELDS] == {"request_id": "x" * ID_CHARS_MAX}
    found = of_requests(map(_request, range(1, 1000)))[FIELDS]["traces"]
    assert found == [_ids(trace) for trace in range(1, TRACES_MAX + 1)]
