"""The inputs of streams.py: decoupled graphs, their models and requests as records.

Decides the random graphs (nested levels, branches that join again, tensors from outer levels), the substitute for a
tensor, and the expected responses, computed by nested loops. Does not know time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from flowserve.graph.plan import Plan, make_plan
from flowserve.graph.regions import are_nested, joined
from flowserve.graph.types import GRAPH, Edge, Graph, ModelKey, Node
from flowserve.scheduling.rate_limit.limiter import Needs
from flowserve.values import DType, TensorSpec

PORT = TensorSpec("X", DType.FP32, (-1,))


@dataclass(unsafe_hash=True)
class Content:
    """The substitute for a tensor: its producer and inputs. Equal only if all of these are equal."""

    made_of: tuple[object, ...]
    start: int = 0
    stop: int = 1
    shape: tuple[int, ...] = (1, 2)


@dataclass
class Model:
    """`answers`: the number of responses of a step, by its inputs; None for a model with one response. `ns`: the time
    between responses, or of its batch. `keeps_instance`: it responds before `execute` returns, not from a thread.
    `needs`: the resources of each running instance, if there is a limiter. `calls`: its blocking calls of other models
    before it responds; not for decoupled models. `waiting_max`: the size of its queue, beyond which requests are
    refused; 0 is no limit.
    """

    key: ModelKey
    instances: int = 1
    ns: tuple[int, int] = (1, 1)
    answers: Callable[[Content], int] | None = None
    keeps_instance: bool = True
    max_batch_size: int = 8
    needs: Needs = field(default_factory=lambda: Needs({}))
    calls: Graph | None = None
    waiting_max: int = 0


@dataclass
class StreamRequest:
    number: int
    arrives_ns: int = 0
    leaves_after_ns: int | None = None
    reads_every_ns: int = 0
    fails_at: Content | None = None  # the model fails instead of computing this


def make_graph(
    models: list[Model], wires: list[tuple[int, list[int]]], outputs: list[int], limit: int, *, is_shared: bool = False
) -> Graph:
    """`wires[n]`: node n's model and the nodes it reads (GRAPH for the request), all through one port each."""
    nodes, edges = [], []
    for n, (m, reads) in enumerate(wires):
        inputs = tuple(TensorSpec(f"I{i}", DType.FP32, (-1,)) for i in range(len(reads)))
        nodes.append(
            Node(
                n,
                f"n{n}",
                models[m].key,
                inputs,
                (PORT,),
                models[m].max_batch_size,
                decoupled=models[m].answers is not None,
                max_inflight=limit,
            )
        )
        edges += [Edge(f"t{read}", read, 0, n, i) for i, read in enumerate(reads)]
    edges += [Edge(f"t{read}", read, 0, GRAPH, i) for i, read in enumerate(outputs)]
    out = tuple(TensorSpec(f"O{i}", DType.FP32, (-1,)) for i in range(len(outputs)))
    return Graph("g", 1, (PORT,), out, 1, tuple(nodes), tuple(edges), is_ensemble=True, shares_limits=is_shared)


def draw_wires(random: Random, models: list[Model]) -> tuple[list[tuple[int, list[int]]], list[int]]:
    """A random well-formed graph over these models: every node leads to an output, all levels are nested."""
    chains: list[tuple[int, ...]] = []
    below: dict[int, tuple[int, ...]] = {GRAPH: ()}
    wires: list[tuple[int, list[int]]] = []
    spine: tuple[int, ...] = ()
    for n in range(random.randint(1, 6)):
        plain = [m for m, model in enumerate(models) if model.answers is None]
        decoupled = [m for m, model in enumerate(models) if model.answers is not None]
        splits = len(spine) < 2 and bool(decoupled) and random.random() < 0.45
        reads = sorted({random.choice([*below]) for _ in range(random.randint(1, 3))})
        if splits:
            deepest = [one for one in below if below[one] == spine]
            reads = sorted({*reads, random.choice(deepest)})
        chain = joined([below[read] for read in reads])
        assert are_nested([below[read] for read in reads])
        chains.append(chain)
        wires.append((random.choice(decoupled if splits else plain), reads))
        below[n] = (*chain, n) if splits else chain
        if splits:
            spine = below[n]
    read = {one for _, reads in wires for one in reads}
    outputs = [n for n in range(len(wires)) if n not in read] or [len(wires) - 1]
    return wires, outputs


def right_answers(graph: Graph, models: dict[ModelKey, Model], request: StreamRequest) -> list[list[Content]]:
    """The contents of each response to a request, in order, computed by nested loops."""
    plan = make_plan(graph)
    splits = plan.regions.splits if plan.regions else ()

    def loop(depth: int, values: dict[int, Content]) -> Iterator[list[Content]]:
        values = dict(values)
        ready = [n for n in range(len(graph.nodes)) if _depth(plan, n) == depth and n not in splits]
        for n in [*ready, *splits[depth : depth + 1]]:
            made = made_by(graph.nodes[n], [values[edge.producer] for edge in _inputs(graph, n)])
            if n not in splits:
                values[n] = made
                continue
            answers = models[graph.nodes[n].model].answers
            assert answers is not None
            for number in range(answers(made)):
                yield from loop(depth + 1, {**values, n: Content((*made.made_of, number))})
        if depth == len(splits):
            yield [values[edge.producer] for edge in graph.edges if edge.consumer == GRAPH]

    return [*loop(0, {GRAPH: Content((request.number,))})]


def _depth(plan: Plan, n: int) -> int:
    return 0 if plan.regions is None else plan.regions.depth[n]


def _inputs(graph: Graph, n: int) -> list[Edge]:
    return sorted((edge for edge in graph.edges if edge.consumer == n), key=lambda edge: edge.input)


def made_by(node: Node, read: list[Content]) -> Content:
    return Content((node.index, *(one.made_of for one in read)))
