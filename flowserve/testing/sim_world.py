"""A random world as a record: its models, the graphs over them, the requests that will come, and what is right.

Decided here: what a simulated model computes and how each request must end, worked out without any machine, by walking
the graph: so that a test can tell a wrong answer from a right one. What worlds look like is drawn in strategies.py, how
they are lived through is sim.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flowserve.graph.plan import NO_SLOT, Plan, make_plan
from flowserve.graph.types import Graph, ModelKey
from flowserve.scheduling.affinity import NOWHERE, Affine, Moves
from flowserve.scheduling.batcher import Batcher, BatchPolicy, DynamicBatcher, OneByOne
from flowserve.scheduling.limiter import Needs
from flowserve.scheduling.queues import LevelPolicy, Levels, PolicyBatcher
from flowserve.values import TensorSpec

MOVES = Moves(each_ns=7, bytes_per_ns=2)  # worth waiting for in a world where a batch takes up to 250 ns
FIXED = 4  # the width that inputs of fixed shape want
NOTHING = -7  # what an input that is not there counts as in a content


class Handle:
    """What stands for a tensor: facts, what it holds, and the block it lies in. `block` is the run that made it, and
    `device` where that was.
    """

    __slots__ = ("__weakref__", "block", "content", "device", "start", "stop", "width")

    def __init__(
        self, content: int, width: int, start: int, stop: int, block: object = None, device: int = NOWHERE
    ) -> None:
        self.content = content
        self.width = width
        self.start = start
        self.stop = stop
        self.block = block
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.width,) if self.stop < 0 else (self.stop - self.start, self.width)


@dataclass(frozen=True)
class SimModel:
    """A model whose outputs say what went into them. `policy` None: the default scheduler. `levels` None: one line.

    `shortest_ns` to `longest_ns` is how long a batch takes; where both are 0 it runs inline, inside `run`.
    `in_process`: its instances may take part in relays, as far as its outputs and its queue let them. `least` above 0:
    what of a crowd of more is left to the next batch (crowd.py), where its queue takes whoever is there.
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
    in_process: bool = False
    least: int = 0

    @property
    def passes_on(self) -> bool:
        """Whether it can hand a batch on: the next process knows where outputs of fixed shapes lie."""
        return self.in_process and self.max_batch_size > 0 and all(spec.dims == (FIXED,) for spec in self.outputs)

    @property
    def receives(self) -> int:
        """How many requests it may be handed at once: none where whoever waits is for its queue to choose."""
        if not self.in_process or not self.max_batch_size or self.levels is not None:
            return 0
        if self.policy is None:
            return 1
        return 1 << 30 if self.takes_all else 0

    @property
    def takes_all(self) -> bool:
        """Whether whoever waits leaves at once, up to the maximum, on whichever instance."""
        return self.levels is None and not self.devices and self.policy == BatchPolicy.simple(self.max_batch_size)

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
    often it lets a model be overtaken. `ends_ns`: when the server goes away, if it does while these requests come.
    """

    models: tuple[SimModel, ...]
    graphs: tuple[Graph, ...]
    requests: tuple[SimRequest, ...]
    overtaken_max: int | None = None
    ends_ns: int | None = None
    by_key: dict[ModelKey, SimModel] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_key", {model.key: model for model in self.models})

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each request."""
        plans: list[Plan] = []
        made: dict[tuple[int, frozenset[str] | None], Plan] = {}  # one of each kind, as in a server
        for request in self.requests:
            kind = request.graph, None if request.wanted is None else frozenset(request.wanted)
            if kind not in made:
                made[kind] = make_plan(self.graphs[request.graph], request.wanted)
            plans.append(made[kind])
        return tuple(plans)

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


def residence(handle: Any) -> tuple[int, int]:
    """Where a handle of the simulator lies, and how many bytes it has."""
    return handle.device, max(handle.stop - handle.start, 1) * handle.width
