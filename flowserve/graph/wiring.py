"""The wiring of one ensemble before folding: its steps, its tensors, and the writer and readers of each.

Decides the model and version of each step, when two ends of a tensor match, which steps lead to an output and which are
on a cycle. A step with an unknown model stays, with `model` None, so that other mistakes are still found. Does not
decide what is a mistake (`rules`). Callers: `rules`, `spaces`, `compile`, `repository`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx as nx

from flowserve.config.types import LATEST, EnsembleStep, Fill, ModelConfig
from flowserve.errors import Place
from flowserve.graph.types import GRAPH
from flowserve.values import TensorSpec

AvailableModels = Mapping[str, Mapping[int, ModelConfig]]


@dataclass(frozen=True, slots=True)
class WiredStep:
    """A step and its model. `version` and `model` are None if the model or version is not available."""

    index: int
    written: EnsembleStep
    version: int | None
    model: ModelConfig | None


@dataclass(frozen=True, slots=True)
class End:
    """One end of a tensor.

    `step` is a step's index, or GRAPH for the ensemble itself; `port` the name of the input or output there. `field`:
    the end is no port of the step's model but this field, below the step's path: a test or an `each` that reads the
    tensor, or, of a writer, the `present` of a `fill` of one of its tensors.
    """

    step: int
    port: str
    field: str = ""


@dataclass(frozen=True, slots=True)
class Wiring:
    """`writers[T]` and `readers[T]` in the order of the file, the ensemble itself first among the writers and last
    among the readers.
    """

    config: ModelConfig
    available: AvailableModels
    failed: Mapping[str, str]
    steps: tuple[WiredStep, ...]
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

    @property
    def fills(self) -> tuple[Fill, ...]:
        return self.config.ensemble.fills if self.config.ensemble else ()

    @property
    def has_spaces(self) -> bool:
        """Whether some step runs for some rows only, or for items."""
        return bool(self.fills) or any(step.written.when or step.written.each for step in self.steps)

    def place_of_reader(self, end: End) -> Place:
        if end.field:
            return self.place(f"{self.steps[end.step].written.path}.{end.field}")
        if end.step == GRAPH:
            return self.place(f"output[{port_index(self.config.outputs, end.port)}]")
        return self.place(f"{self.steps[end.step].written.path}.input_map[{end.port}]")

    def place_of_writer(self, end: End) -> Place:
        if end.field:
            return self.place(end.field)
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
    """The position of the port called `name`; raises ValueError if there is none."""
    return [spec.name for spec in specs].index(name)


def find_step_model(step: EnsembleStep, available: AvailableModels) -> tuple[int | None, ModelConfig | None]:
    """The version and configuration of a step's model, (None, None) if they are not available."""
    versions = available.get(step.model, {})
    version = max(versions, default=LATEST) if step.version == LATEST else step.version
    return (version, versions[version]) if version in versions else (None, None)


def wire(config: ModelConfig, available: AvailableModels, failed: Mapping[str, str]) -> Wiring:
    """Collect the writers and readers of every tensor of an ensemble."""
    steps = tuple(WiredStep(index, step, *find_step_model(step, available)) for index, step in enumerate(config.steps))
    writers: dict[str, list[End]] = {}
    readers: dict[str, list[End]] = {}
    for spec in config.inputs:
        writers.setdefault(spec.name, []).append(End(GRAPH, spec.name))
    for step in steps:
        for port, tensor in step.written.output_map.items():
            writers.setdefault(tensor, []).append(End(step.index, port))
        for port, tensor in step.written.input_map.items():
            readers.setdefault(tensor, []).append(End(step.index, port))
        for tensor, path in step.written.row_reads():
            readers.setdefault(tensor, []).append(End(step.index, "", path))
    for fill in config.ensemble.fills if config.ensemble else ():
        for end in writers.get(fill.tensor, ()) if fill.present else ():
            writers.setdefault(fill.present, []).append(End(end.step, "", f"{fill.path}.present"))
    for spec in config.outputs:
        readers.setdefault(spec.name, []).append(End(GRAPH, spec.name))
    return Wiring(config, available, failed, steps, writers, readers)


def ensembles_below(config: ModelConfig, available: AvailableModels) -> nx.DiGraph[str]:
    """The containment graph of all ensembles reachable from `config`.

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
    """The names of all ensembles, each after those it contains; ties, and those on a cycle, by name."""
    contains: nx.DiGraph[str] = nx.DiGraph()
    contains.add_nodes_from(name for name, config in configs.items() if config.is_ensemble)
    contains.add_edges_from(
        (step.model, name) for name, config in configs.items() for step in config.steps if step.model in contains
    )
    groups = nx.condensation(contains)
    members = {group: sorted(groups.nodes[group]["members"]) for group in groups}
    order = nx.lexicographical_topological_sort(groups, key=lambda group: members[group])
    return [name for group in order for name in members[group]]


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of a tensor at one end: the input or output `spec` of the model or ensemble `owner`. `has_rows`:
    whether it has a batch dimension, if the model does not decide that.
    """

    owner: ModelConfig
    spec: TensorSpec
    has_rows: bool | None = None

    @property
    def batches(self) -> bool:
        return self.owner.max_batch_size > 0 if self.has_rows is None else self.has_rows

    @property
    def full(self) -> tuple[int, ...]:
        """The full shape, with a leading -1 for the batch dimension if there is one."""
        return (-1, *self.spec.dims) if self.batches else self.spec.dims

    def __str__(self) -> str:
        return f"'{self.spec.name}' of '{self.owner.name}'"


def shapes_meet(a: Declaration, b: Declaration) -> bool:
    """Whether the full shapes of two ends can match (-1 matches anything), or the dims match and only one end has a
    batch dimension: a leading 1 is then added or removed.
    """
    return dims_meet(a.full, b.full) or (a.batches != b.batches and dims_meet(a.spec.dims, b.spec.dims))


def dims_meet(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) == len(b) and all(x == y or -1 in (x, y) for x, y in zip(a, b, strict=True))


def circles(joined: nx.DiGraph[Any]) -> list[list[Any]]:
    """The groups of nodes of a directed graph that are on a common cycle, each sorted."""
    groups = sorted(map(sorted, nx.strongly_connected_components(joined)))
    return [group for group in groups if len(group) > 1 or joined.has_edge(group[0], group[0])]


def known_steps(w: Wiring) -> Iterator[tuple[WiredStep, ModelConfig]]:
    for step in w.steps:
        if step.model is not None:
            yield step, step.model


def first_step_per_model(w: Wiring) -> Iterable[tuple[str, WiredStep]]:
    """Each model's name with the first step that names it."""
    return {step.written.model: step for step in reversed(w.steps)}.items()


def steps_that_reach_an_output(w: Wiring) -> set[int]:
    joined = w.step_graph()
    last = {end.step for spec in w.config.outputs for end in w.writers.get(spec.name, ()) if end.step != GRAPH}
    return last.union(*(nx.ancestors(joined, step) for step in last))


def feeds_required_input(w: Wiring, ensemble: ModelConfig, tensor: str) -> bool:
    """Whether an optional input of a nested ensemble feeds a required input of a model."""
    inner = wire(ensemble, w.available, {})
    seen = {(ensemble.name, tensor)}
    waiting = [(inner, tensor)]
    while waiting:
        at, name = waiting.pop()
        for end in at.readers.get(name, ()):
            model = at.steps[end.step].model if end.step != GRAPH else None
            spec = next((spec for spec in model.inputs if spec.name == end.port), None) if model else None
            if model is None or spec is None:
                continue
            if not spec.optional:
                return True
            if model.is_ensemble and (model.name, end.port) not in seen:
                seen.add((model.name, end.port))
                waiting.append((wire(model, w.available, {}), end.port))
    return False


def circles_below(w: Wiring) -> dict[str, str]:
    """Ensembles below this one that are invalid because of a cycle without this one, with the cycle's text."""
    below = ensembles_below(w.config, w.available)
    found: dict[str, str] = {}
    for members in circles(below):
        if w.name in members:
            continue
        path = [a for a, _ in nx.find_cycle(below.subgraph(members), members[0])]
        text = f"circular dependency between ensembles: {' -> '.join([*path, path[0]])}"
        found.update(dict.fromkeys([*members, *sorted(nx.ancestors(below, members[0]) - {w.name})], text))
    return found
