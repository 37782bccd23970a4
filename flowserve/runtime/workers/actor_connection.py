"""The connection to one actor (cluster/), and the batches that are under way on it.

Decides on which thread messages are sent and read: a small one is sent on the event loop, every other by a thread of
the connection, so that the loop is not blocked. Another thread reads the replies and passes them to the engine.

Decides when an actor is lost: its connection has ended, or it has not answered pings for some seconds. Then its
instances end together, and its batches fail and are not run again, because one of them may be the cause
(`InstanceDied`); only if the whole machine is lost may the scheduler run them once more (`MachineLost`).

cluster/ decides the form of messages. Does not know when an actor is started, nor queues or callers. Used by
cluster.py.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import trio

from flowserve.backends.base import NO_ERRORS, NO_PARAMETERS, Results
from flowserve.backends.worker import protocol
from flowserve.backends.worker.protocol import (
    PASSED_AT,
    STAGE_WORDS,
    Garbled,
    Stage,
    decode_done_text,
    decode_error,
    decode_members,
    pack,
    read_passed,
    unpack,
)
from flowserve.cluster import frames
from flowserve.cluster.base import ActorEnd, ActorJob, ClusterEngine, InstanceJob, Started, versions
from flowserve.cluster.frames import Outgoing
from flowserve.cluster.link import ActorLink, Send, client_context, greet_actor
from flowserve.cluster.traffic import MachineTraffic
from flowserve.errors import FlowserveError, InstanceDied, MachineLost, Unavailable
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.ipc.tensors import OutputReader
from flowserve.runtime.workers.base import Outcome, Passed, WorkerContext
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.route import Route

log = logging.getLogger("flowserve.runtime")

SILENCES_MAX: Final = 3  # seconds without a byte from an actor whose instances are open
OPENING_SILENCES_MAX: Final = 120  # loading a model may keep the interpreter from answering
CONNECT_S: Final = 5.0
CLOSE_S_MAX: Final = 600.0
END_S: Final = 10.0  # limit for an actor without instances to end


class ActorWorker(Protocol):
    """A worker whose instance is in the actor: a `ClusterWorker`. `where`: its model and instance, for messages."""

    where: str
    reader: OutputReader
    has_answered: bool

    def job(self, number: int) -> InstanceJob:
        """The job for its actor, with the number of its instance there."""

    def lost(self, connection: ActorConnection, why: str) -> None:
        """Its connection has ended: it takes no batches until it is opened again."""


@dataclass(slots=True, eq=False)
class ActorRun:
    """A batch that was sent, or is being sent, and the workers of its stages. `route`: its number in the actor, 0 for
    none.
    """

    batch: Batch
    rows: Sequence[int]
    workers: Sequence[ActorWorker]
    taken: Sequence[int] = ()
    route: int = 0

    def results(self, passed: Sequence[Stage], words: Sequence[int], at: int, text: bytes, block: Any) -> Results:
        """The results of the last stage that ran the batch, from DONE. Raises Garbled."""
        if len(words) < at + STAGE_WORDS:
            raise Garbled("a reply that is cut off")
        _, gathered_ns, computed_ns, segment, offset, nbytes = words[at : at + STAGE_WORDS]
        reader, rows = self.workers[len(passed)].reader, self.rows
        told, notes = decode_done_text(text, reader.names, len(rows)) if text else (None, None)
        unlike: Collection[str] = () if notes is None else notes.unlike
        memory = _part(block, segment, offset, nbytes)
        outputs, placed = reader.read(words, at + STAGE_WORDS, memory, rows, unlike)
        taken = () if passed else self.taken
        results = Results(outputs, NO_ERRORS, gathered_ns, computed_ns, (), placed, NO_PARAMETERS, (), taken, notes)
        if told:
            decode_members(told, results, len(rows))
            if results.rescheduled:
                raise Garbled("a reply about a member that is to run again")
        return results

    def made(self, passed: Sequence[Stage], block: Any, *, has_outputs: bool) -> list[Results]:
        """The results of the stages before the last one. Raises Garbled."""
        made: list[Results] = []
        for i, stage in enumerate(passed):
            sizes = [nbytes for _, nbytes, _ in stage.outputs]
            nbytes = max([start + size for start, size, shape in stage.outputs if shape], default=0)
            memory = _part(block, stage.segment, stage.offset, nbytes)
            outputs = self.workers[i].reader.read_stage(stage, memory, self.rows) if has_outputs else ()
            taken = () if i else self.taken
            gathered_ns, computed_ns = stage.gathered_ns, stage.computed_ns
            made.append(Results(outputs, NO_ERRORS, gathered_ns, computed_ns, (), sizes, NO_PARAMETERS, (), taken))
        return made


class ActorConnection:
    """The connection to one actor. `runs`: its batches, by number, in order. `instances`: the workers whose instances
    are open or being opened, by number. `routes`: the numbers of the routes that the actor knows. `why`: how the
    connection ended, if it `is_over`.

    | thread | methods |
    |---|---|
    | those that open and close instances, and may block | `__init__`, `add`, `wait_until_open`, `close`, `end` |
    | event loop | `send_soon`, `_release`, `_lost`, `_fail` |
    | the sending thread | `_send_all`, and what it is given by `later`, as `_ping` |
    | the reading thread | `_read_all` and what it calls: `_take`, `_answer`, `_reply`, `_on_silence`, `_how_it_ended` |
    | any thread | `give_up`, `kill`, `later`, `remove`, `tell` |

    Several threads change `runs`, `instances`, `_opening` and `_closing`: each operation on a dictionary is atomic, and
    a loop reads a copy.
    """

    def __init__(
        self,
        job: ActorJob,
        started: Started,
        engine: ClusterEngine,
        context: WorkerContext,
        clock: ClockNs,
        *,
        traffic: MachineTraffic,
        take: Callable[[int], Any],
    ) -> None:
        """Connect to an actor that was `started`. Blocks. Raises Unavailable. `traffic`: of its machine; `take`: makes
        memory for the block of a reply, on the reading thread.
        """
        self.runs: dict[int, ActorRun] = {}
        self.numbers = count(1)  # numbers of batches and routes; taken on the event loop
        self.instances: dict[int, ActorWorker] = {}
        self.routes: WeakKeyDictionary[Route, int] = WeakKeyDictionary()
        self.machine = started.machine
        self.traffic = traffic
        self.is_over = False
        self.why = ""
        self._name = job.name
        self._started = started
        self._engine = engine
        self._context = context
        self._clock = clock
        self._take_memory = take
        self._instance_numbers = count(1)
        self._opening: dict[int, SimpleQueue[bool | FlowserveError]] = {}
        self._closing: dict[int, threading.Event] = {}
        self._refused: FlowserveError | None = None  # why the actor opens no instance
        self._killed = ""  # the server's own reason for the end
        self._silences = 0
        self._sent = 0
        self._outgoing: SimpleQueue[Send | None] = SimpleQueue()
        self._ended = threading.Event()
        tls = None if job.tls is None else client_context(job.tls)
        address = f"{started.host} port {started.port}"
        try:
            sock = socket.create_connection((started.host, started.port), timeout=CONNECT_S)
        except OSError as error:
            raise Unavailable(f"cannot connect to {address}: {error.strerror or error}") from None
        self.link = ActorLink(sock, tls)
        try:
            greet_actor(self.link, job.secret)
            self.link.send(0, pack(frames.HELLO, (), versions()))
        except (Unavailable, OSError, EOFError) as error:
            self.link.discard()
            raise Unavailable(f"{address}: {error}") from None
        self._sender = threading.Thread(target=self._send_all, name=f"flowserve to {job.name}", daemon=True)
        self._sender.start()
        threading.Thread(target=self._read_all, name=f"flowserve from {job.name}", daemon=True).start()

    # ------------------------------------------------------------------ opening and closing; these block

    def add(self, worker: ActorWorker) -> int:
        """Have the actor open a worker's instance. Returns its number."""
        number = next(self._instance_numbers)
        self.instances[number] = worker
        self._opening[number] = SimpleQueue()
        self._closing[number] = threading.Event()
        try:
            self._engine.add(self._started, worker.job(number))
        except Unavailable as error:
            self._opening[number].put(error)
        if self.is_over or self._refused is not None:  # perhaps before the instance was added
            self._opening[number].put(self._refused or Unavailable(self.why))
        return number

    def wait_until_open(self, number: int) -> bool:
        """Wait until that instance is open. Returns whether its model is pure. Raises the error of opening."""
        answer = self._opening[number].get()
        del self._opening[number]
        if isinstance(answer, FlowserveError):
            raise answer
        return answer

    def give_up(self, worker: ActorWorker, why: str) -> None:
        """Give up opening a worker's instance: the actor ends, unless it has other instances."""
        if [*self.instances.values()] == [worker]:
            self.kill(why)
            return
        for number, one in [*self.instances.items()]:
            if one is worker and number in self._opening:
                self._outgoing.put(partial(self.link.send, number, pack(protocol.END, ())))
                self._opening[number].put(Unavailable(why))

    def close(self, number: int) -> None:
        """End an instance after its batches, and wait for that."""
        self._outgoing.put(partial(self.link.send, number, pack(protocol.END, ())))
        closed = self._closing.get(number)
        if closed is not None and not closed.wait(CLOSE_S_MAX):
            self.link.close()

    def end(self) -> None:
        """End the actor, whose instances are all unused, and wait for that."""
        self._killed = self._killed or "it was closed"
        self._outgoing.put(partial(self.link.send, 0, pack(protocol.END, ())))
        if not self._ended.wait(END_S):
            self._engine.kill(self._started)
            self.link.close()
            self._ended.wait()

    def kill(self, why: str) -> None:
        """End it immediately, for this reason. On any thread."""
        self._killed = why
        self._engine.kill(self._started)
        self.link.close()

    # ------------------------------------------------------------------ sending

    def send_soon(self, instance: int, message: bytes, block: Outgoing) -> None:
        """Send a small frame, on the event loop."""
        frame = instance, message, block.finish(block.nbytes), block.nbytes
        if not self._outgoing.empty() or not self.link.try_send(*frame, self.later):
            self.later(partial(self.link.send, *frame))

    def later(self, send: Send) -> None:
        """Run a function on the sending thread."""
        self._outgoing.put(send)

    def remove(self, number: int) -> ActorRun | None:
        """Remove a batch that is no longer under way. None if it is unknown."""
        run = self.runs.pop(number, None)
        if run is not None:
            self.traffic.leave(run)
        return run

    def _send_all(self) -> None:
        while (send := self._outgoing.get()) is not None:
            try:
                send()
            except (OSError, EOFError) as error:  # the reading thread ends the connection
                log.debug("actor %s: cannot send: %s", self._name, error)
                self.link.close()
            del send  # releases the tensors

    # ------------------------------------------------------------------ reading

    def _read_all(self) -> None:
        ended: EOFError | None = None
        try:
            while True:
                instance, message, block = self.link.read(self._take_memory, self._on_silence)
                self._silences = 0
                self._take(instance, *unpack(message), block)
                del block
        except EOFError as error:
            ended = error
        except Exception as error:  # an error about a message concerns this actor only
            what = str(error) if isinstance(error, (Garbled, FlowserveError)) else f"{type(error).__name__}: {error}"
            self._engine.kill(self._started)
            self._killed = self._killed or f"its process sent an invalid message ({what}); it was ended"
        self.why = self._killed or f"its connection to machine '{self.machine}' ended: {ended}"
        self.is_over = True
        self.tell(self._lost)
        self.link.close()
        self._outgoing.put(None)
        self._sender.join()
        self.link.discard()
        end = ActorEnd(self._killed) if self._killed else self._how_it_ended(ended)
        for waiting in [*self._opening.values()]:
            waiting.put(self._refused or Unavailable(f"{end.text} while its instance was opened ({ended})"))
        for closed in [*self._closing.values()]:
            closed.set()
        self._ended.set()
        self.tell(self._fail, end)

    def _take(self, number: int, kind: int, words: Sequence[int], text: bytes, block: Any) -> None:
        """Process one message, on the reading thread. Raises Garbled."""
        if kind in (protocol.DONE, protocol.FAILED):
            self._reply(number, kind, words, text, block)
        elif kind == protocol.READY and len(words) == 2:
            self._answer(number, bool(words[1]))
        elif kind == protocol.BROKEN:
            error = decode_error(json.loads(text))
            self._answer(number, error)
            if not number:  # the whole actor, which ends now
                self._refused = error
        elif kind == frames.CLOSED and number in self._closing:
            self._closing[number].set()
        elif kind == frames.RECALLED and len(words) == 3:
            self.tell(self._release, *words[1:])
        elif kind != frames.PONG:
            raise Garbled(f"a message of kind {kind}")

    def _answer(self, number: int, answer: bool | FlowserveError) -> None:
        """Report the result of opening an instance, unless it was given up."""
        waiting = self._opening.get(number)
        if waiting is not None:
            waiting.put(answer)

    def tell(self, what: Callable[..., None], *about: object) -> None:
        """Call a function on the event loop, if the loop still runs."""
        with suppress(trio.RunFinishedError):
            self._context.token.run_sync_soon(what, *about)

    def _how_it_ended(self, error: EOFError | None) -> ActorEnd:
        end = self._engine.end_of(self._started)
        self._engine.kill(self._started)  # an actor without its connection is useless
        if isinstance(error, _Silent) and not end.with_machine:
            end = ActorEnd(f"machine '{self.machine}' does not answer ({error})", with_machine=True)
        log.error("%s: %s", self._name, end.text)
        return end

    def _on_silence(self) -> None:
        if self.link.sent != self._sent:  # the other end still receives: a large batch is being sent
            self._sent = self.link.sent
            self._silences = 0
        self._silences += 1
        if self._silences >= (OPENING_SILENCES_MAX if self._opening else SILENCES_MAX):
            raise _Silent(f"nothing was heard from it for {self._silences} s")
        self._outgoing.put(self._ping)

    def _ping(self) -> None:
        self.link.send(0, pack(frames.PING, ()))
        self._sent = self.link.sent  # the ping itself does not count: only the kernel has taken it

    def _reply(self, instance: int, kind: int, words: Sequence[int], text: bytes, block: Any) -> None:
        """Complete a batch, on the reading thread. Raises Garbled."""
        if len(words) < 4:
            raise Garbled("a reply that is cut off")
        number, stages = words[1:PASSED_AT]
        passed, at = read_passed(words, PASSED_AT, stages)
        run = self.remove(number)
        if run is None:
            raise Garbled(f"a reply to batch {number}, which it does not have")
        try:
            k = len(passed)
            if k >= len(run.workers) or self.instances.get(instance) is not run.workers[k]:
                raise Garbled(f"a reply to batch {number} of an instance that does not have it")
            if block is not None:
                block.flags.writeable = False
            error: FlowserveError | None = None
            is_whole = kind == protocol.DONE and k + 1 == len(run.workers) and not text
            made = run.made(passed, block, has_outputs=not is_whole)
            if kind == protocol.DONE:
                made.append(run.results(passed, words, at, text, block))
            else:
                error = decode_error(json.loads(text))
        except Exception:
            self.runs[number] = run  # so that it fails with the connection
            raise
        now_ns = self._clock()
        _shift(made, run.batch.started_ns, now_ns)
        computed_ns = sum([results.computed_ns - results.gathered_ns for results in made])
        self.traffic.answered(max(now_ns - run.batch.started_ns - computed_ns, 0))
        for worker in run.workers[: k + 1]:
            worker.has_answered = True
        for following in [*self.runs.values()]:
            if following.workers[0] is run.workers[0]:  # it begins now, and has waited in the actor until now
                free_ns = made[0].computed_ns if len(run.workers) > 1 and made else now_ns
                following.batch.started_ns = max(following.batch.started_ns, free_ns)
                break
        outcome: Outcome = Passed(made, error)
        if run.batch.route is None:
            outcome = made[0] if error is None else error
        self._context.completions.add(run.batch, outcome)

    # ------------------------------------------------------------------ on the event loop

    def _release(self, number: int, stage: int) -> None:
        """A recalled batch returns after that stage: free the instances of all other stages."""
        run = self.runs.get(number)
        if run is not None and run.batch.route is not None:
            self._context.release(run.batch, [i for i in range(len(run.workers)) if i != stage])

    def _lost(self) -> None:
        for worker in [*self.instances.values()]:
            worker.lost(self, self.why)

    def _fail(self, end: ActorEnd) -> None:
        """Fail the batches that were under way when it ended."""
        kind = MachineLost if end.with_machine else InstanceDied
        runs, self.runs = self.runs, {}
        for run in runs.values():
            self.traffic.leave(run)
            self._context.completions.waiting.append((run.batch, kind(f"{run.workers[0].where}: {end.text}")))
        self._context.wake()


def _part(block: Any, segment: int, offset: int, nbytes: int) -> Any:
    """A part of the block of a reply; None for no bytes. Raises Garbled."""
    if not nbytes:
        return None
    if block is None or segment != frames.BLOCK or offset + nbytes > len(block) or offset % 8:
        raise Garbled("outputs that are not within their block")
    return block if nbytes == len(block) else block[offset : offset + nbytes]


def _shift(made: Sequence[Results], started_ns: int, now_ns: int) -> None:
    """Shift the times of computations to the server's clock, because clocks differ between machines: they are placed at
    the end of the time between sending and reply.
    """
    if not made:
        return
    by_ns = now_ns - made[-1].computed_ns
    for results in made:
        results.gathered_ns = min(max(results.gathered_ns + by_ns, started_ns), now_ns)
        started_ns = results.computed_ns = min(max(results.computed_ns + by_ns, results.gathered_ns), now_ns)


class _Silent(EOFError):
    """Nothing was received for too long."""
