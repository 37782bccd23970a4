"""Calls of a model that runs in another process: a worker process, an actor on another machine, or one that the model
has forked there.

Decides that everything the process sends is checked before use; that each process has calls of its own, and that they
and its metrics end with it; and what a process is told about a call. How messages and tensors travel is decided by the
port: call_socket.py for processes of this machine, elsewhere/call_frames.py for actors. Its other requests
(server_requests.py) come the same way.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from flowserve.backends.base import IS_WITHDRAWN, METRIC, METRIC_VALUE, OPEN_FAMILY, Answer, BlsCall
from flowserve.backends.worker.messages import (
    CALL,
    DROP,
    FROM_CALLER,
    LEAVE,
    NO_PARAMETERS,
    SERVER_REQUEST,
    Garbled,
    encode_error,
    read_fields,
)
from flowserve.errors import FlowserveError, Internal, Unsupported
from flowserve.observe.exposition import GAUGE
from flowserve.observe.model_metrics import Cells
from flowserve.runtime.ipc.tensors import OutputReader
from flowserve.runtime.model_calls.calls import Calls, PendingCall, is_withdrawn
from flowserve.scheduling.batch import Batch
from flowserve.values import BY_NUMBER, Array, Request, Response, TensorSpec

_FACTS: Final[tuple[Any, ...]] = (str, str, list, (list, type(None)), str, int, int, (int, str), bool, bool, dict)
NO_OUTPUTS: Final[Mapping[str, Array]] = {}

# The memory of a message's tensors, by its segment, its offset and its bytes. Raises Garbled, or LookupError.
MemoryOf = Callable[[int, int, int], Any]


class CallingWorker(Protocol):
    """The worker whose model makes the calls. `running`: the batch it executes; `loads`: the model's name while it is
    opened, else "".
    """

    @property
    def running(self) -> Batch | None: ...
    @property
    def loads(self) -> str: ...
    def end_route(self, number: int | None) -> None:
        """A call was made during this batch, None: the one that it executes. It therefore leaves its route."""

    def calls_ended(self, calls: RemoteCalls) -> None:
        """These calls are closed."""

    def kill_for(self, what: str) -> None:
        """The process sent an invalid message, and is killed."""


class CallPort(Protocol):
    """The way of messages to a process that calls."""

    def result(
        self, number: int, is_last: bool, error: Sequence[str] | None, outputs: Mapping[str, Array], parameters: Any
    ) -> None:
        """Send a RESULT. Raises MemoryError, and Internal if it is too long for a message; then nothing was sent."""

    def reply(self, number: int, error: Sequence[str] | None, answer: Any) -> None:
        """Send a SERVER_REPLY."""

    def cells(self, number: int, family: int, cells: Array, *, is_gauge: bool) -> Cells:
        """The numbers of a metric that the process shows by this request, up to date at any time. `cells`: at first."""

    def drop(self, family: int) -> None:
        """The process does not count in the metrics of this family any more."""

    def close(self) -> None:
        """Nothing is sent any more."""


class RemoteCalls:
    """The calls of one process; `is_fork`: one that the model has forked. On the event loop."""

    def __init__(
        self,
        model: str,
        calls: Calls,
        port: CallPort,
        worker: CallingWorker,
        *,
        families: set[int],
        is_fork: bool,
        refusal: str = "",
    ) -> None:
        """`families`: the metric families of the worker's model, including those of its other processes. `refusal`: why
        it cannot call other models, "" if it can.
        """
        self.is_fork = is_fork
        self._refusal = refusal
        self._calls = calls
        self._port = port
        self._worker = worker
        self._reader = OutputReader(model, (), batches=False)
        self._pending: dict[int, PendingCall] = {}
        self._families = families
        self._opened: set[int] = set()  # the families that end with this process
        self._is_closed = False

    def close(self) -> None:
        """Withdraw its calls: the process has ended or its socket is closed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._port.close()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            self._calls.leave(one)
        for family in [*self._opened]:
            self._drop(family)
        self._worker.calls_ended(self)

    def broke(self, error: Exception) -> None:
        """An invalid message, or a fault of the server while reading: its calls would never be answered, so the process
        is killed.
        """
        self.close()
        self._worker.kill_for(str(error) if isinstance(error, Garbled) else f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------ from the process

    def take(self, kind: int, words: Sequence[int], text: bytes, memory_of: MemoryOf) -> None:
        """Process a message, unless it is about the port's memory. Kills the process if it is invalid."""
        try:
            if kind == CALL:
                self._begin_call(words, json.loads(text), memory_of)
            elif kind == SERVER_REQUEST:
                what, arguments, names = json.loads(text)
                self._begin_server_request(words, what, arguments, names, memory_of)
            elif kind == DROP:
                self._drop(*read_fields(FROM_CALLER, kind, words))
            elif kind == LEAVE:
                number, is_answered = read_fields(FROM_CALLER, kind, words)
                self._withdraw(number, is_answered=bool(is_answered))
            else:
                raise Garbled(f"a message of kind {kind} about calls")
        except (struct.error, ValueError, LookupError, TypeError, RecursionError, FlowserveError) as error:
            self.broke(error)

    def _withdraw(self, number: int, *, is_answered: bool) -> None:
        pending = self._pending.get(number)
        if pending is None:
            return  # its last response was sent already
        if is_answered:
            self._calls.cancel(pending)
        else:
            del self._pending[number]
            self._calls.leave(pending)

    def _drop(self, family: int) -> None:
        self._opened.remove(family)
        self._families.remove(family)
        self._calls.server_requests.metrics.drop(family)
        self._port.drop(family)

    def _begin_call(self, words: Sequence[int], facts: list[Any], memory_of: MemoryOf) -> None:
        number, is_stream, batch, segment, offset, nbytes, count = words[1:8]
        if number in self._pending:
            raise Garbled(f"two calls with number {number}")
        if len(facts) != len(_FACTS) or not all(isinstance(*pair) for pair in zip(facts, _FACTS, strict=True)):
            raise Garbled("a call whose facts are none")
        model, version, names, outputs, *rest = facts
        if len(names) != count or not all(isinstance(name, str) for name in (*names, *(outputs or ()))):
            raise Garbled("a call whose tensors have no names")
        if not all(isinstance(value, (str, int, float)) for value in facts[-1].values()):
            raise Garbled("a call whose parameters are none")
        inputs = self._inputs(words, names, memory_of(segment, offset, nbytes))
        if self._refusal:
            self._port.result(number, True, encode_error(Unsupported(self._refusal)), NO_OUTPUTS, NO_PARAMETERS)
            return
        request = Request(inputs, None if outputs is None else tuple(outputs), *rest)
        pending = PendingCall(
            self._worker.running, BlsCall(model, version, request, bool(is_stream)), partial(self._respond, number)
        )
        if batch or self.is_fork:  # a forked process does not know which batch is executed
            self._worker.end_route(None if self.is_fork else batch)
        self._pending[number] = pending
        self._calls.begin(pending)

    def _inputs(self, words: Sequence[int], names: Sequence[str], memory: Array) -> dict[str, Array]:
        inputs = {}
        at = 8
        for name in names:
            number, offset, nbytes, dimensions = words[at : at + 4]
            shape = tuple(words[at + 4 : at + 4 + dimensions])
            at += 4 + dimensions
            spec = TensorSpec(name, BY_NUMBER[number], (-1,) * len(shape))
            inputs[name] = self._reader.array(spec, offset, nbytes, shape, memory)
        return inputs

    def _begin_server_request(
        self, words: Sequence[int], what: str, arguments: list[Any], names: list[str], memory_of: MemoryOf
    ) -> None:
        number, _, _, segment, offset, nbytes, count = words[1:8]
        if len(names) != count or not all(isinstance(name, str) for name in (what, *names)):
            raise Garbled("what is asked has no name")
        if what in (METRIC, METRIC_VALUE) and arguments[0] not in self._families:
            raise Garbled("a metric of a family that is not its own")
        arrays = self._inputs(words, names, memory_of(segment, offset, nbytes))
        if what == IS_WITHDRAWN:
            self._reply(number, what, is_withdrawn(self._worker.running, operator.index(arguments[0])))
            return
        if what == METRIC:
            (cells,) = arrays.values()
            if cells.ndim != 1 or cells.dtype != np.float64:
                raise Garbled("a metric that is not counted in numbers")
            answer: FlowserveError | None = None
            try:
                server_requests = self._calls.server_requests
                is_gauge = server_requests.metrics.kind_of(arguments[0]) == GAUGE
                shown = self._port.cells(number, arguments[0], cells, is_gauge=is_gauge)
                server_requests.show(arguments, shown)
            except FlowserveError as error:
                answer = error.with_traceback(None)
            self._reply(number, what, answer)
            return
        files = {name: array.tobytes() for name, array in arrays.items()}
        self._calls.server_requests.begin(
            what, arguments, files, self._worker.loads, partial(self._reply, number, what)
        )

    # ------------------------------------------------------------------ to the process

    def _reply(self, number: int, what: str, answer: Any) -> None:
        if what == OPEN_FAMILY and isinstance(answer, int):
            self._opened.add(answer)
            self._families.add(answer)
        error = encode_error(answer) if isinstance(answer, FlowserveError) else None
        self._port.reply(number, error, None if error else answer)

    def _respond(self, number: int, answer: Answer) -> None:
        pending = self._pending.get(number)
        if pending is None:
            return
        is_last = isinstance(answer, FlowserveError) or answer.is_final
        if is_last:
            del self._pending[number]
        if isinstance(answer, Response):
            try:
                self._port.result(number, is_last, None, answer.outputs, answer.parameters)
                return
            except MemoryError as none:  # within the engine's step, which must continue for other requests
                answer = Internal(f"the answer of model '{pending.call.model}' cannot be handed on: {none}")
            except Internal as error:
                answer = Internal(f"the response of model '{pending.call.model}' {error}")
        self._port.result(number, is_last, encode_error(answer), NO_OUTPUTS, NO_PARAMETERS)
