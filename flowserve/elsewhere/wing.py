"""Instances on other machines as a wing: what a placement file names is loaded there.

Decides how many instances a placed model has, which of them share an actor, the warning about a segment that a graph
leaves and comes back to, and the metrics of the cluster. Does not know how an actor is started or given batches. The
command line opens the cluster; the server's loader calls `Wing.load` on its threads, the rest on the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flowserve.config.types import InstanceGroup, instances_of
from flowserve.elsewhere.actors import ActorPort, ClusterActor, ClusterModel, ClusterOptions
from flowserve.elsewhere.cluster.base import MachineNeeds
from flowserve.elsewhere.placement import ModelPlace, why_not_placed
from flowserve.elsewhere.segments import paths_outside, way_back
from flowserve.errors import Invalid
from flowserve.graph.types import Graph
from flowserve.observe.exposition import COUNTER, GAUGE, family
from flowserve.runtime.clock import SECOND_NS
from flowserve.runtime.engine.wings import Wing, WingLoad, WingModel
from flowserve.runtime.remote.worker import RemoteWorker
from flowserve.runtime.workers.base import Worker


def other_machines(cluster: ClusterOptions, places: Mapping[str, ModelPlace]) -> Wing:
    """The wing of the machines of `cluster`, with the models of `places`, by name."""
    machines = _Machines(cluster, places)
    return Wing(places, machines.load, machines.warnings, machines.metrics)


@dataclass(slots=True)
class _Machines:
    cluster: ClusterOptions
    places: Mapping[str, ModelPlace]
    segments: dict[str, list[ClusterActor]] = field(default_factory=dict)  # the actors of each
    lock: threading.Lock = field(default_factory=threading.Lock)  # models of one segment are loaded at the same time

    def load(self, load: WingLoad) -> WingModel:
        """As `Wing.load`. Loads nothing here: each worker has its instance opened in an actor."""
        config, place = load.config, self.places[load.config.name]
        if why := why_not_placed(config):
            raise Invalid(why)
        there = {**load.options, "execution": "thread", "runs_at_once": "1"}
        model = ClusterModel(load.inner, load.files, there, is_alone=not place.segment)
        instances = instances_of(config)
        if place.count:
            group = instances[0][1]
            instances = [(f"{group.name}_{number}", group) for number in range(place.count)]
        with self.lock:
            actors = self.segments.setdefault(place.segment, []) if place.segment else []
            for number in range(len(actors), len(instances)):
                name = f"{place.segment}_{number}" if place.segment else instances[number][0]
                actors.append(ClusterActor(name, MachineNeeds(place.resources, place.labels), self.cluster, load.clock))
            following = iter([*actors])

        def make_worker(name: str, group: InstanceGroup) -> Worker:
            depth = model.depth(is_limited=load.is_limited)
            is_plain = load.state is None and load.streams is None
            port = ActorPort(name, model, group, next(following), depth=depth, is_plain=is_plain)
            return RemoteWorker(name, load.inner, port, load.clock, state=load.state, streams=load.streams)

        return WingModel(model, instances, make_worker)

    def warnings(self, graph: Graph) -> Iterator[str]:
        """The segments that do not run as one hop in this graph."""
        for segment, path in paths_outside(graph, self.places):
            yield f"{way_back(graph, segment, path)}: the steps of the segment run one by one [P7]"

    def metrics(self) -> str:
        """Whether the cluster can be reached, and the traffic with its machines."""
        found = [((("machine", name),), one) for name, one in sorted(self.cluster.traffic.items())]
        batches = [(labels, one.batches) for labels, one in found]
        seconds = [(labels, one.way_ns / SECOND_NS) for labels, one in found]
        nbytes = [(labels, one.nbytes) for labels, one in found]
        text = "Whether the cluster can start instances (1) or not (0)"
        parts = [family("flowserve_cluster_reachable", text, GAUGE, [((), float(self.cluster.engine.is_reachable))])]
        if found:
            text = "Batches that a machine of the cluster answered"
            parts.append(family("flowserve_link_batches_total", text, COUNTER, batches))
            text = "Time of these batches on the way there and back, without their computation"
            parts.append(family("flowserve_link_seconds_total", text, COUNTER, seconds))
            text = "Bytes of the inputs of batches under way to a machine of the cluster"
            parts.append(family("flowserve_link_bytes", text, GAUGE, nbytes))
        return "".join(parts)
