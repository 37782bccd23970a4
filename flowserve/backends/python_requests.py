"""The requests of a batch, as a Python model is given them.

Decided here: what of a batch a model sees of each of its members, looked up when the model asks for it, so that a
request costs next to nothing until then; and what it may do with one. What it answers with is in triton_objects.py and
python_sender.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowserve.backends.base import Caller, Work
from flowserve.backends.triton_objects import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
)
from flowserve.backends.triton_tensors import Tensor, TritonModelException, _Input, inner_shape
from flowserve.errors import FlowserveError
from flowserve.memory.assemble import in_one_piece
from flowserve.memory.columns import Together
from flowserve.memory.pool import POOLED_BYTES_MIN
from flowserve.memory.tensor import Tensor as Rows
from flowserve.values import Array, TensorSpec


class GivenRequest(InferenceRequest):
    """One member of a batch. Everything is looked up when the model asks for it."""

    __slots__ = ("_flags", "_kept_sender", "_member", "_model", "_work")

    _kept_sender: Any
    _flags: int

    def __init__(self, model: ModelFacts, work: Work, member: int) -> None:
        self._model = model
        self._work = work
        self._member = member
        self._inputs = None

    def inputs(self) -> list[Tensor]:
        found = self._inputs
        if found is None:
            # Written out plainly: this runs for every request.
            work, member = self._work, self._member
            columns, writable = work.inputs, work.may_write
            found = self._inputs = []
            for i, spec in enumerate(self._model.inputs):
                rows = columns[i][member]
                if rows is not None:
                    found.append(_Input(spec, rows, writable is not None and writable[i][member]))
        return found

    @property
    def _sender(self) -> Any:
        """The sender that the model asked for, None where it did not."""
        return getattr(self, "_kept_sender", None)

    def get_response_sender(self) -> Any:
        sender = self._sender
        if sender is None:
            sender = self._kept_sender = self._model.make_sender(self._work, self._member)
        return sender

    @property
    def _is_rescheduled(self) -> bool:
        return getattr(self, "_flags", TRITONSERVER_REQUEST_RELEASE_ALL) == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def set_release_flags(self, flags: int) -> None:
        """TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: it is not done, and comes with a later batch again."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(
                f"Invalid request release flags: {flags} is neither TRITONSERVER_REQUEST_RELEASE_ALL nor "
                "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"
            )
        if flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE and not self._model.is_iterative:
            raise TritonModelException(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while its model "
                f"'{self._model.name}' does not have sequence_batching {{ iterative_sequence: true }}"
            )
        self._flags = flags

    def trace(self) -> InferenceTrace:
        """The span in which this is computed, where requests are traced as spans."""
        contexts = self._work.contexts
        return InferenceTrace(contexts[self._member] if contexts else "")

    def set_flags(self, flags: int) -> None:
        """Its flags are its sender's."""
        raise TritonModelException("Unable to set flags: the request was given to this model")

    def is_cancelled(self) -> bool:
        """Whether nobody wants its answers any more. Where its model is not decoupled, it is asked while the batch is
        executed: which goes on, unless the model ends it.
        """
        senders = self._work.senders
        if senders is None:
            return self._model.is_withdrawn(self._work, self._member)
        return senders[self._member].is_cancelled()

    def _facts(self) -> dict[str, Any]:
        request = self._work.requests[self._member]
        start = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if request.sequence_start else 0
        end = TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if request.sequence_end else 0
        return {
            "request_id": request.id,
            "correlation_id": request.sequence_id,
            "requested_output_names": self._work.wanted[self._member],
            "model_name": self._model.name,
            "model_version": self._model.version,
            "flags": start | end,
            "timeout": request.timeout_us,
            "priority": request.priority,
            "parameters": dict(request.parameters),
        }


def hand_out(requests: Sequence[GivenRequest], work: Work, specs: Sequence[TensorSpec]) -> None:
    """Give each request its tensors now, where all lie as one array: to write into, or a copy of what is small."""
    for i, spec in enumerate(specs):
        whole = _whole(work, i, spec)
        if whole is None:
            if i:
                for request in requests:
                    request._inputs = None  # all or none: they stand in the configuration's order
            return
        give(requests, spec, whole, work.rows)


def _whole(work: Work, i: int, spec: TensorSpec) -> Array | None:
    """One input of all members as one array that they may write into; None where it is better asked for one by one."""
    column: Any = work.inputs[i]
    if type(column) is not Together and (len(column) == 1 or spec.optional or type(column[0]) is not Rows):
        return None
    whole = in_one_piece(column)
    if whole is None:
        return None
    flags = whole.flags
    if flags.writeable and flags.aligned and work.may_write is not None and all(work.may_write[i]):
        return whole
    return whole.copy() if whole.nbytes < POOLED_BYTES_MIN else None


def give(requests: Sequence[GivenRequest], spec: TensorSpec, whole: Array, rows: Sequence[int]) -> None:
    """Give each request its rows of one input, the next in the configuration's order, of which `whole` holds all: that
    costs less than when each is asked for.
    """
    if spec.reshape is not None:
        whole = whole.reshape(inner_shape(whole.shape, spec))
    name = spec.name
    arrays = [whole] if len(rows) == 1 else Together(whole, rows).arrays()
    for request, array in zip(requests, arrays, strict=True):
        tensors = request._inputs
        if tensors is None:
            request._inputs = [Tensor(name, array)]
        else:
            tensors.append(Tensor(name, array))


class ModelFacts:
    """What all requests to one model have in common. `make_sender` makes what a model answers a member of a batch
    through; `is_withdrawn` says whether nobody waits for one. `is_iterative`: its requests may be run again.
    """

    __slots__ = ("inputs", "is_iterative", "is_withdrawn", "make_sender", "name", "version")

    def __init__(
        self,
        name: str,
        version: int,
        inputs: tuple[TensorSpec, ...],
        make_sender: Callable[[Work, int], Any],
        *,
        is_iterative: bool = False,
    ) -> None:
        self.is_iterative = is_iterative
        self.name = name
        self.version = version
        self.inputs = inputs
        self.make_sender = make_sender
        self.is_withdrawn: Callable[[Work, int], bool] = _never


class Executing:
    """Which batch a model executes, noted for its requests that ask whether anybody still waits for them."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._work: Work | None = None

    def around(self, execute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What is called in place of `execute`."""

        def noted(requests: Sequence[GivenRequest]) -> Any:
            self._work = requests[0]._work
            try:
                return execute(requests)
            finally:
                self._work = None

        return noted

    def is_withdrawn(self, work: Work, member: int) -> bool:
        """False for a batch that is not executed any more: it has its answers."""
        try:
            return self._work is work and self._caller.is_withdrawn(member)
        except FlowserveError:
            return True  # the server is gone


def _never(work: Work, member: int) -> bool:
    return False
