"""What requests that go alone through processes are written down as, many of them at a time.

Decided here: that what is known of such a request is only kept, and added up when somebody reads, or when there is
some of it while a later one is with the models: then there is nothing else to do. Whoever comes alone finds the
processor's caches cold: each part of the statistics that is touched costs more than what is done there. The figures are
the same as if each request were written down when it is answered (accounts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flowserve.memory.tensor import Tensor
from flowserve.observe.statistics import Statistics
from flowserve.observe.traffic import NodeTraffic
from flowserve.runtime.accounts import Stop, sizes_of
from flowserve.runtime.deployment import Deployment
from flowserve.scheduling.relays import Way

# Adding up so many takes about as long as quick models do.
_SOME: Final = 16

# Its rows, when it was sent and answered, bytes of each input that were copied and, where they vary, that there were,
# and its stops.
_Note = tuple[int, int, int, Sequence[int], Sequence[int] | None, Sequence[Stop]]


class Ledger:
    """Whatever a server has not added up yet, in the order in which it came. Touched on the loop."""

    def __init__(self) -> None:
        self._noted: list[tuple[LoneAccounts, _Note]] = []

    def note(self, accounts: LoneAccounts, note: _Note) -> None:
        """One more request."""
        self._noted.append((accounts, note))

    def catch_up(self) -> None:
        """There is nothing else to do for a while. Between any two notes, so that there are never many."""
        if len(self._noted) >= _SOME:
            self.settle()

    def settle(self) -> None:
        """All of it is added up. Before anything is read."""
        noted, self._noted = self._noted, []
        for accounts, note in noted:
            accounts.add(*note)


class LoneAccounts:
    """Those of one way through a whole plan. Holds nothing of the deployment but what counts for it."""

    def __init__(self, ledger: Ledger, way: Way, deployment: Deployment) -> None:
        self._ledger = ledger
        stops = zip(way.queues, way.nodes, strict=True)
        self._stops: list[tuple[Statistics, NodeTraffic]] = [
            (queue.observer, deployment.traffic[node.index]) for queue, node in stops
        ]
        self._ensemble = deployment.statistics if deployment.graph.is_ensemble else None
        self._is_fixed = self._stops[0][1].is_fixed

    def note(
        self,
        inputs: Sequence[Tensor | None],
        rows: int,
        copied: Sequence[int],
        began_ns: int,
        stops: Sequence[Stop],
        now_ns: int,
    ) -> None:
        """One request of so many `rows` went through all stops. `inputs` are the first one's, and bytes of each that
        were `copied`.
        """
        sizes = None if self._is_fixed else sizes_of(inputs)
        self._ledger.note(self, (rows, began_ns, now_ns, copied, sizes, stops))

    def add(
        self,
        rows: int,
        began_ns: int,
        now_ns: int,
        copied: Sequence[int],
        sizes: Sequence[int] | None,
        stops: Sequence[Stop],
    ) -> None:
        """What was noted of one request is added to what everybody reads."""
        last = len(self._stops) - 1
        since_ns = began_ns
        input_ns = infer_ns = 0
        for i, (gathered_ns, computed_ns, placed) in enumerate(stops):
            statistics, traffic = self._stops[i]
            until_ns = now_ns if i == last else computed_ns
            took_ns = gathered_ns - since_ns, computed_ns - gathered_ns
            statistics.ran(rows, 1, until_ns - since_ns, 0, *took_ns, until_ns - computed_ns, until_ns)
            traffic.ran(rows, placed)
            if i:
                traffic.took_in(rows, None, (), out_of_one=True)
            else:
                traffic.took_in(rows, sizes, copied)
            input_ns += took_ns[0]
            infer_ns += took_ns[1]
            since_ns = computed_ns
        if self._ensemble is not None:
            total_ns = now_ns - began_ns
            self._ensemble.ran(rows, 1, total_ns, 0, input_ns, infer_ns, now_ns - since_ns, now_ns)
