"""What was copied between memories, and how full their pools are, as Prometheus families.

Decided here: names and labels of those families. They are there only where the process has a GPU: elsewhere nothing
crosses, and nothing is pooled but what metrics.py does not show either.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowserve.memory.devices import Devices
from flowserve.observe.exposition import COUNTER, GAUGE, family
from flowserve.values import PINNED_MEMORY


def device_families(devices: Devices) -> Iterator[str]:
    """The families, as they are now."""
    yield from _ledger(devices)
    yield from _pools(devices)


def _ledger(devices: Devices) -> Iterator[str]:
    found = [((("from", str(a)), ("to", str(b))), said) for (a, b), said in devices.ledger.entries().items()]
    text = "Copies of a batch's tensor from one memory to another"
    yield family("flowserve_memory_copies_total", text, COUNTER, [(labels, count) for labels, (count, _) in found])
    nbytes = [(labels, total) for labels, (_, total) in found]
    yield family("flowserve_memory_copied_bytes_total", "Bytes of those copies", COUNTER, nbytes)


def _pools(devices: Devices) -> Iterator[str]:
    pools = devices.statistics()
    pinned = pools[PINNED_MEMORY]
    for name, text, nbytes in (
        ("nv_pinned_memory_pool_total_bytes", "Most bytes of pinned memory", pinned.budget_bytes),
        ("nv_pinned_memory_pool_used_bytes", "Bytes of it lent to tensors", pinned.lent_bytes),
    ):
        yield family(name, text, GAUGE, [((), nbytes)])
    held = [
        ((("memory", str(place)), ("state", state)), nbytes)
        for place, pool in pools.items()
        for state, nbytes in (("lent", pool.lent_bytes), ("kept", pool.kept_bytes), ("budget", pool.budget_bytes))
    ]
    text = "Bytes of a memory's pool: lent to tensors, kept for the next, and the most there may be of both"
    yield family("flowserve_memory_pool_bytes", text, GAUGE, held)
    refused = [((("memory", str(place)),), pool.refused) for place, pool in pools.items()]
    text = "Tensors for which a memory's pool had no room, so that they lay in the next one"
    yield family("flowserve_memory_pool_refused_total", text, COUNTER, refused)
