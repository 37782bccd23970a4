"""Random models, graphs and requests for the scheduling machines.

Decided here: what a random world looks like. Everything is drawn from a `random.Random`, so that one description
serves twice: a seeded one repeats for ever (the simulator's seeds), Hypothesis's own shrinks (`worlds`). A world also
says how each request must end, worked out without any machine, by walking the graph: so that a test can tell a wrong
answer from a right one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any

from hypothesis import strategies as st

from flowserve.config.types import LimitedResource, RateLimiter
from flowserve.graph.plan import NO_SLOT, Plan, make_plan
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.scheduling.affinity import Affine, Moves
from flowserve.scheduling.batcher import Batcher, BatchPolicy, DynamicBatcher, OneByOne
from flowserve.scheduling.limiter import Needs
from flowserve.scheduling.queues import LevelPolicy, Levels, PolicyBatcher
from flowserve.values import DType, TensorSpec

MOVES = Moves(each_ns=7, bytes_per_ns=2)  # worth waiting for in a world where a batch takes up to 250 ns
FIXED = 4  # the width that inputs of fixed shape want
NOTHING = -7  # what an input that is not there counts as in a content


@dataclass(frozen=True)
class SimModel:
    """A model whose outputs say what went into them. `policy` None: the default scheduler. `levels` None: one line.

    `shortest_ns` to `longest_ns` is how long a batch takes; where both are 0 it runs inline, inside `run`.
    """

    number: int
    key: ModelKey
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    policy: BatchPolicy | None
    instances: int
    is_pure: bool
    shortest_ns: int
    longest_ns: int
    needs: tuple[Needs, ...] = ()  # of each instance, where the world has a rate limiter
    levels: Levels | None = None
    keeps_order: bool = False
    devices: tuple[int, ...] = ()  # of each instance, where a request stays on the device its tensors lie on

    def batcher(self) -> Batcher:
        if self.devices:
            return Affine(self._line, self.max_batch_size, self.devices.__getitem__, residence, MOVES)
        if self.levels is not None and self.policy is not None:
            return PolicyBatcher(self.policy, self.levels)
        return self._line()

    def _line(self) -> Batcher:
        return OneByOne() if self.policy is None else DynamicBatcher(self.policy)

    def level_policy(self, request: SimRequest) -> LevelPolicy:
        """What waiting means for this request."""
        if self.policy is None or self.levels is None:
            return LevelPolicy()
        exists = 1 <= request.priority <= self.levels.count
        level = request.priority if exists else self.levels.default
        return self.levels.policies.get(level, self.levels.policy)

    def patience_ns(self, request: SimRequest) -> int | None:
        """How long it waits at most before it is refused, or None."""
        policy = self.level_policy(request)
        if policy.is_delayed or not policy.timeout_ns:
            return None
        own_ns = request.timeout_ns if policy.may_override else 0
        return min(own_ns, policy.timeout_ns) if own_ns else policy.timeout_ns

    def content(self, output: int, inputs: tuple[int, ...]) -> int:
        """What output number `output` holds when the inputs hold `inputs`. Integers hash alike in every process."""
        return hash((self.number, output, *inputs))


@dataclass(frozen=True)
class SimRequest:
    """One request. It raises in the models it is `poison` for, fails alone in those of `faults`, and those of `omits`
    leave out their last output for it. `widths[i]` is the width of input i, None where it is not given. `wanted`: the
    outputs it asks for, None for all. `leaves_after_ns`: when its caller gives up. `follows`: the request whose end
    makes this one arrive. `priority` and `timeout_ns` are what it says itself, 0 for nothing.
    """

    number: int
    graph: int
    arrives_ns: int
    rows: int
    widths: tuple[int | None, ...]
    wanted: tuple[str, ...] | None = None
    poison: frozenset[ModelKey] = frozenset()
    faults: frozenset[ModelKey] = frozenset()
    omits: frozenset[ModelKey] = frozenset()
    leaves_after_ns: int | None = None
    follows: int | None = None
    priority: int = 0
    timeout_ns: int = 0

    def content(self, i: int) -> int:
        return hash((self.number, i, 1 << 20))


@dataclass(frozen=True)
class World:
    """Models, the graphs over them, and the requests that will come. `overtaken_max`: where there is a limiter, how
    often it lets a model be overtaken.
    """

    models: tuple[SimModel, ...]
    graphs: tuple[Graph, ...]
    requests: tuple[SimRequest, ...]
    overtaken_max: int | None = None
    by_key: dict[ModelKey, SimModel] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_key", {model.key: model for model in self.models})

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each request."""
        return tuple(make_plan(self.graphs[request.graph], request.wanted) for request in self.requests)

    def right_answer(self, request: SimRequest) -> list[int | None] | None:
        """What each output must hold (None: left out), or None where the request must fail."""
        plan = self.plans[request.number]
        held: dict[int, tuple[int, int]] = {}  # slot -> content, width
        for i, width in enumerate(request.widths):
            if width is not None:
                held[i] = (request.content(i), width)
        for node in plan.nodes:
            if not node.writes:
                continue  # nobody wants what it would make
            model = self.by_key[node.model]
            inputs = [held.get(slot) for slot in node.inputs]
            for found, spec in zip(inputs, model.inputs, strict=True):
                if found is None and not spec.optional:
                    return None
                if found is not None and spec.dims == (FIXED,) and found[1] != FIXED:
                    return None
            if model.key in request.poison or model.key in request.faults:
                return None
            contents = tuple(NOTHING if found is None else found[0] for found in inputs)
            width = next((found[1] for found in inputs if found is not None), FIXED)
            for j, slot in enumerate(node.outputs):
                if slot != NO_SLOT and not is_omitted(model, request, j):
                    fixed = model.outputs[j].dims == (FIXED,)
                    held[slot] = (model.content(j, contents), FIXED if fixed else width)
        return [held[slot][0] if slot in held else None for slot in plan.output_slots]


def is_omitted(model: SimModel, request: SimRequest, output: int) -> bool:
    return model.key in request.omits and output == len(model.outputs) - 1


# ---------------------------------------------------------------------------------------------------------- drawing


def draw_policy(random: Random, max_batch_size: int) -> BatchPolicy:
    """Any policy the configuration rules allow for that maximum."""
    sizes = range(1, max_batch_size + 1)
    preferred = sorted(random.sample(sizes, random.randint(1, min(2, max_batch_size)))) or [max_batch_size]
    if random.random() < 0.5:
        preferred = [max_batch_size]
    return BatchPolicy(max_batch_size, tuple(preferred), random.choice([0, 0, 1, 15, 100]))


def draw_levels(random: Random, *, keeps_order: bool = False) -> Levels:
    """Any levels and queue policies the configuration rules allow."""

    def policy() -> LevelPolicy:
        timeout_ns = random.choice([0, 0, 5, 30, 100])
        return LevelPolicy(
            max_size=random.choice([0, 0, 1, 2, 4]),
            timeout_ns=timeout_ns,
            may_override=random.random() < 0.5,
            is_delayed=random.random() < 0.5 and not (keeps_order and timeout_ns),
        )

    count = random.choice([0, 1] if keeps_order else [0, 2, 3])
    policies = {level: policy() for level in range(1, count + 1) if random.random() < 0.5}
    return Levels(count, random.randint(1, count) if count else 0, policy(), policies)


def _draw_spec(random: Random, name: str, *, may_be_optional: bool = False) -> TensorSpec:
    dims = (random.choice([-1, -1, FIXED]),)
    return TensorSpec(name, DType.FP32, dims, optional=may_be_optional and random.random() < 0.3)


def draw_model(random: Random, number: int, *, batching: bool) -> SimModel:
    limit = random.choice([1, 2, 4, 8]) if batching else 0
    inputs = [_draw_spec(random, f"I{i}", may_be_optional=i > 0) for i in range(random.randint(1, 3))]
    shortest = random.choice([0, 0, 1, 10, 50])
    keeps_order = random.random() < 0.2
    return SimModel(
        number=number,
        key=ModelKey(f"model{number}", 1),
        inputs=tuple(inputs),
        outputs=tuple(_draw_spec(random, f"O{j}") for j in range(random.randint(1, 2))),
        max_batch_size=limit,
        policy=draw_policy(random, limit) if batching and random.random() < 0.75 else None,
        instances=random.randint(1, 3),
        is_pure=random.random() < 0.6,
        shortest_ns=shortest,
        longest_ns=shortest * random.choice([1, 1, 5]),
        levels=draw_levels(random, keeps_order=keeps_order) if random.random() < 0.4 else None,
        keeps_order=keeps_order,
    )


def draw_needs(random: Random, instances: int) -> tuple[Needs, ...]:
    """What each instance of a model needs: of none to two resources on one of two devices, and of one for all."""
    amounts = {name: random.randint(0, 4) for name in ("memory", "cores")}
    shared = random.randint(0, 2)
    priority = random.choice([1, 1, 2, 5])
    limits = [
        (random.randrange(2), [LimitedResource(name, count) for name, count in amounts.items()])
        for _ in range(instances)
    ]
    return tuple(
        Needs.of(RateLimiter((*here, LimitedResource("licence", shared, is_global=True)), priority), device)
        for device, here in limits
    )


def draw_devices(random: Random, model: SimModel) -> tuple[int, ...]:
    """The device of each instance of a model; () where its queue is one line, whatever its instances are on."""
    if model.levels is not None or model.keeps_order:
        return ()
    return tuple(random.randrange(2) for _ in range(model.instances))


def residence(handle: Any) -> tuple[int, int]:
    """Where a handle of the simulator lies, and how many bytes it has."""
    return handle.device, max(handle.stop - handle.start, 1) * handle.width


def plain_graph(model: SimModel) -> Graph:
    """A model as a graph of one node."""
    node = Node(0, model.key.name, model.key, model.inputs, model.outputs, model.max_batch_size)
    edges = [Edge(spec.name, GRAPH, i, 0, i) for i, spec in enumerate(model.inputs)]
    edges += [Edge(spec.name, 0, j, GRAPH, j) for j, spec in enumerate(model.outputs)]
    return Graph(model.key.name, 1, model.inputs, model.outputs, model.max_batch_size, (node,), tuple(edges))


def chain_graph(name: str, models: list[SimModel]) -> Graph:
    """First output to first input, one model after the other."""
    nodes = tuple(
        Node(i, f"{model.key.name}#{i}", model.key, model.inputs, model.outputs, model.max_batch_size)
        for i, model in enumerate(models)
    )
    edges = [Edge("in", GRAPH, 0, 0, 0)]
    edges += [Edge(f"t{i}", i - 1, 0, i, 0) for i in range(1, len(nodes))]
    edges.append(Edge("out", len(nodes) - 1, 0, GRAPH, 0))
    limit = min(model.max_batch_size for model in models)
    ends = models[0].inputs[:1], models[-1].outputs[:1]
    return Graph(name, 1, *ends, limit, nodes, tuple(edges), is_ensemble=True)


def draw_graph(random: Random, name: str, models: list[SimModel]) -> Graph:
    """A random well-formed ensemble: fan-out, joins, one tensor read twice by a step, optional inputs unfed.

    Every tensor that no step reads is an output, and some that are read are outputs too.
    """
    sources = [(GRAPH, i) for i in range(random.randint(1, 2))]
    nodes: list[Node] = []
    edges: list[Edge] = []
    read: set[tuple[int, int]] = set()
    for index in range(random.randint(1, 6)):
        model = random.choice(models)
        label = f"{model.key.name}#{index}"
        nodes.append(Node(index, label, model.key, model.inputs, model.outputs, model.max_batch_size))
        for i, spec in enumerate(model.inputs):
            if spec.optional and random.random() < 0.5:
                continue
            producer, output = random.choice(sources[-4:] if random.random() < 0.7 else sources)
            read.add((producer, output))
            edges.append(Edge(f"t{producer}_{output}", producer, output, index, i))
        sources += [(index, j) for j in range(len(model.outputs))]
    # Graph inputs that nobody read are no inputs; the others are numbered again.
    used = [i for producer, i in sources if producer == GRAPH and (GRAPH, i) in read]
    edges = [
        Edge(e.tensor, e.producer, used.index(e.output) if e.producer == GRAPH else e.output, e.consumer, e.input)
        for e in edges
    ]
    results = [s for s in sources if s[0] != GRAPH and (s not in read or random.random() < 0.2)]
    edges += [Edge(f"t{producer}_{output}", producer, output, GRAPH, k) for k, (producer, output) in enumerate(results)]
    return Graph(
        name,
        1,
        tuple(TensorSpec(f"in{k}", DType.FP32, (-1,)) for k in range(len(used))),
        tuple(replace(nodes[producer].outputs[output], name=f"out{k}") for k, (producer, output) in enumerate(results)),
        min(node.max_batch_size for node in nodes),
        tuple(nodes),
        tuple(edges),
        is_ensemble=True,
    )


def draw_request(random: Random, number: int, index: int, graph: Graph) -> SimRequest:
    keys = sorted({node.model for node in graph.nodes})

    def some(chance: float) -> frozenset[ModelKey]:
        return frozenset([random.choice(keys)]) if random.random() < chance else frozenset()

    widths: list[int | None] = []
    for spec in graph.inputs:
        width = FIXED if spec.dims == (FIXED,) or random.random() < 0.8 else 3
        widths.append(None if spec.optional and random.random() < 0.5 else width)
    limit = graph.max_batch_size
    names = [spec.name for spec in graph.outputs]
    asks = graph.is_ensemble and random.random() < 0.2
    return SimRequest(
        number=number,
        graph=index,
        arrives_ns=random.randint(0, 20) * 10,
        rows=random.choice([1, 1, 1, random.randint(0, limit)]) if limit else 1,
        widths=tuple(widths),
        wanted=tuple(random.sample(names, random.randint(1, len(names)))) if asks else None,
        poison=some(0.06),
        faults=some(0.05),
        omits=some(0.08),
        leaves_after_ns=random.randint(0, 12) * 10 if random.random() < 0.15 else None,
        follows=random.randrange(number) if number and random.random() < 0.15 else None,
        priority=random.choice([0, 0, 1, 2, 3, 9]),
        timeout_ns=random.choice([0, 0, 3, 50]),
    )


def draw_world(random: Random) -> World:
    """Up to four models, each served alone, ensembles over them that share them, and up to forty requests."""
    batching = random.random() < 0.85
    models = [draw_model(random, number, batching=batching) for number in range(random.randint(1, 4))]
    graphs = [plain_graph(model) for model in models[: random.randint(0, len(models))]]
    graphs += [draw_graph(random, f"ensemble{i}", models) for i in range(random.randint(1, 3))]
    requests = []
    for number in range(random.randint(1, 40)):
        index = random.randrange(len(graphs))
        requests.append(draw_request(random, number, index, graphs[index]))
    overtaken_max = random.choice([None, None, 0, 1, 16])
    if overtaken_max is not None:
        models = [replace(model, needs=draw_needs(random, model.instances)) for model in models]
    elif random.random() < 0.4:
        models = [replace(model, devices=draw_devices(random, model)) for model in models]
    return World(tuple(models), tuple(graphs), tuple(requests), overtaken_max)


def worlds() -> st.SearchStrategy[World]:
    """Random worlds that shrink."""
    return st.randoms(use_true_random=False).map(draw_world)


def policies(max_batch_size: int = 8) -> st.SearchStrategy[BatchPolicy]:
    """Any policy the configuration rules allow, with maxima up to `max_batch_size`."""
    return st.tuples(st.randoms(use_true_random=False), st.integers(1, max_batch_size)).map(
        lambda drawn: draw_policy(*drawn)
    )
