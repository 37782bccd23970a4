"""The thread that writes traces: in order, to the end, and never more waiting than there is room for."""

from __future__ import annotations

import logging
import threading

import pytest

from flowserve.observe.writer import Writer


def test_what_it_was_given_is_done_in_order_before_it_ends_whatever_fails(caplog: pytest.LogCaptureFixture) -> None:
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


def test_where_too_much_waits_more_is_lost_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowserve.observe.writer.WAITING_MAX", 2)
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
            writer.offer(lambda number=number: done.append(number))  # type: ignore[misc]
        gate.set()
        writer.close()
    assert done == [0, 1]
    assert caplog.text.count("some traces are lost") == 1
