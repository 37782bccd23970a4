"""Random models, graphs and requests for the scheduling machines.

Decided here: what a random world (sim_world.py) looks like. Everything is drawn from a `random.Random`, so that one
description serves twice: a seeded one repeats for ever (the simulator's seeds), Hypothesis's own shrinks (`worlds`).
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from flowserve.config.types import LimitedResource, RateLimiter
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.scheduling.batcher import BatchPolicy
from flowserve.scheduling.limiter import Needs
from flowserve.scheduling.queues import LevelPolicy, Levels
from flowserve.testing.sim_world import FIXED, SimModel, SimRequest, World
from flowserve.values import DType, TensorSpec


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
    """`limit`: its `max_batch_size` where that is not to be drawn."""
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
        least=number % 3,
    )


def draw_quick_model(random: Random, number: int) -> SimModel:
    """One in processes, as models are between which batches are handed on."""
    model = draw_model(random, number, batching=True, limit=random.choice([2, 8, 8]))
    policy = random.choice([None, model.policy, *[BatchPolicy.simple(model.max_batch_size)] * 4])
    plain = random.random() < 0.9
    return replace(
        model,
        in_process=random.random() < 0.95,
        inputs=tuple(replace(spec, optional=False) for spec in model.inputs),
        outputs=tuple(replace(spec, dims=(FIXED,)) for spec in model.outputs) if plain else model.outputs,
        policy=policy,
        levels=None if plain else model.levels,
        keeps_order=not plain and model.keeps_order,
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

    Every tensor that no step reads is an output, and some that are read are outputs too. `is_close`: nearly all models
    stand in it once, and most steps read what the others made, as where batches are handed on.
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
    if random.random() < 0.35:
        return draw_quick_world(random)
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
    return World(tuple(models), tuple(graphs), requests, overtaken_max, draw_end(random, 0.1))


def draw_quick_world(random: Random) -> World:
    """Models in processes, of which some are not as they must be to hand batches on, and ensembles over them in which
    that would be possible.
    """
    models = [draw_quick_model(random, number) for number in range(random.randint(2, 6))]
    if random.random() < 0.1:
        models = [replace(model, devices=draw_devices(random, model)) for model in models]
    graphs = [draw_graph(random, f"ensemble{i}", models, is_close=True) for i in range(random.choice([1, 1, 2]))]
    if random.random() < 0.3:
        graphs.append(plain_graph(random.choice(models)))
    requests = []
    for request in draw_requests(random, graphs, random.randint(1, 30)):
        come = request.arrives_ns // 100 * 100  # many at once
        poison = request.poison or frozenset([random.choice(models).key] if random.random() < 0.1 else [])
        wanted = None if random.random() < 0.8 else request.wanted
        requests.append(replace(request, arrives_ns=come, poison=poison, wanted=wanted))
    return World(tuple(models), tuple(graphs), tuple(requests), None, draw_end(random, 0.3))


def draw_requests(random: Random, graphs: list[Graph], count: int) -> tuple[SimRequest, ...]:
    chosen = [random.randrange(len(graphs)) for _ in range(count)]
    return tuple(draw_request(random, number, index, graphs[index]) for number, index in enumerate(chosen))


def draw_end(random: Random, chance: float) -> int | None:
    return random.randint(1, 200) if random.random() < chance else None


def worlds() -> st.SearchStrategy[World]:
    """Random worlds that shrink."""
    return st.randoms(use_true_random=False).map(draw_world)


def quick_worlds() -> st.SearchStrategy[World]:
    """Those of them in which batches are handed on."""
    return st.randoms(use_true_random=False).map(draw_quick_world)


def policies() -> st.SearchStrategy[BatchPolicy]:
    """Any policy the configuration rules allow, with maxima up to 8."""
    return st.tuples(st.randoms(use_true_random=False), st.integers(1, 8)).map(lambda drawn: draw_policy(*drawn))
