"""A worker whose instance runs on another machine, in an actor (cluster/) to which the server has a connection.

An actor (`ClusterActor`) has the instance of one worker, or one of each model of a segment: then workers share it, and
a batch on a route is one message and one reply, with only the outputs of the last stage.

Decides that whole batches are sent, and that an instance has up to `DEPTH` of them: while one computes, the next is
being sent, and the queue has an entry of the instance for each (`base.slots_of`). A small batch is sent on the event
loop; a larger one is packed and sent by a thread of the connection, so that the loop is not blocked. Tensors are sent
without a copy. Another thread reads the replies into memory of the pool, or into shared memory if a model in a process
reads them next, and passes them to the engine.

Decides when an actor is lost: its connection has ended, or it has not answered pings for some seconds. Then its
instances end together, and its batches fail and are not run again, because one of them may be the cause
(`InstanceDied`); only if the whole machine is lost may the scheduler run them once more (`MachineLost`). supervisor.py
decides when the next actor is started.

cluster/ decides the form of messages, and how actors are started. Does not know queues or callers. Made by loading/,
driven by the engine on the event loop.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Final
from weakref import WeakKeyDictionary

import trio

from flowserve.backends.base import ModelFiles, Results, Work
from flowserve.backends.worker import protocol
from flowserve.backends.worker.protocol import (
    PASSED_AT,
    Garbled,
    RouteHop,
    Stage,
    decode_done_text,
    decode_error,
    decode_members,
    encode_about,
    encode_route,
    encode_run,
    pack,
    read_passed,
    request_facts,
    unpack,
)
from flowserve.cluster import frames
from flowserve.cluster.base import ActorEnd, ActorJob, ClusterEngine, InstanceJob, MachineNeeds, Started, versions
from flowserve.cluster.files import digest_of
from flowserve.cluster.frames import Outgoing, add_inputs
from flowserve.cluster.link import ActorLink, Send, Tls, client_context, greet_actor
from flowserve.cluster.traffic import MachineTraffic
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, InstanceDied, MachineLost, Unavailable
from flowserve.memory.arena import Arena
from flowserve.memory.pool import HOST
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.ipc.tensors import OutputReader
from flowserve.runtime.workers.base import Outcome, Passed, StateAdapter, WorkerContext, cannot_start, works
from flowserve.scheduling.batch import Batch, Route
from flowserve.scheduling.flow import Ticket

log = logging.getLogger("flowserve.runtime")

DEPTH: Final = 2
# A batch of at most this size is sent on the event loop, which takes about 20 us.
SENT_ON_LOOP_BYTES_MAX: Final = 64 * 1024
SILENCES_MAX: Final = 3  # seconds without a byte from an actor whose instances are open
OPENING_SILENCES_MAX: Final = 120  # loading a model may keep the interpreter from answering
CONNECT_S: Final = 5.0
CLOSE_S_MAX: Final = 600.0
END_S: Final = 10.0  # limit for an actor without instances to end
_NONE: Final[Mapping[int, Any]] = {}


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """A server's cluster. `give_up_s`: how long an instance may wait for a machine that has what it needs. `traffic`:
    the traffic of each machine, by its name.
    """

    engine: ClusterEngine
    give_up_s: float = 60.0
    tls: Tls | None = None
    traffic: dict[str, MachineTraffic] = field(default_factory=dict)


class ClusterModel:
    """One version of a model that runs on other machines. Nothing is loaded here. `is_alone`: its actors have no
    instances of other models.
    """

    may_run_inline = False

    def __init__(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str], *, is_alone: bool) -> None:
        """Reads all files to compute their digest; blocks."""
        self.config = config
        self.is_pure = False  # known when the first instance is open
        self._files = files
        self._options = options
        self._is_alone = is_alone
        self._digest = digest_of(files)

    def job(self, number: int, name: str, group: InstanceGroup) -> InstanceJob:
        """The job of an actor's instance with that number."""
        if group.kind == "KIND_GPU":
            group = replace(group, gpus=group.gpus or (0,))  # the engine shows an actor its own GPUs only
        files, digest, options = self._files, self._digest, self._options
        return InstanceJob(number, name, self.config, group, files, digest, options, self._is_alone)

    def instance(self, name: str, group: InstanceGroup) -> Any:
        raise NotImplementedError  # its instances are in actors

    def close(self) -> None:
        """No effect: there is nothing to release."""


class ClusterActor:
    """One actor, for one worker or for one of each model of a segment. It is started when the first worker opens its
    instance, and ends when the last is closed; if it ends before, the next worker that opens starts it again.
    """

    def __init__(self, name: str, needs: MachineNeeds, cluster: ClusterOptions, clock: ClockNs) -> None:
        self.name = name
        self.cluster = cluster
        self.clock = clock
        self._needs = needs
        self._lock = threading.Lock()  # held while it is started, and while an instance is added or removed
        self._connection: _Connection | None = None
        self._arena: Arena | None = None  # memory for outputs that processes read; used on the reading thread only

    # ------------------------------------------------------------------ blocking, on other threads

    def join(self, worker: ClusterWorker, context: WorkerContext) -> tuple[_Connection, int]:
        """Start opening a worker's instance. Returns the connection, and the instance's number there. Raises
        Unavailable.
        """
        with self._lock:
            connection = self._connection
            if connection is None or connection.is_over:
                connection = self._connection = self._start(worker, context)
            return connection, connection.add(worker)

    def _start(self, worker: ClusterWorker, context: WorkerContext) -> _Connection:
        engine = self.cluster.engine
        job = ActorJob(self.name, os.urandom(frames.SECRET_BYTES), self.cluster.tls)
        started = engine.start(job, self._needs, self.cluster.give_up_s)
        worker.machine = started.machine
        try:
            worker.check_given_up()
            return _Connection(self, started, job, context)
        except BaseException:
            engine.kill(started)
            raise

    def leave(self, connection: _Connection, number: int) -> None:
        """Remove an instance that is closed, or was not opened. The actor ends with its last one."""
        with self._lock:
            connection.instances.pop(number, None)
            if connection.instances:
                return
            if self._connection is connection:
                self._connection = None
        connection.end()

    # ------------------------------------------------------------------ its memory

    def share(self) -> None:
        """Place outputs in shared memory from now on, because processes read them."""
        if self._arena is None:
            self._arena = Arena()

    def take(self, nbytes: int) -> Any:
        """Memory for the block of a reply, on the reading thread."""
        return HOST.take(nbytes) if self._arena is None else self._arena.lease(nbytes)


class ClusterWorker:
    """One instance on another machine, in an actor. While there is none, `ended` is how the last one ended. `on_end`:
    as for a `ProcessWorker`. `machine`: the machine that has it, or had it last.
    """

    _context: WorkerContext  # set by the last `open`

    def __init__(
        self, name: str, model: ClusterModel, group: InstanceGroup, actor: ClusterActor, *, depth: int = DEPTH
    ) -> None:
        config = model.config
        self.name = name
        self.state = StateAdapter()
        self.has_state = False
        self.is_on_gpu = False
        self.route_group: object = actor
        self.computes_apart = False  # one process runs the instances of its actor
        self.outage = works
        self.depth = depth
        self.ended = ""
        self.has_answered = False
        self.on_end: Callable[[], None] | None = None
        self.machine = ""
        self.reader = OutputReader(config.name, config.outputs, batches=config.max_batch_size > 0)
        self.where = f"model '{config.name}', instance '{name}'"
        self.share = actor.share
        self._model = model
        self._group = group
        self._actor = actor
        self._numbers = {spec.name: j for j, spec in enumerate(config.outputs)}
        self._connection: _Connection | None = None
        self._number = 0  # the number of its instance in the actor
        self._opening: _Connection | None = None  # set while its instance is being opened
        self._is_closed = False
        self._given_up = ""

    @property
    def running(self) -> Batch | None:
        """The oldest of its batches."""
        return next(iter(self.batches), None)

    @property
    def batches(self) -> list[Batch]:
        """All its batches in the actor; of a batch on a route, this worker's stage."""
        connection = self._connection
        runs = [] if connection is None else [*connection.runs.values()]
        return [run.batch.stage(run.workers.index(self)) for run in runs if self in run.workers]

    # ------------------------------------------------------------------ opening and closing, on other threads

    def open(self, context: WorkerContext) -> None:
        """Have its actor open the instance, and wait for that; the actor is started if there is none. Blocks; called on
        a loader's thread. Raises the model's exception, or Unavailable. May be called again after `on_end`.
        """
        self._context = context
        self.machine = ""
        try:
            connection, number = self._actor.join(self, context)
            self.machine = connection.machine
            self._opening = connection
            try:
                self.check_given_up()
                is_pure = connection.wait_until_open(number)
            except BaseException:
                self._actor.leave(connection, number)
                self.check_given_up()
                raise
            finally:
                self._opening = None
        except Unavailable as error:
            at = f", machine '{self.machine}'" if self.machine and not self._given_up else ""
            raise Unavailable(f"{self.where}{at}: {error}") from None
        self._model.is_pure = is_pure
        self._number = number
        self._connection, self.ended = connection, ""
        if self._is_closed:  # checked last: `close` sets it before it looks for a connection
            self.close()
        elif connection.is_over:  # its end may have been reported before
            connection.tell(self.lost, connection, connection.why)

    def job(self, number: int) -> InstanceJob:
        """The job for its actor."""
        return self._model.job(number, self.name, self._group)

    def check_given_up(self) -> None:
        """Raises Unavailable if its opening was given up."""
        if self._given_up:
            raise Unavailable(self._given_up)

    def give_up(self, why: str) -> None:
        """As `RunsElsewhere.give_up`. A worker that still waits for a machine continues to wait, for as long as that
        takes. An actor with other instances continues.
        """
        self._given_up = f"its process was ended: {why}"
        connection = self._opening
        if connection is not None:
            connection.give_up(self, self._given_up)

    def close(self) -> None:
        """End the instance after its running batches; the last one also ends its actor. Blocks; called on a thread."""
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            connection.close(self._number)
            self._actor.leave(connection, self._number)

    # ------------------------------------------------------------------ batches, on the event loop

    def run(self, batch: Batch) -> Outcome | None:
        """Send a batch. Returns None if its outcome arrives later."""
        connection = self._connection
        if connection is None:
            return Unavailable(f"instance '{self.name}' is not running")
        work = self.state.work(batch.tickets)
        batch.started_ns = self._actor.clock()
        workers: Sequence[ClusterWorker] = (self,)
        if batch.route is not None:
            if batch.wants_outputs or any(one._connection is not connection for one in batch.instances):
                self._context.release(batch, range(1, len(batch.route)))  # it does not take its route
            else:
                workers = batch.instances
        number = next(connection.numbers)
        run = connection.runs[number] = _Run(batch, work.rows, workers)
        nbytes = 0
        for column in work.inputs:
            nbytes += column.nbytes
        is_announced = len(workers) == 1 or self._announce(connection, run)
        try:
            if nbytes <= SENT_ON_LOOP_BYTES_MAX and is_announced:
                connection.traffic.count(run, nbytes)
                message, block = self._packed(number, run, work)
                connection.send_soon(self._number, message, block)
            else:  # after the messages that announce its route
                send = partial(self._send, connection, number, run, work)
                connection.traffic.admit(run, nbytes, partial(connection.later, send))
        except OSError:
            return None  # the connection has ended, and its reading thread is about to report that
        except Exception:
            connection.remove(number)
            raise
        return None

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        """As `Worker.finish`; it has no state."""
        return outcome, ()

    def recall(self, batch: Batch) -> None:
        """Return a batch from its route after its current stage."""
        connection = self._connection
        if connection is None:
            return
        for number in [*connection.runs]:
            run = connection.runs.get(number)  # it may return at this moment
            if run is not None and run.batch is batch:
                connection.later(partial(connection.link.send, 0, pack(protocol.CANCEL, (number,))))

    def kill(self, why: str) -> None:
        """End its actor immediately, for this reason."""
        connection = self._connection
        if connection is not None:
            connection.kill(why)

    def _announce(self, connection: _Connection, run: _Run) -> bool:
        """Whether the actor knows the route of this batch. If not, the announcement is queued to be sent."""
        route, workers = run.batch.route, run.workers
        assert route is not None
        if route in connection.routes:
            run.route = connection.routes[route]
            return True
        number = run.route = connection.routes[route] = next(connection.numbers)
        for i, read in enumerate(route.reads):
            following = workers[i + 1]
            wanted = tuple([following._numbers[name] for name in route.nodes[i + 1].wanted])
            message = encode_route(number, RouteHop(following._number, wanted, read))
            connection.later(partial(connection.link.send, workers[i]._number, message))
        return False

    def _packed(self, number: int, run: _Run, work: Work) -> tuple[bytes, Outgoing]:
        """A batch as a message and a block. Raises FlowserveError."""
        block = Outgoing()
        places, run.taken = add_inputs(work, self._model.config.inputs, block)
        names = work.wanted
        wanted = (
            [[self._numbers[one] for one in names[0]]]
            if names.count(names[0]) == len(names)
            else [[self._numbers[one] for one in some] for some in names]
        )
        facts = [*map(request_facts, work.requests)] if any(map(any, map(request_facts, work.requests))) else None
        about: Sequence[int] = ()
        text = b""
        if facts is not None or run.batch.contexts:
            about, text = encode_about(facts, run.batch.contexts)
        updates = (0, 0) * len(run.workers)  # no updates, for each stage
        return encode_run(number, run.route, 0, work.rows, wanted, updates, places, (), about, text), block

    def _send(self, connection: _Connection, number: int, run: _Run, work: Work) -> None:
        """Pack and send a batch, on the sending thread."""
        try:
            run.batch.started_ns = self._actor.clock()  # it waited in the server until now
            message, block = self._packed(number, run, work)
            del work
            connection.link.send(self._number, message, block.finish(block.nbytes), block.nbytes)
        except (OSError, EOFError):
            raise
        except Exception as error:
            if connection.remove(number) is not None:
                failed = error if isinstance(error, FlowserveError) else cannot_start(self, run.batch, error)
                self._context.completions.add(run.batch, failed.with_traceback(None))

    # ------------------------------------------------------------------ the end of its actor, on the event loop

    def lost(self, connection: _Connection, why: str) -> None:
        """Its connection has ended: it takes no batches until it is opened again. Its current batches fail when the
        cause of the actor's end is known (`_Connection._fail`).
        """
        if self._connection is not connection:
            return
        self._connection = None
        self.ended = f"{self.where}: {why}"
        if self.on_end is not None:
            self.on_end()


@dataclass(slots=True, eq=False)
class _Run:
    """A batch that was sent, or is being sent, and the workers of its stages. `route`: its number in the actor, 0 for
    none.
    """

    batch: Batch
    rows: Sequence[int]
    workers: Sequence[ClusterWorker]
    taken: Sequence[int] = ()
    route: int = 0

    def results(self, passed: Sequence[Stage], words: Sequence[int], at: int, text: bytes, block: Any) -> Results:
        """The results of the last stage that ran the batch, from DONE. Raises Garbled."""
        if len(words) < at + 6:
            raise Garbled("a reply that is cut off")
        _, gathered_ns, computed_ns, segment, offset, nbytes = words[at : at + 6]
        reader, rows = self.workers[len(passed)].reader, self.rows
        told, notes = decode_done_text(text, reader.names, len(rows)) if text else (None, None)
        unlike: Collection[str] = () if notes is None else notes.unlike
        outputs, placed = reader.read(words, at + 6, _part(block, segment, offset, nbytes), rows, unlike)
        taken = () if passed else self.taken
        results = Results(outputs, _NONE, gathered_ns, computed_ns, (), placed, _NONE, (), taken, notes)
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
            made.append(Results(outputs, _NONE, stage.gathered_ns, stage.computed_ns, (), sizes, _NONE, (), taken))
        return made


class _Connection:
    """The connection to one actor, with its two threads. `runs`: its batches, by number, in order. `instances`: the
    workers whose instances are open or being opened, by number. `routes`: the numbers of the routes that the actor
    knows. `why`: how the connection ended, if it `is_over`.
    """

    def __init__(self, actor: ClusterActor, started: Started, job: ActorJob, context: WorkerContext) -> None:
        """Connect to an actor. Blocks. Raises Unavailable."""
        self.runs: dict[int, _Run] = {}
        self.numbers = count(1)  # numbers of batches and routes; taken on the event loop
        self.instances: dict[int, ClusterWorker] = {}
        self.routes: WeakKeyDictionary[Route, int] = WeakKeyDictionary()
        self.machine = started.machine
        self.traffic = actor.cluster.traffic.setdefault(started.machine, MachineTraffic())
        self.is_over = False
        self.why = ""
        self._actor = actor
        self._started = started
        self._engine = actor.cluster.engine
        self._context = context
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
        self._sender = threading.Thread(target=self._send_all, name=f"flowserve to {actor.name}", daemon=True)
        self._sender.start()
        threading.Thread(target=self._read_all, name=f"flowserve from {actor.name}", daemon=True).start()

    # ------------------------------------------------------------------ opening and closing; these block

    def add(self, worker: ClusterWorker) -> int:
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

    def give_up(self, worker: ClusterWorker, why: str) -> None:
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

    def remove(self, number: int) -> _Run | None:
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
                log.debug("actor %s: cannot send: %s", self._actor.name, error)
                self.link.close()
            del send  # releases the tensors

    # ------------------------------------------------------------------ reading

    def _read_all(self) -> None:
        ended: EOFError | None = None
        try:
            while True:
                instance, message, block = self.link.read(self._actor.take, self._on_silence)
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
        log.error("%s: %s", self._actor.name, end.text)
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
        passed, at = read_passed(words, PASSED_AT, words[2])
        run = self.remove(words[1])
        if run is None:
            raise Garbled(f"a reply to batch {words[1]}, which it does not have")
        try:
            k = len(passed)
            if k >= len(run.workers) or self.instances.get(instance) is not run.workers[k]:
                raise Garbled(f"a reply to batch {words[1]} of an instance that does not have it")
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
            self.runs[words[1]] = run  # so that it fails with the connection
            raise
        now_ns = self._actor.clock()
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
