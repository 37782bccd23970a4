"""The last requests of watched deployments: which are traced, how many are kept, and that none is without viewers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flowserve.runtime.tracing.recent import KEPT, Recent


def trace(name: str) -> Any:
    return SimpleNamespace(graph=SimpleNamespace(name=name))


def test_ten_requests_a_second_of_a_watched_deployment_are_traced() -> None:
    now = SimpleNamespace(ns=0)
    changes: list[bool] = []
    recent = Recent(lambda: now.ns, lambda: changes.append(recent.is_on))
    assert not recent.wants("a")
    with recent.watching("a"), recent.watching("a"):
        traced = 0
        for now.ns in range(0, 1_000_000_000, 1_000_000):
            traced += recent.wants("a")
            assert not recent.wants("b")
        assert traced == 10
    assert not recent.wants("a")
    assert changes == [True, True, False]


def test_the_last_fifty_are_kept_as_long_as_they_are_watched() -> None:
    recent = Recent(lambda: 0, lambda: None)
    recent.put(trace("a"))
    with recent.watching("a"):
        assert recent.since("a", 0) == []
        for _ in range(KEPT + 10):
            recent.put(trace("a"))
        kept = recent.since("a", 0)
        assert len(kept) == KEPT
        assert recent.since("a", kept[-1][0] - 2) == kept[-2:]
        assert recent.since("b", 0) == []
    assert recent.since("a", 0) == []
    with recent.watching(""):
        assert not recent.is_on
