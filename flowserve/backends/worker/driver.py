"""One open instance in a worker process, driven by messages.

Decides that batches run one after another until the server sends END, which errors the server gets, when a batch with a
route is not run here, and which batches are handed on to the next process of their route: those whose wanted outputs
exist for all members, each as one tensor, and whose model has not called another model meanwhile. All others return to
the server. A batch is handed on through the server's end of the next process's socket: so it arrives after every
earlier message of the server, and that process has no second socket to read.

The one thread of an instance waits on the socket. A thread of the model's own may release an input at any time, and
then reports it itself while the first one waits. Messages are decided in protocol.py, memory in tensors.py. It does not
know the event loop, queues or graphs, nor which backend it runs. Called by main.py.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from flowserve.backends.base import ClockNs, Instance, Results, Work
from flowserve.backends.worker import protocol
from flowserve.backends.worker.protocol import Garbled, Job, RunMessage, encode_error, encode_notes, pack, unpack
from flowserve.backends.worker.tensors import NOTHING_PLACED, InputReader, OutputWriter, Placed, Run, Together
from flowserve.errors import FlowserveError, model_raised, told
from flowserve.memory.device import why_lost
from flowserve.memory.release import Idle, ProcessMemory
from flowserve.memory.segment import Segment
from flowserve.values import Request

log = logging.getLogger("flowserve.child")

# The least time between two checks whether the GPU is lost: a check takes 50 us where no driver is loaded, and a model
# may refuse every other request. After a loss all requests fail, so the next check finds it.
_LOOK_EVERY_NS: Final = 100_000_000
_PLAIN_REQUEST: Final = Request({}, None, *protocol.PLAIN_FACTS)  # its attributes are only read
_CANCELLED_MAX: Final = 1 << 12  # the number of remembered batches that were cancelled before they arrived


class BatchRequests(Sequence[Request]):
    """The requests of a batch, from the facts in its message; each is made when the backend reads it."""

    __slots__ = ("_facts",)

    def __init__(self, facts: Sequence[Sequence[Any]]) -> None:
        self._facts = facts

    def __len__(self) -> int:
        return len(self._facts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return BatchRequests(self._facts[index])
        return Request({}, None, *self._facts[index])


class Driver:
    """Drives an open instance."""

    def __init__(self, sock: socket.socket, job: Job, instance: Instance, guard: RouteGuard, clock: ClockNs) -> None:
        self._socket = sock
        self._job = job
        self._instance = instance
        self._guard = guard
        self._inputs = InputReader(job.model, job.inputs, batches=job.batches, let_go=self._let_go)
        self._outputs = OutputWriter(job.outputs, self._show)
        self._memory = ProcessMemory()
        self._handoff = HandOff(self._inputs, self._outputs)
        names = [spec.name for spec in job.outputs]
        # Names by requested outputs, which clients choose in any order and number.
        self._names_of = lru_cache(100)(lambda outputs: tuple([names[j] for j in outputs]))
        # The last batch with a route that was run, and the words about its results.
        self._last: tuple[int, Sequence[int] | None] = (0, None)
        self._cancelled: dict[int, None] = {}  # batches that must no longer be run here
        self._is_idle = False
        self._has_failed = False  # whether a batch or some of its members failed
        self._look_ns = 0  # earliest time of the next check of the GPU
        self._pid = os.getpid()
        self._clock = clock

    def run(self) -> None:
        """Run batches until END, or until the server has ended. Raises Garbled."""
        self._socket.send(pack(protocol.READY, ()))
        while True:
            self._is_idle = True
            if self._inputs.gone:
                self._let_go()
            message = self._next_message()
            self._is_idle = False
            if message is None:
                return
            kind, words, text = message
            if kind == protocol.END:
                return
            try:
                if kind == protocol.RUN:
                    self._run(protocol.decode_run(words, text))
                elif kind == protocol.CANCEL:
                    self._cancel(words[1])
                elif kind == protocol.RELEASE:
                    self._release_idle(words)
            except LookupError as error:  # a block, a route or a word that does not exist
                raise Garbled(f"a message of kind {kind}: {type(error).__name__}: {error}") from None

    def _next_message(self) -> tuple[int, tuple[int, ...], bytes] | None:
        """The next message that `run` handles; those about attached memory, peers and routes are handled here. None if
        the server has ended. Raises Garbled.
        """
        while True:
            packed, ancillary, _, _ = self._socket.recvmsg(
                protocol.MESSAGE_BYTES_MAX, protocol.ANCILLARY_BYTES, protocol.CLOSE_ON_EXEC
            )
            if not packed:
                return None
            message = unpack(packed)
            kind, words, _ = message
            if kind == protocol.RUN:
                return message
            try:
                if kind == protocol.ATTACH:
                    self._inputs.attach(words[1], *protocol.descriptors(ancillary))
                elif kind == protocol.SPILLED:
                    return unpack(self._inputs.message(*words[1:]))
                elif kind == protocol.SHOW:
                    self._show(self._outputs.segment(words[1]))
                elif kind == protocol.PEER:
                    self._handoff.add_peer(words, *protocol.descriptors(ancillary))
                elif kind == protocol.ROUTE:
                    self._handoff.add_route(words)
                else:
                    return message
            except (LookupError, TypeError, ValueError, OverflowError) as error:
                raise Garbled(f"a message of kind {kind}: {error}") from None

    def _run(self, message: RunMessage) -> None:
        number, route, stage = message.number, message.route, message.stage
        free, ended = message.update
        if free:
            self._outputs.give_back(free)
        if ended:
            self._inputs.detach(ended)
        if stage and (number in self._cancelled or not self._inputs.fit(message.columns)):
            self._send(pack(protocol.NOT_RUN, (number, stage, *message.passed)))
            return
        run = Run(number)
        self._guard.number = number if route else 0
        kind, text, times, placed = protocol.FAILED, None, (0, 0), NOTHING_PLACED
        try:
            text, times, placed = self._execute(run, message)
            kind = protocol.DONE
        except FlowserveError as error:
            text, self._has_failed = encode_error(error), True
        except Exception as error:
            # A backend's own fault: its traceback belongs in the log, never in a response.
            what = told(error, str(error), len(message.rows))
            failed = model_raised(f"model '{self._job.model}', instance '{self._job.instance}' failed: {what}", error)
            text, self._has_failed = encode_error(failed), True
        kept = self._inputs.finish(run)
        if self._has_failed:
            self._look_for_loss()
        made: Sequence[int] | None = None
        if route:
            if self._guard.end_route() and kind == protocol.DONE and text is None:
                made = stage_words(message, int(kept), times, placed)
            self._last = number, made
        if made is None or not message.later or not self._handoff.hand_on(message, made, placed):
            words = [number, stage, *message.passed, int(kept)]
            if kind == protocol.DONE:
                words += times
                words += placed.words()
            self._send(pack(kind, words, text))
        if not kept:
            self._inputs.forget_writes(run)  # last, because no other process waits for it

    def _release_idle(self, words: Sequence[int]) -> None:
        """Process a RELEASE message. Batches wait meanwhile, for more than some milliseconds only after a burst."""
        idle = self._collect_idle(words)
        if idle is not None:
            idle.release()

    def _collect_idle(self, words: Sequence[int]) -> Idle | None:
        is_quiet, free, ended = protocol.decode_release(words)
        self._outputs.give_back(free)
        self._inputs.detach(ended)
        self._memory.used()
        return self._memory.collect(self._clock(), (self._outputs.arena,), is_quiet=is_quiet)

    def _cancel(self, number: int) -> None:
        """Report whether a batch with a route was run here. If not, it must no longer be run."""
        seen, stage = self._last
        if seen != number:
            stage = None
            self._cancelled[number] = None
            if len(self._cancelled) > _CANCELLED_MAX:
                del self._cancelled[next(iter(self._cancelled))]
        self._send(pack(protocol.CANCELLED, (number, 0) if stage is None else (number, 1, *stage)))

    def _look_for_loss(self) -> None:
        """After a failure: end this process if it has lost its GPU, since only a new process can use it. The batch is
        not answered, because the server would then send the next one.
        """
        self._has_failed = False
        now_ns = self._clock()
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + _LOOK_EVERY_NS
        why = why_lost()
        if why:
            log.error("instance %s: its process cannot use the GPU any more (%s), and ends", self._job.instance, why)
            raise SystemExit(protocol.LOST_GPU)

    def _execute(self, run: Run, message: RunMessage) -> tuple[Any, tuple[int, int], Placed]:
        """Run the batch. Returns the text about members that failed, run again or have parameters, None if there are
        none; the times at which inputs were in place and outputs computed; and the places of the outputs. No tensor of
        the batch is referenced afterwards, except by the model.
        """
        results = self._instance.run(self._work(run, message), self._clock)
        if os.getpid() != self._pid:
            os._exit(0)  # the model forked, and this is the child: only the parent answers, and output memory is shared
        rows = message.rows if self._job.batches else None
        placed = self._outputs.place(results.outputs, rows)  # before the times are read; if it raises, the batch fails
        times = results.gathered_ns, results.computed_ns
        self._has_failed = bool(results.errors)
        return text_about(results, is_on_route=bool(message.route)), times, placed

    def _work(self, run: Run, message: RunMessage) -> Work:
        rows, columns = message.rows, message.columns
        count = len(rows)
        wanted = [*map(self._names_of, message.wanted)]
        if len(wanted) < count:
            wanted *= count
        requests: Sequence[Request] = [_PLAIN_REQUEST] * count
        contexts = None
        if message.about:
            facts, by_stage = protocol.decode_about(message.about, message.text, count)
            if facts is not None:
                requests = BatchRequests(facts)
            contexts = by_stage[message.stage] if by_stage else None
        # The model may write to all inputs: they are mapped privately.
        may_write = [[True] * count] * len(columns)
        return Work(self._inputs.take(run, columns, rows), rows, requests, wanted, may_write, None, contexts)

    def _send(self, message: bytes) -> None:
        if len(message) > protocol.MESSAGE_BYTES_MAX:
            message = pack(protocol.SPILLED_OUT, self._outputs.message(message))
        self._socket.send(message)

    def _show(self, segment: Segment) -> None:
        socket.send_fds(self._socket, [pack(protocol.SEGMENT, (segment.number,))], [segment.fd])

    def _let_go(self) -> None:
        """Report the batches whose inputs the model has released. On any thread; never blocks."""
        if not self._is_idle:
            return  # reported after the run
        gone = self._inputs.gone
        while gone:
            number = gone.popleft()
            try:
                self._socket.send(pack(protocol.GONE, (number,)), socket.MSG_DONTWAIT)
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
        self._routes: dict[int, protocol.RouteHop] = {}  # the next stage of each route

    def add_peer(self, words: Sequence[int], fd: int) -> None:
        """Process a PEER message and its descriptor."""
        _, number, *gone = words
        for ended in gone:
            self._peers.pop(ended).close()
            self._shown.pop(ended, None)
        self._peers[number] = socket.socket(fileno=fd)
        self._shown[number] = set()

    def add_route(self, words: Sequence[int]) -> None:
        """Process a ROUTE message."""
        number, hop, ended = protocol.decode_route(words)
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
        earlier: Sequence[protocol.Stage] = protocol.read_passed(message.passed, 0, stage)[0] if stage else ()
        segments = [placed.segment]
        for one in earlier:
            segments.append(one.segment)  # noqa: PERF401  # a comprehension is one more call
        columns: list[protocol.ColumnPlace] = []
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
        onward = protocol.encode_run(
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
        if len(onward) > protocol.MESSAGE_BYTES_MAX:
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
            socket.send_fds(peer, [pack(protocol.ATTACH, (number,))], [fd])
        finally:
            os.close(fd)


def text_about(results: Results, *, is_on_route: bool) -> Any:
    """The text of DONE about members that failed, run again or have parameters, the notes, and the model's exception
    after its responses; None if there are none of these.
    """
    notes = results.notes
    if notes is not None and is_on_route:
        notes.orders.clear()  # an ensemble's response does not use that order, so the batch can stay on its route
        notes = results.notes = notes.or_none()
    raised = results.raised
    if not (results.errors or results.parameters or results.rescheduled or notes or raised):
        return None
    failed = {m: protocol.RAISED if error is raised else encode_error(error) for m, error in results.errors.items()}
    whole = {} if notes is None else {"": encode_notes(notes)}
    if raised is not None:
        whole[protocol.RAISED] = encode_error(raised)
    return {**results.parameters, **dict.fromkeys(results.rescheduled), **failed, **whole}


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
