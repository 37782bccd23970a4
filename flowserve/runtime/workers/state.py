"""State adapters: control inputs before a batch, states after it.

Decides the additional inputs of a model of sequences, and the state that is kept for the next request. To its backend
such a model has more inputs and outputs (`inner`): its control inputs and its states are tensors like all others, so
every backend and every kind of worker serves them. They are created when a batch starts, and the computed state is kept
with the sequence (`memory`) as rows of the block it was computed in: a batch that stays together passes that block on
unchanged. State ends with its sequence and is not visible to other sequences. A sequence begins with its
`initial_state`, or with zeros without one.

`SequenceAdapter` is for models of sequences, `IterativeAdapter` for iterative sequences; `StateAdapter` is for
models without state. Does not know which requests make a batch (scheduling/sequence/), nor where it runs. Called on the
event loop, once before and once after each batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from flowserve.backends.base import Results, Work
from flowserve.config.types import ModelConfig, SequenceControl, SequenceState
from flowserve.errors import FlowserveError, Invalid, ModelFailed
from flowserve.memory import raw
from flowserve.memory.assemble import padding_like, zeros
from flowserve.memory.column import Column
from flowserve.memory.tensor import Tensor
from flowserve.runtime.workers.base import Outcome, Returned, StateAdapter
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.borders import Source
from flowserve.scheduling.frames.frame import Frame, Ticket, filler_frame
from flowserve.scheduling.sequence.sequence import RequestSequence
from flowserve.values import Array, DType, Request, TensorSpec

FOLDER: Final = "initial_state"
# The request of an empty slot.
NULL: Final = Request({})

Memory = Sequence[Tensor]


class SequenceAdapter(StateAdapter):
    """The controls and the state of one version of a model. Blocks while it reads the files of initial states.

    Raises Invalid if such a file cannot be read or does not contain enough data.
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
        states = tuple(state.output for state in sequence.states)
        # By requested outputs, which clients choose in any order and number.
        self._asked = lru_cache(100)(lambda names: tuple(dict.fromkeys((*names, *states))))

    # ------------------------------------------------------------------ before a batch

    def work(self, tickets: Sequence[Ticket], *, may_write: bool = False) -> Work:
        real = [ticket for ticket in tickets if ticket.sequence is not None]
        work = super().work(real, may_write=may_write)
        if self._states:
            work.wanted = [*map(self._asked, work.wanted)]
        work.requests = self._requests(real, work.requests)
        given = [*work.inputs]
        states = self._remembered(real, work.requests)
        if len(real) < len(tickets):
            is_real = [ticket.sequence is not None for ticket in tickets]
            given, states = _with_padding(given, is_real), _with_padding(states, is_real)
            _stretch(work, is_real)
        controls = [self._control(make, dtype, work.requests) for make, dtype in self._controls]
        outer = len(self._outer)
        work.inputs = [*given, *controls, *states]
        if work.may_write is not None:
            none_may_write = [False] * len(tickets)
            work.may_write += [none_may_write] * (len(work.inputs) - outer)
        return work

    def _requests(self, tickets: Sequence[Ticket], requests: Sequence[Request]) -> Sequence[Request]:
        """The request of each ticket, as its model gets it."""
        return requests

    def _begins(self, ticket: Ticket) -> bool:
        """Whether a request begins its sequence, or begins it again."""
        request: Request = ticket.frame.request
        return request.sequence_start

    def _control(self, make: Callable[[Request], Any], dtype: Any, requests: Sequence[Request]) -> Column:
        block = np.array([make(request) for request in requests], dtype)
        if not self._batches:
            return Column.of([Tensor(block)], [1])
        return Column.whole(block.reshape(-1, 1), [1] * len(block))

    def _remembered(self, tickets: Sequence[Ticket], requests: Sequence[Request]) -> list[Column]:
        """Each state as it was after the previous request."""
        memories: list[Memory] = [
            self._initial if request.sequence_start or ticket.sequence.memory is None else ticket.sequence.memory
            for ticket, request in zip(tickets, requests, strict=True)
        ]
        ones = [1] * len(tickets)
        return [Column.of([*column], ones) for column in zip(*memories, strict=True)]

    # ------------------------------------------------------------------ after a batch

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
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
        return outcome, ()

    def restart(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._forget_if_restarted(ticket)

    def take(self, ticket: Ticket, outputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """As `StateAdapter.take`. Raises ModelFailed if an output is not the state of one request."""
        if self._states:
            for state, j in zip(self._states, self._updated, strict=True):
                tensor = outputs[j]
                if self._batches and tensor is not None and tensor.stop - tensor.start != 1:
                    rows = tensor.stop - tensor.start
                    raise ModelFailed(f"model '{self._model}' answered state '{state.output}' with {rows} rows")
            self._remember(ticket.sequence, [outputs[j] for j in self._updated])
        return outputs[: self._output_count]

    def _kept(self, tickets: Sequence[Ticket], outcome: Outcome) -> list[int] | None:
        """The members that are requests, not empty slots; None for all."""
        real = [m for m, ticket in enumerate(tickets) if ticket.sequence is not None]
        return real if len(real) < len(tickets) else None

    def _forget_if_restarted(self, ticket: Ticket) -> None:
        if ticket.sequence is not None and self._begins(ticket):
            ticket.sequence.memory = ticket.sequence.shapes = None

    def _keep(self, tickets: Sequence[Ticket], results: Results) -> None:
        columns = [results.outputs[j] for j in self._updated]
        errors = results.errors
        for m, (ticket, updated) in enumerate(zip(tickets, zip(*columns, strict=True), strict=True)):
            if errors and m in errors:
                self._forget_if_restarted(ticket)
            elif ticket.sequence is not None:
                if self._begins(ticket):
                    ticket.sequence.memory = None
                self._remember(ticket.sequence, updated)

    def _remember(self, sequence: RequestSequence, updated: Sequence[Tensor | None]) -> None:
        """Keep the computed states. A state that the model left out is unchanged."""
        if None in updated:
            before = sequence.memory or self._initial
            updated = [old if new is None else new for old, new in zip(before, updated, strict=True)]
        sequence.memory = updated
        if self._has_shapes:
            sequence.shapes = tuple(tensor.shape for tensor in sequence.memory)

    def _trim(self, results: Results, kept: Sequence[int] | None) -> None:
        results.outputs = results.outputs[: self._output_count]
        results.copied = results.copied[: len(self._outer)]
        results.placed = results.placed[: self._output_count]
        if kept is not None:
            results.outputs = [[column[m] for m in kept] for column in results.outputs]
            results.errors = {n: results.errors[m] for n, m in enumerate(kept) if m in results.errors}
            results.parameters = {n: results.parameters[m] for n, m in enumerate(kept) if m in results.parameters}
            if results.notes is not None:
                orders = results.notes.orders
                results.notes.orders = {n: orders[m] for n, m in enumerate(kept) if m in orders}


class IterativeAdapter(SequenceAdapter):
    """For a model of iterative sequences. A request that runs again has the same inputs as before, which the model may
    not write to, the id of its sequence, and no START; its state is that of its last execution. Members that the model
    reschedules are queued again before the batch is processed further, and are not among its results.
    """

    def work(self, tickets: Sequence[Ticket], *, may_write: bool = False) -> Work:
        work = super().work(tickets, may_write=may_write)
        if work.may_write is not None:
            work.may_write = [[False] * len(tickets)] * len(work.inputs)
        return work

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        again = self._again(batch, outcome)
        rows = sum(ticket.sequence is not None for ticket in batch.tickets)
        outcome, _ = super().finish(batch, outcome)
        batch.rows = rows
        if batch.tickets or not isinstance(outcome, Results):
            return outcome, again
        batch.tickets = again
        return Returned(outcome.gathered_ns, outcome.computed_ns), again

    def _requests(self, tickets: Sequence[Ticket], requests: Sequence[Request]) -> Sequence[Request]:
        return [
            replace(request, sequence_id=ticket.sequence.id, sequence_start=self._begins(ticket), sequence_end=False)
            for ticket, request in zip(tickets, requests, strict=True)
        ]

    def _begins(self, ticket: Ticket) -> bool:
        return ticket.sequence.rescheduled is not ticket

    def _kept(self, tickets: Sequence[Ticket], outcome: Outcome) -> list[int] | None:
        again = frozenset(outcome.rescheduled) if isinstance(outcome, Results) else frozenset()
        kept = [m for m, ticket in enumerate(tickets) if ticket.sequence is not None and m not in again]
        return kept if len(kept) < len(tickets) else None

    def _again(self, batch: Batch, outcome: Outcome) -> list[Ticket]:
        if batch.queue.bound is None or not isinstance(outcome, Results | Returned):
            return []  # a warm-up runs once
        again = [batch.tickets[m] for m in outcome.rescheduled]
        # A decoupled model may also have sent its final flag.
        return [one for one in again if one.sequence is not None and not (isinstance(one, Source) and one.is_over)]


def sequence_of(frame: Frame) -> tuple[int | str, bool, bool]:
    """The sequence parameters of a request: the id, START, END."""
    request: Request = frame.request
    return request.sequence_id, request.sequence_start, request.sequence_end


def filler(outputs: Sequence[TensorSpec]) -> Frame:
    """The frame of an empty slot. A model computes it like any other."""
    return filler_frame(NULL, tuple(spec.name for spec in outputs))


def _with_padding(columns: Sequence[Column], is_real: Sequence[bool]) -> list[Column]:
    """The columns with padding rows for the slots that have no request."""
    ones = [1] * len(is_real)
    found = []
    for column in columns:
        like = column[0]  # all members of a batch have the same inputs
        padding = None if like is None else padding_like(like)
        found.append(Column.of(_spread(column, is_real, padding), ones))
    return found


def _stretch(work: Work, is_real: Sequence[bool]) -> None:
    """Make room between the members of a batch for the slots that have no request."""
    work.rows = [1] * len(is_real)
    work.requests = _spread(work.requests, is_real, NULL)
    work.wanted = _spread(work.wanted, is_real, work.wanted[0])
    if work.may_write is not None:
        work.may_write = [_spread(column, is_real, False) for column in work.may_write]


def _spread(members: Sequence[Any], is_real: Sequence[bool], padding: Any) -> list[Any]:
    following = iter(members)
    return [next(following) if one else padding for one in is_real]


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
    """The value of a control for one request."""
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
    """The initial state of a sequence."""
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
        return raw.decode_bytes(content, count, name=state.input, model=config.name)
    wanted = count * state.dtype.itemsize
    if len(content) != wanted:
        raise Invalid(f"{where} has {len(content)} bytes, and the state needs {wanted} ({count} {state.dtype})")
    return np.frombuffer(content, state.dtype.numpy, count)
