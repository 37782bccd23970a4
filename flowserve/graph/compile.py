"""From an ensemble's checked configuration to the frozen Graph that everything else runs, draws and counts.

Decided here: how nested ensembles are folded in, how nodes are named and numbered, and how large a graph may get.
What is wrong with an ensemble is said by rules.py before anything is folded; only what shows after folding is said
here. Plain models are plain.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import networkx as nx

from flowserve.config.types import ModelConfig
from flowserve.errors import Place, Problem, Problems
from flowserve.graph.conversion import Conversion, conversion, inside
from flowserve.graph.facts import differ_by_batch, shape_text, shapes_meet, side_of
from flowserve.graph.levels import counts_that_differ, pauses_without_end
from flowserve.graph.rules import find_problems
from flowserve.graph.types import DEPTH_LIMIT, GRAPH, Edge, Graph, ModelKey, Node
from flowserve.graph.wiring import Available, Step, Wiring, ensembles_below, port_index, wire
from flowserve.values import TensorSpec

# A few nested ensembles, each using the one before twice, would otherwise fill the memory: twenty such levels are a
# million nodes.
NODE_LIMIT: Final = 10_000
# The parameter of an ensemble that says whom `max_inflight_requests` counts: "request" (each by itself) or "shared".
SCOPE: Final = "max_inflight_scope"


def compile_ensemble(
    config: ModelConfig, version: int, available: Available, failed: Mapping[str, str] | None = None
) -> Graph:
    """An ensemble as one flat graph. Raises Problems holding every violation of every rule.

    `available`: every known deployment by name and version, nested ensembles included. `failed`: why those that are
    known but not available are not, for the message of an ensemble that needs them.
    """
    wiring = wire(config, available, failed or {})
    problems = find_problems(wiring) or list(_too_large(wiring))
    if problems:
        raise Problems(problems)
    folding = _Folding(config, available)
    graph = folding.graph(version)
    problems = [*_disagreements_across_folds(config, folding)]
    problems += [*counts_that_differ(graph), *pauses_without_end(graph, available)]
    if problems:
        raise Problems(problems)
    return graph


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor comes from.

    A call's number (or GRAPH), the index of its output (or of the graph's input), and its name. `spec` is what it is
    after the `reshapes` of the ensembles whose inputs and outputs it came through.
    """

    call: int
    output: int
    tensor: str
    spec: TensorSpec
    reshapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    def entering(self, port: TensorSpec) -> _Source:
        """This, as the steps of an ensemble see it that it enters by an input."""
        return self._as(port.dims, inside(port))

    def leaving(self, port: TensorSpec) -> _Source:
        """This, as it is outside of an ensemble that it leaves by an output."""
        return self._as(inside(port).dims, port)

    def _as(self, dims: tuple[int, ...], spec: TensorSpec) -> _Source:
        if dims == spec.dims:
            return self
        return replace(self, spec=spec, reshapes=(*self.reshapes, (dims, spec.dims)))


@dataclass(frozen=True, slots=True)
class _Call:
    """One model call before numbering.

    `sources[i]` feeds the model's i-th input; None where an optional input is left out.
    """

    name: str
    config: ModelConfig
    version: int
    path: tuple[str, ...]
    place: Place
    order: tuple[int, ...]
    sources: tuple[_Source | None, ...]
    max_inflight: int


@dataclass(slots=True)
class _Scope:
    """One ensemble while it is folded in.

    `prefix` stands before the names of its nodes and tensors, "" for the outermost.
    """

    wiring: Wiring
    tensors: dict[str, _Source]
    prefix: str = ""
    path: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    seen: dict[str, int] = field(default_factory=dict)
    max_inflight: int = 0  # the smallest limit of this ensemble and those around it, 0 where none has one

    def name_step(self, step: Step) -> str:
        """The model's name, "name#2" for its second step in this ensemble."""
        count = self.seen[step.written.model] = self.seen.get(step.written.model, 0) + 1
        return f"{self.prefix}{step.written.model}" + (f"#{count}" if count > 1 else "")


class _Folding:
    """Walks a well-formed ensemble and the ones inside it, collecting model calls; each call's sources stand before
    it.
    """

    def __init__(self, config: ModelConfig, available: Available) -> None:
        self.config = config
        self.available = available
        self.calls: list[_Call] = []
        inputs = {spec.name: _Source(GRAPH, i, spec.name, spec).entering(spec) for i, spec in enumerate(config.inputs)}
        self.outputs = self._fold(_Scope(wire(config, available, {}), inputs, max_inflight=_limit(config)))

    def _fold(self, scope: _Scope) -> list[_Source]:
        """Add the calls of one ensemble; what its outputs come from, in its order."""
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
                source = made[port_index(step.model.outputs, port)]
                scope.tensors[tensor] = replace(source, tensor=scope.prefix + tensor)
        return [scope.tensors[spec.name].leaving(spec) for spec in scope.wiring.config.outputs]

    def _fold_nested(self, scope: _Scope, step: Step, name: str) -> list[_Source]:
        assert step.model is not None
        given = {port: scope.tensors.get(tensor) for port, tensor in step.written.input_map.items()}
        ports = {spec.name: spec for spec in step.model.inputs}
        inner = _Scope(
            wire(step.model, self.available, {}),
            {port: source.entering(ports[port]) for port, source in given.items() if source is not None},
            prefix=f"{name}/",
            path=(*scope.path, step.model.name),
            order=(*scope.order, step.index),
            max_inflight=min(filter(None, (_limit(step.model), scope.max_inflight)), default=0),
        )
        return self._fold(inner)

    def _call(self, scope: _Scope, step: Step, name: str) -> list[_Source]:
        config, version = step.model, step.version
        assert config is not None
        assert version is not None
        # An optional input of a nested ensemble that nobody gave has no source, and so has what it feeds.
        sources = tuple(scope.tensors.get(step.written.input_map.get(spec.name, "")) for spec in config.inputs)
        place = scope.wiring.place(step.written.path)
        order = (*scope.order, step.index)
        self.calls.append(_Call(name, config, version, scope.path, place, order, sources, scope.max_inflight))
        call = len(self.calls) - 1
        return [_Source(call, j, f"{name}/{spec.name}", spec) for j, spec in enumerate(config.outputs)]

    def graph(self, version: int) -> Graph:
        """Number the calls and join them by edges."""
        number = {call: index for index, call in enumerate(self._topological())}
        number[GRAPH] = GRAPH
        nodes = {number[call]: self._node(number[call], made) for call, made in enumerate(self.calls)}
        edges = [
            Edge(source.tensor, number[source.call], source.output, consumer, port, self._conversion(source, wanted))
            for (source, consumer, port), wanted in zip(self._joints(number), self._wanted(), strict=True)
        ]
        return Graph(
            name=self.config.name,
            version=version,
            inputs=self.config.inputs,
            outputs=self.config.outputs,
            max_batch_size=self.config.max_batch_size,
            nodes=tuple(nodes[index] for index in range(len(nodes))),
            edges=tuple(
                sorted(
                    edges,
                    key=lambda edge: (edge.producer, edge.output, edge.consumer == GRAPH, edge.consumer, edge.input),
                )
            ),
            is_ensemble=True,
            shares_limits=shares_limits(self.config),
        )

    def _topological(self) -> Iterator[int]:
        joined: nx.DiGraph[int] = nx.DiGraph()
        joined.add_nodes_from(range(len(self.calls)))
        for consumer, call in enumerate(self.calls):
            joined.add_edges_from((source.call, consumer) for source in call.sources if source and source.call != GRAPH)
        yield from nx.lexicographical_topological_sort(joined, key=lambda call: self.calls[call].order)

    def _node(self, index: int, call: _Call) -> Node:
        return Node(
            index=index,
            name=call.name,
            model=ModelKey(call.config.name, call.version),
            inputs=call.config.inputs,
            outputs=call.config.outputs,
            max_batch_size=call.config.max_batch_size,
            path=call.path,
            place=call.place,
            decoupled=call.config.decoupled,
            max_inflight=call.max_inflight,
        )

    def _joints(self, number: Mapping[int, int]) -> Iterator[tuple[_Source, int, int]]:
        """Every source with who reads it: a node's index and port, or GRAPH and the index of the graph's output."""
        for consumer, call in enumerate(self.calls):
            for port, source in enumerate(call.sources):
                if source is not None:
                    yield source, number[consumer], port
        for port, source in enumerate(self.outputs):
            yield source, GRAPH, port

    def _wanted(self) -> Iterator[tuple[TensorSpec, bool]]:
        """What each of `_joints` is read as, and whether its reader batches."""
        for call in self.calls:
            for source, spec in zip(call.sources, call.config.inputs, strict=True):
                if source is not None:
                    yield spec, call.config.max_batch_size > 0
        for spec in self.config.outputs:
            yield spec, self.config.max_batch_size > 0

    def _conversion(self, source: _Source, wanted: tuple[TensorSpec, bool]) -> Conversion | None:
        spec, wants_batches = wanted
        batches = self.producer(source).max_batch_size > 0
        return conversion(source.reshapes, source.spec.dims, batches, spec.dims, wants_batches)

    def producer(self, source: _Source) -> ModelConfig:
        return self.config if source.call == GRAPH else self.calls[source.call].config


def _limit(config: ModelConfig) -> int:
    return config.ensemble.max_inflight_requests if config.ensemble else 0


def shares_limits(config: ModelConfig) -> bool:
    """Whether an ensemble's `max_inflight_requests` is for all its requests together."""
    return config.parameters.get(SCOPE) == "shared"


def _too_large(wiring: Wiring) -> Iterator[Problem]:
    """Count the nodes of all nested ensembles, innermost first, before any of them is unfolded."""
    below = ensembles_below(wiring.config, wiring.available)
    sizes: dict[str, int] = {}
    depths: dict[str, int] = {}
    for name in reversed(list(nx.topological_sort(below))):
        inside = wire(below.nodes[name]["config"], wiring.available, {})
        sizes[name] = sum(sizes.get(step.written.model, 1) for step in inside.steps)
        depths[name] = 1 + max((depths.get(step.written.model, 0) for step in inside.steps), default=0)
    name = wiring.name
    place = wiring.place("ensemble_scheduling")
    if sizes[name] > NODE_LIMIT:
        yield Problem(
            f"ensemble '{name}' has {sizes[name]} steps when its nested ensembles are unfolded; at most"
            f" {NODE_LIMIT} are allowed",
            place,
            rule="G19",
        )
    if depths[name] > DEPTH_LIMIT:
        yield Problem(
            f"ensemble '{name}' nests ensembles {depths[name]} deep; at most {DEPTH_LIMIT} are allowed",
            place,
            rule="G19",
        )


def _disagreements_across_folds(config: ModelConfig, folding: _Folding) -> Iterator[Problem]:
    """A -1 in a nested ensemble's own inputs and outputs meets everything; what it stood between must meet too."""
    own = {GRAPH: GRAPH} | {call: call for call in range(len(folding.calls))}
    for source, consumer, port in folding._joints(own):
        reader = config if consumer == GRAPH else folding.calls[consumer].config
        place = config.source.place(f"output[{port}]") if consumer == GRAPH else folding.calls[consumer].place
        spec = config.outputs[port] if consumer == GRAPH else reader.inputs[port]
        writer = folding.producer(source)
        first = side_of(writer.name, source.spec, writer.max_batch_size > 0)
        second = side_of(reader.name, spec, reader.max_batch_size > 0)
        if not shapes_meet(first, second) and not differ_by_batch(first, second):
            yield Problem(
                f"in ensemble {config.name}, ensemble tensor {source.tensor}: inconsistent shape: {shape_text(first)}"
                " is inferred from"
                f" model {first.owner} while {shape_text(second)} is inferred from model {second.owner}",
                place,
                rule="G15",
                hint="a dimension of -1 in a nested ensemble hides this",
            )
