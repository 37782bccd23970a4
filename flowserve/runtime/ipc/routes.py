"""Routes over worker processes: the next process of a batch, as announced to each process.

Decides when a route is announced: once, with the first batch that takes it over these processes. A route over
processes of which one has ended is forgotten. Does not know when a batch takes a route (scheduling/). Called by
workers/process.py on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from operator import attrgetter
from typing import NamedTuple, Protocol, cast

from flowserve.backends.worker.protocol import ROUTE, pack
from flowserve.runtime.ipc.channel import Channel
from flowserve.runtime.ipc.encoder import InputPacker
from flowserve.scheduling.batch import Route

_numbers = count(1)
_number_of = attrgetter("number")


class Known(NamedTuple):
    """A route over certain processes: its number in messages, and their channels."""

    number: int
    channels: Sequence[Channel]


class RouteWorker(Protocol):
    """A worker of a route. `packer` numbers its outputs."""

    packer: InputPacker


def route_number(route: Route, channels: Sequence[Channel], workers: Sequence[RouteWorker]) -> int:
    """The number of a route over these workers' processes. A new route is announced to them first."""
    known = cast("dict[tuple[int, ...], Known] | None", route.worker_data)
    if known is None:
        known = route.worker_data = {}
    key = tuple(map(_number_of, channels))
    found = known.get(key)
    if found is None:
        found = Known(next(_numbers), channels)
        wanted = [worker.packer.indices(node.wanted) for worker, node in zip(workers, route.nodes, strict=True)]
        _tell(found, route, wanted, _forget_ended(known))
        known[key] = found  # not before: it raises where a socket cannot be shown
    return found.number


def _forget_ended(known: dict[tuple[int, ...], Known]) -> list[int]:
    """Forget the routes over a process that has ended. Returns their numbers."""
    gone = [key for key, route in known.items() if any(channel.is_closed for channel in route.channels)]
    return [known.pop(key).number for key in gone]


def _tell(known: Known, route: Route, wanted: Sequence[Sequence[int]], gone: Sequence[int]) -> None:
    number, channels = known
    for i in range(len(channels) - 1):
        here, following = channels[i], channels[i + 1]
        here.introduce(following)
        inputs = [word for read in route.reads[i] for word in read]
        asked = wanted[i + 1]
        here.tell(pack(ROUTE, [number, following.number, len(asked), *asked, len(route.reads[i]), *inputs, *gone]))
