"""Who may take part in relays (scheduling/relays.py), and who carries them.

Decided here: what of a model's configuration allows it, that its instances are all of one kind, and that only what one
carrier carries is handed on from one to the other: from process to process (relays.py), on the loop (relays_here.py),
or on one GPU (relays_on_gpu.py). It knows nothing of how that is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Protocol

from flowserve.backends.shapes import has_fixed_shapes
from flowserve.config.types import ModelConfig
from flowserve.scheduling.batch import ModelQueue
from flowserve.scheduling.batcher import DynamicBatcher, OneByOne
from flowserve.scheduling.relays import Relay
from flowserve.values import DType, TensorSpec

_ANY: Final = 1 << 30  # requests


class Carrier(Protocol):
    """Carries batches from one instance to the next. `private_only`: on private ways only (`Way`). `members_min`: how
    many requests a batch must have.
    """

    private_only: bool
    members_min: int

    def carries(self, instance: Any) -> bool:
        """Whether it can do so with this one: an instance has `passes_on` and `receives` then."""

    def start(self, relay: Relay) -> bool:
        """Take it. False: it is not worth it, or cannot be now, and nothing was done."""


def passes_on(config: ModelConfig) -> bool:
    """Whether it is known before what a batch's outputs are, and where each member's rows lie in them."""
    return config.max_batch_size > 0 and bool(config.outputs) and has_fixed_shapes(config.outputs)


def receives(config: ModelConfig) -> bool:
    """Whether each input of a batch may come as one array."""
    return config.max_batch_size > 0 and not any(map(_is_in_pieces, config.inputs))


def join(queue: ModelQueue, carriers: Iterable[Carrier]) -> None:
    """Say of a model how it may take part."""
    hosts = queue.instances
    for carrier in carriers:
        if hosts and all(map(carrier.carries, hosts)):
            queue.carrier = carrier
            queue.relayed_min = carrier.members_min
            queue.passes_on = all(host.passes_on for host in hosts)
            if all(host.receives for host in hosts):
                queue.receives = _received_at_once(queue)
            return


def _received_at_once(queue: ModelQueue) -> int:
    if isinstance(queue.batcher, OneByOne):
        return 1
    return _ANY if isinstance(queue.batcher, DynamicBatcher) and queue.batcher.takes_all else 0


def _is_in_pieces(spec: TensorSpec) -> bool:
    return spec.optional or spec.ragged or spec.dtype is DType.BYTES
