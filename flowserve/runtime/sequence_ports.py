"""What a model of sequences gets besides its inputs, and what is kept of it for its next request.

Decided here: to its backend such a model is one with more inputs and outputs (`inner`): its control inputs and its
state are tensors like all others, so that every backend and every place to run serves them. They are made when a batch
starts, and what came out as state is kept with the sequence (`Line.memory`) as rows of the block it was computed in:
a batch that stays together hands that block on as it is. State goes when its sequence goes, and nobody else ever sees
it. A sequence begins with what `initial_state` says, else with zeros.

Which requests make a batch is decided in scheduling/; this file never changes that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from flowserve.backends.base import Results
from flowserve.config.types import ModelConfig, SequenceControl, SequenceState
from flowserve.errors import Invalid
from flowserve.memory import bytes_codec
from flowserve.memory.blank import blank_like, zeros
from flowserve.memory.tensor import Tensor
from flowserve.runtime.instance import Outcome
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.direct import Nobody
from flowserve.scheduling.lines import Line
from flowserve.scheduling.router import Flow, Ticket
from flowserve.values import Array, DType, Request, TensorSpec

FOLDER: Final = "initial_state"
# The request of a place that nobody has.
NULL: Final = Request({})
# A warm-up request is a whole sequence.
_WARM_UP: Final = Line(1)


class Member:
    """A ticket as a host sees it: ticket, flow and node in one, with the model's inner inputs in their order."""

    __slots__ = ("inputs", "is_start", "line", "request", "rows", "tensors", "ticket", "wanted")

    def __init__(self, ticket: Ticket, inputs: Sequence[int], wanted: tuple[str, ...]) -> None:
        self.ticket = ticket
        self.inputs = inputs
        self.wanted = wanted
        self.rows = ticket.rows
        self.request: Request = ticket.flow.request
        self.line: Line | None = getattr(ticket, "line", _WARM_UP)
        self.is_start = self.line is _WARM_UP or self.request.sequence_start
        self.tensors: list[Tensor | None] = []
        if self.line is not None:
            tensors = ticket.flow.tensors
            self.tensors += [tensors[slot] if slot >= 0 else None for slot in ticket.node.inputs]

    @property
    def flow(self) -> Member:
        return self

    @property
    def node(self) -> Member:
        return self

    def is_last_reader(self, slot: int) -> bool:
        outer = self.ticket.node.inputs
        if self.line is None or slot >= len(outer):
            return False
        return self.ticket.flow.is_last_reader(outer[slot]) and outer.count(outer[slot]) == 1


class SequencePorts:
    """The controls and the state of one version of a model. Blocks while it reads the files of initial states.

    Raises Invalid where such a file cannot be read or does not hold what the state needs.
    """

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        sequence = config.sequence
        assert sequence is not None, "made for models of sequences only"
        self._states = sequence.states
        self._batches = config.max_batch_size > 0
        self._input_count = len(config.inputs)
        self._output_count = len(config.outputs)
        self._makers = [(_maker(control), control) for control in sequence.controls]
        self._initial = [_initial(state, config, folder, batches=self._batches) for state in sequence.states]
        self._has_shapes = any(-1 in state.dims for state in sequence.states)
        self.inner = _inner(config, sequence.controls, sequence.states)
        outputs = {spec.name: j for j, spec in enumerate(self.inner.outputs)}
        self._updated = [outputs[state.output] for state in sequence.states]
        self._state_names = tuple(state.output for state in sequence.states)
        self._inputs = tuple(range(len(self.inner.inputs)))
        self._wanted: dict[tuple[str, ...], tuple[str, ...]] = {}

    def prepare(self, batch: Batch) -> None:
        """Give each ticket of a batch that is about to start the model's inner inputs."""
        members = [Member(ticket, self._inputs, self._asked(ticket)) for ticket in batch.tickets]
        first = next(member for member in members if member.line is not None)
        for member in members:
            if member.line is None:
                member.tensors = [None if tensor is None else blank_like(tensor) for tensor in first.tensors]
        for make, control in self._makers:
            block = np.array([make(member) for member in members], control.dtype.numpy)
            if self._batches:
                block = block.reshape(-1, 1)
                for m, member in enumerate(members):
                    member.tensors.append(Tensor(block, m, m + 1))
            else:
                members[0].tensors.append(Tensor(block))
        for k, initial in enumerate(self._initial):
            column = [None if member.line is None else _remembered(member, k) or initial for member in members]
            like = next(tensor for tensor in column if tensor is not None)
            for member, tensor in zip(members, column, strict=True):
                member.tensors.append(blank_like(like) if tensor is None else tensor)
        batch.tickets = cast("list[Ticket]", members)

    def finish(self, batch: Batch, outcome: Outcome) -> Outcome:
        """Keep the state that came of a batch, and leave of it what was asked for: its tickets and their outputs."""
        members = cast("list[Member]", batch.tickets)
        real = [m for m, member in enumerate(members) if member.line is not None]
        batch.tickets = [members[m].ticket for m in real]
        if len(real) != len(members):
            batch.rows = sum(ticket.rows for ticket in batch.tickets)
        if not isinstance(outcome, Results):
            for m in real:
                _forget_if_restarted(members[m])
            return outcome
        for m in real:
            if m in outcome.errors:
                _forget_if_restarted(members[m])
            elif self._states:
                self._remember(members[m], m, outcome)
        self._trim(outcome, real, len(members))
        return outcome

    def _asked(self, ticket: Ticket) -> tuple[str, ...]:
        names = ticket.node.wanted or ticket.flow.wanted
        found = self._wanted.get(names)
        if found is None:
            if len(self._wanted) > 100:
                self._wanted.clear()  # clients choose these names, in any order and number
            found = self._wanted[names] = tuple(dict.fromkeys((*names, *self._state_names)))
        return found

    def _remember(self, member: Member, m: int, results: Results) -> None:
        """A model that leaves a state out leaves it as it was."""
        line = member.line
        if line is None or line is _WARM_UP:
            return
        old = member.tensors[-len(self._states) :]
        line.memory = [results.outputs[j][m] or old[k] for k, j in enumerate(self._updated)]
        if self._has_shapes:
            line.shapes = tuple(tensor.shape for tensor in line.memory)

    def _trim(self, results: Results, real: list[int], members: int) -> None:
        del results.outputs[self._output_count :]
        results.copied = results.copied[: self._input_count]
        results.placed = results.placed[: self._output_count]
        if len(real) != members:
            results.outputs = [[column[m] for m in real] for column in results.outputs]
            results.errors = {n: results.errors[m] for n, m in enumerate(real) if m in results.errors}
            results.parameters = {n: results.parameters[m] for n, m in enumerate(real) if m in results.parameters}


def sequence_of(flow: Flow) -> tuple[int | str, bool, bool]:
    """What a request says of its sequence: the id, START, END."""
    request: Request = flow.request
    return request.sequence_id, request.sequence_start, request.sequence_end


def nobody(outputs: Sequence[TensorSpec]) -> Nobody:
    """The flow of a place that nobody has. A model answers it like any other."""
    flow = Nobody(NULL)
    flow.wanted = tuple(spec.name for spec in outputs)
    return flow


def _remembered(member: Member, k: int) -> Tensor | None:
    line = member.line
    if member.is_start or line is None or line.memory is None:
        return None
    tensor: Tensor = line.memory[k]
    return tensor


def _forget_if_restarted(member: Member) -> None:
    if member.is_start and member.line is not None:
        member.line.memory = member.line.shapes = None


def _inner(config: ModelConfig, controls: Sequence[SequenceControl], states: Sequence[SequenceState]) -> ModelConfig:
    listed = {spec.name for spec in config.outputs}
    return replace(
        config,
        inputs=(
            *config.inputs,
            *(TensorSpec(control.name, control.dtype, (1,)) for control in controls),
            *(TensorSpec(state.input, state.dtype, state.dims) for state in states),
        ),
        outputs=(
            *config.outputs,
            *(TensorSpec(state.output, state.dtype, state.dims) for state in states if state.output not in listed),
        ),
    )


def _maker(control: SequenceControl) -> Callable[[Member], Any]:
    """What a control says of one member."""
    false, true = control.false, control.true
    if control.kind == "START":
        return lambda member: true if member.is_start and member.line is not None else false
    if control.kind == "END":
        return lambda member: true if member.request.sequence_end or member.line is _WARM_UP else false
    if control.kind == "READY":
        return lambda member: false if member.line is None else true
    if control.dtype is DType.BYTES:
        return lambda member: str(member.request.sequence_id or "").encode()
    bits = control.dtype.itemsize * 8
    is_signed = control.dtype in (DType.INT32, DType.INT64)

    def number(member: Member) -> int:
        """The low bits of the id."""
        low = int(member.request.sequence_id) & ((1 << bits) - 1)
        return low - (1 << bits) if is_signed and low >> (bits - 1) else low

    return number


def _initial(state: SequenceState, config: ModelConfig, folder: Path, *, batches: bool) -> Tensor:
    """What a sequence begins with."""
    dims = state.initial_dims if state.initial_dims is not None else tuple(1 if dim < 0 else dim for dim in state.dims)
    shape = (1, *dims) if batches else dims
    array = zeros(shape, state.dtype.numpy)
    if state.file:
        array = _read(state, config, folder, math.prod(dims)).reshape(shape)
        array.flags.writeable = False
    return Tensor(array, 0, 1) if batches else Tensor(array)


def _read(state: SequenceState, config: ModelConfig, folder: Path, count: int) -> Array:
    shown = f"{folder.name}/{FOLDER}/{state.file}"
    where = f"model '{config.name}', state input '{state.input}': initial state file '{shown}'"
    try:
        content = (folder / FOLDER / state.file).read_bytes()
    except OSError as error:
        raise Invalid(f"{where} cannot be read: {error.strerror}") from error
    if state.dtype is DType.BYTES:
        return bytes_codec.decode(content, count, name=state.input, model=config.name)
    wanted = count * state.dtype.itemsize
    if len(content) != wanted:
        raise Invalid(f"{where} has {len(content)} bytes, and the state needs {wanted} ({count} {state.dtype})")
    return np.frombuffer(content, state.dtype.numpy, count)
