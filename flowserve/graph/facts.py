"""What the rules ask of an ensemble's wiring, and the words they answer in.

Decided here: when two ends of a tensor meet, which steps lead to an output, which lie on a circle. Nothing here calls
anything a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import networkx as nx

from flowserve.config.types import ModelConfig
from flowserve.errors import Place
from flowserve.graph.conversion import inside
from flowserve.graph.types import GRAPH
from flowserve.graph.wiring import End, Step, Wiring, ensembles_below, wire
from flowserve.values import DType, TensorSpec


@dataclass(frozen=True, slots=True)
class Side:
    """What one end says about a tensor.

    `owner` is the model's (or the ensemble's) name, `port` the input or output there. `reshape`: how a model itself has
    it, where that is not `dims`.
    """

    owner: str
    port: str
    dtype: DType
    dims: tuple[int, ...]
    batches: bool
    reshape: tuple[int, ...] | None = None

    @property
    def full(self) -> tuple[int, ...]:
        """The whole shape, a leading -1 for the batch dimension where there is one."""
        return (-1, *self.dims) if self.batches else self.dims


def side_of(owner: str, spec: TensorSpec, batches: bool) -> Side:
    return Side(owner, spec.name, spec.dtype, spec.dims, batches, spec.reshape)


def shapes_meet(a: Side, b: Side) -> bool:
    """Whether a tensor of one end's full shape can be one of the other's; -1 meets anything."""
    return _dims_meet(a.full, b.full)


def shape_text(side: Side) -> str:
    return f"[{','.join(map(str, side.full))}]"


def differ_by_batch(a: Side, b: Side) -> bool:
    """The dims meet and one of the two has a batch dimension more: there a leading 1 is added or taken away."""
    return a.batches != b.batches and _dims_meet(a.dims, b.dims)


def _dims_meet(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) == len(b) and all(x == y or -1 in (x, y) for x, y in zip(a, b, strict=True))


def disagreements(w: Wiring, agree: Callable[[Side, Side], bool]) -> Iterator[tuple[str, Side, Side, Place]]:
    """For each end of each tensor, the first end before it that it does not agree with.

    Readers against the writer, and against each other.
    """
    for tensor in w.tensors():
        ends = [(_writing_side(w, end), w.place_of_writer(end)) for end in w.writers.get(tensor, ())[:1]]
        ends += [(_reading_side(w, end), w.place_of_reader(end)) for end in w.readers.get(tensor, ())]
        sides = [(side, place) for side, place in ends if side is not None]
        for later, (second, place) in enumerate(sides):
            first = next((side for side, _ in sides[:later] if not agree(side, second)), None)
            if first is not None:
                yield tensor, first, second, place


def _writing_side(w: Wiring, end: End) -> Side | None:
    if end.step == GRAPH:
        return _side(w.config, tuple(map(inside, w.config.inputs)), end.port)
    model = w.steps[end.step].model
    return _side(model, model.outputs, end.port) if model else None


def _reading_side(w: Wiring, end: End) -> Side | None:
    if end.step == GRAPH:
        return _side(w.config, tuple(map(inside, w.config.outputs)), end.port)
    model = w.steps[end.step].model
    return _side(model, model.inputs, end.port) if model else None


def _side(config: ModelConfig, specs: tuple[TensorSpec, ...], port: str) -> Side | None:
    spec = next((spec for spec in specs if spec.name == port), None)
    return None if spec is None else side_of(config.name, spec, config.max_batch_size > 0)


def both_ends(first: Side, second: Side) -> str:
    return f"'{first.port}' of '{first.owner}' meets '{second.port}' of '{second.owner}' here"


def how_to_meet(first: Side, second: Side, ensemble: str) -> str:
    """What to write where two shapes do not meet and it can be told what was meant; else both ends."""
    both = both_ends(first, second)
    for one, other in ((first, second), (second, first)):
        if one.batches and other.batches and one.dims[:1] == (-1,) and _dims_meet(one.dims[1:], other.dims):
            return (
                f"{both}; dims leave out the batch dimension, and those of '{one.port}' of '{one.owner}' begin with it?"
            )
    fixed = -1 not in (*first.dims, *second.dims) and first.batches == second.batches
    if not fixed or prod(first.dims) != prod(second.dims):
        return both
    inner = second.dims if second.reshape is None else second.reshape
    outside, within = (second.dims, first.dims) if second.owner == ensemble else (first.dims, inner)
    which = f"'{second.port}' of '{second.owner}'"
    dims, shape = (", ".join(map(str, sizes)) for sizes in (outside, within))
    return f"{both}; they hold equally many elements: dims: [ {dims} ] reshape {{ shape: [ {shape} ] }} for {which}"


def circles(joined: nx.DiGraph[Any]) -> list[list[Any]]:
    """The groups of nodes of a directed graph that lie on a circle together, each sorted."""
    groups = sorted(map(sorted, nx.strongly_connected_components(joined)))
    return [group for group in groups if len(group) > 1 or joined.has_edge(group[0], group[0])]


def known(w: Wiring) -> Iterator[tuple[Step, ModelConfig]]:
    for step in w.steps:
        if step.model is not None:
            yield step, step.model


def first_steps(w: Wiring) -> Iterable[tuple[str, Step]]:
    """Each model's name with the first step that names it."""
    return {step.written.model: step for step in reversed(w.steps)}.items()


def step_text(w: Wiring, index: int) -> str:
    return f"step {index} (model '{w.steps[index].written.model}')"


def listing(words: str, names: list[str]) -> str:
    return f"{words} {', '.join(repr(name) for name in names)}" if names else ""


def not_written(w: Wiring, tensor: str, readers: list[End]) -> str:
    if readers[0].step == GRAPH:
        return f"ensemble output '{tensor}' for ensemble {w.name}' is not used: no step writes it"
    by = f"no step writes '{tensor}', which {step_text(w, readers[0].step)} reads as '{readers[0].port}'"
    if readers[-1].step == GRAPH:
        return f"output '{tensor}' for ensemble '{w.name}' is not written: {by}"
    return f"{unreachable(w, tensor, {end.step for end in readers})}: {by}"


def unreachable(w: Wiring, tensor: str, readers: set[int]) -> str:
    """Triton's text for a tensor that never gets a value: it names an output that waits for it, where there is one."""
    joined = w.step_graph()
    waiting = readers.union(*(nx.descendants(joined, step) for step in readers))
    for spec in w.config.outputs:
        if any(end.step in waiting for end in w.writers.get(spec.name, ())):
            return (
                f"output '{spec.name}' for ensemble '{w.name}' is not written:"
                f" at least one of its depending tensors, '{tensor}', is not connected"
            )
    return f"ensemble tensor '{tensor}' is unused in ensemble '{w.name}'"


def steps_that_reach_an_output(w: Wiring) -> set[int]:
    joined = w.step_graph()
    last = {end.step for spec in w.config.outputs for end in w.writers.get(spec.name, ()) if end.step != GRAPH}
    return last.union(*(nx.ancestors(joined, step) for step in last))


def feeds_required_input(w: Wiring, ensemble: ModelConfig, tensor: str) -> bool:
    """Whether an (optional) input of a nested ensemble ends at a model input that must be given."""
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
    """Ensembles below this one that cannot be because of a circle this one is not part of, each with the circle's
    text.
    """
    below = ensembles_below(w.config, w.available)
    found: dict[str, str] = {}
    for members in circles(below):
        if w.name in members:
            continue
        path = [a for a, _ in nx.find_cycle(below.subgraph(members), members[0])]
        text = f"circular dependency between ensembles: {' -> '.join([*path, path[0]])}"
        found.update(dict.fromkeys([*members, *sorted(nx.ancestors(below, members[0]) - {w.name})], text))
    return found
