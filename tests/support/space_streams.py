"""Random ensembles with spaces and one decoupled step: the expected responses, and a scheduler that runs them.

Decides which responses a request has, by an interpreter that computes one row of one response at a time, and the
model's side of the decoupled step (`Sending`). The ensembles and the other models are those of spaces_world.py.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from flowserve.config.types import ModelConfig
from flowserve.graph.compile import SCOPE
from flowserve.graph.spaces import Arrangement
from flowserve.graph.wiring import Wiring
from flowserve.memory import rows as row_operations
from flowserve.memory.recipe import host_array
from flowserve.memory.tensor import Tensor
from flowserve.scheduling.batch import Batch, Grant, Responses, Stop
from flowserve.scheduling.frames.borders import RegionFrame, Source, region_frame
from flowserve.scheduling.frames.frame import Frame
from flowserve.scheduling.frames.slots import InflightSlots
from flowserve.values import Array
from tests.support.ensembles import model
from tests.support.spaces_world import MODELS, VEC, Interpreter, World, plain

STREAM = replace(model("stream", {"X": VEC}, {"Y": VEC}, 4), decoupled=True)
WITH_STREAM = (*MODELS, STREAM, STREAM)


def count_of(x: Array) -> int:
    """The number of responses to these rows."""
    return int(abs(round(float(x[0].sum()) * 3))) % 4


def response_to(x: Array, k: int) -> Array:
    """The k-th response to these rows."""
    made: Array = (x * 10 + k).astype(np.float32)
    return made


def stream_step(w: Wiring) -> int | None:
    """The number of the decoupled step; None if there is none. Raises ValueError if there are several."""
    found = [step.index for step in w.steps if step.written.model == "stream"]
    if len(found) > 1:
        raise ValueError
    return found[0] if found else None


Context = tuple[Any, ...]


class StreamInterpreter(Interpreter):
    """As `Interpreter`, for one row of one response: the k-th one to row `bound` of the decoupled step's space, or, if
    `bound` is None, the one of a row for which the step does not run.
    """

    def __init__(self, w: Wiring, made: Arrangement, row: Array, bound: Context | None = None, k: int = 0) -> None:
        super().__init__(w, made, row)
        self._bound = bound
        self._k = k
        self._is_present_below = False
        step = stream_step(w)
        assert step is not None
        self._step = step
        self._space = made.of_step[step]
        self._below = _steps_below(w, made, step)
        tensors = {tensor for n in self._below for tensor in w.steps[n].written.output_map.values()}
        self._tensors = tensors | {*w.steps[step].written.output_map.values()}

    def streams(self) -> list[tuple[Context | None, int]]:
        """The rows of the step's space, each with its number of responses; None for a request in which it has none."""
        found = [(context, count_of(self.given(context))) for context in self.contexts(self._space)]
        return [*found] or [(None, 1)]

    def given(self, context: Context) -> Array:
        """What the decoupled step reads for one row of its space."""
        written = self.w.steps[self._step].written
        found = self.value(written.input_map["X"], self._space, context)
        return np.asarray(plain(found), np.float32).reshape(1, 2)

    def _contexts_around(self, record: Any) -> list[Context]:
        found = super()._contexts_around(record)
        return [one for one in found if self._is_here(record.parent, one)] if self._is_below(record) else found

    def _is_below(self, record: Any) -> bool:
        """Whether a space is opened by what the decoupled step, or one behind it, writes."""
        while record.index:
            if self._opens(record) & self._tensors:
                return True
            record = self.made.spaces[record.parent]
        return False

    @staticmethod
    def _opens(record: Any) -> set[str]:
        if record.test is not None:
            return {record.test.tensor}
        return {*record.each.tensors, record.each.count} - {""}

    def _is_here(self, space: int, context: Context) -> bool:
        """Whether a row of a space belongs to the rows of this response."""
        if not self._space:
            return True
        path, own = self.made.path(space), self.made.path(self._space)
        shared = sum(a == b for a, b in zip(path, own, strict=False)) - 1
        if self._bound is None:
            return True
        return context[:shared] == self._bound[:shared]

    def present(self, tensor: str) -> Any:
        spaces = [self.made.of_step[end.step] for end in self.w.writers[tensor] if not end.field]
        is_below = any(self._is_below(self.made.spaces[space]) for space in spaces)
        self._is_present_below = is_below or tensor in self._tensors
        return super().present(tensor)

    def _rows_below(self, tensor: str, below: int, context: Context) -> list[Context]:
        rows = super()._rows_below(tensor, below, context)
        if (
            tensor in self._tensors
            or self._is_below(self.made.spaces[below])
            or (not tensor and self._is_present_below)
        ):
            rows = [one for one in rows if self._is_here(below, one)]
        return rows

    def _run(self, index: int, context: Context) -> dict[str, Any]:
        if index != self._step:
            return super()._run(index, context)
        assert context == self._bound, "a response of another row is read"
        return {"Y": response_to(self.given(context), self._k)[0]}


def _steps_below(w: Wiring, made: Arrangement, step: int) -> set[int]:
    """The steps that run once for each response of `step`."""
    tensors = {*w.steps[step].written.output_map.values()}
    below: set[int] = set()
    while True:
        more = set()
        for one in w.steps:
            if one.index in below or one.index == step:
                continue
            written = one.written
            read = {*written.input_map.values(), *(name for name, _ in written.row_reads())}
            for space in made.path(made.of_step[one.index])[1:]:
                read |= StreamInterpreter._opens(made.spaces[space])
            if read & tensors:
                more.add(one.index)
        if not more:
            return below
        below |= more
        tensors |= {tensor for n in more for tensor in w.steps[n].written.output_map.values()}


class Sending:
    """One step of the decoupled model, as a thread that sends and waits: the model's side of `Streams`."""

    def __init__(self, world: StreamWorld, source: Source, given: Array) -> None:
        self.world = world
        self.source = source
        self.given = given
        self.sent = 0
        self.total = count_of(given)
        self.is_over = self.is_waiting = False
        self.credit = world.scheduler.streams.start(source, self, world.now_ns)

    def grant(self, count: int) -> None:
        self.credit += count
        self.is_waiting = False

    def withdraw(self) -> None:
        self.is_over = True

    @property
    def can_act(self) -> bool:
        return not self.is_over and not self.is_waiting

    def act(self) -> None:
        streams, now = self.world.scheduler.streams, self.world.now_ns
        if self.sent == self.total:
            self.is_over = True
            streams.last(self.source, now)
        elif self.credit:
            self.credit -= 1
            array = response_to(self.given, self.sent)
            self.sent += 1
            is_last = self.sent == self.total and self.world.rng.random() < 0.5
            self.is_over = is_last
            streams.answer(self.source, [Tensor(array, 0, len(array))], now, is_last=is_last)
        else:
            self.is_waiting = True
            streams.wait(self.source, None)


class StreamWorld(World):
    """Runs the decoupled step in senders that act in random order, and reads the responses at random times."""

    def __init__(self, config: ModelConfig, rng: random.Random, *, is_shared: bool = False, **options: Any) -> None:
        """`is_shared`: all requests share the in-flight slots."""
        if is_shared:
            config = replace(config, parameters={**config.parameters, SCOPE: "shared"})
        super().__init__(config, rng, models=WITH_STREAM, **options)
        regions = self.plan.regions
        assert regions is not None
        self.shared = InflightSlots(regions.limits) if regions.is_shared else None
        self.senders: list[Sending] = []
        self.unread: dict[RegionFrame, None] = {}
        self.cancelled: set[Frame] = set()
        self.answers: dict[Frame, list[dict[str, Array | None]]] = {}

    def submit(self, array: Array) -> Frame:
        frame = region_frame(
            self.plan, self.queues, self.inputs_of(array), self.now_ns, rows=row_operations, shared=self.shared
        )
        self.answers[frame] = []
        self.scheduler.submit(frame)
        return frame

    def notice(self, notice: Any) -> None:
        if isinstance(notice, Grant):
            notice.sender.grant(notice.credits)
        elif isinstance(notice, Stop):
            notice.sender.withdraw()
        elif isinstance(notice, Responses):
            self.unread[notice.stream] = None

    def over(self, frame: Frame) -> None:
        assert isinstance(frame, RegionFrame)
        self.unread.pop(frame, None)
        while self._read(frame):
            pass

    def _read(self, frame: RegionFrame) -> bool:
        answer = frame.take()
        if answer is None:
            return False
        self.answers[frame].append(self.outputs(answer))
        return True

    def act(self) -> bool:
        """Let a reader or a sender act. False: none can."""
        able = [sender for sender in self.senders if sender.can_act]
        readers = [*self.unread]
        if not able and not readers:
            return False
        if not readers or (able and self.rng.random() < 0.7):
            self.rng.choice(able).act()
        else:
            reader = self.rng.choice(readers)
            if not self._read(reader):
                del self.unread[reader]
        self.senders = [sender for sender in self.senders if not sender.is_over]
        return True

    def complete(self, batch: Batch) -> None:
        if batch.tickets[0].node.model.name != "stream":
            super().complete(batch)
            return
        for ticket in batch.tickets:
            assert isinstance(ticket, Source)
            given = np.zeros((1, 2), np.float32)
            if not ticket.frame.record.done:
                given = np.array(host_array(ticket.tensors[ticket.node.inputs[0]]))
            self.senders.append(Sending(self, ticket, given))
        self.scheduler.execute_returned(batch)


def expected(world: StreamWorld, array: Array) -> list[list[list[StreamInterpreter]]]:
    """For each row of the decoupled step, or each row of the request for which it does not run: its responses in order,
    each with an interpreter for each row that it has.
    """
    w, made = world.wiring, world.made
    step = stream_step(w)
    assert step is not None
    rows = [StreamInterpreter(w, made, row) for row in array]
    if not made.of_step[step]:  # the responses have all rows of the request
        count = count_of(rows[0].given(()))
        return [[[StreamInterpreter(w, made, row, (), k) for row in array] for k in range(count)]]
    found: list[list[list[StreamInterpreter]]] = []
    for row, one in zip(array, rows, strict=True):
        for bound, count in one.streams():
            found.append([[StreamInterpreter(w, made, row, bound, k)] for k in range(count)])
    return found


def is_streamed(world: World) -> bool:
    """Whether responses of the decoupled step reach the response of the graph."""
    regions = world.plan.regions
    return regions is not None and bool(regions.splits)
