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

from flowserve.config.types import Fill, ModelConfig
from flowserve.errors import Problem, Problems
from flowserve.graph import rules
from flowserve.graph.regions import SPREAD, Chains, are_nested, ref_of
from flowserve.graph.spaces import Arrangement, arrange
from flowserve.graph.types import (
    DEPTH_LIMIT,
    DERIVED,
    GRAPH,
    Derivation,
    Derived,
    Edge,
    Graph,
    Node,
    Ref,
    Space,
    conversion,
    inside,
    node_of,
)
from flowserve.graph.wiring import (
    AvailableModels,
    Declaration,
    WiredStep,
    Wiring,
    ensembles_below,
    port_index,
    shapes_meet,
    wire,
)
from flowserve.values import DType, TensorSpec

# Nested ensembles grow exponentially if each uses the inner one twice: twenty such levels are a million nodes.
NODE_LIMIT: Final = 10_000
# The parameter of an ensemble for the scope of `max_inflight_requests`: "request" (each separately) or "shared".
SCOPE: Final = "max_inflight_scope"


def compile_ensemble(
    config: ModelConfig, version: int, available: AvailableModels, failed: Mapping[str, str] | None = None
) -> Graph:
    """An ensemble as one flat graph. Raises Problems with every violation of every rule.

    `available`: every known deployment by name and version, nested ensembles included. `failed`: the reasons of known
    deployments that are not available, for the messages of ensembles that need them.
    """
    wired = wire(config, available, failed or {})
    problems = rules.ensemble_problems(wired) or list(_too_large(wired))
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

    `spec` is its declaration after the `reshapes` of the ensembles whose inputs and outputs it passed through. It is a
    tensor of `space`. If it is derived from others, `derived` is its number, and `makers` are the calls (or GRAPH) with
    their outputs that it is made from; `call` is the first. `fill`: how it is filled outside of its space.
    """

    call: int
    output: int
    tensor: str
    spec: TensorSpec
    reshapes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    space: int = 0
    derived: int = -1
    makers: tuple[tuple[int, int], ...] = ()
    fill: Fill | None = None
    batches: bool = False

    @property
    def ref(self) -> Ref:
        return (self.call, self.output) if self.derived < 0 else (DERIVED, self.derived)

    @property
    def made_by(self) -> tuple[tuple[int, int], ...]:
        return self.makers or ((self.call, self.output),)

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


@dataclass
class _Scope:
    """One ensemble while it is folded in.

    `prefix` precedes the names of its nodes and tensors, "" for the outermost.
    """

    wiring: Wiring
    tensors: dict[str, _Source]
    prefix: str = ""
    path: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    seen: dict[str, int] = field(default_factory=dict)
    max_inflight: int = 0  # the smallest limit of this ensemble and those around it, 0 if there is none
    spaces: dict[int, int] = field(default_factory=dict)  # the number in the graph of each local space
    branches: dict[str, list[_Source]] = field(default_factory=dict)  # of tensors that several steps write

    def __post_init__(self) -> None:
        self.arrangement: Arrangement = arrange(self.wiring)

    def name_step(self, step: WiredStep) -> str:
        """The step's name or the model's, "name#2" for the second of that name in this ensemble."""
        name = step.written.name or step.written.model
        count = self.seen[name] = self.seen.get(name, 0) + 1
        return f"{self.prefix}{name}" + (f"#{count}" if count > 1 else "")


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

    def __init__(self, config: ModelConfig, available: AvailableModels) -> None:
        self.config = config
        self.available = available
        self.calls: list[_Call] = []
        self.borders = _Borders(config.max_batch_size > 0)
        inputs = {
            spec.name: _Source(GRAPH, i, spec.name, spec, batches=config.max_batch_size > 0).entering(spec)
            for i, spec in enumerate(config.inputs)
        }
        self.outputs = self._fold(
            _Scope(wire(config, available, {}), inputs, max_inflight=config.max_inflight_requests, spaces={0: 0})
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
                source = made[port_index(step.model.outputs, port)]
                self._write(scope, tensor, replace(source, tensor=scope.prefix + tensor))
        outside = scope.spaces[0]
        return [
            self.borders.seen_from(outside, scope.tensors[spec.name]).leaving(spec)
            for spec in scope.wiring.config.outputs
        ]

    def _write(self, scope: _Scope, tensor: str, source: _Source) -> None:
        """Record that a step writes a tensor. The tensors of several writers are merged with the last of them."""
        arrangement = scope.arrangement
        fill = arrangement.fills.get(tensor)
        ends = [end for end in scope.wiring.writers[tensor] if not end.field]
        if len(ends) > 1:
            branches = scope.branches.setdefault(tensor, [])
            branches.append(source)
            if len(branches) < len(ends):
                return
            home = scope.spaces[arrangement.homes[tensor]]
            scope.tensors[tensor] = self.borders.merged(home, branches, fill)
        else:
            scope.tensors[tensor] = replace(source, fill=fill)
        if fill is not None and fill.present:
            sources = scope.branches.get(tensor, [source])
            scope.tensors[fill.present] = self.borders.present(
                scope.prefix + fill.present, sources, scope.tensors[tensor]
            )

    def _enter(self, scope: _Scope, local: int) -> int:
        """The number in the graph of a space of an ensemble; the space is added at its first use."""
        if local not in scope.spaces:
            space = scope.arrangement.spaces[local]
            parent = self._enter(scope, space.parent)
            names = [space.test.tensor] if space.test else [*space.each.tensors] if space.each else []
            if space.each is not None and space.each.count:
                names.append(space.each.count)
            opens = tuple([self.borders.seen_from(parent, scope.tensors[name]) for name in names])
            others = scope.arrangement.tests_beside(space) if space.test and space.test.otherwise else []
            place = scope.wiring.place(space.path)
            made = Space(0, parent, "", (), space.test, tuple(others), space.each, place=place, depth=len(scope.path))
            scope.spaces[local] = self.borders.open(made, opens, scope.prefix)
        return scope.spaces[local]

    def _inputs(self, scope: _Scope, step: WiredStep) -> dict[str, _Source]:
        """The sources of a step's inputs, by the port of its model, as tensors of the step's space."""
        space = self._enter(scope, scope.arrangement.of_step[step.index])
        found = {port: scope.tensors.get(tensor) for port, tensor in step.written.input_map.items()}
        return {port: self.borders.seen_from(space, one) for port, one in found.items() if one is not None}

    def _fold_nested(self, scope: _Scope, step: WiredStep, name: str) -> list[_Source]:
        assert step.model is not None
        given = self._inputs(scope, step)
        ports = {spec.name: spec for spec in step.model.inputs}
        inner = _Scope(
            wire(step.model, self.available, {}),
            {port: source.entering(ports[port]) for port, source in given.items()},
            prefix=f"{name}/",
            path=(*scope.path, step.model.name),
            order=(*scope.order, step.index),
            max_inflight=min(filter(None, (step.model.max_inflight_requests, scope.max_inflight)), default=0),
            spaces={0: self._enter(scope, scope.arrangement.of_step[step.index])},
        )
        return self._fold(inner)

    def _call(self, scope: _Scope, step: WiredStep, name: str) -> list[_Source]:
        config, version = step.model, step.version
        assert config is not None
        assert version is not None
        # An omitted optional input of a nested ensemble has no source, and neither have the inputs it feeds.
        given = self._inputs(scope, step)
        sources = tuple(given.get(spec.name) for spec in config.inputs)
        call = len(self.calls)
        node = node_of(config, version, call, name, scope.wiring.place(step.written.path))
        space = self._enter(scope, scope.arrangement.of_step[step.index])
        node = replace(node, path=scope.path, max_inflight=scope.max_inflight, space=space)
        self.calls.append(_Call(node, config, (*scope.order, step.index), sources))
        batches = config.max_batch_size > 0 or self.is_divided(call)
        return [
            _Source(call, j, f"{name}/{spec.name}", spec, space=space, batches=batches)
            for j, spec in enumerate(config.outputs)
        ]

    def graph(self, version: int) -> Graph:
        """Number the calls and join them by edges."""
        number = {call: index for index, call in enumerate(self._topological())}
        number[GRAPH] = GRAPH
        nodes = {number[made.node.index]: made.node for made in self.calls}
        edges: list[Edge] = []
        for source, reader, port, spec, config in self.joints():
            wants_batches = config.max_batch_size > 0
            batches = wants_batches if self.is_divided(reader) else source.batches
            change = conversion(source.reshapes, source.spec.dims, batches, spec.dims, wants_batches)
            edges += [
                Edge(source.tensor, number[call], output, number[reader], port, change, source.derived)
                for call, output in dict.fromkeys(source.made_by)
            ]
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
            spaces=tuple(replace(one, opens=_renumbered(one.opens, number)) for one in self.borders.spaces[1:]),
            derived=tuple(
                replace(one, reads=_renumbered(one.reads, number), of=_renumbered(one.of, number))
                for one in self.borders.derived
            ),
        )

    def is_divided(self, reader: int) -> bool:
        """Whether a call runs in a space with a batch dimension: its rows are divided as the model needs them."""
        space = 0 if reader == GRAPH else self.calls[reader].node.space
        return space > 0 and self.borders.has_rows(space)

    def _topological(self) -> Iterator[int]:
        joined: nx.DiGraph[int] = nx.DiGraph()
        joined.add_nodes_from(range(len(self.calls)))
        for consumer, call in enumerate(self.calls):
            needs = {one for source in call.sources if source for one, _ in source.made_by}
            needs |= self.borders.openers(call.node.space)
            joined.add_edges_from((one, consumer) for one in needs if one != GRAPH)
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


class _Borders:
    """The spaces of the graph, and the tensors that are derived where they begin and end. `batches`: whether the graph
    has a batch dimension.
    """

    def __init__(self, batches: bool) -> None:
        self.spaces = [Space(0, 0, "", (), has_rows=batches)]
        self.derived: list[Derived] = []
        self._openers: list[set[int]] = [set()]  # of each space: the calls that decide its rows
        self._known: dict[tuple[object, ...], _Source] = {}

    def has_rows(self, space: int) -> bool:
        return self.spaces[space].has_rows

    def openers(self, space: int) -> set[int]:
        """The calls that decide which rows a space and those around it have."""
        return self._openers[space]

    def open(self, space: Space, opens: tuple[_Source, ...], prefix: str) -> int:
        index = len(self.spaces)
        name = f"{prefix}{space.title}"
        if any(one.name == name for one in self.spaces):
            name += f"#{1 + sum(one.name.partition('#')[0] == name for one in self.spaces)}"
        has_rows = space.each is not None or self.has_rows(space.parent)
        refs = tuple(self._settled(source).ref for source in opens)
        self.spaces.append(replace(space, index=index, name=name, opens=refs, has_rows=has_rows))
        makers = {call for source in opens for call, _ in source.made_by}
        self._openers.append(self._openers[space.parent] | makers)
        return index

    def path(self, space: int) -> list[int]:
        """The spaces from the outermost to this one."""
        found = [space]
        while found[-1]:
            found.append(self.spaces[found[-1]].parent)
        return found[::-1]

    def seen_from(self, space: int, source: _Source) -> _Source:
        """A tensor of another space as a tensor of `space`. A tensor that is read outside of its condition has a
        `fill`, or is left out of a response.
        """
        path = self.path(space)
        while source.space not in path:
            source = self._leave(source)
        for inner in path[path.index(source.space) + 1 :]:
            source = self._take(inner, source)
        return source

    def merged(self, space: int, branches: list[_Source], fill: Fill | None) -> _Source:
        """The tensor of `space` that steps of several conditions write, each for other rows."""
        branches = [self._settled(one) for one in branches]
        first = branches[0]
        dims = tuple(
            sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*(one.spec.dims for one in branches), strict=True)
        )
        spec = replace(first.spec, dims=dims)
        return self._derive(Derivation.MERGE, space, replace(first, spec=spec, fill=fill), branches)

    def present(self, tensor: str, written: list[_Source], source: _Source) -> _Source:
        """The BOOL tensor that states which rows or items of `source`, the merged tensor of these, were written. It is
        a tensor of the space around theirs.
        """
        home = source.space if len(written) > 1 else self.spaces[source.space].parent
        inner = [one for one in written if one.space != home]
        is_all = len(inner) < len(written)  # written for every row
        spec = TensorSpec(tensor, DType.BOOL, (1,))
        like = replace(inner[0], tensor=tensor, spec=spec, fill=Fill(tensor), reshapes=())
        made = Derived(
            Derivation.PRESENT,
            home,
            replace(spec, dims=(-1, 1)) if self.spaces[inner[0].space].each else spec,
            (),
            tuple(one.space for one in inner),
            1.0 if is_all else 0.0,
            of=tuple(one.ref for one in inner),
        )
        self.derived.append(made)
        makers = tuple(dict.fromkeys(maker for one in inner for maker in one.made_by))
        batches = self.has_rows(home)
        return replace(like, spec=made.spec, space=home, derived=len(self.derived) - 1, makers=makers, batches=batches)

    def _take(self, inner: int, source: _Source) -> _Source:
        """A tensor of the space around `inner` as one of `inner`."""
        source = self._settled(source)
        space = self.spaces[inner]
        each = space.each
        if each is None or source.ref not in space.opens[: len(each.tensors)]:
            return self._derive(Derivation.TAKE, inner, source, [source])
        spec = replace(source.spec, dims=source.spec.dims[1:])
        return self._derive(Derivation.ITEMS, inner, replace(source, spec=spec), [source])

    def _leave(self, source: _Source) -> _Source:
        """A tensor as one of the space around its own."""
        source = self._settled(source)
        space = self.spaces[source.space]
        if space.each is None:
            return self._derive(Derivation.MERGE, space.parent, source, [source])
        spec = replace(source.spec, dims=(-1, *source.spec.dims))
        return self._derive(Derivation.GATHER, space.parent, replace(source, spec=spec), [source])

    def _settled(self, source: _Source) -> _Source:
        """A tensor at a border of a space in the shape that the ensemble of this border declares: items are a dimension
        of that shape, and all branches of a merge have the same one.
        """
        return self._derive(Derivation.RESHAPE, source.space, source, [source]) if source.reshapes else source

    def _derive(self, how: Derivation, space: int, like: _Source, reads: list[_Source]) -> _Source:
        """The tensor of `space` derived from `reads`, each of which enters or leaves a space or is reshaped; `like` is
        its source apart from that.
        """
        key = (how, space, like.spec, like.reshapes, *(one.ref for one in reads))
        if key not in self._known:
            inner = tuple(space if how in (Derivation.TAKE, Derivation.ITEMS) else one.space for one in reads)
            fill = like.fill
            value = None if fill is None else fill.string.encode() if like.spec.dtype is DType.BYTES else fill.value
            if how is Derivation.GATHER and value is None:
                value = b"" if like.spec.dtype is DType.BYTES else 0.0
            refs = tuple(one.ref for one in reads)
            self.derived.append(Derived(how, space, like.spec, refs, inner, value, like.reshapes))
            makers = tuple(dict.fromkeys(maker for one in reads for maker in one.made_by))
            made = replace(like, space=space, derived=len(self.derived) - 1, makers=makers, reshapes=())
            batches = like.batches and how in (Derivation.TAKE, Derivation.MERGE, Derivation.RESHAPE)
            batches |= how is not Derivation.RESHAPE and self.has_rows(space)
            self._known[key] = replace(made, call=makers[0][0], output=makers[0][1], batches=batches)
        return self._known[key]


def _renumbered(refs: tuple[Ref, ...], number: Mapping[int, int]) -> tuple[Ref, ...]:
    return tuple(ref if ref[0] == DERIVED else (number[ref[0]], ref[1]) for ref in refs)


def shares_limits(config: ModelConfig) -> bool:
    """Whether an ensemble's `max_inflight_requests` applies to all its requests together."""
    return config.parameters.get(SCOPE) == "shared"


def _too_large(wiring: Wiring) -> Iterator[Problem]:
    """Size limits, checked by counting the nodes of all nested ensembles, innermost first, before folding."""
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
        text = f"ensemble '{name}' has {sizes[name]} steps when its nested ensembles are unfolded"
        yield Problem(f"{text}; at most {NODE_LIMIT} are allowed", place, "G19")
    if depths[name] > DEPTH_LIMIT:
        text = f"ensemble '{name}' nests ensembles {depths[name]} deep"
        yield Problem(f"{text}; at most {DEPTH_LIMIT} are allowed", place, "G19")


def _disagreements_across_folds(config: ModelConfig, folding: _Folding) -> Iterator[Problem]:
    """A -1 in a nested ensemble's inputs and outputs matches everything; the tensors on both sides must match too."""
    for source, consumer, port, spec, reader in folding.joints():
        place = config.source.place(f"output[{port}]") if consumer == GRAPH else folding.calls[consumer].node.place
        is_divided = folding.is_divided(consumer)
        first = Declaration(folding.producer(source), source.spec, source.batches or is_divided)
        second = Declaration(reader, spec, True if is_divided else None)
        if not shapes_meet(first, second):
            text = rules.inconsistent_shape(config.name, source.tensor, first, second)
            yield Problem(text, place, "G15", "a dimension of -1 in a nested ensemble hides this")


def mismatched_iterations(graph: Graph) -> Iterator[Problem]:
    """Steps, and responses, that combine tensors of different decoupled steps that are not nested."""
    found = Chains(graph, graph.edges)
    for reader in (*(node.index for node in graph.nodes), GRAPH):
        read = [ref_of(edge) for edge in graph.edges if edge.consumer == reader]
        if reader != GRAPH and graph.nodes[reader].space:
            read.append((SPREAD, graph.nodes[reader].space))
        chains = [found.of(maker) for ref in dict.fromkeys(read) for maker in dict.fromkeys(found.makers(ref))]
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
