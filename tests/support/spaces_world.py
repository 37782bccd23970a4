"""Random ensembles with spaces, the expected responses, and a scheduler that runs them.

Decides the models (numpy functions that compute each row independently), how graphs are drawn, and an interpreter that
computes one row at a time by following the file's steps, without spreads, parts or batches. `World` drives the real
scheduler with the real operations on rows, in random order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flowserve.config.types import EachItem, Ensemble, EnsembleStep, Fill, ModelConfig, RowTest, SourceMap
from flowserve.errors import FlowserveError, ModelFailed, Place, Problems
from flowserve.graph.compile import compile_ensemble
from flowserve.graph.plan import Plan, make_plan
from flowserve.graph.spaces import Arrangement, arrange
from flowserve.graph.types import GRAPH, ModelKey
from flowserve.graph.wiring import Wiring, wire
from flowserve.memory import rows as row_operations
from flowserve.memory.assemble import gather
from flowserve.memory.pool import Pool
from flowserve.memory.tensor import Tensor
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.borders import region_frame
from flowserve.scheduling.frames.frame import Frame, request_frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import PLAIN, BatchPolicy, LevelPolicy, Levels, Queue
from flowserve.scheduling.scheduler import Scheduler
from flowserve.values import Array
from tests.support.ensembles import available, model, tensors

Function = Callable[..., tuple[Array, ...]]


class Made(NamedTuple):
    outputs: Sequence[Sequence[Tensor | None]]
    errors: dict[int, FlowserveError]


ITEMS_OF_A_STACK = 3
VEC, ITEMS, THREE = "FP32[2]", "FP32[-1,2]", "FP32[3,2]"
MODELS = (
    model("double", {"X": VEC}, {"Y": VEC}, 4),
    model("minus", {"X": VEC}, {"Y": VEC}, 3),
    model("single", {"X": VEC}, {"Y": VEC}, 0),
    model("add", {"A": VEC, "B": VEC}, {"Y": VEC}, 4),
    model("split", {"X": VEC}, {"ITEMS": THREE, "COUNT": "INT32[1]", "KINDS": "INT32[3,1]"}, 4),
    model("kind", {"X": VEC}, {"KIND": "INT32[1]", "SURE": "BOOL[1]", "SCORE": "FP32[1]"}, 4),
    model("pool", {"ITEMS": ITEMS}, {"Y": VEC}, 4),
)


def _hash(x: Array) -> Array:
    found: Array = np.abs(np.round(x.sum(axis=-1, keepdims=True) * 7)).astype(np.int32)
    return found


FLAG = "flag"  # an input of the request that only tests read


def flag_of(array: Array) -> Array:
    """The number that a request has in FLAG for each row of its other input."""
    found: Array = _hash(array + 3) % 3
    return found


FUNCTIONS: dict[str, Function] = {
    "double": lambda x: (x * 2 + 1,),
    "minus": lambda x: (1 - x,),
    "single": lambda x: (x + 5,),
    "add": lambda a, b: (a + b * 3,),
    "split": lambda x: (
        np.stack([x, x + 1, 2 - x], axis=1),
        _hash(x) % 4,
        np.concatenate([_hash(x), _hash(x + 1), _hash(2 - x)], axis=1)[..., None] % 3,
    ),
    "kind": lambda x: (
        _hash(x) % 3,
        _hash(x) % 2 == 0,
        np.where(_hash(x) % 5 == 0, np.nan, (_hash(x) % 10) / 10).astype(np.float32),
    ),
    "pool": lambda items: (items.sum(axis=1),),
}


def drawn(rng: random.Random, steps_max: int = 8, models: Sequence[ModelConfig] = MODELS) -> ModelConfig | None:
    """A random well-formed ensemble of these models; None if the draw has no useful result."""
    known = available(*models)
    kinds: dict[str, str] = {"in": VEC}
    written: list[EnsembleStep] = []
    fills: list[Fill] = []
    limit = rng.choice((0, 0, 1, 2))
    rows = rng.choice((1, 4, 4))
    for number in range(rng.randrange(2, steps_max + 1)):
        step = _step(rng, number, kinds, models)
        if step is None:
            continue
        names = dict(zip(step.output_map.values(), _kinds_of(step.model, models), strict=True))
        again = rng.random() < 0.35 and step.when and step.model in ("double", "minus", "add", "single")
        if again:  # a second writer of a tensor that an earlier step wrote under a condition, or for all rows
            earlier = [one for one in written if one.model in ("double", "minus", "add") and one.when]
            base = [one for one in written if one.model in ("double", "minus", "add") and not one.when and not one.each]
            chosen = rng.choice([*earlier, *base]) if earlier or base else None
            if chosen is not None:
                step = replace(step, output_map=dict.fromkeys(step.output_map, next(iter(chosen.output_map.values()))))
                if chosen.when and rng.random() < 0.7:
                    test = chosen.when[-1]
                    other = replace(test, negate=not test.negate) if not test.otherwise else test
                    if rng.random() < 0.3:
                        other = RowTest(test.tensor, otherwise=True)
                    step = replace(step, when=(*chosen.when[:-1], other), each=chosen.each)
                names = {}
        tried = [*written, step]
        if step.model == "single" and not (step.when or step.each):
            continue  # outside of a space it accepts requests of one row only
        if _is_sound(_config(tried, fills, {}, rows, limit), known):
            written = tried
            kinds.update(names)
        if rng.random() < 0.25 and (tensor := rng.choice([*kinds])) not in [fill.tensor for fill in fills]:
            value = rng.choice((0.0, 0.0, -1.0)) if kinds[tensor] == VEC else 0.0
            filled = [*fills, Fill(tensor, value, present=rng.choice(("", f"has_{tensor}")))]
            if _is_sound(_config(written, filled, {}, rows, limit), known):
                fills = filled
    outputs: dict[str, str] = {}
    made = arrange(wire(_config(written, fills, {}, rows, limit), known, {}))
    for tensor in [*kinds, *(fill.present for fill in fills if fill.present)]:
        home = made.homes.get(tensor)
        if tensor == "in" or home is None:
            continue
        kind = kinds.get(tensor, "BOOL[1]")
        dims = kind[kind.index("[") + 1 : -1]
        if tensor not in kinds:
            written_in = made.homes[tensor]
            filled_one = next(fill for fill in fills if fill.present == tensor)
            wired = wire(_config(written, fills, {}, rows, limit), known, {})
            writers = [end for end in wired.writers[filled_one.tensor] if not end.field]
            home = written_in if len(writers) > 1 else made.spaces[written_in].parent
            if len(writers) == 1 and made.spaces[written_in].each is not None:
                dims = f"-1,{dims}"
        dims = "-1," * sum(made.spaces[one].each is not None for one in made.path(home)) + dims
        outputs[tensor] = f"{kind[: kind.index('[')]}[{dims}]"
        if not _is_sound(_config(written, fills, outputs, rows, limit), known):
            del outputs[tensor]
    if not outputs:
        return None
    pooled = {step.input_map["ITEMS"] for step in written if step.model == "pool"}
    if any(fill.tensor in pooled and fill.value for fill in fills):
        return None  # a row with fewer items than others is padded, which would change the sum of its items
    config = _config(written, fills, outputs, rows, limit)
    while True:  # leave out steps that lead to no output
        try:
            compile_ensemble(config, 1, known)
        except Problems as problems:
            unused = {
                problem.place.path for problem in problems.problems if problem.place and problem.rule in ("G12", "G13")
            }
            if not unused:
                raise
            kept = [step for step in config.steps if step.path not in unused]
            kept = [
                replace(
                    step,
                    output_map={
                        p: t for p, t in step.output_map.items() if f"{step.path}.output_map[{p}]" not in unused
                    },
                )
                for step in kept
            ]
            kept = [step for step in kept if step.output_map]
            gone = [
                replace(fill, present="" if f"{fill.path}.present" in unused else fill.present)
                for fill in fills_of(config)
                if any(fill.tensor in step.output_map.values() for step in kept)
            ]
            if not kept:
                return None
            if (
                [fill.present for fill in gone] == [fill.present for fill in fills_of(config)]
                and len(kept) == len(config.steps)
                and sum(len(one.output_map) for one in kept) == sum(len(one.output_map) for one in config.steps)
            ):
                return None
            config = _config(kept, gone, outputs, rows, limit)
            if not _is_sound(config, known):
                return None
        else:
            return config


def fills_of(config: ModelConfig) -> tuple[Fill, ...]:
    return config.ensemble.fills if config.ensemble else ()


class _Places(dict[str, Any]):
    def __missing__(self, path: str) -> Any:
        return Place("world", 1, 1, path)

    def __contains__(self, path: object) -> bool:
        return True

    def get(self, path: str, default: Any = None) -> Any:
        return self[path]


def _config(
    steps: Sequence[EnsembleStep], fills: Sequence[Fill], outputs: dict[str, str], rows: int, limit: int
) -> ModelConfig:
    numbered = tuple(replace(step, path=f"step[{i}]") for i, step in enumerate(steps))
    marked = tuple(replace(fill, path=f"fill[{i}]") for i, fill in enumerate(fills))
    source = SourceMap("world", _Places())
    given = {"in": VEC}
    if any(test.tensor == FLAG for step in steps for test in step.when):
        given[FLAG] = "INT32[1]"
    return ModelConfig(
        name="world",
        backend="",
        platform="ensemble",
        max_batch_size=rows,
        inputs=tensors(given),
        outputs=tensors(outputs),
        source=source,
        ensemble=Ensemble(numbered, limit, marked),
    )


def _is_sound(config: ModelConfig, known: Any) -> bool:
    """Whether only rules about unused steps and tensors are violated."""
    try:
        compile_ensemble(config, 1, known)
    except Problems as problems:
        return all(problem.rule in ("G9", "G10", "G12", "G13") for problem in problems.problems)
    return True


def _kinds_of(name: str, models: Sequence[ModelConfig]) -> list[str]:
    outputs = next(one for one in models if one.name == name).outputs
    return [f"{spec.dtype}[{','.join(map(str, spec.dims))}]" for spec in outputs]


def _step(rng: random.Random, number: int, kinds: dict[str, str], models: Sequence[ModelConfig]) -> EnsembleStep | None:
    chosen = rng.choice((*models, *MODELS[3:6]))
    vecs = [tensor for tensor, kind in kinds.items() if kind == VEC]
    stacks = [tensor for tensor, kind in kinds.items() if kind == THREE]
    each = None
    reads: dict[str, str] = {}
    item: list[str] = []
    if stacks and rng.random() < 0.5 and chosen.name != "pool":
        taken = rng.choice(stacks)
        partner = taken.replace("ITEMS", "KINDS")
        count = taken.replace("ITEMS", "COUNT")
        names = (taken, partner) if rng.random() < 0.6 else (taken,)
        each = EachItem(names, count if rng.random() < 0.7 else "", 10_000)
        item = [taken]
    for spec in chosen.inputs:
        choices = [*vecs, *item * 3] if spec.name != "ITEMS" else [*stacks, *(v for v in vecs)]
        if not choices:
            return None
        reads[spec.name] = rng.choice(choices)
    if each is not None and item[0] not in reads.values():
        each = None if rng.random() < 0.8 else each
    when: list[RowTest] = []
    if rng.random() < 0.6:
        when.append(_test(rng, kinds))
    if rng.random() < 0.15:
        when.append(_test(rng, kinds))
    when = [test for test in when if test.tensor]
    outputs = {spec.name: f"t{number}_{spec.name}" for spec in chosen.outputs}
    return EnsembleStep(chosen.name, -1, reads, outputs, "", tuple(when), each)


def _test(rng: random.Random, kinds: dict[str, str]) -> RowTest:
    choices = [tensor for tensor in kinds if tensor.endswith(("_KIND", "_KINDS", "_SURE", "_SCORE"))]
    tensor = rng.choice([*choices, FLAG] if rng.random() < 0.3 else choices or [""])
    if not tensor:
        return RowTest("")
    negate = rng.random() < 0.3
    if tensor.endswith("SURE"):
        return RowTest(tensor, negate)
    if tensor.endswith("SCORE"):
        return RowTest(tensor, negate, above=rng.choice((None, 0.25)), below=0.65)
    if rng.random() < 0.15:
        return RowTest(tensor, otherwise=True)
    return RowTest(tensor, negate, equals=rng.choice(((0,), (1,), (0, 2))))


class Interpreter:
    """Computes the response of one row of one request."""

    def __init__(self, w: Wiring, made: Arrangement, row: Array) -> None:
        self.w = w
        self.made = made
        self.row = row
        self._results: dict[tuple[int, tuple[Any, ...]], dict[str, Any]] = {}

    def contexts(self, space: int) -> list[tuple[Any, ...]]:
        """The rows of a space: for each space on the way, an item's number, or None for a condition."""
        if not space:
            return [()]
        record = self.made.spaces[space]
        found: list[tuple[Any, ...]] = []
        for around in self._contexts_around(record):
            if record.test is not None:
                if self._passes(record, around):
                    found.append((*around, None))
                continue
            assert record.each is not None
            stack = self.value(record.each.tensors[0], record.parent, around)
            count = ITEMS_OF_A_STACK if isinstance(stack, tuple) else len(stack)
            if record.each.count:
                count = int(np.ravel(plain(self.value(record.each.count, record.parent, around), 1))[0])
            found += [(*around, i) for i in range(count)]
        return found

    def _contexts_around(self, record: Any) -> list[tuple[Any, ...]]:
        """The rows of the space around a space."""
        return self.contexts(record.parent)

    def _passes(self, record: Any, around: tuple[Any, ...]) -> bool:
        number = float(np.ravel(plain(self.value(record.test.tensor, record.parent, around), 1))[0])
        if record.test.otherwise:
            return not any(other.passes(number) for other in self.made.tests_beside(record))
        return bool(record.test.passes(number))

    def value(self, tensor: str, space: int, context: tuple[Any, ...]) -> Any:
        """The value of a tensor in a row of a space: outside of its space of items a list, None if it was not
        written.
        """
        home, path = self.made.homes[tensor], self.made.path(space)
        if home not in path:
            common = self.made.common(home, space)
            found = self._outside(tensor, home, common, context[: len(self.made.path(common)) - 1])
            known = len(self.made.path(common))
        else:
            known = len(self.made.path(home))
            found = self._own(tensor, context[: known - 1])
        for depth in range(known, len(path)):
            each = self.made.spaces[path[depth]].each
            if each is not None and tensor in each.tensors:
                found = ("fill", found[1]) if isinstance(found, tuple) else found[context[depth - 1]]
        return found

    def _outside(self, tensor: str, space: int, target: int, context: tuple[Any, ...]) -> Any:
        """A tensor of `space`, or made from one, in a row of the space `target` around it."""
        path = self.made.path(space)
        below = path[path.index(target) + 1]
        record = self.made.spaces[below]
        fill = self.made.fills.get(tensor)
        rows = self._rows_below(tensor, below, context)
        if record.each is not None:
            return [self._inside(tensor, space, below, one) for one in rows]
        if rows:
            return self._inside(tensor, space, below, rows[0])
        return None if fill is None else ("fill", fill.value)

    def _rows_below(self, tensor: str, below: int, context: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The rows of the space `below` from which a tensor is made in a row of the space around it."""
        return [one for one in self.contexts(below) if one[:-1] == context]

    def _inside(self, tensor: str, space: int, below: int, context: tuple[Any, ...]) -> Any:
        return self._own(tensor, context) if below == space else self._outside(tensor, space, below, context)

    def _own(self, tensor: str, context: tuple[Any, ...]) -> Any:
        ends = [end for end in self.w.writers[tensor] if not end.field]
        if ends[0].step == GRAPH:
            return flag_of(self.row) if tensor == FLAG else self.row
        if len(ends) == 1:
            return self._run(ends[0].step, context)[ends[0].port]
        home = self.made.homes[tensor]
        base = None
        for end in ends:
            space = self.made.of_step[end.step]
            if space == home:
                base = end
            elif (*context, None) in self.contexts(space):
                return self._run(end.step, (*context, None))[end.port]
        if base is not None:
            return self._run(base.step, context)[base.port]
        fill = self.made.fills.get(tensor)
        return None if fill is None else ("fill", fill.value)

    def present(self, tensor: str) -> Any:
        """Whether a tensor was written: the value of its `present` outside of all spaces."""
        ends = [end for end in self.w.writers[tensor] if not end.field]
        spaces = [self.made.of_step[end.step] for end in ends]
        home = self.made.homes[tensor] if len(ends) > 1 else self.made.spaces[spaces[0]].parent
        return self._present_in(spaces, home, ())

    def _present_in(self, spaces: list[int], home: int, context: tuple[Any, ...]) -> Any:
        depth = len(context)
        path = self.made.path(home)
        if depth == len(path) - 1:
            below = [space for space in spaces if space != home]
            if len(below) < len(spaces):
                return [True]
            if self.made.spaces[below[0]].each is not None:
                return [[True] for _ in self._rows_below("", below[0], context)]
            return [any((*context, None) in self.contexts(space) for space in below)]
        record = self.made.spaces[path[depth + 1]]
        rows = self._rows_below("", path[depth + 1], context)
        if record.each is not None:
            return [self._present_in(spaces, home, one) for one in rows]
        return self._present_in(spaces, home, rows[0]) if rows else ("fill", 0.0)

    def _run(self, index: int, context: tuple[Any, ...]) -> dict[str, Any]:
        key = (index, context)
        if key not in self._results:
            step = self.w.steps[index]
            assert step.model is not None
            space = self.made.of_step[index]
            given = [self.value(step.written.input_map[spec.name], space, context) for spec in step.model.inputs]
            arrays = [
                np.asarray(plain(one), np.float32).reshape((1, -1, 2) if spec.name == "ITEMS" else (1, 2))
                for one, spec in zip(given, step.model.inputs, strict=True)
            ]
            made = FUNCTIONS[step.model.name](*arrays)
            self._results[key] = {
                spec.name: [*one[0]] if one[0].ndim == 2 else one[0]
                for spec, one in zip(step.model.outputs, made, strict=True)
            }
        return self._results[key]


def plain(value: Any, dims: int = 2) -> Any:
    """A value in which fills are replaced by arrays."""
    if isinstance(value, tuple):
        return np.full(dims, value[1], np.float32)
    if isinstance(value, list):
        return [plain(one, dims) for one in value]
    return value


def padded(value: Any, shape: tuple[int, ...], fill: float) -> Any:
    """The interpreter's result in the shape of a response, whose rows and items are padded."""
    if isinstance(value, tuple):
        return np.full(shape, value[1])
    if isinstance(value, list):
        made = np.full(shape, fill)
        for i, one in enumerate(value):
            made[i] = padded(one, shape[1:], fill)
        return made
    return np.asarray(value)


class World:
    """A scheduler with the models of one graph, whose batches end in random order. `has_limits`: queues are bounded.
    `keeps_order`: all models do.
    """

    def __init__(
        self,
        config: ModelConfig,
        rng: random.Random,
        *,
        fails: float = 0.0,
        has_limits: bool = False,
        keeps_order: bool = False,
        models: Sequence[ModelConfig] = MODELS,
    ) -> None:
        known = available(*models)
        self.config = config
        self.rng = rng
        self.fails = fails
        self.wiring = wire(config, known, {})
        self.made = arrange(self.wiring)
        self.graph = compile_ensemble(config, 1, known)
        self.plan: Plan = make_plan(self.graph)
        self.scheduler = Scheduler()
        self.now_ns = 0
        self.running: list[Batch] = []
        self.finished: list[Frame] = []
        self.rows_run: dict[tuple[int, int], int] = Counter()
        self.pool = Pool()
        queues: dict[ModelKey, ModelQueue] = {}
        for node in self.graph.nodes:
            if node.model not in queues:
                policy = BatchPolicy.simple(node.max_batch_size) if node.max_batch_size else BatchPolicy.single()
                instances = [object() for _ in range(rng.choice((1, 2)))]
                levels = Levels(policy=LevelPolicy(max_size=rng.randrange(1, 4))) if has_limits else PLAIN
                queues[node.model] = ModelQueue(
                    node.model,
                    Queue(policy, levels),
                    instances,
                    is_pure=fails > 0 and rng.random() < 0.5,
                    keeps_order=keeps_order,
                )
                self.scheduler.models.add(queues[node.model])
        self.queues = [queues[node.model] for node in self.graph.nodes]

    def inputs_of(self, array: Array) -> list[Tensor]:
        """The inputs of a request."""
        given = [flag_of(array) if spec.name == FLAG else array for spec in self.graph.inputs]
        return [Tensor(one, 0, len(array)) for one in given]

    def submit(self, array: Array) -> Frame:
        frame: Frame
        inputs = self.inputs_of(array)
        if self.plan.regions is None:
            frame = request_frame(self.plan, self.queues, inputs, self.now_ns)
        else:
            frame = region_frame(
                self.plan,
                self.queues,
                inputs,
                self.now_ns,
                rows=row_operations,
                is_read_whole=True,
            )
        self.scheduler.submit(frame)
        return frame

    def go_on(self) -> bool:
        """Run one step of the scheduler, or complete one batch. False: no event is left."""
        self.now_ns += 1
        decisions = self.scheduler.schedule(self.now_ns)
        if decisions is not None:
            for notice in decisions.notices:
                self.notice(notice)
            self.running += decisions.batches
            self.finished += decisions.finished
            for frame in decisions.finished:
                self.over(frame)
            if self.scheduler.schedule(self.now_ns) is not None:
                raise AssertionError("decisions are left")
            self.scheduler.check()
            for batch in self.running:
                for ticket in batch.tickets:
                    if not ticket.frame.record.done:
                        ticket.frame.whole.check()
            return True
        if (not self.running or self.rng.random() < 0.5) and self.act():
            return True
        if not self.running:
            return False
        batch = self.running.pop(self.rng.randrange(len(self.running)))
        if self.rng.random() < self.fails:
            self.scheduler.complete(batch, [], ModelFailed("it fell over"), self.now_ns)
        else:
            self.complete(batch)
        return True

    def notice(self, notice: Any) -> None:
        """A notice of the scheduler; only decoupled steps have any."""

    def over(self, frame: Frame) -> None:
        """A request is over."""

    def act(self) -> bool:
        """Let something happen besides the end of a batch. False: there is nothing."""
        return False

    def complete(self, batch: Batch) -> None:
        """Run a batch, and report its end to the scheduler."""
        self.scheduler.complete(batch, [self._run(batch)], None, self.now_ns)

    def _run(self, batch: Batch) -> Made:
        """The outputs of a batch; None for requests that ended meanwhile."""
        node = batch.tickets[0].node
        live = [(m, ticket) for m, ticket in enumerate(batch.tickets) if not ticket.frame.record.done]
        outputs: list[list[Tensor | None]] = [[None] * len(batch.tickets) for _ in node.outputs]
        assert sum(ticket.rows for ticket in batch.tickets) <= max(node.max_batch_size, 1)
        if not live:
            return Made(outputs, {})
        columns = []
        for i in range(len(node.inputs)):
            held = [ticket.tensors[ticket.node.inputs[i]] for _, ticket in live]
            assert all(one is not None for one in held)
            if node.max_batch_size:
                for (_, ticket), one in zip(live, held, strict=True):
                    assert one.stop - one.start == ticket.rows <= node.max_batch_size
                columns.append(gather(held, self.pool)[0])
            else:
                columns.append(held[0].array[None])
        for column, array in zip(outputs, FUNCTIONS[node.model.name](*columns), strict=True):
            start = 0
            for m, ticket in live:
                column[m] = Tensor(array, start, start + ticket.rows) if node.max_batch_size else Tensor(array[0])
                start += ticket.rows
        for _, ticket in live:
            self.rows_run[id(ticket.frame.whole), ticket.node.index] += ticket.rows
        return Made(outputs, {})

    def outputs(self, frame: Frame) -> dict[str, Array | None]:
        found = {}
        for spec, slot in zip(self.graph.outputs, self.plan.output_slots, strict=True):
            tensor = frame.tensors[slot]
            edge = next(
                edge for edge in self.graph.edges if edge.consumer == GRAPH and self.graph.outputs[edge.input] is spec
            )
            if tensor is not None and edge.conversion is not None:
                tensor = tensor.converted(edge.conversion)
            found[spec.name] = None if tensor is None else tensor.array
        return found
