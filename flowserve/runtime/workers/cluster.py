"""A worker whose instance runs on another machine, in an actor (cluster/) to which the server has a connection.

An actor (`ClusterActor`) has the instance of one worker, or one of each model of a segment: then workers share it, and
a batch on a route is one message and one reply, with only the outputs of the last stage.

Decides that whole batches are sent, and that an instance has up to `DEPTH` of them: while one computes, the next is
being sent, and the queue has an entry of the instance for each (`base.slots_of`). A small batch is packed and sent on
the event loop, a larger one on the sending thread of the connection. Tensors are sent without a copy. Replies are read
into memory of the pool, or into shared memory if a model in a process reads them next.

actor_connection.py decides how replies are read and when an actor is lost, supervisor.py when the next one is started,
cluster/ the form of messages and how actors are started. Does not know queues or callers. Made by loading/, driven by
the engine on the event loop.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from flowserve.backends.base import ModelFiles, Work
from flowserve.backends.worker import protocol
from flowserve.backends.worker.protocol import RouteHop, encode_about, encode_route, encode_run, pack, request_facts
from flowserve.cluster import frames
from flowserve.cluster.base import ActorJob, ClusterEngine, InstanceJob, MachineNeeds
from flowserve.cluster.files import digest_of
from flowserve.cluster.frames import Outgoing, add_inputs
from flowserve.cluster.link import Tls
from flowserve.cluster.traffic import MachineTraffic
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, Unavailable
from flowserve.memory.arena import Arena
from flowserve.memory.pool import HOST
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.ipc.tensors import OutputReader
from flowserve.runtime.workers.actor_connection import ActorConnection, ActorRun
from flowserve.runtime.workers.base import Outcome, StateAdapter, WorkerContext, cannot_start, counts_nothing, works
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import Ticket
from flowserve.values import TensorSpec

log = logging.getLogger("flowserve.runtime")

DEPTH: Final = 2
# A batch of at most this size is sent on the event loop, which takes about 20 us.
SENT_ON_LOOP_BYTES_MAX: Final = 64 * 1024


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
        return InstanceJob(
            number,
            name,
            self.config,
            group,
            files=self._files,
            digest=self._digest,
            options=self._options,
            is_alone=self._is_alone,
        )

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
        self._connection: ActorConnection | None = None
        self._arena: Arena | None = None  # memory for outputs that processes read; used on the reading thread only

    # ------------------------------------------------------------------ blocking, on other threads

    def join(self, worker: ClusterWorker, context: WorkerContext) -> tuple[ActorConnection, int]:
        """Start opening a worker's instance. Returns the connection, and the instance's number there. Raises
        Unavailable.
        """
        with self._lock:
            connection = self._connection
            if connection is None or connection.is_over:
                connection = self._connection = self._start(worker, context)
            return connection, connection.add(worker)

    def _start(self, worker: ClusterWorker, context: WorkerContext) -> ActorConnection:
        engine = self.cluster.engine
        job = ActorJob(self.name, os.urandom(frames.SECRET_BYTES), self.cluster.tls)
        started = engine.start(job, self._needs, self.cluster.give_up_s)
        worker.machine = started.machine
        try:
            worker.check_given_up()
            return ActorConnection(
                job,
                started,
                engine,
                context,
                self.clock,
                traffic=self.cluster.traffic.setdefault(started.machine, MachineTraffic()),
                take=self.take,
            )
        except BaseException:
            engine.kill(started)
            raise

    def leave(self, connection: ActorConnection, number: int) -> None:
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
        self.counted_there = counts_nothing
        self.arena = None
        self.depth = depth
        self.ended = ""
        self.has_answered = False
        self.on_end: Callable[[], None] | None = None
        self.machine = ""
        self.reader = OutputReader(config.name, config.outputs, batches=config.max_batch_size > 0)
        self.where = f"model '{config.name}', instance '{name}'"
        self._model = model
        self._group = group
        self._actor = actor
        self._numbers = {spec.name: j for j, spec in enumerate(config.outputs)}
        self._connection: ActorConnection | None = None
        self._number = 0  # the number of its instance in the actor
        self._opening: ActorConnection | None = None  # set while its instance is being opened
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

    def share(self, output: int, spec: TensorSpec) -> None:
        """As `Worker.share`; its actor's replies have all outputs in one block."""
        self._actor.share()

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
        run = connection.runs[number] = ActorRun(batch, work.rows, workers)
        nbytes = 0
        for column in work.inputs:
            nbytes += column.nbytes
        is_announced = len(workers) == 1 or self._announce(connection, run, workers)
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

    def _announce(self, connection: ActorConnection, run: ActorRun, workers: Sequence[ClusterWorker]) -> bool:
        """Whether the actor knows the route of this batch over these workers. If not, the announcement is queued to be
        sent.
        """
        route = run.batch.route
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

    def _packed(self, number: int, run: ActorRun, work: Work) -> tuple[bytes, Outgoing]:
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
        message = encode_run(
            number,
            run.route,
            0,
            work.rows,
            wanted=wanted,
            updates=(0, 0) * len(run.workers),  # none, for each stage
            columns=places,
            about=about,
            text=text,
        )
        return message, block

    def _send(self, connection: ActorConnection, number: int, run: ActorRun, work: Work) -> None:
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

    def lost(self, connection: ActorConnection, why: str) -> None:
        """Its connection has ended: it takes no batches until it is opened again. Its current batches fail when the
        cause of the actor's end is known (`ActorConnection._fail`).
        """
        if self._connection is not connection:
            return
        self._connection = None
        self.ended = f"{self.where}: {why}"
        if self.on_end is not None:
            self.on_end()
