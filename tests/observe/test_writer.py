"""The background writer: order, completion, limit of waiting jobs."""

from __future__ import annotations

import logging
import threading
from functools import partial

import pytest

from flowserve.observe.trace_file import Writer


def test_jobs_run_in_order_before_the_end_even_if_some_fail(caplog: pytest.LogCaptureFixture) -> None:
    done: list[object] = []
    writer = Writer("w", done.append)

    def refuse() -> None:
        raise PermissionError("no")

    def break_down() -> None:
        raise ValueError("broken")

    for what in (lambda: done.append(1), refuse, break_down, lambda: done.append(2)):
        writer.do(what)
    writer.close()
    assert [str(one) for one in done] == ["1", "no", "2"]
    assert "a trace was lost" in caplog.text
    assert not writer.is_begun


def test_with_too_many_waiting_jobs_others_are_dropped_and_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowserve.observe.trace_file.WAITING_MAX", 2)
    gate = threading.Event()
    begun = threading.Event()
    done: list[int] = []
    writer = Writer("w", lambda _: None)

    def wait() -> None:
        begun.set()
        gate.wait(10)

    with caplog.at_level(logging.WARNING):
        writer.offer(wait)
        assert begun.wait(10)
        for number in range(5):
            writer.offer(partial(done.append, number))
        gate.set()
        writer.close()
    assert done == [0, 1]
    assert caplog.text.count("some traces are lost") == 1
