"""What requests that go alone are written down as, many of them at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flowserve.observe.statistics import Statistics
from flowserve.runtime.lone_accounts import Ledger, LoneAccounts


class Counting:
    """Statistics and traffic of a node: how many requests they were told of."""

    is_fixed = True

    def __init__(self) -> None:
        self.told = 0

    def ran(self, *told: Any) -> None:
        self.told += len(told) > 2  # as statistics

    def took_in(self, *_: Any) -> None:
        pass


def accounts(ledger: Ledger, counting: Counting) -> LoneAccounts:
    way: Any = SimpleNamespace(queues=[SimpleNamespace(observer=counting)], nodes=[SimpleNamespace(index=0)], reads=[])
    graph = SimpleNamespace(is_ensemble=False)
    deployment: Any = SimpleNamespace(traffic=[counting], graph=graph, statistics=Statistics("m", 1))
    return LoneAccounts(ledger, way, deployment)


def test_some_are_added_up_at_a_time_and_never_many_wait() -> None:
    ledger, counting = Ledger(), Counting()
    several = [accounts(ledger, counting) for _ in range(8)]
    before = most = 0
    for number in range(800):
        one = several[number % 8]
        ledger.catch_up()
        most, before = max(most, counting.told - before), counting.told
        one.note((), 1, (), number, [(number, number, ())], number)
        assert number + 1 - counting.told <= 16
    assert most == 16, "the loop does nothing else meanwhile"
    ledger.settle()
    assert counting.told == 800
