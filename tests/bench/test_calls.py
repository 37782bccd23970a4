"""`python -m bench --calls`."""

from __future__ import annotations

from bench.calls import Calls


def test_calls_are_counted_by_package_and_file() -> None:
    calls = Calls("a request", {"flowserve/a.py:f:1": 2, "flowserve/a.py:g:9": 1, "trio/b.py:h:3": 4})
    assert calls.of("flowserve") == (3, 1)
    assert str(calls).endswith("3 calls in  1 files, of trio   4 in 1")
