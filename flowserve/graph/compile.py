"""Compiles an ensemble's configuration into the frozen Graph that all other packages use.

Decides how nested ensembles are folded in, how nodes are named and numbered, the maximum size of a graph, and the rules
that can be checked only after folding: shapes across nested ensembles (G15), tensors of different decoupled models that
cannot be read together (G20), and limits that would deadlock (G21). `rules` checks all others before. Plain models are
compiled in `types`. Does not know the runtime plan (`plan`). Caller: `repository`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import networkx as nx

from flowserve.config.types import ModelConfig
from flowserve.errors import Problem, Problems
from flowserve.graph import rules
from flowserve.graph.nesting import are_nested, origins, written_by
from flowserve.graph.types import DEPTH_LIMIT, GRAPH, Edge, Graph, Node, conversion, inside, node_of
from flowserve.values import TensorSpec

# Nested ensembles grow exponentially if each uses the inner one twice: twenty such levels are a million nodes.
NODE_LIMIT: Final = 10_000
# The parameter of an ensemble for the scope of `max_inflight_requests`: "request" (each separately) or "shared".
SCOPE: Final = "max_inflight_scope"


def compile_ensemble(
    config: ModelConfig, version: int, available: rules.AvailableModels, failed: Mapping[str, str] | None = None
) -> Graph:
    """An ensemble as one flat graph. Raises Problems with every violation of every rule.

    `available`: every known deployment by name and version, nested ensembles included. `failed`: the reasons of known
    deployments that are not available, for the messages of ensembles that need them.
    """
    wiring = rules.wire(config, available, failed or {})
    problems = rules.ensemble_problems(wiring) or list(_too_large(wiring))
    if problems:
        raise Problems(problems)
    folding = _Folding(config, available)
    graph = folding.graph(version)
    problems = [*_disagreements_across_folds(config, folding)]
    problems += [*mismatched_iterations(graph), *deadlocking_limits(graph, available)]
    if problems:
        raise Problems(problems)
    return graph


@dataclass(frozen=True, slots=True)
class _Source:
    """The origin of a tensor: a call's number (or GRAPH), the index of its output (or of the graph's input), its name.

    `spec` is its declaration after the `reshapes` of the ensembles whose inputs and outputs it passed through.
    """

    call: int
    output: int
    tensor: str
    spec: TensorSpec
    reshapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    def entering(self, port: TensorSpec) -> _Source:
        """The source as seen by the steps of an ensemble that it enters through an input."""
        return self._as(port.dims, inside(port))

    def leaving(self, port: TensorSpec) -> _Source:
        """The source as seen outside of an ensemble that it leaves through an output."""
        return self._as(inside(port).dims, port)

    def _as(self, dims: tuple[int, ...], spec: TensorSpec) -> _Source:
        if dims == spec.dims:
            return self
        return replace(self, spec=spec, reshapes=(*self.reshapes, (dims, spec.dims)))


@dataclass(frozen=True, slots=True)
class _Call:
    """One model call before numbering: the index of `node` is its position among the calls.

    `sources[i]` feeds the model's i-th input; None if an optional input is omitted.
    """

    node: Node
    config: ModelConfig
    order: tuple[int, ...]
    sources: tuple[_Source | None, ...]


@dataclass(slots=True)
class _Scope:
    """One ensemble while it is folded in.

    `prefix` precedes the names of its nodes and tensors, "" for the outermost.
    """

    wiring: rules.Wiring
    tensors: dict[str, _Source]
    prefix: str = ""
    path: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    seen: dict[str, int] = field(default_factory=dict)
    max_inflight: int = 0  # the smallest limit of this ensemble and those around it, 0 if there is none

    def name_step(self, step: rules.WiredStep) -> str:
        """The model's name, "name#2" for its second step in this ensemble."""
        count = self.seen[step.written.model] = self.seen.get(step.written.model, 0) + 1
        return f"{self.prefix}{step.written.model}" + (f"#{count}" if count > 1 else "")


class _Joint(NamedTuple):
    """A source and one reader: a call's number with an input, or GRAPH with an output of the graph. `spec` is the
    declaration of that input or output, `config` the configuration it is from.
    """

    source: _Source
    reader: int
    port: int
    spec: TensorSpec
    config: ModelConfig


class _Folding:
    """Traverses a well-formed ensemble and those inside it, and collects model calls, each after its sources."""

    def __init__(self, config: ModelConfig, available: rules.AvailableModels) -> None:
        self.config = config
        self.available = available
        self.calls: list[_Call] = []
        inputs = {spec.name: _Source(GRAPH, i, spec.name, spec).entering(spec) for i, spec in enumerate(config.inputs)}
        self.outputs = self._fold(
            _Scope(rules.wire(config, available, {}), inputs, max_inflight=config.max_inflight_requests)
        )

    def _fold(self, scope: _Scope) -> list[_Source]:
        """Add the calls of one ensemble. Returns the sources of its outputs, in order."""
        names = [scope.name_step(step) for step in scope.wiring.steps]
        for index in nx.lexicographical_topological_sort(scope.wiring.step_graph(), key=lambda index: index):
            step = scope.wiring.steps[index]
            assert step.model is not None, "rules G2 and G4 hold"
            made = (
                self._fold_nested(scope, step, names[index])
                if step.model.is_ensemble
                else self._call(scope, step, names[index])
            )
            for port, tensor in step.written.output_map.items():
                source = made[rules.port_index(step.model.outputs, port)]
                scope.tensors[tensor] = replace(source, tensor=scope.prefix + tensor)
        return [scope.tensors[spec.name].leaving(spec) for spec in scope.wiring.config.outputs]

    def _fold_nested(self, scope: _Scope, step: rules.WiredStep, name: str) -> list[_Source]:
        assert step.model is not None
        given = {port: scope.tensors.get(tensor) for port, tensor in step.written.input_map.items()}
        ports = {spec.name: spec for spec in step.model.inputs}
        inner = _Scope(
            rules.wire(step.model, self.available, {}),
            {port: source.entering(ports[port]) for port, source in given.items() if source is not None},
            prefix=f"{name}/",
            path=(*scope.path, step.model.name),
            order=(*scope.order, step.index),
            max_inflight=min(filter(None, (step.model.max_inflight_requests, scope.max_inflight)), default=0),
        )
        return self._fold(inner)

    def _call(self, scope: _Scope, step: rules.WiredStep, name: str) -> list[_Source]:
        config, version = step.model, step.version
        assert config is not None
        assert version is not None
        # An omitted optional input of a nested ensemble has no source, and neither have the inputs it feeds.
        sources = tuple(scope.tensors.get(step.written.input_map.get(spec.name, "")) for spec in config.inputs)
        call = len(self.calls)
        node = node_of(config, version, call, name, scope.wiring.place(step.written.path))
        node = replace(node, path=scope.path, max_inflight=scope.max_inflight)
        self.calls.append(_Call(node, config, (*scope.order, step.index), sources))
        return [_Source(call, j, f"{name}/{spec.name}", spec) for j, spec in enumerate(config.outputs)]

    def graph(self, version: int) -> Graph:
        """Number the calls and join them by edges."""
        number = {call: index for index, call in enumerate(self._topological())}
        number[GRAPH] = GRAPH
        nodes = {number[made.node.index]: made.node for made in self.calls}
        edges: list[Edge] = []
        for source, reader, port, spec, config in self.joints():
            batches, wants_batches = self.producer(source).max_batch_size > 0, config.max_batch_size > 0
            change = conversion(source.reshapes, source.spec.dims, batches, spec.dims, wants_batches)
            edges.append(Edge(source.tensor, number[source.call], source.output, number[reader], port, change))
        edges.sort(key=lambda edge: (edge.producer, edge.output, edge.consumer == GRAPH, edge.consumer, edge.input))
        return Graph(
            name=self.config.name,
            version=version,
            inputs=self.config.inputs,
            outputs=self.config.outputs,
            max_batch_size=self.config.max_batch_size,
            nodes=tuple(replace(nodes[index], index=index) for index in range(len(nodes))),
            edges=tuple(edges),
            is_ensemble=True,
            shares_limits=shares_limits(self.config),
        )

    def _topological(self) -> Iterator[int]:
        joined: nx.DiGraph[int] = nx.DiGraph()
        joined.add_nodes_from(range(len(self.calls)))
        for consumer, call in enumerate(self.calls):
            joined.add_edges_from((source.call, consumer) for source in call.sources if source and source.call != GRAPH)
        yield from nx.lexicographical_topological_sort(joined, key=lambda call: self.calls[call].order)

    def joints(self) -> Iterator[_Joint]:
        """Every source with each of its readers."""
        for consumer, call in enumerate(self.calls):
            for port, (source, spec) in enumerate(zip(call.sources, call.config.inputs, strict=True)):
                if source is not None:
                    yield _Joint(source, consumer, port, spec, call.config)
        for port, (source, spec) in enumerate(zip(self.outputs, self.config.outputs, strict=True)):
            yield _Joint(source, GRAPH, port, spec, self.config)

    def producer(self, source: _Source) -> ModelConfig:
        return self.config if source.call == GRAPH else self.calls[source.call].config


def shares_limits(config: ModelConfig) -> bool:
    """Whether an ensemble's `max_inflight_requests` applies to all its requests together."""
    return config.parameters.get(SCOPE) == "shared"


def _too_large(wiring: rules.Wiring) -> Iterator[Problem]:
    """Size limits, checked by counting the nodes of all nested ensembles, innermost first, before folding."""
    below = rules.ensembles_below(wiring.config, wiring.available)
    sizes: dict[str, int] = {}
    depths: dict[str, int] = {}
    for name in reversed(list(nx.topological_sort(below))):
        inside = rules.wire(below.nodes[name]["config"], wiring.available, {})
        sizes[name] = sum(sizes.get(step.written.model, 1) for step in inside.steps)
        depths[name] = 1 + max((depths.get(step.written.model, 0) for step in inside.steps), default=0)
    name = wiring.name
    place = wiring.place("ensemble_scheduling")
    if sizes[name] > NODE_LIMIT:
        text = f"ensemble '{name}' has {sizes[name]} steps when its nested ensembles are unfolded"
        yield Problem(f"{text}; at most {NODE_LIMIT} are allowed", place, "G19")
    if depths[name] > DEPTH_LIMIT:
        text = f"ensemble '{name}' nests ensembles {depths[name]} deep"
        yield Problem(f"{text}; at most {DEPTH_LIMIT} are allowed", place, "G19")


def _disagreements_across_folds(config: ModelConfig, folding: _Folding) -> Iterator[Problem]:
    """A -1 in a nested ensemble's inputs and outputs matches everything; the tensors on both sides must match too."""
    for source, consumer, port, spec, reader in folding.joints():
        place = config.source.place(f"output[{port}]") if consumer == GRAPH else folding.calls[consumer].node.place
        first, second = rules.Declaration(folding.producer(source), source.spec), rules.Declaration(reader, spec)
        if not rules.shapes_meet(first, second):
            text = rules.inconsistent_shape(config.name, source.tensor, first, second)
            yield Problem(text, place, "G15", "a dimension of -1 in a nested ensemble hides this")


def mismatched_iterations(graph: Graph) -> Iterator[Problem]:
    """Steps, and responses, that combine tensors of different decoupled steps that are not nested."""
    found = origins(graph, graph.edges)
    for reader in (*(node.index for node in graph.nodes), GRAPH):
        writers = [edge.producer for edge in graph.edges if edge.consumer == reader]
        chains = [written_by(graph, found, writer) for writer in writers]
        if are_nested(chains):
            continue
        makers = " and ".join(dict.fromkeys(f"'{graph.nodes[chain[-1]].name}'" for chain in chains if chain))
        node = graph.nodes[reader] if reader != GRAPH else None
        subject = "its outputs are" if node is None else f"step of model '{node.model.name}' receives inputs"
        text = f"{subject} originated from different decoupled models: {makers}"
        yield Problem(
            f"in ensemble {graph.name}, {text}",
            node.place if node is not None else None,
            rule="G20",
            hint="each sends any number of responses, and nothing tells which of them belong together",
        )
        return  # later steps fail for the same reason


def deadlocking_limits(graph: Graph, available: Mapping[str, Mapping[int, ModelConfig]]) -> Iterator[Problem]:
    """Limited steps behind a decoupled step that run on the only instance of its own model: while it is blocked in
    send() until they are over, it keeps that instance.
    """
    joined: nx.DiGraph[int] = nx.DiGraph()
    joined.add_nodes_from(range(len(graph.nodes)))
    joined.add_edges_from(
        (edge.producer, edge.consumer) for edge in graph.edges if GRAPH not in (edge.producer, edge.consumer)
    )
    for node in graph.nodes:
        if not node.decoupled or _instances(node, available) != 1:
            continue
        below = [graph.nodes[n] for n in sorted(nx.descendants(joined, node.index))]
        limit = min((one.max_inflight for one in below if one.max_inflight), default=0)
        for later in below if limit else ():
            if later.model == node.model:
                yield Problem(
                    f"in ensemble {graph.name}, max_inflight_requests {limit} can never be kept: step '{node.name}'"
                    f" keeps the only instance of model '{node.model.name}' while it waits in its send until step"
                    f" '{later.name}' is over, which needs that instance",
                    later.place,
                    rule="G21",
                    hint=f"give '{node.model.name}' another instance, or leave the limit out",
                )


def _instances(node: Node, available: Mapping[str, Mapping[int, ModelConfig]]) -> int:
    config = available[node.model.name][node.model.version]
    return sum(group.count for group in config.active_groups)
