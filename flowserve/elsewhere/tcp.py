"""The connection to an actor on another machine: TCP, over which tensors travel as bytes behind their message.

Decides on which thread what happens: a small frame is sent on the event loop, a larger one by the sending thread of the
connection, so that the loop is not blocked, and none overtakes another. Another thread reads what the actor sends, into
memory of the pool or into shared memory, and passes it to the event loop in order. There a message goes to the worker
of its instance (worker.py), which decides what it means.

Decides when an actor is lost: its connection has ended, or it has not answered pings for some seconds. Then its
instances end together, and its batches fail and are not run again, because one of them may be the cause
(`InstanceDied`); only if the whole machine is lost may the scheduler run them once more (`MachineLost`).

cluster/ decides the form of frames, actors.py when an actor is started and what is sent to it. Does not know queues or
callers.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Final, Protocol, cast
from weakref import WeakKeyDictionary

import trio

from flowserve.backends.base import Results
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import (
    Garbled,
    RouteHop,
    Stage,
    decode_error,
    encode_route,
    pack,
    read_fields,
    unpack,
)
from flowserve.elsewhere.call_frames import CallFrames
from flowserve.elsewhere.cluster import frames
from flowserve.elsewhere.cluster.base import ActorEnd, ActorJob, ClusterEngine, InstanceJob, Started, versions
from flowserve.elsewhere.cluster.frames import Outgoing, part_of_block
from flowserve.elsewhere.cluster.link import ActorLink, Send, client_context, greet_actor
from flowserve.elsewhere.cluster.traffic import MachineTraffic
from flowserve.errors import FlowserveError, InstanceDied, MachineLost, Unavailable
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.remote.run import RemoteRun
from flowserve.runtime.remote.sink import RemoteSink
from flowserve.runtime.remote.worker import RemoteWorker
from flowserve.runtime.workers.base import WorkerContext
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.route import Route
from flowserve.values import Array

log = logging.getLogger("flowserve.runtime")

# A frame of at most this size is sent on the event loop, which takes about 20 us.
SENT_ON_LOOP_BYTES_MAX: Final = 64 * 1024
_PORTION: Final = 64  # messages that are processed without a pause
SILENCES_MAX: Final = 3  # seconds without a byte from an actor whose instances are open
OPENING_SILENCES_MAX: Final = 120  # loading a model may keep the interpreter from answering
CONNECT_S: Final = 5.0
CLOSE_S_MAX: Final = 600.0
END_S: Final = 10.0  # limit for an actor without instances to end
_ENDED: Final = "its process has ended"
_OF_OPENING: Final = frozenset((messages.READY, messages.BROKEN, frames.CLOSED, frames.OBJECTION))

_route_numbers = count(1)


class ConnectedPort(Protocol):
    """The port of one instance: an `ActorPort`. `number`: of its instance in the actor; `has_readiness`: whether its
    model has code that says whether it is ready.
    """

    has_readiness: bool

    @property
    def worker(self) -> RemoteWorker: ...
    def job(self, number: int) -> InstanceJob:
        """The job for the actor, with the number of the instance there."""

    def lost(self, connection: ActorConnection, why: str) -> RemoteSink | None:
        """The connection has ended. Returns the sink of its responses."""


class ActorRunMemory:
    """The memory of one batch: `frame` is the block of its reply, `made` its results."""

    __slots__ = ("_batch", "copied", "frame", "made", "taken")

    def __init__(self, batch: Batch) -> None:
        self.taken: Sequence[int] = ()
        self.copied: Sequence[int] = ()
        self.frame: Array | None = None
        self.made: Sequence[Results] = ()
        self._batch = batch

    def block(self, i: int, segment: int, offset: int, nbytes: int) -> Array | None:
        found: Array | None = part_of_block(self.frame, segment, offset, nbytes)
        return found

    def give_back(self, passed: Sequence[Stage]) -> bool:
        return True  # outputs that are not read were not sent

    def blocks(self, passed: Sequence[Stage], last: int) -> list[Array | Exception | None]:
        found: list[Array | Exception | None] = []
        for stage in passed:
            nbytes = max([start + size for start, size, shape in stage.outputs if shape], default=0)
            try:
                found.append(part_of_block(self.frame, stage.segment, stage.offset, nbytes))
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


class ConnectedInstance:
    """An instance of an actor, for the threads that open, close or question it. `opened`: whether its model is pure, or
    the error of opening.
    """

    def __init__(self, port: ConnectedPort) -> None:
        self.port = port
        self.is_opening = True
        self.opened: SimpleQueue[bool | FlowserveError] = SimpleQueue()
        self.closed = threading.Event()
        self.objections: SimpleQueue[str] = SimpleQueue()

    def take(self, kind: int, words: Sequence[int], text: bytes) -> None:
        """Process a message of `_OF_OPENING`, on the reading thread. Raises Garbled."""
        if kind == messages.READY:
            (is_pure,) = words[1:]
            self.opened.put(bool(is_pure))
        elif kind == messages.BROKEN:
            self.opened.put(decode_error(json.loads(text)))
        elif kind == frames.CLOSED:
            self.closed.set()
        else:
            self.objections.put(text.decode(errors="replace"))


class ActorConnection:
    """The connection to one actor. `runs`: its batches, by number, in order. `instances`: those that are open or being
    opened, by number. `why`: how the connection ended, if it `is_over`.

    | thread | methods |
    |---|---|
    | those that open and close instances, and may block | `__init__`, `add`, `wait_until_open`, `close`, `end`, `ask` |
    | event loop | `announce`, `send_soon`, `failed`, `_take_arrived` and what it calls, `_lost`, `_fail` |
    | the sending thread | `_send_all`, and what it is given by `later`, as `_ping` |
    | the reading thread | `_read_all` and what it calls: `_take_here`, `_on_silence`, `_how_it_ended` |
    | any thread | `give_up`, `kill`, `garbled`, `later`, `post` |

    Several threads change `instances`: each operation on a dictionary is atomic, and a loop reads a copy.
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
        self.runs: dict[int, RemoteRun] = {}
        self.instances: dict[int, ConnectedInstance] = {}
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
        self._ports: dict[int, ConnectedPort] = {}  # as `instances`, for the event loop
        self._channels: dict[int, CallFrames] = {}  # the calls of processes, by number
        self._arrived: deque[tuple[int, int, Sequence[int], bytes, Any]] = deque()  # for the event loop
        self._instance_numbers = count(1)
        self._refused: FlowserveError | None = None  # why the actor opens no instance
        self._killed = ""  # the server's own reason for the end
        self._silence = _Silence()
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
        self._sender = threading.Thread(target=self._send_all, name=f"flowserve to {job.name}", daemon=True)
        self._sender.start()
        threading.Thread(target=self._read_all, name=f"flowserve from {job.name}", daemon=True).start()

    # ------------------------------------------------------------------ opening and closing; these block

    def add(self, port: ConnectedPort) -> int:
        """Have the actor open a port's instance. Returns its number."""
        number = next(self._instance_numbers)
        self._ports[number] = port
        instance = self.instances[number] = ConnectedInstance(port)
        try:
            self._engine.add(self._started, port.job(number))
        except Unavailable as error:
            instance.opened.put(error)
        if self.is_over or self._refused is not None:  # perhaps before the instance was added
            instance.opened.put(self._refused or Unavailable(self.why))
        return number

    def wait_until_open(self, number: int) -> bool:
        """Wait until that instance is open. Returns whether its model is pure. Raises the error of opening."""
        instance = self.instances[number]
        answer = instance.opened.get()
        instance.is_opening = False
        if isinstance(answer, FlowserveError):
            raise answer
        return answer

    def give_up(self, port: ConnectedPort, why: str) -> None:
        """Give up opening a port's instance: the actor ends, unless it has other instances."""
        instances = [*self.instances.items()]
        if [one.port for _, one in instances] == [port]:
            self.kill(why)
            return
        for number, one in instances:
            if one.port is port and one.is_opening:
                self.later(partial(self.link.send, number, pack(messages.END, ())))
                one.opened.put(Unavailable(why))

    def close(self, number: int) -> None:
        """End an instance after its batches, and wait for that."""
        self.later(partial(self.link.send, number, pack(messages.END, ())))
        instance = self.instances.get(number)
        if instance is not None and not instance.closed.wait(CLOSE_S_MAX):
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
        instance = self.instances.get(number)
        if instance is None or self.is_over:
            return _ENDED
        self.later(partial(self.link.send, number, pack(frames.ASK, ())))
        return instance.objections.get()

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
        while self._arrived:  # first what was read before
            self._take_arrived()
        what(*about)

    # ------------------------------------------------------------------ sending

    def later(self, send: Send) -> None:
        """Run a function on the sending thread."""
        self._outgoing.put(send)

    def announce(self, batch: Batch, workers: Sequence[RemoteWorker]) -> tuple[int, bool]:
        """The number of the route of a batch over these workers, and whether the actor knows it. If not, the
        announcement is queued to be sent.
        """
        route = batch.route
        assert route is not None
        number = self._routes.get(route)
        if number is not None:
            return number, True
        number = self._routes[route] = next(_route_numbers)
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
                self._silence.seconds = 0
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
        for instance in [*self.instances.values()]:
            instance.opened.put(self._refused or Unavailable(f"{end.text} while its instance was opened ({ended})"))
            instance.closed.set()
            instance.objections.put(_ENDED)
        self._ended.set()
        self.post(self._fail, end, ended_sinks)

    def _take_here(self, number: int, kind: int, words: Sequence[int], text: bytes, block: Any) -> None:
        """Process one message, or pass it to the event loop. Raises Garbled."""
        instance = self.instances.get(number)  # None also if its opening was given up
        if kind == messages.BROKEN and not number:  # the whole actor, which ends now
            self._refused = decode_error(json.loads(text))
        elif kind in _OF_OPENING:
            if instance is not None:
                instance.take(kind, words, text)
        elif kind != frames.PONG:
            self._arrived.append((number, kind, words, text, block))
            with suppress(trio.RunFinishedError):
                self._context.token.run_sync_soon(self._take_arrived, idempotent=True)

    def _how_it_ended(self, error: EOFError | None) -> ActorEnd:
        end = self._engine.end_of(self._started)
        self._engine.kill(self._started)  # an actor without its connection is useless
        if isinstance(error, _Silent) and not end.with_machine:
            end = ActorEnd(f"machine '{self.machine}' does not answer ({error})", with_machine=True)
        log.error("%s: %s", self._name, end.text)
        return end

    def _on_silence(self) -> None:
        is_opening = any(instance.is_opening for instance in [*self.instances.values()])
        self._silence.last(self.link.sent, OPENING_SILENCES_MAX if is_opening else SILENCES_MAX)
        self.later(self._ping)

    def _ping(self) -> None:
        self.link.send(0, pack(frames.PING, ()))
        self._silence.sent = self.link.sent  # the ping itself does not count: only the kernel has taken it

    # ------------------------------------------------------------------ on the event loop

    def _take_arrived(self) -> None:
        """Process the next messages that were read, in their order, and have the engine run a step."""
        arrived = self._arrived
        if not arrived:
            return
        for _ in range(min(len(arrived), _PORTION)):
            try:
                self._take(*arrived.popleft())
            except Exception as error:  # an error about a message concerns this actor only
                self.garbled(_said(error))
                arrived.clear()
                break
        self._context.completions.step_now()
        if arrived:
            self._context.token.run_sync_soon(self._take_arrived, idempotent=True)

    def _take(self, number: int, kind: int, words: Sequence[int], text: bytes, block: Any) -> None:
        """Process one message. Raises Garbled, or another exception for an invalid one."""
        if block is not None and kind != messages.SERVER_REQUEST:
            block.flags.writeable = False
        memory_of = partial(part_of_block, block)
        if number >= frames.CALLS_FROM:
            channel = self._channels.get(number)
            if channel is not None:  # None if it was closed here
                channel.take(kind, words, text, block)
        elif kind == frames.RECALLED:
            self._release(*read_fields(frames.KINDS, kind, words))
        elif (port := self._ports.get(number)) is None:
            return  # its instance was closed here, or its opening given up
        elif kind in (messages.DONE, messages.FAILED):
            run = self.runs.get(words[1])
            if run is None or len(words) < 4:
                raise Garbled(f"a reply to batch {words[1]}, which it does not have")
            run.memory.frame = block
            port.worker.take(kind, words, text, memory_of)
            self._has_replied(run)
        elif kind == messages.CALLS:
            channel_number, is_fork = read_fields(frames.KINDS, kind, words)
            self._begin_calls(port, frames.CALLS_FROM + channel_number, is_fork=bool(is_fork))
        elif kind == messages.READINESS:
            port.has_readiness = True
        else:
            port.worker.take(kind, words, text, memory_of)

    def _has_replied(self, run: RemoteRun) -> None:
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

    def failed(self, run: RemoteRun, error: FlowserveError) -> None:
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

    def _begin_calls(self, port: ConnectedPort, address: int, *, is_fork: bool) -> None:
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


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, (Garbled, FlowserveError)) else f"{type(error).__name__}: {error}"


class _Silence:
    """How long nothing was received. `seconds` of silence; `sent`: bytes that the other end had taken before them."""

    def __init__(self) -> None:
        self.seconds = 0
        self.sent = 0

    def last(self, sent: int, most: int) -> None:
        """One more second. Raises _Silent after `most` of them."""
        if sent != self.sent:  # the other end still receives: a large batch is being sent
            self.sent, self.seconds = sent, 0
        self.seconds += 1
        if self.seconds >= most:
            raise _Silent(f"nothing was heard from it for {self.seconds} s")


class _Silent(EOFError):
    """Nothing was received for too long."""
