"""The port of an instance on another machine: TCP, over which tensors travel as bytes behind their message.

An actor (cluster/actor.py) has the instances of several workers, and one connection (`ActorConnection`); each worker
has a port (`ActorPort`), which is a number on that connection.

Decides that an instance has up to `DEPTH` batches: while one computes, the next is being sent, and the queue has an
entry of the instance for each (`base.slots_of`). A small batch is packed and sent on the event loop, a larger one by
the sending thread of the connection, so that the loop is not blocked. Tensors are sent without a copy. Another thread
reads what the actor sends, into memory of the pool or into shared memory, and passes it to the event loop in order.

Decides when an actor is lost: its connection has ended, or it has not answered pings for some seconds. Then its
instances end together, and its batches fail and are not run again, because one of them may be the cause
(`InstanceDied`); only if the whole machine is lost may the scheduler run them once more (`MachineLost`).

cluster/ decides the form of frames, actors.py when an actor is started, runtime/remote/worker.py what a message means.
Does not know queues or callers.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Final, Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np
import trio

from flowserve.backends.base import Results, Work
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import (
    HOME_BLOCKS_MAX,
    MESSAGE_BYTES_MAX,
    Garbled,
    ResultColumn,
    RouteHop,
    Stage,
    decode_error,
    encode_result,
    encode_route,
    encode_server_reply,
    pack,
    read,
    request_facts,
    unpack,
)
from flowserve.config.types import ModelConfig
from flowserve.elsewhere.cluster import frames
from flowserve.elsewhere.cluster.base import ActorEnd, ActorJob, ClusterEngine, InstanceJob, Started, versions
from flowserve.elsewhere.cluster.frames import Outgoing, add_inputs
from flowserve.elsewhere.cluster.link import ActorLink, Send, client_context, greet_actor
from flowserve.elsewhere.cluster.traffic import MachineTraffic
from flowserve.errors import FlowserveError, InstanceDied, Internal, MachineLost, Unavailable
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.model_calls.call_socket import TOO_LONG
from flowserve.runtime.model_calls.remote_calls import RemoteCalls
from flowserve.runtime.remote.run import Run
from flowserve.runtime.remote.sink import RemoteSink
from flowserve.runtime.remote.worker import RemoteWorker, encode_batch
from flowserve.runtime.workers.base import WorkerContext, cannot_start
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.route import Route
from flowserve.values import BY_NUMPY, Array

log = logging.getLogger("flowserve.runtime")

DEPTH: Final = 2
# A batch of at most this size is sent on the event loop, which takes about 20 us.
SENT_ON_LOOP_BYTES_MAX: Final = 64 * 1024
SILENCES_MAX: Final = 3  # seconds without a byte from an actor whose instances are open
OPENING_SILENCES_MAX: Final = 120  # loading a model may keep the interpreter from answering
CONNECT_S: Final = 5.0
CLOSE_S_MAX: Final = 600.0
END_S: Final = 10.0  # limit for an actor without instances to end
_ENDED: Final = "its process has ended"
_HOME_BYTES: Final = 16 * HOME_BLOCKS_MAX  # what the actor adds to a message about a call
_NO_BLOCK: Final = Outgoing()


class InstanceModel(Protocol):
    """What an instance is started from: a `ClusterModel`."""

    config: ModelConfig
    is_pure: bool

    def job(self, number: int, name: str, group: Any) -> InstanceJob:
        """The job of an actor's instance with that number."""


class InstanceActor(Protocol):
    """The actor of an instance: a `ClusterActor`. `share`: place outputs in shared memory from now on."""

    clock: ClockNs

    def join(self, port: ActorPort, context: WorkerContext) -> tuple[ActorConnection, int]:
        """Start opening an instance. Returns the connection, and the instance's number there. Raises Unavailable."""

    def leave(self, connection: ActorConnection, number: int) -> None:
        """Remove an instance that is closed, or was not opened. The actor ends with its last one."""

    def share(self) -> None: ...


class ActorPort:
    """The connection of one instance. `connection`: while its instance is open."""

    arena = None  # its process reads no memory of this machine
    has_free_blocks = False
    run_numbers = count(1)

    def __init__(
        self, name: str, model: InstanceModel, group: Any, actor: InstanceActor, *, depth: int, is_plain: bool
    ) -> None:
        """`is_plain`: the model is not decoupled and has no state."""
        self.runs: dict[int, Run] = {}
        self.depth = depth
        self.route_group: object = actor if is_plain else None
        self.computes_apart = False  # one process runs the instances of its actor
        self.machine = ""
        self.connection: ActorConnection | None = None
        self.has_readiness = False  # whether its model has code that says whether it is ready
        self.share = actor.share
        self.names = {spec.name: j for j, spec in enumerate(model.config.outputs)}
        self._name = name
        self._model = model
        self._group = group
        self._actor = actor
        self._is_plain = is_plain
        self._worker: RemoteWorker | None = None  # set by the last `open`
        self._number = 0  # the number of its instance in the actor
        self._opening: ActorConnection | None = None  # set while its instance is being opened
        self._is_closed = False
        self._given_up = ""

    @property
    def worker(self) -> RemoteWorker:
        """Its worker, once it is being opened."""
        assert self._worker is not None
        return self._worker

    @property
    def number(self) -> int:
        """The number of its instance in the actor."""
        return self._number

    # ------------------------------------------------------------------ opening and closing, on other threads

    def open(self, worker: RemoteWorker) -> None:
        """Have its actor open the instance, and wait for that; the actor is started if there is none."""
        self._worker = worker
        self.machine = ""
        self.has_readiness = False
        try:
            connection, number = self._actor.join(self, worker.context)
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
            raise Unavailable(f"{worker.where}{at}: {error}") from None
        self._model.is_pure = is_pure and self._is_plain
        self._number = number
        self.runs = connection.runs
        self.connection = connection

    def serve(self) -> None:
        connection = self.connection
        if connection is None:
            return
        if self._is_closed:  # checked last: `close` sets it before it looks for a connection
            self.close()
        elif connection.is_over:  # its end may have been reported before
            connection.post(self.lost, connection, connection.why)

    def job(self, number: int) -> InstanceJob:
        """The job for its actor."""
        return self._model.job(number, self._name, self._group)

    def check_given_up(self) -> None:
        """Raises Unavailable if its opening was given up."""
        if self._given_up:
            raise Unavailable(self._given_up)

    def give_up(self, why: str) -> None:
        """As `Port.give_up`. A worker that still waits for a machine continues to wait, for as long as that takes. An
        actor with other instances continues.
        """
        self._given_up = f"its process was ended: {why}"
        connection = self._opening
        if connection is not None:
            connection.give_up(self, self._given_up)

    def close(self) -> None:
        self._is_closed = True
        connection = self.connection
        if connection is not None:
            connection.close(self._number)
            self._actor.leave(connection, self._number)

    def kill(self, why: str) -> None:
        connection = self.connection
        if connection is not None:
            connection.kill(why)

    # ------------------------------------------------------------------ to the instance, on the event loop

    def path_of(self, batch: Batch) -> Sequence[RemoteWorker]:
        connection, worker = self.connection, self.worker
        if connection is None:
            return ()
        if batch.route is None:
            return (worker,)
        if batch.wants_outputs or any(one.port.connection is not connection for one in batch.instances):
            worker.context.release(batch, range(1, len(batch.route)))  # it does not take its route
            return (worker,)
        return cast("Sequence[RemoteWorker]", batch.instances)

    def pack(self, work: Work) -> tuple[int, _Packed | None]:
        """The bytes of the inputs, and the inputs in a block if they are so few that the event loop sends them."""
        nbytes = 0
        for column in work.inputs:
            nbytes += column.nbytes
        return nbytes, _Packed(work, self._model.config, self.names) if nbytes <= SENT_ON_LOOP_BYTES_MAX else None

    def send(self, run: Run, work: Work, packed: tuple[int, _Packed | None]) -> None:
        connection = self.connection
        assert connection is not None
        run.memory = ActorRunMemory(run.batch, connection)
        nbytes, contents = packed
        route, is_announced = (0, True) if len(run.workers) == 1 else connection.announce(run.batch, run.workers)
        if contents is not None and is_announced:
            connection.traffic.count(run, nbytes)
            connection.send_soon(self._number, contents.message(run, route), contents.block)
        else:  # after the messages that announce its route
            send = partial(self._send, connection, run, work, route)
            connection.traffic.admit(run, nbytes, partial(connection.later, send))

    def _send(self, connection: ActorConnection, run: Run, work: Work, route: int) -> None:
        """Pack and send a batch, on the sending thread."""
        try:
            run.batch.started_ns = self._actor.clock()  # it waited in the server until now
            packed = _Packed(work, self._model.config, self.names)
            del work
            message = packed.message(run, route)
            block = packed.block
            connection.link.send(self._number, message, block.finish(block.nbytes), block.nbytes)
        except (OSError, EOFError):
            raise
        except Exception as error:
            failed = error if isinstance(error, FlowserveError) else cannot_start(self.worker, run.batch, error)
            connection.post(connection.failed, run, failed.with_traceback(None))

    def tell(self, message: bytes) -> None:
        if self.connection is not None:
            self.connection.send_soon(self._number, message, _NO_BLOCK)

    def recall(self, run: Run) -> None:
        connection = self.connection
        if connection is not None:
            connection.later(partial(connection.link.send, 0, pack(messages.CANCEL, (run.number,))))

    def free_words(self) -> Sequence[int]:
        return ()  # blocks are sent, not shared

    def readiness(self) -> Callable[[], str] | None:
        connection = self.connection
        return None if connection is None or not self.has_readiness else partial(connection.ask, self._number)

    def release_idle(self, *, is_quiet: bool) -> None:
        """No effect: the process has memory of its own."""

    def garbled(self, what: str) -> None:
        connection = self.connection or self._opening
        if connection is not None:
            connection.garbled(what)

    def end(self, why: str) -> None:
        self.kill(why)

    # ------------------------------------------------------------------ the end of its actor, on the event loop

    def lost(self, connection: ActorConnection, why: str) -> RemoteSink | None:
        """Its connection has ended: it takes no batches until it is opened again. Its current batches fail when the
        cause of the actor's end is known (`ActorConnection._fail`). Returns the sink of its responses.
        """
        if self.connection is not connection:
            if self._opening is connection:
                self.worker.end_calls()
            return None
        self.connection = None
        worker = self.worker
        sink = worker.down(f"{worker.where}: {why}")
        worker.report_end()
        return sink


class _Packed:
    """A batch as a message and a block."""

    def __init__(self, work: Work, config: ModelConfig, names: Mapping[str, int]) -> None:
        """Raises FlowserveError."""
        self.block = Outgoing()
        self._columns, self._taken = add_inputs(work, config.inputs, self.block)
        asked = work.wanted
        if asked.count(asked[0]) == len(asked):
            asked = asked[:1]
        self._wanted = [[names[one] for one in some] for some in asked]
        facts = [*map(request_facts, work.requests)]
        self._facts = facts if any(map(any, facts)) else None

    def message(self, run: Run, route: int) -> bytes:
        """The RUN message."""
        run.memory.taken = self._taken
        updates = (0, 0) * len(run.workers)  # none, for each stage
        return encode_batch(run, route, self._wanted, self._facts, updates, self._columns)


class ActorRunMemory:
    """The memory of one batch: `frame` is the block of its reply. `computed_ns`: how long its results took."""

    __slots__ = ("_batch", "_connection", "computed_ns", "copied", "frame", "made", "taken")

    def __init__(self, batch: Batch, connection: ActorConnection) -> None:
        self.taken: Sequence[int] = ()
        self.copied: Sequence[int] = ()
        self.frame: Array | None = None
        self.computed_ns = 0
        self.made: Sequence[Results] = ()
        self._batch = batch
        self._connection = connection

    def block(self, i: int, segment: int, offset: int, nbytes: int) -> Array | None:
        found: Array | None = _part(self.frame, segment, offset, nbytes)
        return found

    def give_back(self, passed: Sequence[Stage]) -> bool:
        return True  # outputs that are not read were not sent

    def blocks(self, passed: Sequence[Stage], last: int) -> list[Array | Exception | None]:
        found: list[Array | Exception | None] = []
        for stage in passed:
            nbytes = max([start + size for start, size, shape in stage.outputs if shape], default=0)
            try:
                found.append(_part(self.frame, stage.segment, stage.offset, nbytes))
            except Garbled as error:
                found.append(error.with_traceback(None))
        return found

    def hold(self, i: int, blocks: Sequence[Any]) -> None:
        """No effect: its process has the inputs for itself."""

    def unreached(self, first: int) -> None:
        """No effect: nothing was sent to these stages."""

    def invalid(self, i: int, error: Exception) -> FlowserveError:
        raise Garbled(str(error))  # the whole actor ends

    def settle(self, made: Sequence[Results], now_ns: int) -> None:
        """Shift the times to the server's clock, because clocks differ between machines: the computations are placed at
        the end of the time between sending and reply.
        """
        self.made = made
        if not made:
            return
        begun_ns = self._batch.started_ns
        by_ns = now_ns - made[-1].computed_ns
        for results in made:
            results.gathered_ns = min(max(results.gathered_ns + by_ns, begun_ns), now_ns)
            begun_ns = results.computed_ns = min(max(results.computed_ns + by_ns, results.gathered_ns), now_ns)


class ActorConnection:
    """The connection to one actor. `runs`: its batches, by number, in order. `instances`: the ports whose instances are
    open or being opened, by number. `routes`: the numbers of the routes that the actor knows. `why`: how the connection
    ended, if it `is_over`.

    | thread | methods |
    |---|---|
    | those that open and close instances, and may block | `__init__`, `add`, `wait_until_open`, `close`, `end`, `ask` |
    | event loop | `announce`, `send_soon`, `failed`, `_take_arrived` and what it calls, `_lost`, `_fail` |
    | the sending thread | `_send_all`, and what it is given by `later`, as `_ping` |
    | the reading thread | `_read_all` and what it calls: `_take_here`, `_answer`, `_on_silence`, `_how_it_ended` |
    | any thread | `give_up`, `kill`, `garbled`, `later`, `post` |

    Several threads change `instances`, `_opening` and `_closing`: each operation on a dictionary is atomic, and a loop
    reads a copy.
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
        memory for the block of a frame, on the reading thread.
        """
        self.runs: dict[int, Run] = {}
        self.instances: dict[int, ActorPort] = {}
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
        self._routes: WeakKeyDictionary[Route, int] = WeakKeyDictionary()
        self._route_numbers = count(1)
        self._ports: dict[int, ActorPort] = {}  # as `instances`, for the event loop
        self._channels: dict[int, CallFrames] = {}  # the calls of processes, by number
        self._arrived: deque[tuple[int, int, Sequence[int], bytes, Any]] = deque()  # for the event loop
        self._instance_numbers = count(1)
        self._opening: dict[int, SimpleQueue[bool | FlowserveError]] = {}
        self._closing: dict[int, threading.Event] = {}
        self._objections: dict[int, SimpleQueue[str]] = {}
        self._refused: FlowserveError | None = None  # why the actor opens no instance
        self._killed = ""  # the server's own reason for the end
        self._silences = 0
        self._sent = 0
        self._outgoing = _Outgoing()
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
        self.later = self._outgoing.put
        self._sender = threading.Thread(target=self._send_all, name=f"flowserve to {job.name}", daemon=True)
        self._sender.start()
        threading.Thread(target=self._read_all, name=f"flowserve from {job.name}", daemon=True).start()

    # ------------------------------------------------------------------ opening and closing; these block

    def add(self, port: ActorPort) -> int:
        """Have the actor open a port's instance. Returns its number."""
        number = next(self._instance_numbers)
        self._ports[number] = self.instances[number] = port
        self._opening[number] = SimpleQueue()
        self._closing[number] = threading.Event()
        try:
            self._engine.add(self._started, port.job(number))
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

    def give_up(self, port: ActorPort, why: str) -> None:
        """Give up opening a port's instance: the actor ends, unless it has other instances."""
        if [*self.instances.values()] == [port]:
            self.kill(why)
            return
        for number, one in [*self.instances.items()]:
            if one is port and number in self._opening:
                self.later(partial(self.link.send, number, pack(messages.END, ())))
                self._opening[number].put(Unavailable(why))

    def close(self, number: int) -> None:
        """End an instance after its batches, and wait for that."""
        self.later(partial(self.link.send, number, pack(messages.END, ())))
        closed = self._closing.get(number)
        if closed is not None and not closed.wait(CLOSE_S_MAX):
            self.link.close()

    def remove(self, number: int) -> None:
        """An instance is closed, or was not opened."""
        self.instances.pop(number, None)
        self.post(self._forget, number)

    def end(self) -> None:
        """End the actor, whose instances are all unused, and wait for that."""
        self._killed = self._killed or "it was closed"
        self.later(partial(self.link.send, 0, pack(messages.END, ())))
        if not self._ended.wait(END_S):
            self._engine.kill(self._started)
            self.link.close()
            self._ended.wait()

    def ask(self, number: int) -> str:
        """The objection of an instance's model, or "". One call for an instance at a time."""
        answers = self._objections[number] = SimpleQueue()
        self.later(partial(self.link.send, number, pack(frames.ASK, ())))
        return _ENDED if self.is_over else answers.get()

    def kill(self, why: str) -> None:
        """End it immediately, for this reason. On any thread."""
        self._killed = self._killed or why
        self._engine.kill(self._started)
        self.link.close()

    def garbled(self, what: str) -> None:
        """It sent an invalid message."""
        self.kill(f"its process sent an invalid message ({what}); it was ended")

    def post(self, what: Callable[..., object], *about: object) -> None:
        """Call a function on the event loop, if the loop still runs."""
        with suppress(trio.RunFinishedError):
            self._context.token.run_sync_soon(self._carry_out, what, about)

    def _carry_out(self, what: Callable[..., object], about: Sequence[object]) -> None:
        self._take_arrived()  # first what was read before
        what(*about)

    # ------------------------------------------------------------------ sending

    def announce(self, batch: Batch, workers: Sequence[RemoteWorker]) -> tuple[int, bool]:
        """The number of the route of a batch over these workers, and whether the actor knows it. If not, the
        announcement is queued to be sent.
        """
        route = batch.route
        assert route is not None
        number = self._routes.get(route)
        if number is not None:
            return number, True
        number = self._routes[route] = next(self._route_numbers)
        for i, inputs in enumerate(route.reads):
            following = workers[i + 1].port
            wanted = tuple([following.names[name] for name in route.nodes[i + 1].wanted])
            message = encode_route(number, RouteHop(following.number, wanted, inputs))
            self.later(partial(self.link.send, workers[i].port.number, message))
        return number, False

    def send_soon(self, number: int, message: bytes, block: Outgoing) -> None:
        """Send a frame: on the event loop if it is small and nothing else is to be sent before."""
        frame = number, message, block.finish(block.nbytes), block.nbytes
        try:
            is_small = block.nbytes <= SENT_ON_LOOP_BYTES_MAX and not self._outgoing.has_unsent
            if not is_small or not self.link.try_send(*frame, self.later):
                self.later(partial(self.link.send, *frame))
        except OSError:
            return  # the connection has ended, and its reading thread is about to report that

    def _send_all(self) -> None:
        while (send := self._outgoing.get()) is not None:
            try:
                send()
            except (OSError, EOFError) as error:  # the reading thread ends the connection
                log.debug("actor %s: cannot send: %s", self._name, error)
                self.link.close()
            del send  # releases the tensors
            self._outgoing.sent()

    # ------------------------------------------------------------------ reading, on the reading thread

    def _read_all(self) -> None:
        ended: EOFError | None = None
        try:
            while True:
                number, message, block = self.link.read(self._take_memory, self._on_silence)
                self._silences = 0
                self._take_here(number, *unpack(message), block)
                del block
        except EOFError as error:
            ended = error
        except Exception as error:  # an error about a message concerns this actor only
            self.garbled(_said(error))
        self.why = self._killed or f"its connection to machine '{self.machine}' ended: {ended}"
        self.is_over = True
        ended_sinks: list[tuple[RemoteSink, RemoteWorker]] = []
        self.post(self._lost, ended_sinks)
        self.link.close()
        self._outgoing.put(None)
        self._sender.join()
        self.link.discard()
        end = ActorEnd(self._killed) if self._killed else self._how_it_ended(ended)
        for waiting in [*self._opening.values()]:
            waiting.put(self._refused or Unavailable(f"{end.text} while its instance was opened ({ended})"))
        for closed in [*self._closing.values()]:
            closed.set()
        for answers in [*self._objections.values()]:
            answers.put(_ENDED)
        self._ended.set()
        self.post(self._fail, end, ended_sinks)

    def _take_here(self, number: int, kind: int, words: Sequence[int], text: bytes, block: Any) -> None:
        """Process one message, or pass it to the event loop. Raises Garbled."""
        if kind == messages.READY and len(words) == 2:
            self._answer(number, bool(words[1]))
        elif kind == messages.BROKEN:
            error = decode_error(json.loads(text))
            self._answer(number, error)
            if not number:  # the whole actor, which ends now
                self._refused = error
        elif kind == frames.CLOSED and number in self._closing:
            self._closing[number].set()
        elif kind == frames.OBJECTION and number in self._objections:
            self._objections[number].put(text.decode(errors="replace"))
        elif kind != frames.PONG:
            self._arrived.append((number, kind, words, text, block))
            with suppress(trio.RunFinishedError):
                self._context.token.run_sync_soon(self._take_arrived, idempotent=True)

    def _answer(self, number: int, answer: bool | FlowserveError) -> None:
        """Report the result of opening an instance, unless it was given up."""
        waiting = self._opening.get(number)
        if waiting is not None:
            waiting.put(answer)

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
        self.later(self._ping)

    def _ping(self) -> None:
        self.link.send(0, pack(frames.PING, ()))
        self._sent = self.link.sent  # the ping itself does not count: only the kernel has taken it

    # ------------------------------------------------------------------ on the event loop

    def _take_arrived(self) -> None:
        """Process the messages that were read, in their order, and have the engine run a step."""
        if not self._arrived:
            return
        while self._arrived:
            try:
                self._take(*self._arrived.popleft())
            except Exception as error:  # an error about a message concerns this actor only
                self.garbled(_said(error))
                self._arrived.clear()
        self._context.completions.step_now()

    def _take(self, number: int, kind: int, words: Sequence[int], text: bytes, block: Any) -> None:
        """Process one message. Raises Garbled, or another exception for an invalid one."""
        if block is not None and kind != messages.SERVER_REQUEST:
            block.flags.writeable = False
        memory_of = partial(_part, block)
        if number >= frames.CALLS_FROM:
            channel = self._channels.get(number)
            if channel is not None:  # None if it was closed here
                channel.take(kind, words, text, block)
        elif kind == frames.RECALLED:
            self._release(*read(frames.KINDS, kind, words))
        elif (port := self._ports.get(number)) is None:
            raise Garbled(f"a message of kind {kind} of instance {number}, which does not exist")
        elif kind in (messages.DONE, messages.FAILED):
            run = self.runs.get(words[1])
            if run is None or len(words) < 4:
                raise Garbled(f"a reply to batch {words[1]}, which it does not have")
            run.memory.frame = block
            port.worker.take(kind, words, text, memory_of)
            self._has_replied(run)
        elif kind == messages.CALLS:
            channel_number, is_fork = read(frames.KINDS, kind, words)
            self._begin_calls(port, frames.CALLS_FROM + channel_number, is_fork=bool(is_fork))
        elif kind == messages.READINESS:
            port.has_readiness = True
        else:
            port.worker.take(kind, words, text, memory_of)

    def _has_replied(self, run: Run) -> None:
        self.traffic.leave(run)
        now_ns = self._clock()
        made = run.memory.made
        computed_ns = sum([results.computed_ns - results.gathered_ns for results in made])
        self.traffic.answered(max(now_ns - run.batch.started_ns - computed_ns, 0))
        for following in self.runs.values():
            if following.workers[0] is run.workers[0]:  # it begins now, and has waited in the actor until now
                free_ns = made[0].computed_ns if len(run.workers) > 1 and made else now_ns
                following.batch.started_ns = max(following.batch.started_ns, free_ns)
                break

    def failed(self, run: Run, error: FlowserveError) -> None:
        """A batch cannot be sent."""
        if run.number in self.runs:
            self.traffic.leave(run)
            cast("RemoteWorker", run.workers[0]).complete(run, error)
            self._context.wake()

    def _release(self, number: int, stage: int) -> None:
        """A recalled batch returns after that stage: free the instances of all other stages."""
        run = self.runs.get(number)
        if run is not None and run.batch.route is not None:
            for i, worker in enumerate(run.workers):
                if i != stage and number in cast("RemoteWorker", worker).runs:
                    cast("RemoteWorker", worker).leave(run)

    def _begin_calls(self, port: ActorPort, address: int, *, is_fork: bool) -> None:
        make = port.worker.begin_calls(is_fork=is_fork)
        if make is not None:
            self._channels[address] = CallFrames(self, address, self._channels, self._clock, make)

    def _forget(self, number: int) -> None:
        port = self._ports.pop(number, None)
        if port is not None:
            port.worker.end_calls()  # the connection may end before the actor has said that they are over

    def _lost(self, sinks: list[tuple[RemoteSink, RemoteWorker]]) -> None:
        for port in [*self._ports.values()]:
            sink = port.lost(self, self.why)
            if sink is not None:
                sinks.append((sink, port.worker))

    def _fail(self, end: ActorEnd, sinks: list[tuple[RemoteSink, RemoteWorker]]) -> None:
        """Fail the batches that were under way when it ended."""
        kind = MachineLost if end.with_machine else InstanceDied
        for sink, worker in sinks:
            sink.fail(kind(f"{worker.where}: {end.text}"))
        runs = [*self.runs.values()]
        self.runs.clear()
        for run in runs:
            self.traffic.leave(run)
            worker = cast("RemoteWorker", run.workers[0])
            worker.complete(run, kind(f"{worker.where}: {end.text}"))
        self._context.wake()


class _Outgoing:
    """What the sending thread is to send, in order. `has_unsent`: whether it has something to do, or is doing it: a
    frame that the event loop sent meanwhile would overtake it.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Send | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unsent = 0
        self.get = self._queue.get

    @property
    def has_unsent(self) -> bool:
        return self._unsent > 0

    def put(self, send: Send | None) -> None:
        """On any thread. None ends the sending thread."""
        with self._lock:
            self._unsent += 1
        self._queue.put(send)

    def sent(self) -> None:
        """What `get` returned has been done."""
        with self._lock:
            self._unsent -= 1


class CallFrames:
    """The port of the calls of one process in an actor: frames with a number of their own. `cells` are the numbers of
    its metrics, which are sent when they have changed.
    """

    def __init__(
        self,
        connection: ActorConnection,
        address: int,
        channels: dict[int, CallFrames],
        clock: ClockNs,
        make: Callable[[CallFrames], RemoteCalls],
    ) -> None:
        self._connection = connection
        self._address = address
        self._channels = channels
        self._clock = clock
        self._cells: dict[int, _SentCells] = {}
        self.calls = make(self)

    def take(self, kind: int, words: Sequence[int], text: bytes, block: Array | None) -> None:
        """Process a message of the process."""
        if kind == frames.CALLS_ENDED:
            self.calls.close()
        elif kind == frames.CELLS:
            (number,) = read(frames.KINDS, kind, words)
            cells = self._cells.get(number)
            if cells is not None and block is not None:  # None if the metric was dropped, or refused
                cells.take(block.view(np.float64).tolist(), self._clock())
        else:
            self.calls.take(kind, words, text, lambda *place: _memory(block, *place))

    def result(
        self, number: int, is_last: bool, error: Sequence[str] | None, outputs: Mapping[str, Array], parameters: Any
    ) -> None:
        block = Outgoing()
        columns: list[ResultColumn] = []
        for name, array in outputs.items():
            start, nbytes = block.add([array])
            where = (frames.BLOCK, start, nbytes) if nbytes else b""
            columns.append((name, BY_NUMPY[array.dtype].number, array.shape, where))
        message = encode_result(number, is_last, 0, (), error, columns, parameters)
        if len(message) > MESSAGE_BYTES_MAX - _HOME_BYTES:
            raise Internal(TOO_LONG)
        self._connection.send_soon(self._address, message, block)

    def reply(self, number: int, error: Sequence[str] | None, answer: Any) -> None:
        self._connection.send_soon(self._address, encode_server_reply(number, (), error, answer), _NO_BLOCK)

    def cells(self, number: int, family: int, cells: Array, *, is_gauge: bool) -> list[float]:
        shown = self._cells[number] = _SentCells(family, cells.tolist(), is_gauge=is_gauge)
        return shown.numbers

    def drop(self, family: int) -> None:
        self._cells = {number: one for number, one in self._cells.items() if one.family != family}

    def close(self) -> None:
        self._channels.pop(self._address, None)


class _SentCells:
    """The numbers of one metric."""

    def __init__(self, family: int, numbers: list[float], *, is_gauge: bool) -> None:
        self.family = family
        self.numbers = numbers
        self._is_gauge = is_gauge
        self._set_ns = numbers[0]  # by the clock of the other machine

    def take(self, numbers: Sequence[float], now_ns: int) -> None:
        """Take over numbers that have changed. The time of a gauge is compared between machines, so it is the time at
        which the server learns of it.
        """
        if len(numbers) != len(self.numbers):
            raise Garbled("a metric with another number of cells")
        if not self._is_gauge:
            self.numbers[:] = numbers
            return
        if numbers[0] != self._set_ns:
            self._set_ns = numbers[0]
            self.numbers[0] = float(now_ns)
        self.numbers[1:] = numbers[1:]


def _part(block: Any, segment: int, offset: int, nbytes: int) -> Any:
    """A part of the block of a frame; None for no bytes. Raises Garbled."""
    if not nbytes:
        return None
    if block is None or segment != frames.BLOCK or offset + nbytes > len(block) or offset % 8:
        raise Garbled("tensors that are not within their block")
    return block if nbytes == len(block) else block[offset : offset + nbytes]


def _memory(block: Array | None, segment: int, offset: int, nbytes: int) -> Array:
    """The memory of a call's tensors. Raises Garbled."""
    found: Array | None = _part(block, segment, offset, nbytes)
    return np.empty(0, np.uint8) if found is None else found


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, (Garbled, FlowserveError)) else f"{type(error).__name__}: {error}"


class _Silent(EOFError):
    """Nothing was received for too long."""
