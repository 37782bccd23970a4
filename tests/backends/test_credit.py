"""Credits of a decoupled model's responses, where the model offers them and must not wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowserve.backends.base import Sent
from flowserve.backends.credit import CreditSender
from flowserve.errors import FlowserveError


class Told(CreditSender):
    """A sender that notes what it tells. `late`: credits that are granted while it tells that it waits."""

    def __init__(self, late: int = 0) -> None:
        super().__init__()
        self.told: list[object] = []
        self._late = late

    def _tell_answer(self, sent: Sent) -> None:
        self.told.append(sent)

    def _tell_over(self, error: FlowserveError | None) -> None:
        self.told.append("over")

    def _tell_waits(self) -> None:
        self.told.append("waits")
        self.grant(self._late)


def test_an_offer_without_a_credit_is_refused_and_reported_once() -> None:
    sender, sent, changes = Told(), Sent([]), list[str]()
    sender.watch(lambda: changes.append("changed"))
    assert not sender.offer(sent)
    assert not sender.offer(sent)
    assert sender.told == ["waits"]
    assert not changes
    sender.grant(1)
    assert changes == ["changed"]
    assert sender.offer(sent)
    assert not sender.offer(sent)
    assert sender.told == ["waits", sent, "waits"]


def test_a_credit_that_comes_while_the_wait_is_reported_is_used() -> None:
    sender, sent = Told(late=1), Sent([])
    assert sender.offer(sent)
    assert sender.told == ["waits", sent]


def test_credits_that_nothing_waits_for_are_not_reported() -> None:
    sender, changes = Told(), list[str]()
    sender.watch(lambda: changes.append("changed"))
    sender.grant(5)
    assert sender.offer(Sent([]))
    assert not changes


def test_a_cancellation_is_reported_at_once_also_to_a_later_watch() -> None:
    sender, changes = Told(), list[str]()
    sender.watch(lambda: changes.append("first"))
    sender.withdraw()
    sender.watch(lambda: changes.append("second"))
    assert changes == ["first", "second"]
    assert sender.offer(Sent([]))  # dropped
    assert sender.offer(Sent([]))
    assert sender.told == []


@pytest.mark.parametrize("send", [Told.send, Told.offer])
def test_a_response_with_the_final_flag_is_the_only_report_of_the_end(send: Callable[[Told, Sent], object]) -> None:
    sender, last, changes = Told(), Sent([], is_last=True), list[str]()
    sender.watch(lambda: changes.append("changed"))
    sender.grant(1)
    send(sender, last)
    sender.withdraw()
    assert sender.told == [last]
    assert not changes


@pytest.mark.parametrize("send", [Told.send, Told.offer])
def test_the_end_is_reported_even_if_the_response_that_carries_it_is_dropped(
    send: Callable[[Told, Sent], object],
) -> None:
    sender = Told()
    sender.withdraw()
    send(sender, Sent([]))
    assert sender.told == []
    send(sender, Sent([], is_last=True))
    assert sender.told == ["over"]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_reported_after_the_last_response(fails: bool) -> None:
    sender, changes = Told(), list[str]()
    sender.watch(lambda: changes.append("changed"))
    assert not sender.offer(Sent([]))
    if fails:
        sender.fail(FlowserveError("x"))
    else:
        sender.finish()
    sender.grant(1)
    sender.withdraw()
    assert not changes
