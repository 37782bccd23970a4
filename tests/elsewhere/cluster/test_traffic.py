"""The bytes that are under way to one machine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowserve.elsewhere.cluster.traffic import MachineTraffic

MOST = 60


class Sending(RuleBasedStateMachine):
    """Batches come, are answered and fail in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = MachineTraffic(MOST)
        self.number = 0
        self.sizes: dict[int, int] = {}
        self.waiting: list[int] = []  # in order
        self.under_way: list[int] = []

    def begin(self, batch: int) -> None:
        assert self.waiting[0] == batch, "a large batch is not passed by later ones"
        self.waiting.remove(batch)
        self.under_way.append(batch)
        of_all = sum(self.sizes[one] for one in self.under_way)
        assert of_all <= MOST or not sum(self.sizes[one] for one in self.under_way[:-1])

    @rule(nbytes=st.integers(0, 100))
    def large(self, nbytes: int) -> None:
        self.number += 1
        batch, self.sizes[self.number] = self.number, nbytes
        self.waiting.append(batch)
        self.traffic.admit(batch, nbytes, lambda: self.begin(batch))

    @rule(nbytes=st.integers(0, 5))
    def small(self, nbytes: int) -> None:
        self.number += 1
        self.sizes[self.number] = nbytes
        self.under_way.append(self.number)
        self.traffic.count(self.number, nbytes)

    @precondition(lambda self: self.under_way or self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from([*self.under_way, *self.waiting]))
        (self.under_way if batch in self.under_way else self.waiting).remove(batch)
        self.traffic.leave(batch)
        self.traffic.leave(batch)  # which has no effect

    @invariant()
    def every_byte_is_counted_and_nothing_waits_without_need(self) -> None:
        assert self.traffic.nbytes == sum(self.sizes[one] for one in self.under_way)
        if self.waiting:
            assert self.traffic.nbytes
            assert self.traffic.nbytes + self.sizes[self.waiting[0]] > MOST


TestSending = Sending.TestCase


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_the_way_of_batches_is_added_up(ways: list[int]) -> None:
    traffic = MachineTraffic()
    for way_ns in ways:
        traffic.answered(way_ns)
    assert (traffic.batches, traffic.way_ns) == (len(ways), sum(ways))
