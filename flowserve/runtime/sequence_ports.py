"""What a model of sequences gets besides its inputs, and what is kept of it for its next request.

Decided here: to its backend such a model is one with more inputs and outputs (`inner`): its control inputs and its
state are tensors like all others, so that every backend and every place to run serves them. They are made when a batch
starts, and what came out as state is kept with the sequence (`Line.memory`) as rows of the block it was computed in:
a batch that stays together hands that block on as it is. State goes when its sequence goes, and nobody else ever sees
it. A sequence begins with what `initial_state` says, else with zeros.

Which requests make a batch is decided in scheduling/; this file never changes that. It runs for every batch of such a
model, so whatever can be asked of a batch is not asked of its members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from flowserve.backends.base import Results, Work
from flowserve.config.types import ModelConfig, SequenceControl, SequenceState
from flowserve.errors import FlowserveError, Invalid, ModelFailed
from flowserve.memory import bytes_codec
from flowserve.memory.blank import blank_like, zeros
from flowserve.memory.tensor import Tensor
from flowserve.runtime.instance import Outcome, gather
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.direct import Nobody
from flowserve.scheduling.lines import Line
from flowserve.scheduling.router import Flow, Ticket
from flowserve.values import Array, DType, Request, TensorSpec

FOLDER: Final = "initial_state"
# The request of a place that nobody has.
NULL: Final = Request({})

Column = list[Tensor | None]
Memory = Sequence[Tensor]


class SequencePorts:
    """The controls and the state of one version of a model. Blocks while it reads the files of initial states.

    Raises Invalid where such a file cannot be read or does not hold what the state needs.
    """

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        sequence = config.sequence
        assert sequence is not None, "made for models of sequences only"
        self._model = config.name
        self._states = sequence.states
        self._batches = config.max_batch_size > 0
        self._outer = range(len(config.inputs))
        self._output_count = len(config.outputs)
        self._controls = [(_maker(control), control.dtype.numpy) for control in sequence.controls]
        self._initial = [_initial(state, config, folder, batches=self._batches) for state in sequence.states]
        self._has_shapes = any(-1 in state.dims for state in sequence.states)
        self.inner = _inner(config, sequence.controls, sequence.states)
        outputs = {spec.name: j for j, spec in enumerate(self.inner.outputs)}
        self._updated = [outputs[state.output] for state in sequence.states]
        self._state_names = tuple(state.output for state in sequence.states)
        self._wanted: dict[tuple[str, ...], tuple[str, ...]] = {}

    # ------------------------------------------------------------------ before a batch

    def gather(self, tickets: Sequence[Ticket], *, may_write: bool = False) -> Work:
        """What an instance is given of a batch that is about to start. `may_write`: as for any other model."""
        real = [ticket for ticket in tickets if ticket.line is not None]
        work = gather(real, self._outer, may_write=may_write)
        if self._states:
            work.wanted = [self._asked(names) for names in work.wanted]
        work.requests = self._requests(real, work.requests)
        work.inputs += self._remembered(real, work.requests)
        if len(real) < len(tickets):
            _stretch(work, [ticket.line is not None for ticket in tickets])
        controls = [self._control(make, dtype, work.requests) for make, dtype in self._controls]
        outer = len(self._outer)
        work.inputs[outer:outer] = controls
        if work.may_write is not None:
            nobody_may = [False] * len(tickets)
            work.may_write += [nobody_may] * (len(work.inputs) - outer)
        return work

    def _requests(self, tickets: Sequence[Ticket], requests: Sequence[Request]) -> Sequence[Request]:
        """What the model is told of each ticket's request."""
        return requests

    def _begins(self, ticket: Ticket) -> bool:
        """Whether a request begins its sequence, or begins it again."""
        request: Request = ticket.flow.request
        return request.sequence_start

    def _asked(self, names: tuple[str, ...]) -> tuple[str, ...]:
        found = self._wanted.get(names)
        if found is None:
            if len(self._wanted) > 100:
                self._wanted.clear()  # clients choose these names, in any order and number
            found = self._wanted[names] = tuple(dict.fromkeys((*names, *self._state_names)))
        return found

    def _control(self, make: Callable[[Request], Any], dtype: Any, requests: Sequence[Request]) -> Column:
        block = np.array([make(request) for request in requests], dtype)
        if not self._batches:
            return [Tensor(block)]
        block = block.reshape(-1, 1)
        return [Tensor(block, m, m + 1) for m in range(len(block))]

    def _remembered(self, tickets: Sequence[Ticket], requests: Sequence[Request]) -> list[Column]:
        """Each state as it was after the request before."""
        memories: list[Memory] = [
            self._initial if request.sequence_start or ticket.line.memory is None else ticket.line.memory
            for ticket, request in zip(tickets, requests, strict=True)
        ]
        return [[*column] for column in zip(*memories, strict=True)]

    # ------------------------------------------------------------------ after it

    def finish(self, batch: Batch, outcome: Outcome) -> Outcome:
        """Keep the state that came of a batch, and leave of it what was asked for: its tickets and their outputs."""
        tickets = batch.tickets
        kept = self._kept(tickets, outcome)
        if isinstance(outcome, Results):
            if self._states:
                self._keep(tickets, outcome)
            self._trim(outcome, kept)
        elif isinstance(outcome, FlowserveError):
            self.restart(tickets)
        if kept is not None:
            batch.tickets = [tickets[m] for m in kept]
            batch.rows = len(kept)
        return outcome

    def restart(self, tickets: Sequence[Ticket]) -> None:
        """Forget what sequences were that begin anew with these."""
        for ticket in tickets:
            self._forget_if_restarted(ticket)

    def take(self, ticket: Ticket, outputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Keep the state that is in one answer of a decoupled model. Returns the rest of it. Raises ModelFailed where
        it is not the state of one request.
        """
        if self._states:
            for state, j in zip(self._states, self._updated, strict=True):
                tensor = outputs[j]
                if self._batches and tensor is not None and tensor.stop - tensor.start != 1:
                    rows = tensor.stop - tensor.start
                    raise ModelFailed(f"model '{self._model}' answered state '{state.output}' with {rows} rows")
            self._remember(ticket.line, [outputs[j] for j in self._updated])
        return outputs[: self._output_count]

    def _kept(self, tickets: Sequence[Ticket], outcome: Outcome) -> list[int] | None:
        """The members that somebody hears of, None for all."""
        real = [m for m, ticket in enumerate(tickets) if ticket.line is not None]
        return real if len(real) < len(tickets) else None

    def _forget_if_restarted(self, ticket: Ticket) -> None:
        if ticket.line is not None and self._begins(ticket):
            ticket.line.memory = ticket.line.shapes = None

    def _keep(self, tickets: Sequence[Ticket], results: Results) -> None:
        columns = [results.outputs[j] for j in self._updated]
        errors = results.errors
        for m, (ticket, updated) in enumerate(zip(tickets, zip(*columns, strict=True), strict=True)):
            if errors and m in errors:
                self._forget_if_restarted(ticket)
            elif ticket.line is not None:
                if self._begins(ticket):
                    ticket.line.memory = None
                self._remember(ticket.line, updated)

    def _remember(self, line: Line, updated: Sequence[Tensor | None]) -> None:
        """A model that leaves a state out leaves it as it was."""
        if None in updated:
            before = line.memory or self._initial
            updated = [old if new is None else new for old, new in zip(before, updated, strict=True)]
        line.memory = updated
        if self._has_shapes:
            line.shapes = tuple(tensor.shape for tensor in line.memory)

    def _trim(self, results: Results, kept: Sequence[int] | None) -> None:
        del results.outputs[self._output_count :]
        results.copied = results.copied[: len(self._outer)]
        results.placed = results.placed[: self._output_count]
        if kept is not None:
            results.outputs = [[column[m] for m in kept] for column in results.outputs]
            results.errors = {n: results.errors[m] for n, m in enumerate(kept) if m in results.errors}
            results.parameters = {n: results.parameters[m] for n, m in enumerate(kept) if m in results.parameters}


def sequence_of(flow: Flow) -> tuple[int | str, bool, bool]:
    """What a request says of its sequence: the id, START, END."""
    request: Request = flow.request
    return request.sequence_id, request.sequence_start, request.sequence_end


def nobody(outputs: Sequence[TensorSpec]) -> Nobody:
    """The flow of a place that nobody has. A model answers it like any other."""
    flow = Nobody(NULL)
    flow.wanted = tuple(spec.name for spec in outputs)
    return flow


def _stretch(work: Work, is_real: Sequence[bool]) -> None:
    """Make room between the members of a batch for the places that nobody has."""
    for column in work.inputs:
        like = column[0]  # of one kind with all others, or they would not share a batch
        blank = None if like is None else blank_like(like)
        column[:] = _spread(column, is_real, blank)
    work.rows = [1] * len(is_real)
    work.requests = _spread(work.requests, is_real, NULL)
    work.wanted = _spread(work.wanted, is_real, work.wanted[0])
    if work.may_write is not None:
        work.may_write = [_spread(column, is_real, False) for column in work.may_write]


def _spread(members: Sequence[Any], is_real: Sequence[bool], nobody: Any) -> list[Any]:
    following = iter(members)
    return [next(following) if one else nobody for one in is_real]


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


def _maker(control: SequenceControl) -> Callable[[Request], Any]:
    """What a control says of one request."""
    false, true = control.false, control.true
    if control.kind == "START":
        return lambda request: true if request.sequence_start else false
    if control.kind == "END":
        return lambda request: true if request.sequence_end else false
    if control.kind == "READY":
        return lambda request: false if request is NULL else true
    if control.dtype is DType.BYTES:
        return lambda request: str(request.sequence_id or "").encode()
    bits = control.dtype.itemsize * 8
    is_signed = control.dtype in (DType.INT32, DType.INT64)

    def number(request: Request) -> int:
        """The low bits of the id."""
        low = int(request.sequence_id) & ((1 << bits) - 1)
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
