"""`python -m bench --calls`."""

from __future__ import annotations

import pytest

from bench.calls import Calls, measure_calls


def test_calls_are_counted_by_package_and_file() -> None:
    calls = Calls("a request", {"flowserve/a.py:f:1": 2, "flowserve/a.py:g:9": 1, "trio/b.py:h:3": 4})
    assert calls.of("flowserve") == (3, 1)
    assert str(calls).endswith("3 calls in  1 files, of trio   4 in 1")


# The calls of flowserve's functions at most. A figure that has to grow needs a reason: a call costs CPU time.
MOST = {
    "identity, in a process: the server, a request": 93,
    "identity, in a process: the process of identity, a batch": 36,
    "identity, inline: the server, a request": 87,
    "chain, in a process: the server, a request": 121,
    "chain, in a process: the process of chain_double, a batch": 38,
    "chain, in a process: the process of chain_add, a batch": 39,
    "chain, in a process: the process of chain_subtract, a batch": 39,
    "chain, inline: the server, a request": 151,
    "a small ONNX model, in process: await Engine.infer": 76,
}


@pytest.mark.slow
@pytest.mark.server
def test_the_path_of_a_request_has_no_more_calls_than_it_had() -> None:
    found = {calls.subject: calls.of("flowserve")[0] for calls in measure_calls(print)}
    assert found.keys() == MOST.keys()
    assert not {subject: count for subject, count in found.items() if not 10 < count <= MOST[subject]}
