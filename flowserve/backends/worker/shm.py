"""The port of an instance in a worker process: sequenced packets and shared memory.

Decides how messages are read and sent, and what is done about those of them that concern memory and routes. A batch
with a route is handed on to the next process if its wanted outputs exist for all members, each as one tensor, and its
model has not called another model meanwhile. All others return to the server. A batch is handed on through the server's
end of the next process's socket: so it arrives after every earlier message of the server, and that process has no
second socket to read.

One thread waits on the socket. A thread of the model's own may release an input at any time, and then reports it itself
while the first one waits. Messages are decided in messages.py, memory in tensors.py. Does not know instances, nor how
they run. Made by main.py, used by driver.py.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from typing import Any, Final

from flowserve.backends.base import ClockNs
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import Garbled, Job, RunMessage, pack, unpack
from flowserve.backends.worker.port import TakeMessage
from flowserve.backends.worker.tensors import InputReader, OutputWriter, Placed, Run, Together
from flowserve.memory.column import Column
from flowserve.memory.release import ProcessMemory
from flowserve.memory.segment import Segment

_CANCELLED_MAX: Final = 1 << 12  # the number of remembered batches that were cancelled before they arrived


class SharedMemoryPort:
    """The connection of a worker process."""

    def __init__(self, sock: socket.socket, job: Job, clock: ClockNs) -> None:
        self._socket = sock
        self._clock = clock
        self._batches = job.batches
        self._inputs = InputReader(job.model, job.inputs, batches=job.batches, let_go=self._let_go)
        self._outputs = OutputWriter(job.outputs, self._show)
        self._memory = ProcessMemory()
        self._handoff = HandOff(self._inputs, self._outputs)
        self._guard = RouteGuard()
        self.end_route = self._guard.end_route
        # Held while the arena of the outputs changes: the threads of a decoupled model respond at any time. Without it,
        # a batch costs less where all is done on one thread.
        self._placing = threading.Lock()
        self._take_back = self.give_back if job.decoupled else self._outputs.give_back
        self._run = Run(0)  # of the batch that runs
        # The last batch with a route that was run, and the words about its results.
        self._last: tuple[int, Sequence[int] | None] = (0, None)
        self._cancelled: dict[int, None] = {}  # batches that must no longer be run here
        self._is_idle = False  # whether a thread waits for messages

    # ------------------------------------------------------------------ from the server

    def receive(self, take: TakeMessage) -> RunMessage | None:
        self._is_idle = True
        if self._inputs.gone:
            self._let_go()
        while True:
            packed, ancillary, _, _ = self._socket.recvmsg(
                messages.MESSAGE_BYTES_MAX, messages.ANCILLARY_BYTES, messages.CLOSE_ON_EXEC
            )
            if not packed:
                return None
            kind, words, text = unpack(packed)
            try:
                if kind == messages.SPILLED:
                    kind, words, text = unpack(self._inputs.message(*words[1:]))
                if kind == messages.RUN:
                    self._is_idle = False
                    return messages.decode_run(words, text)
                if kind == messages.END:
                    return None
                self._take(kind, words, ancillary, take)
            except Garbled:
                raise
            except (LookupError, TypeError, ValueError, OverflowError) as error:
                raise Garbled(f"a message of kind {kind}: {type(error).__name__}: {error}") from None

    def _take(self, kind: int, words: Sequence[int], ancillary: Any, take: TakeMessage) -> None:
        if kind == messages.ROUTE:
            self._handoff.add_route(words)
        elif kind == messages.RELEASE:
            self._release_idle(words)
        elif kind in messages.OF_STREAMS:
            take(kind, words)
        else:
            number, *rest = messages.read_fields(messages.TO_INSTANCE, kind, words)
            if kind == messages.ATTACH:
                self._inputs.attach(number, *messages.descriptors(ancillary))
            elif kind == messages.SHOW:
                self._show(self._outputs.segment(number))
            elif kind == messages.PEER:
                self._handoff.add_peer(number, rest, *messages.descriptors(ancillary))
            elif kind == messages.CANCEL:
                self._cancel(number)
            else:
                take(kind, words)

    def _cancel(self, number: int) -> None:
        """Report whether a batch with a route was run here. If not, it must no longer be run."""
        seen, stage = self._last
        if seen != number:
            stage = None
            self._cancelled[number] = None
            if len(self._cancelled) > _CANCELLED_MAX:
                del self._cancelled[next(iter(self._cancelled))]
        self.send(pack(messages.CANCELLED, (number, 0) if stage is None else (number, 1, *stage)))

    def _release_idle(self, words: Sequence[int]) -> None:
        """Process a RELEASE message. Batches wait meanwhile, for more than some milliseconds only after a burst."""
        is_quiet, free, ended = messages.decode_release(words)
        self._inputs.detach(ended)
        self._memory.used()
        with self._placing:
            self._outputs.give_back(free)
            idle = self._memory.collect(self._clock(), (self._outputs.arena,), is_quiet=is_quiet)
        if idle is not None:
            idle.release()

    # ------------------------------------------------------------------ one batch

    def begin(self, batch: RunMessage) -> bool:
        free, ended = batch.update
        if free:
            self._take_back(free)
        if ended:
            self._inputs.detach(ended)
        number, stage = batch.number, batch.stage
        if stage and (number in self._cancelled or not self._inputs.fit(batch.columns)):
            self.send(pack(messages.NOT_RUN, (number, stage, *batch.passed)))
            return False
        self._run = Run(number)
        self._guard.number = number if batch.route else 0
        return True

    def inputs(self, batch: RunMessage) -> list[Column]:
        return self._inputs.take(self._run, batch.columns, batch.rows)

    def may_write(self, batch: RunMessage) -> bool:
        return True  # they are mapped privately

    def place(self, batch: RunMessage, outputs: Sequence[Sequence[Any]]) -> Placed:
        with self._placing:
            return self._outputs.place(outputs, batch.rows if self._batches else None)

    def reply(self, batch: RunMessage, text: Any, times: tuple[int, int], placed: Placed | None) -> None:
        run = self._run
        kept = self._inputs.finish(run)
        number, stage = batch.number, batch.stage
        made: Sequence[int] | None = None
        if batch.route:
            if self._guard.end_route() and placed is not None and text is None:
                made = stage_words(batch, int(kept), times, placed)
            self._last = number, made
        if made is None or placed is None or not batch.later or not self._handoff.hand_on(batch, made, placed):
            words = [number, stage, *batch.passed, int(kept)]
            if placed is None:
                self.send(pack(messages.FAILED, words, text))
            else:
                words += times
                words += placed.words()
                self.send(pack(messages.DONE, words, text))
        if not kept:
            self._inputs.forget_writes(run)  # last, because no other process waits for it

    # ------------------------------------------------------------------ on any thread

    def respond(self, head: Sequence[int], outputs: Sequence[Any], text: Any) -> None:
        with self._placing:
            placed = self._outputs.place([[one] for one in outputs], None)
        self.send(pack(messages.ANSWER, [*head, *placed.words()], text))

    def send(self, message: bytes) -> None:
        if len(message) > messages.MESSAGE_BYTES_MAX:
            with self._placing:
                message = pack(messages.SPILLED_OUT, self._outputs.message(message))
        self._socket.send(message)

    def give_back(self, blocks: Sequence[tuple[int, int]]) -> None:
        with self._placing:
            self._outputs.give_back(blocks)

    def _show(self, segment: Segment) -> None:
        socket.send_fds(self._socket, [pack(messages.SEGMENT, (segment.number,))], [segment.fd])

    def _let_go(self) -> None:
        """Report the batches whose inputs the model has released. Never blocks."""
        if not self._is_idle:
            return  # reported after the run
        gone = self._inputs.gone
        while gone:
            number = gone.popleft()
            try:
                self._socket.send(pack(messages.GONE, (number,)), socket.MSG_DONTWAIT)
            except OSError:
                gone.append(number)  # the socket is full, or the server has ended
                return


class HandOff:
    """The routes that continue after this process. `inputs` and `outputs`: the memory that it reads and writes."""

    def __init__(self, inputs: InputReader, outputs: OutputWriter) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._peers: dict[int, socket.socket] = {}  # sockets of other processes, by number
        self._shown: dict[int, set[int]] = {}  # the segments that each peer has attached
        self._routes: dict[int, messages.RouteHop] = {}  # the next stage of each route

    def add_peer(self, number: int, gone: Sequence[int], fd: int) -> None:
        """Process a PEER message and its descriptor."""
        for ended in gone:
            self._peers.pop(ended).close()
            self._shown.pop(ended, None)
        self._peers[number] = socket.socket(fileno=fd)
        self._shown[number] = set()

    def add_route(self, words: Sequence[int]) -> None:
        """Process a ROUTE message."""
        number, hop, ended = messages.decode_route(words)
        for gone in ended:
            self._routes.pop(gone, None)
        self._routes[number] = hop

    def hand_on(self, message: RunMessage, made: Sequence[int], placed: Placed) -> bool:
        """Hand on a batch that was run here, with the words about its results (`stage_words` of `placed`). False if it
        must return to the server instead.
        """
        stage = message.stage
        following, wanted, inputs = self._routes[message.route]
        peer, shown = self._peers[following], self._shown[following]
        earlier: Sequence[messages.Stage] = messages.read_passed(message.passed, 0, stage)[0] if stage else ()
        segments = [placed.segment]
        for one in earlier:
            segments.append(one.segment)  # noqa: PERF401  # a comprehension is one more call
        columns: list[messages.ColumnPlace] = []
        for i, j in inputs:
            if i < stage:
                segment, block = earlier[i].segment, earlier[i].offset
                start, nbytes, shape = earlier[i].outputs[j]
            else:
                segment, block = placed.segment, placed.offset
                output = placed.outputs[j]
                if not isinstance(output, Together):
                    return False
                start, nbytes, _, shape = output
            columns.append((segment, block + start, nbytes, shape) if nbytes else (0, 0, 0, shape))
        onward = messages.encode_run(
            message.number,
            message.route,
            stage + 1,
            message.rows,
            wanted=(wanted,),
            updates=message.later,
            columns=columns,
            passed=(*message.passed, *made),
            about=message.about,
            text=message.text,
        )
        if len(onward) > messages.MESSAGE_BYTES_MAX:
            return False
        try:
            for segment in segments:  # also segments that only a later stage reads
                if segment and segment not in shown:
                    self._show(segment, peer)
                    shown.add(segment)
            peer.send(onward)  # without waiting: the server's sockets are non-blocking
        except OSError:  # the process has ended, or its socket is full
            return False
        return True

    def _show(self, number: int, peer: socket.socket) -> None:
        """Send a process the descriptor of memory that it, or a later one, is about to read."""
        fd = (self._inputs.segment(number) or self._outputs.segment(number)).open_for_reading()
        try:
            socket.send_fds(peer, [pack(messages.ATTACH, (number,))], [fd])
        finally:
            os.close(fd)


def stage_words(message: RunMessage, kept: int, times: tuple[int, int], placed: Placed) -> list[int] | None:
    """The results of this stage, for the later stages, as in PASSED. None if an output is not one tensor of all
    members.
    """
    total = sum(message.rows)
    words = [kept, *times, placed.segment, placed.offset, len(placed.outputs)]
    for j, output in enumerate(placed.outputs):
        if output is None and j not in message.wanted[0]:
            words += (0, 0, 0)
        elif isinstance(output, Together) and not output.absent and output.shape[0] == total:
            start, nbytes, _, shape = output
            words += (start, nbytes, len(shape), *shape)
        else:
            return None
    return words


class RouteGuard:
    """Whether the batch that is executed may still be handed on. A call of another model prevents that: while the model
    waits for its response, the server must be able to use the instances of all other stages.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.number = 0  # the batch with a route that is executed, 0 for none

    def end_route(self) -> int:
        """The model calls another model, or the execution is over. Returns the batch that could be handed on until now,
        0 for none. On any thread.
        """
        with self._lock:
            number, self.number = self.number, 0
            return number
