"""`python -m bench --calls`."""

from __future__ import annotations

import pytest

from bench.calls import Calls, measure_calls


def test_calls_are_counted_by_package_and_file() -> None:
    calls = Calls("a request", {"flowserve/a.py:f:1": 2, "flowserve/a.py:g:9": 1, "trio/b.py:h:3": 4})
    assert calls.of("flowserve") == (3, 1)
    assert str(calls).endswith("3 calls in  1 files, of trio   4 in 1")


@pytest.mark.slow
@pytest.mark.server
def test_the_calls_of_every_request_are_within_what_its_path_may_cost() -> None:
    """More calls are more CPU time for each request: a higher figure needs a reason."""
    found = {calls.subject.rpartition(",")[0].partition(": the process")[0]: calls for calls in measure_calls(print)}
    assert len(found) == 5
    for calls in found.values():
        assert calls.of("flowserve")[0] > 10
