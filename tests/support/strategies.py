"""Random models, graphs and requests for the scheduler: records, and functions that draw them.

`SimModel`, `SimRequest` and `World` are the records. A world also computes the correct answer of each request, by
walking the graph without a scheduler, so that a wrong response is detected. All values are drawn from a
`random.Random`: a seeded one repeats its world (`Sim(seed)`), Hypothesis's own shrinks (`worlds`).
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
from flowserve.scheduling.affinity import NO_DEVICE, AffinityBatcher, CopyCost
from flowserve.scheduling.queue import PLAIN, Batcher, BatchPolicy, LevelPolicy, Levels, Queue
from flowserve.scheduling.rate_limit.limiter import Needs
from flowserve.values import DType, TensorSpec

COPY_COST = CopyCost(each_ns=7, bytes_per_ns=2)  # comparable to the duration of a batch, up to 250 ns
FIXED = 4  # the width of inputs of fixed shape
NOTHING = -7  # the content of an input that is not given


@dataclass(slots=True, weakref_slot=True, eq=False)
class Handle:
    """A simulated tensor: its facts and its content. `block` is the run that computed it, `device` its device."""

    content: int
    width: int
    start: int
    stop: int
    block: object = None
    device: int = NO_DEVICE

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.width,) if self.stop < 0 else (self.stop - self.start, self.width)


@dataclass(frozen=True)
class SimModel:
    """A model whose outputs are hashes of its inputs. `policy` None: the default scheduler. `levels` None: no levels.

    `shortest_ns` to `longest_ns` is the duration of a batch; if both are 0 it runs inline. `is_routed`: its workers
    pass batches to those of other such models, if its queue allows it. `is_cached`: it has a response cache.
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
    needs: tuple[Needs, ...] = ()  # of each instance, if the world has a rate limiter
    levels: Levels | None = None
    keeps_order: bool = False
    devices: tuple[int, ...] = ()  # of each instance, with device affinity
    is_routed: bool = False
    is_cached: bool = False

    def batcher(self) -> Batcher:
        if self.devices:
            return AffinityBatcher(
                self._fifo_queue, self.max_batch_size, self.devices.__getitem__, handle_residence, COPY_COST
            )
        return Queue(self.policy, self.levels or PLAIN) if self.policy is not None else self._fifo_queue()

    def _fifo_queue(self) -> Queue:
        return Queue(self.policy or BatchPolicy.single())

    def level_policy(self, request: SimRequest) -> LevelPolicy:
        """The queue policy of this request."""
        if self.policy is None or self.levels is None:
            return LevelPolicy()
        exists = 1 <= request.priority <= self.levels.count
        level = request.priority if exists else self.levels.default
        return self.levels.policies.get(level, self.levels.policy)

    def effective_timeout_ns(self, request: SimRequest) -> int | None:
        """The time after which a waiting request is refused, or None."""
        policy = self.level_policy(request)
        own_ns = request.timeout_ns if policy.may_override and policy.timeout_ns else 0
        return None if policy.is_delayed else min(filter(None, (own_ns, policy.timeout_ns)), default=None)

    def content(self, output: int, inputs: tuple[int, ...]) -> int:
        """The content of output number `output` for these inputs. Hashes of integers are equal in every process."""
        return hash((self.number, output, *inputs))


@dataclass(frozen=True)
class SimRequest:
    """One request. Its batch raises in the models of `poison`, it fails alone in those of `faults`, and those of
    `omits` omit their last output for it. `widths[i]` is the width of input i, None if it is not given. `wanted`: the
    requested outputs, None for all. `leaves_after_ns`: when its caller disconnects. `follows`: the request whose end
    makes this one arrive. `like`: the request whose inputs it has, None for its own. `priority` and `timeout_ns` are
    its parameters, 0 for none.
    `due_after_ns`: its deadline, None for none.
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
    due_after_ns: int | None = None
    like: int | None = None

    def content(self, i: int) -> int:
        return hash((self.number if self.like is None else self.like, i, 1 << 20))


@dataclass(frozen=True)
class World:
    """Models, the graphs over them, and the requests. `overtaken_max`: of the rate limiter, None without one.
    `ends_ns`: when the server stops, None if it does not. `is_divided`: only instances of one number, one of each
    model, pass batches to each other.
    """

    models: tuple[SimModel, ...]
    graphs: tuple[Graph, ...]
    requests: tuple[SimRequest, ...]
    overtaken_max: int | None = None
    ends_ns: int | None = None
    is_divided: bool = False
    by_key: dict[ModelKey, SimModel] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_key", {model.key: model for model in self.models})

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each request."""
        plans: list[Plan] = []
        made: dict[tuple[int, frozenset[str] | None], Plan] = {}  # one per graph and requested outputs, as in a server
        for request in self.requests:
            kind = request.graph, None if request.wanted is None else frozenset(request.wanted)
            if kind not in made:
                made[kind] = make_plan(self.graphs[request.graph], request.wanted)
            plans.append(made[kind])
        return tuple(plans)

    def right_answer(self, request: SimRequest) -> list[int | None] | None:
        """The content of each output (None: omitted), or None if the request must fail."""
        plan = self.plans[request.number]
        held: dict[int, tuple[int, int]] = {}  # slot -> content, width
        for i, width in enumerate(request.widths):
            if width is not None:
                held[i] = (request.content(i), width)
        for node in plan.nodes:
            if not node.writes:
                continue  # no step and no output of the graph reads its outputs
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


def handle_residence(handle: Any) -> tuple[int, int]:
    """The device of a simulated tensor, and its size in bytes."""
    return handle.device, max(handle.stop - handle.start, 1) * handle.width


# -------------------------------------------------------------------------------------------------- drawing


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


def draw_model(random: Random, number: int, *, batching: bool, limit: int = 0) -> SimModel:
    """`limit`: its `max_batch_size`, 0 for a random one."""
    limit = limit or (random.choice([1, 2, 4, 8]) if batching else 0)
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


def draw_routed_model(random: Random, number: int) -> SimModel:
    """A model that is part of a route group, nearly always."""
    model = draw_model(random, number, batching=True, limit=random.choice([2, 8, 8]))
    policy = random.choice([None, model.policy, *[BatchPolicy.simple(model.max_batch_size)] * 4])
    plain = random.random() < 0.9
    return replace(
        model,
        is_routed=random.random() < 0.95,
        inputs=tuple(replace(spec, optional=False) for spec in model.inputs),
        outputs=tuple(replace(spec, dims=(FIXED,)) for spec in model.outputs) if plain else model.outputs,
        policy=policy,
        levels=None if plain else model.levels,
        keeps_order=not plain and model.keeps_order,
    )


def draw_needs(random: Random, instances: int) -> tuple[Needs, ...]:
    """The needs of each instance of a model: up to two resources of one of two devices, and a global one."""
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
    """The device of each instance of a model; () if it has no device affinity."""
    if model.levels is not None or model.keeps_order:
        return ()
    return tuple(random.randrange(2) for _ in range(model.instances))


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


def draw_graph(random: Random, name: str, models: list[SimModel], *, is_close: bool = False) -> Graph:
    """A random well-formed ensemble: fan-out, joins, one tensor read twice by a step, optional inputs unfed.

    Every tensor that no step reads is an output, and some that are read are outputs too. `is_close`: the graph contains
    nearly all models once, and most steps read outputs of other steps, so that batches can take routes.
    """
    if is_close:
        order = random.sample(models, len(models)) + random.choices(models, k=random.random() < 0.15)
    else:
        order = random.choices(models, k=random.randint(1, 6))
    sources = [(GRAPH, i) for i in range(random.randint(1, 2))]
    nodes: list[Node] = []
    edges: list[Edge] = []
    read: set[tuple[int, int]] = set()
    for index, model in enumerate(order):
        label = f"{model.key.name}#{index}"
        nodes.append(Node(index, label, model.key, model.inputs, model.outputs, model.max_batch_size))
        for i, spec in enumerate(model.inputs):
            if spec.optional and random.random() < 0.5:
                continue
            near = [one for one in sources if one[0] != GRAPH][-2:] if is_close and random.random() < 0.95 else []
            producer, output = random.choice(near or (sources[-4:] if random.random() < 0.7 else sources))
            read.add((producer, output))
            edges.append(Edge(f"t{producer}_{output}", producer, output, index, i))
        sources += [(index, j) for j in range(len(model.outputs))]
    # Unread graph inputs are removed; the others are renumbered.
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
        due_after_ns=random.randint(1, 120) if random.random() < 0.15 else None,
    )


def draw_world(random: Random) -> World:
    """Up to four models, each served alone, ensembles over them that share them, and up to forty requests."""
    if random.random() < 0.35:
        return draw_routed_world(random)
    batching = random.random() < 0.85
    models = [draw_model(random, number, batching=batching) for number in range(random.randint(1, 4))]
    graphs = [plain_graph(model) for model in models[: random.randint(0, len(models))]]
    graphs += [draw_graph(random, f"ensemble{i}", models) for i in range(random.randint(1, 3))]
    requests = draw_requests(random, graphs, random.randint(1, 40))
    overtaken_max = random.choice([None, None, 0, 1, 16])
    if overtaken_max is not None:
        models = [replace(model, needs=draw_needs(random, model.instances)) for model in models]
    elif random.random() < 0.4:
        models = [replace(model, devices=draw_devices(random, model)) for model in models]
    end = draw_end(random, 0.1)
    if random.random() < 0.4:
        models = [replace(model, is_cached=random.random() < 0.7) for model in models]
        requests = tuple(replace(one, like=random.randrange(3)) for one in requests)
    return World(tuple(models), tuple(graphs), requests, overtaken_max, end)


def draw_routed_world(random: Random) -> World:
    """Models that are mostly part of a route group, and ensembles over them in which batches can take routes."""
    models = [draw_routed_model(random, number) for number in range(random.randint(2, 6))]
    is_divided = random.random() < 0.4
    if is_divided:
        instances = random.randint(1, 3)
        models = [replace(model, instances=instances) for model in models]
    if random.random() < 0.1:
        models = [replace(model, devices=draw_devices(random, model)) for model in models]
    graphs = [draw_graph(random, f"ensemble{i}", models, is_close=True) for i in range(random.choice([1, 1, 2]))]
    if random.random() < 0.3:
        graphs.append(plain_graph(random.choice(models)))
    requests = []
    for request in draw_requests(random, graphs, random.randint(1, 30)):
        come = request.arrives_ns // 100 * 100  # many arrive at the same time
        poison = request.poison or frozenset([random.choice(models).key] if random.random() < 0.1 else [])
        wanted = None if random.random() < 0.8 else request.wanted
        requests.append(replace(request, arrives_ns=come, poison=poison, wanted=wanted))
    return World(tuple(models), tuple(graphs), tuple(requests), None, draw_end(random, 0.3), is_divided)


def draw_requests(random: Random, graphs: list[Graph], count: int) -> tuple[SimRequest, ...]:
    chosen = [random.randrange(len(graphs)) for _ in range(count)]
    return tuple(draw_request(random, number, index, graphs[index]) for number, index in enumerate(chosen))


def draw_end(random: Random, chance: float) -> int | None:
    return random.randint(1, 200) if random.random() < chance else None


def worlds() -> st.SearchStrategy[World]:
    """Random worlds that Hypothesis can shrink."""
    return st.randoms(use_true_random=False).map(draw_world)


def routed_worlds() -> st.SearchStrategy[World]:
    """Random worlds in which batches take routes."""
    return st.randoms(use_true_random=False).map(draw_routed_world)


def policies() -> st.SearchStrategy[BatchPolicy]:
    """Any policy the configuration rules allow, with maxima up to 8."""
    return st.tuples(st.randoms(use_true_random=False), st.integers(1, 8)).map(lambda drawn: draw_policy(*drawn))
