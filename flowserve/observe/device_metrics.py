"""What was copied between memories, and how full their pools are, as Prometheus families.

Decided here: names and labels of those families. They are there only where the process has a GPU: elsewhere nothing
crosses, and nothing is pooled but what metrics.py does not show either.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from flowserve.memory.devices import Devices
from flowserve.values import PINNED_MEMORY

_CROSSING = ("from", "to")


class DeviceMetrics(Collector):
    """Read when somebody asks."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def collect(self) -> Iterator[Metric]:
        yield from self._ledger()
        yield from self._pools()

    def _ledger(self) -> Iterator[Metric]:
        copies = CounterMetricFamily(
            "flowserve_memory_copies", "Copies of a batch's tensor from one memory to another", labels=_CROSSING
        )
        nbytes = CounterMetricFamily("flowserve_memory_copied_bytes", "Bytes of those copies", labels=_CROSSING)
        for (source, to), (count, total) in self._devices.ledger.entries().items():
            copies.add_metric([str(source), str(to)], count)
            nbytes.add_metric([str(source), str(to)], total)
        yield copies
        yield nbytes

    def _pools(self) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            "flowserve_memory_pool_bytes",
            "Bytes of a memory's pool: lent to tensors, kept for the next, and the most there may be of both",
            labels=("memory", "state"),
        )
        refused = CounterMetricFamily(
            "flowserve_memory_pool_refused",
            "Tensors for which a memory's pool had no room, so that they lay in the next one",
            labels=("memory",),
        )
        pools = self._devices.statistics()
        pinned = pools[PINNED_MEMORY]
        yield GaugeMetricFamily("nv_pinned_memory_pool_total_bytes", "Most bytes of pinned memory", pinned.budget_bytes)
        yield GaugeMetricFamily("nv_pinned_memory_pool_used_bytes", "Bytes of it lent to tensors", pinned.lent_bytes)
        for place, pool in pools.items():
            held.add_metric([str(place), "lent"], pool.lent_bytes)
            held.add_metric([str(place), "kept"], pool.kept_bytes)
            held.add_metric([str(place), "budget"], pool.budget_bytes)
            refused.add_metric([str(place)], pool.refused)
        yield held
        yield refused
