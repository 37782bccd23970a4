"""One ensemble as its author wired it: steps, tensors, who writes and who reads each.

Decided here: which model and version a step means, and the two tables (writers and readers of every tensor) that
rules.py judges and compile.py folds. A step whose model cannot be told keeps its place with `model` None, so that the
other mistakes are still found. Nothing here says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import networkx as nx

from flowserve.config.types import LATEST, EnsembleStep, ModelConfig
from flowserve.errors import Place
from flowserve.graph.types import GRAPH
from flowserve.values import TensorSpec

Available = Mapping[str, Mapping[int, ModelConfig]]


@dataclass(frozen=True, slots=True)
class Step:
    """A step and the model it means. `version` and `model` are None where no such model or version is available."""

    index: int
    written: EnsembleStep
    version: int | None
    model: ModelConfig | None


@dataclass(frozen=True, slots=True)
class End:
    """One end of a tensor.

    `step` is a step's index, or GRAPH for the ensemble itself; `port` the name of the input or output there.
    """

    step: int
    port: str


@dataclass(frozen=True, slots=True)
class Wiring:
    """`writers[T]` and `readers[T]` in the order of the file, the ensemble itself first among the writers and last
    among the readers.
    """

    config: ModelConfig
    available: Available
    failed: Mapping[str, str]
    steps: tuple[Step, ...]
    writers: Mapping[str, list[End]] = field(default_factory=dict)
    readers: Mapping[str, list[End]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.config.name

    def tensors(self) -> Iterator[str]:
        """Every tensor once: the written ones first, then those that are only read."""
        yield from dict.fromkeys([*self.writers, *self.readers])

    def place(self, path: str) -> Place:
        return self.config.source.place(path)

    def place_of_reader(self, end: End) -> Place:
        if end.step == GRAPH:
            return self.place(f"output[{port_index(self.config.outputs, end.port)}]")
        return self.place(f"{self.steps[end.step].written.path}.input_map[{end.port}]")

    def place_of_writer(self, end: End) -> Place:
        if end.step == GRAPH:
            return self.place(f"input[{port_index(self.config.inputs, end.port)}]")
        return self.place(f"{self.steps[end.step].written.path}.output_map[{end.port}]")

    def step_graph(self) -> nx.DiGraph[int]:
        """Steps joined by tensors. An edge's attribute `tensor` is the first tensor that joins the two."""
        joined: nx.DiGraph[int] = nx.DiGraph()
        joined.add_nodes_from(step.index for step in self.steps)
        for tensor in self.tensors():
            for writer in self.writers.get(tensor, ()):
                for reader in self.readers.get(tensor, ()):
                    if GRAPH not in (writer.step, reader.step) and not joined.has_edge(writer.step, reader.step):
                        joined.add_edge(writer.step, reader.step, tensor=tensor)
        return joined


def port_index(specs: tuple[TensorSpec, ...], name: str) -> int:
    """The position of the port called `name`; raises ValueError where there is none."""
    return [spec.name for spec in specs].index(name)


def pick_version(versions: Mapping[int, ModelConfig], wanted: int) -> int | None:
    """The version a step means by `wanted` (LATEST: the highest), or None where it is not available."""
    if wanted == LATEST:
        return max(versions, default=None)
    return wanted if wanted in versions else None


def find_step_model(step: EnsembleStep, available: Available) -> tuple[int | None, ModelConfig | None]:
    """The version and configuration a step means, (None, None) where they are not available."""
    versions = available.get(step.model, {})
    version = pick_version(versions, step.version)
    return version, None if version is None else versions[version]


def wire(config: ModelConfig, available: Available, failed: Mapping[str, str]) -> Wiring:
    """Collect the writers and readers of every tensor of an ensemble."""
    steps = tuple(Step(index, step, *find_step_model(step, available)) for index, step in enumerate(config.steps))
    writers: dict[str, list[End]] = {}
    readers: dict[str, list[End]] = {}
    for spec in config.inputs:
        writers.setdefault(spec.name, []).append(End(GRAPH, spec.name))
    for step in steps:
        for port, tensor in step.written.output_map.items():
            writers.setdefault(tensor, []).append(End(step.index, port))
        for port, tensor in step.written.input_map.items():
            readers.setdefault(tensor, []).append(End(step.index, port))
    for spec in config.outputs:
        readers.setdefault(spec.name, []).append(End(GRAPH, spec.name))
    return Wiring(config, available, failed, steps, writers, readers)


def ensembles_below(config: ModelConfig, available: Available) -> nx.DiGraph[str]:
    """Which ensemble contains which, as far as can be reached from `config`.

    A node's attribute `config` is the ensemble's configuration; an edge's attribute `step` is the path of the first
    such step.
    """
    below: nx.DiGraph[str] = nx.DiGraph()
    below.add_node(config.name, config=config)
    waiting = [config]
    while waiting:
        outer = waiting.pop()
        for step in outer.steps:
            if step.model not in below:
                inner = find_step_model(step, available)[1]
                if inner is None or not inner.is_ensemble:
                    continue
                below.add_node(inner.name, config=inner)
                waiting.append(inner)
            if not below.has_edge(outer.name, step.model):
                below.add_edge(outer.name, step.model, step=step.path)
    return below


def containment_order(configs: Mapping[str, ModelConfig]) -> list[str]:
    """The names of all ensembles, each after those it contains; ties, and those on a circle, by name."""
    contains: nx.DiGraph[str] = nx.DiGraph()
    contains.add_nodes_from(name for name, config in configs.items() if config.is_ensemble)
    contains.add_edges_from(
        (step.model, name) for name, config in configs.items() for step in config.steps if step.model in contains
    )
    groups = nx.condensation(contains)
    members = {group: sorted(groups.nodes[group]["members"]) for group in groups}
    order = nx.lexicographical_topological_sort(groups, key=lambda group: members[group])
    return [name for group in order for name in members[group]]
