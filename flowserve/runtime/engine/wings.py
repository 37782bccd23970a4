"""What a part of flowserve outside of the core, a wing, brings to an engine.

Decides the points at which a wing takes part: the load of a model, a graph that is about to be served, the metrics. The
core calls the wings of `EngineOptions.wings` there, and imports none of them. The command line assembles them
(cli/wings.py), from their options. What the core asks of an instance that a wing makes is in workers/base.py: the live
page and the statistics read that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flowserve.backends.base import LoadedModel, ModelFiles
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.graph.types import Graph
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.factory import MakeWorker
from flowserve.runtime.workers.base import StateAdapter
from flowserve.runtime.workers.streaming import ResponseStreams


class WingLoad(NamedTuple):
    """One version of a model that is being loaded. `inner`, `state` and `streams`: as for `worker_maker`. `options` are
    those for its backend. `is_limited`: the server has a rate limiter, which counts an instance's batches.
    """

    config: ModelConfig
    inner: ModelConfig
    files: ModelFiles
    options: Mapping[str, str]
    clock: ClockNs
    state: StateAdapter | None
    streams: ResponseStreams | None
    is_limited: bool


class WingModel(NamedTuple):
    """A model of a wing, its instances by name, and how their workers are made."""

    model: LoadedModel
    instances: Sequence[tuple[str, InstanceGroup]]
    make_worker: MakeWorker


def _load_none(_: WingLoad) -> WingModel:
    raise NotImplementedError  # the wing has no models


@dataclass(frozen=True, slots=True)
class Wing:
    """`models`: the names of models that `load` loads in place of the server: it blocks, runs on a loader's thread, and
    raises FlowserveError. `warnings`: about a graph that is served from now on. `metrics`: families, as text.
    """

    models: Collection[str] = ()
    load: Callable[[WingLoad], WingModel] = _load_none
    warnings: Callable[[Graph], Iterable[str]] = lambda _: ()
    metrics: Callable[[], str] = str
