"""The port of an instance in an actor: messages and tensors of one connection that all instances of the actor share.

Decides that the inputs of a batch are views of the block behind its message, and that outputs are sent from where the
model has left them. Decides how a batch passes its route (`scheduling/route.py`), all of whose stages are instances of
this actor: each thread passes it to the next one without copying the outputs, and the last replies. A batch returns
earlier, with the outputs of all stages that it has passed, if a member failed, an output cannot be passed on as it is,
its model has called another model, or it was recalled.

Does not know instances, nor how they run. Made by actor.py, whose reading thread calls `take`; used by
backends/worker/driver.py on the thread of the instance.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from queue import SimpleQueue
from typing import Any

from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import Garbled, Job, RouteHop, RunMessage, encode_error, pack
from flowserve.backends.worker.port import TakeMessage
from flowserve.backends.worker.shm import stage_words
from flowserve.backends.worker.tensors import OutputWriter, Placed
from flowserve.elsewhere.cluster.frames import Buffer, OutgoingArena, inputs_of_block
from flowserve.errors import FlowserveError
from flowserve.memory.column import Column, whole_output
from flowserve.memory.pool import HOST
from flowserve.memory.segment import Segment
from flowserve.values import Array, TensorSpec, fits

# Sends a message of an instance, or of the actor (0), with a block of this many bytes.
Tell = Callable[[int, bytes, Sequence[Buffer], int], None]


@dataclass(slots=True, eq=False)
class Made:
    """The results of a stage: `columns[j]` is output j, None if it is not wanted."""

    specs: Sequence[TensorSpec]
    columns: Sequence[Column | None]
    times: tuple[int, int]

    def place(self, rows: Sequence[int], arena: OutgoingArena) -> Placed:
        """Add the outputs to a block."""
        outputs = [[None] * len(rows) if column is None else column for column in self.columns]
        return OutputWriter(self.specs, _show, arena).place(outputs, None)

    def words(self, message: RunMessage, arena: OutgoingArena | None) -> Sequence[int]:
        """The numbers of a PASSED message. `arena`: receives the outputs; None if they are not sent."""
        if arena is None:
            sizes = [0 if column is None else column.nbytes for column in self.columns]
            return [0, *self.times, 0, 0, len(sizes), *chain.from_iterable((0, size, 0) for size in sizes)]
        wanted = tuple([j for j, column in enumerate(self.columns) if column is not None])
        placed = self.place(message.rows, arena)
        words = stage_words(message._replace(wanted=[wanted]), 0, self.times, placed)
        assert words is not None  # each output is one tensor
        return words


class ActorBatch:
    """A batch in this actor, at its current `stage`. As `is_recalled`, that is changed only while the lock of `Routed`
    is held. `made`: the results of the stages before that one; `inputs`: those of the stage, if an earlier one computed
    them.
    """

    def __init__(self, words: Sequence[int], text: bytes, block: Array | None) -> None:
        """Raises Garbled."""
        self._message: RunMessage | None = None
        self._source = words, text
        self.block = block
        if len(words) < 4 or words[3]:
            raise Garbled("a batch that is cut off, or has passed stages elsewhere")
        self.number, self.route = words[1:3]
        self.stage = 0
        self.is_recalled = False
        self.made: list[Made] = []
        self.inputs: Sequence[Column] = ()
        self.wanted: Sequence[tuple[int, ...]] = ()  # wanted outputs of the stage, by member, or one entry for all

    def decode(self, outputs: int) -> None:
        """Decode the message, on the thread that runs the first stage, whose model has so many outputs. Raises
        Garbled.
        """
        message = self._message = messages.decode_run(*self._source)
        if not message.rows or message.passed:
            raise Garbled("a batch without members, or with results")
        self.wanted = message.wanted
        if len(self.wanted) not in (1, len(message.rows)):
            raise Garbled("outputs are asked for by other members")
        if max(chain.from_iterable(self.wanted), default=-1) >= outputs:
            raise Garbled("an output that does not exist is asked for")

    @property
    def message(self) -> RunMessage:
        """The decoded message."""
        assert self._message is not None
        return self._message

    @property
    def rows(self) -> list[int]:
        return self.message.rows

    @property
    def about(self) -> Sequence[int]:
        return self.message.about

    @property
    def text(self) -> bytes:
        return self.message.text

    @property
    def is_at_end(self) -> bool:
        """Whether no stage follows."""
        return self.stage == len(self.message.later) // 2


class Routed:
    """The batches of an actor that are on a route, and the ports of its instances by number."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.ports: dict[int, FramePort] = {}
        self._batches: dict[int, ActorBatch] = {}
        self._lock = threading.Lock()

    def add(self, batch: ActorBatch) -> None:
        """A batch has arrived. On the reading thread, before its instance can see it."""
        self._batches[batch.number] = batch

    def recall(self, number: int) -> int | None:
        """The batch returns after its current stage, which is returned; None if it has returned. On any thread."""
        batch = self._batches.get(number)
        if batch is None:
            return None
        with self._lock:
            batch.is_recalled = True
            return batch.stage

    def advance(self, batch: ActorBatch) -> bool:
        """Advance a batch to its next stage. False if it was recalled."""
        with self._lock:
            batch.stage += not batch.is_recalled
            return not batch.is_recalled

    def forget(self, batch: ActorBatch) -> None:
        """Remove a batch that is about to return."""
        self._batches.pop(batch.number, None)


class FramePort:
    """The connection of one instance."""

    def __init__(self, number: int, job: Job, routed: Routed) -> None:
        self._number = number
        self._job = job
        self._routed = routed
        self._received: SimpleQueue[ActorBatch | tuple[int, Sequence[int]] | None] = SimpleQueue()
        self._routes: dict[int, RouteHop] = {}  # the next stage of each route
        self._on_route = 0  # the batch with a route that is executed, 0 for none

    # ------------------------------------------------------------------ on the reading thread

    def take(self, kind: int, words: Sequence[int], text: bytes, block: Array | None) -> None:
        """Take a message to the instance. Raises Garbled."""
        if kind == messages.RUN:
            batch = ActorBatch(words, text, block)
            if batch.route:
                self._routed.add(batch)
            self._received.put(batch)
        elif kind == messages.ROUTE:
            try:
                route, hop, _ = messages.decode_route(words)
            except (LookupError, ValueError):
                raise Garbled("a route that is cut off") from None
            self._routes[route] = hop
        elif kind in messages.OF_STREAMS and self._job.decoupled:
            self._received.put((kind, words))
        else:
            raise Garbled(f"a message of kind {kind}")

    def end(self) -> None:
        """End the instance after its batches. On any thread."""
        self._received.put(None)

    # ------------------------------------------------------------------ one batch, for its driver

    def receive(self, take: TakeMessage) -> ActorBatch | None:
        while (received := self._received.get()) is not None:
            if isinstance(received, ActorBatch):
                if not received.stage:
                    received.decode(len(self._job.outputs))
                return received
            try:
                take(*received)
            except (LookupError, ValueError) as error:
                raise Garbled(f"a message of kind {received[0]}: {error}") from None
        return None

    def begin(self, batch: ActorBatch) -> bool:
        self._on_route = batch.number if batch.route else 0
        return True

    def inputs(self, batch: ActorBatch) -> Sequence[Column]:
        if batch.stage:
            return batch.inputs
        job, message = self._job, batch.message
        block = HOST.take(0) if batch.block is None else batch.block
        return inputs_of_block(message.columns, job.inputs, message.rows, block, job.model, job.batches)

    def may_write(self, batch: ActorBatch) -> bool:
        return not batch.stage  # the block belongs to this batch only; outputs of a stage may have other readers

    def place(self, batch: ActorBatch, outputs: Sequence[Sequence[Any]]) -> Any:
        """The columns of outputs that may be passed on as they are, else a block and their places in it."""
        columns = None if batch.is_at_end else _whole(batch, outputs)
        if columns is not None:
            return columns, None, None
        arena = OutgoingArena()
        writer = OutputWriter(self._job.outputs, _show, arena)
        return None, arena, writer.place(outputs, batch.rows if self._job.batches else None)

    def reply(self, batch: ActorBatch, text: Any, times: tuple[int, int], placed: Any) -> None:
        try:
            if placed is None:
                self._fail(batch, text)
                return
            columns, arena, place = placed
            if columns is not None:
                made = Made(self._job.outputs, columns, times)
                if text is None and self._hand_on(batch, made):
                    return
                arena = OutgoingArena()
                place = made.place(batch.rows, arena)
            # The outputs of earlier stages are sent if the batch has not passed its whole route.
            is_whole = text is None and batch.is_at_end
            passed = [one.words(batch.message, None if is_whole else arena) for one in batch.made]
            words = [batch.number, len(passed), *chain.from_iterable(passed), 0, *times, *place.words()]
            self._return(batch, pack(messages.DONE, words, text), arena)
        except FlowserveError as error:  # the reply is larger than a frame
            self._fail(batch, encode_error(error))

    def _fail(self, batch: ActorBatch, text: Any) -> None:
        arena = OutgoingArena()
        passed = [one.words(batch.message, arena) for one in batch.made]
        words = [batch.number, len(passed), *chain.from_iterable(passed), 0]
        self._return(batch, pack(messages.FAILED, words, text), arena)

    def _return(self, batch: ActorBatch, message: bytes, arena: OutgoingArena) -> None:
        self._routed.forget(batch)
        self._routed.tell(self._number, message, arena.block.finish(arena.nbytes), arena.nbytes)

    # ------------------------------------------------------------------ routes

    def _hand_on(self, batch: ActorBatch, made: Made) -> bool:
        """Pass a batch to the instance of the next stage. False if it returns to the server instead: it was recalled,
        or the next model does not accept an output.
        """
        hop = self._routes.get(batch.route)
        following = None if hop is None else self._routed.ports.get(hop.peer)
        if hop is None or following is None:
            return False
        every = [*batch.made, made]
        inputs = [column for stage, j in hop.inputs if (column := every[stage].columns[j]) is not None]
        if not following._accepts(inputs) or not self._routed.advance(batch):
            return False
        batch.made, batch.inputs, batch.wanted, batch.block = every, inputs, [hop.outputs], None
        following._received.put(batch)
        return True

    def _accepts(self, columns: Sequence[Column]) -> bool:
        """Whether these columns, of a whole batch, have the types and dims of the configuration."""
        specs = self._job.inputs
        firsts = [column.pieces[0] for column in columns]
        return len(specs) == len(firsts) and all(
            first.dtype == spec.dtype.numpy and fits(first.shape[1:], spec.dims)
            for spec, first in zip(specs, firsts, strict=True)
        )

    def end_route(self) -> int:
        """The model calls another model: the batch that is executed returns after this stage. Returns its number, 0 if
        it is on no route, or returns already. On any thread.
        """
        number, self._on_route = self._on_route, 0
        if number:
            self._routed.recall(number)
        return number

    # ------------------------------------------------------------------ on any thread

    def respond(self, head: Sequence[int], outputs: Sequence[Any], text: Any) -> None:
        arena = OutgoingArena()
        placed = OutputWriter(self._job.outputs, _show, arena).place([[one] for one in outputs], None)
        message = pack(messages.ANSWER, [*head, *placed.words()], text)
        try:
            self._routed.tell(self._number, message, arena.block.finish(arena.nbytes), arena.nbytes)
        except FlowserveError as error:  # the response is larger than a frame
            self.send(pack(messages.OVER, head[:2], encode_error(error)))

    def send(self, message: bytes) -> None:
        self._routed.tell(self._number, message, (), 0)

    def give_back(self, blocks: Sequence[tuple[int, int]]) -> None:
        """No effect: blocks are sent, not shared."""


def _whole(batch: ActorBatch, outputs: Sequence[Sequence[Any]]) -> list[Column | None] | None:
    """The wanted outputs, if each is one tensor of all members."""
    rows = batch.rows
    columns: list[Column | None] = [None] * len(outputs)
    for j in batch.wanted[0]:
        column = columns[j] = whole_output(outputs[j], rows)
        if column is None or sum(map(len, column.pieces)) != sum(rows):
            return None
    return columns


def _show(segment: Segment) -> None:
    """Not needed: blocks are sent, not shared."""
