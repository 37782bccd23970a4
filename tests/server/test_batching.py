"""The dynamic batcher as its clients see it: which requests form a batch, and when it starts."""

from __future__ import annotations

from typing import Any

import pytest


def row(number: float, width: int = 4) -> list[list[float]]:
    return [[number] * width]


def ask(wire: Any, model: str, count: int, width: int = 4) -> list[Any]:
    answers: list[Any] = wire.together([wire.infer_request(model, row(number, width)) for number in range(count)])
    assert [answer.data for answer in answers] == [[number] * width for number in range(count)]
    return answers


@pytest.mark.fault("D10")
def test_a_batch_of_a_preferred_size_starts_before_the_queue_delay_is_over(wire: Any) -> None:
    answers, batches = wire.batches_during(["prefers_four"], lambda: ask(wire, "prefers_four", 4))
    assert batches == {"prefers_four": {4: 1}}
    assert max(answer.seconds for answer in answers) < 1.5, "they waited for more, up to the delay of 2 s"


def test_a_remainder_below_a_preferred_size_is_batched_with_later_requests(wire: Any) -> None:
    answers, batches = wire.batches_during(["prefers_four"], lambda: ask(wire, "prefers_four", 8))
    assert batches["prefers_four"] in ({4: 2}, {8: 1})
    assert max(answer.seconds for answer in answers) < 1.5


def test_requests_within_the_queue_delay_are_one_batch(wire: Any) -> None:
    answers, batches = wire.batches_during(["waits_a_little"], lambda: ask(wire, "waits_a_little", 6))
    assert batches == {"waits_a_little": {6: 1}}
    assert max(answer.seconds for answer in answers) < 1.5


def test_a_full_batch_does_not_wait_and_is_never_exceeded(wire: Any) -> None:
    _, batches = wire.batches_during(["waits_a_little"], lambda: ask(wire, "waits_a_little", 40))
    sizes = batches["waits_a_little"]
    assert max(sizes) == 16
    assert sum(size * runs for size, runs in sizes.items()) == 40
    assert sum(sizes.values()) == 3


def test_requests_of_several_rows_fill_a_batch_by_rows(wire: Any) -> None:
    requests = [wire.infer_request("waits_a_little", row(number) * 8) for number in range(3)]
    answers, batches = wire.batches_during(["waits_a_little"], lambda: wire.together(requests))
    assert [answer.data for answer in answers] == [[number] * 32 for number in range(3)]
    assert batches == {"waits_a_little": {16: 1, 8: 1}}


@pytest.mark.fault("D7")
def test_requests_of_different_shapes_are_not_merged(wire: Any) -> None:
    widths = [3, 3, 5, 5, 5, 3]
    requests = [wire.infer_request("any_width", row(i, width)) for i, width in enumerate(widths)]
    answers, batches = wire.batches_during(["any_width"], lambda: wire.together(requests))
    assert [answer.data for answer in answers] == [[i] * width for i, width in enumerate(widths)]
    sizes = batches["any_width"]  # the members depend on the order of arrival on six connections
    assert max(sizes) <= 3
    assert sum(size * runs for size, runs in sizes.items()) == 6


def test_a_model_without_a_batcher_runs_each_request_by_itself(wire: Any) -> None:
    _, batches = wire.batches_during(["no_batcher"], lambda: ask(wire, "no_batcher", 8))
    assert batches == {"no_batcher": {1: 8}}


@pytest.mark.fault("D12")
def test_a_closed_connection_is_removed_from_the_queue(wire: Any) -> None:
    with wire.connect() as busy, wire.connect() as waits, wire.connect() as leaves:
        _, batches = wire.batches_during(["sleeps"], lambda: _leave(wire, busy, waits, leaves))
    assert batches == {"sleeps": {1: 2}}


def _leave(wire: Any, busy: Any, waits: Any, leaves: Any) -> None:
    busy.sendall(wire.infer_request("sleeps", row(0.5)))
    assert wire.get("/v2/health/live").status == 200  # requests sent before have arrived, and run
    leaves.sendall(wire.infer_request("sleeps", row(0.25)))
    wire.until(lambda: wire.waiting("sleeps") == 1, "the second waits")
    leaves.close()
    wire.until(lambda: wire.waiting("sleeps") == 0, "the second is gone from the queue")
    waits.sendall(wire.infer_request("sleeps", row(0.0)))
    assert waits.recv(65536).startswith(b"HTTP/1.1 200")
    assert busy.recv(65536).startswith(b"HTTP/1.1 200")
