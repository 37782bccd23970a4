"""Instances in a cluster: what they are started from, the actors in which they run, and the port of each of them.

An actor (`ClusterActor`) has the instance of one worker, or one of each model of a segment: then workers share it, and
a batch on a route is one message and one reply, with only the outputs of the last stage. An instance is a number on the
connection of its actor (`ActorPort`).

Decides when an actor is started and ended, and in which memory its frames are received. Decides that an instance has up
to `DEPTH` batches: while one computes, the next is being sent, and the queue has an entry of the instance for each
(`base.slots_of`); but one only if a batch may wait for another, as those of a model that calls others. A small batch is
packed and sent on the event loop, a larger one by the sending thread of the connection. Tensors are sent without a
copy.

cluster/ decides how actors are started, tcp.py how they are connected, worker.py what a message means. Does not know
queues or callers. Called by wing.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Final, cast

from flowserve.backends.base import ModelFiles, Work
from flowserve.backends.python.calling import calls_models
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import pack, request_facts
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.elsewhere.cluster import frames
from flowserve.elsewhere.cluster.base import ActorJob, ClusterEngine, InstanceJob, MachineNeeds
from flowserve.elsewhere.cluster.files import digest_of
from flowserve.elsewhere.cluster.frames import Outgoing, add_inputs
from flowserve.elsewhere.cluster.link import Tls
from flowserve.elsewhere.cluster.traffic import MachineTraffic
from flowserve.elsewhere.tcp import SENT_ON_LOOP_BYTES_MAX, ActorConnection, ActorRunMemory
from flowserve.errors import FlowserveError, Unavailable
from flowserve.memory.arena import Arena
from flowserve.memory.pool import HOST
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.remote.run import RemoteRun
from flowserve.runtime.remote.sink import RemoteSink
from flowserve.runtime.remote.worker import RemoteWorker, encode_batch
from flowserve.runtime.workers.base import WorkerContext, cannot_start
from flowserve.scheduling.batch import Batch

DEPTH: Final = 2


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
        # Whether a batch never waits for another: then an instance may take several.
        self.is_independent = config.sequence is None and not config.decoupled and not calls_models(files)

    def depth(self, *, is_limited: bool) -> int:
        """The batches that an instance takes at once; `is_limited`: the rate limiter counts them."""
        return DEPTH if self.is_independent and not is_limited else 1

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

    def join(self, port: ActorPort, context: WorkerContext) -> tuple[ActorConnection, int]:
        """Start opening an instance. Returns the connection, and the instance's number there. Raises Unavailable."""
        with self._lock:
            connection = self._connection
            if connection is None or connection.is_over:
                connection = self._connection = self._start(port, context)
            return connection, connection.add(port)

    def _start(self, port: ActorPort, context: WorkerContext) -> ActorConnection:
        engine = self.cluster.engine
        job = ActorJob(self.name, os.urandom(frames.SECRET_BYTES), self.cluster.tls)
        started = engine.start(job, self._needs, self.cluster.give_up_s)
        port.machine = started.machine
        try:
            port.check_given_up()
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
            connection.remove(number)
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


class ActorPort:
    """The connection of one instance. `connection`: while its instance is open."""

    arena = None  # its process reads no memory of this machine
    has_free_blocks = False
    run_numbers = count(1)

    def __init__(
        self, name: str, model: ClusterModel, group: InstanceGroup, actor: ClusterActor, *, depth: int, is_plain: bool
    ) -> None:
        """`is_plain`: the model is not decoupled and has no state."""
        self.runs: dict[int, RemoteRun] = {}
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
        """As `RemotePort.give_up`. A worker that waits for a machine continues to wait, for as long as that takes. An
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

    def send(self, run: RemoteRun, work: Work, packed: tuple[int, _Packed | None]) -> None:
        connection = self.connection
        assert connection is not None
        run.memory = ActorRunMemory(run.batch)
        nbytes, contents = packed
        route, is_announced = (0, True) if len(run.workers) == 1 else connection.announce(run.batch, run.workers)
        if contents is not None and is_announced:
            connection.traffic.count(run, nbytes)
            connection.send_soon(self._number, contents.message(run, route), contents.block)
        else:  # after the messages that announce its route
            send = partial(self._send, connection, run, work, route)
            connection.traffic.admit(run, nbytes, partial(connection.later, send))

    def _send(self, connection: ActorConnection, run: RemoteRun, work: Work, route: int) -> None:
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
            self.connection.send_soon(self._number, message, Outgoing())

    def recall(self, run: RemoteRun) -> None:
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

    def message(self, run: RemoteRun, route: int) -> bytes:
        """The RUN message."""
        run.memory.taken = self._taken
        updates = (0, 0) * len(run.workers)  # none, for each stage
        return encode_batch(run, route, self._wanted, self._facts, updates, self._columns)
