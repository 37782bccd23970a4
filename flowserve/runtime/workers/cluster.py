"""A worker whose instance runs on another machine: an actor (cluster/), reached by a connection of its own.

Decides that whole batches cross, and that an instance is given up to `DEPTH` of them: while one computes there, the
next is on its way, and the instance is that many times in its queue (`base.slots_of`). A small batch is sent on the
event loop; a larger one is packed and sent by a thread of the connection, so that the loop is not held. The tensors are
sent from where they are. Another thread reads the replies into memory of the pool, or into shared memory where a model
in a process reads them next, and hands them to the engine.

Decides when an actor is lost: its connection has ended, or it has been silent for some seconds, although it was pinged
every second. Then its batches fail and are not run again, since one of them may be the reason (`InstanceDied`); only if
the machine as a whole is lost, the scheduler may run them once more (`MachineLost`). supervisor.py decides when the
next actor is started.

cluster/ decides the form of what travels, and how actors are started. Does not know queues or callers. Made by
loading/, driven by the engine on the event loop.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, Final

import trio

from flowserve.backends.base import ModelFiles, Results, Work
from flowserve.backends.worker import protocol
from flowserve.backends.worker.protocol import (
    Garbled,
    decode_error,
    decode_notes,
    encode_about,
    encode_run,
    pack,
    request_facts,
    unpack,
)
from flowserve.cluster import frames
from flowserve.cluster.base import ActorEnd, ActorJob, ClusterEngine, MachineNeeds, Started, versions
from flowserve.cluster.files import digest_of
from flowserve.cluster.frames import Outgoing, add_inputs
from flowserve.cluster.link import ActorLink, Send, Tls, client_context, greet_actor
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, InstanceDied, MachineLost, ModelFailed, Unavailable
from flowserve.memory.arena import Arena
from flowserve.memory.pool import HOST
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.ipc.tensors import OutputReader
from flowserve.runtime.workers.base import Outcome, StateAdapter, WorkerContext, cannot_start, works
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import Ticket

log = logging.getLogger("flowserve.runtime")

DEPTH: Final = 2
# A batch of at most so many bytes is sent on the event loop, which takes some 20 us.
SENT_ON_LOOP_BYTES_MAX: Final = 64 * 1024
SILENCES_MAX: Final = 3  # seconds without a sign of an instance that is open
OPENING_SILENCES_MAX: Final = 120  # a model that is loaded may keep its interpreter from answering
CONNECT_S: Final = 5.0
CLOSE_S_MAX: Final = 600.0
_NONE: Final[Mapping[int, Any]] = {}


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """A server's cluster. `give_up_s`: how long an instance may wait for a machine that has what it needs."""

    engine: ClusterEngine
    give_up_s: float = 60.0
    tls: Tls | None = None


class ClusterModel:
    """One version of a model that runs on other machines. Nothing is loaded here."""

    may_run_inline = False

    def __init__(
        self,
        config: ModelConfig,
        files: ModelFiles,
        options: Mapping[str, str],
        needs: MachineNeeds,
        cluster: ClusterOptions,
    ) -> None:
        """Reads all files, for their digest; blocks."""
        self.config = config
        self.is_pure = False  # told by the first instance that is open
        self._files = files
        self._options = options
        self.needs = needs
        self.cluster = cluster
        self._digest = digest_of(files)

    def job(self, name: str, group: InstanceGroup) -> ActorJob:
        """What an actor of this model is started with. Its secret is new each time."""
        if group.kind == "KIND_GPU":
            group = replace(group, gpus=group.gpus or (0,))  # the engine shows an actor its own GPUs only
        secret = os.urandom(frames.SECRET_BYTES)
        return ActorJob(name, self.config, group, self._files, self._digest, self._options, secret, self.cluster.tls)

    def instance(self, name: str, group: InstanceGroup) -> Any:
        raise NotImplementedError  # its instances are elsewhere

    def close(self) -> None:
        """Nothing is held here."""


class ClusterWorker:
    """One instance on another machine. While there is none, `ended` is how the last one ended. `on_end`: as of a
    `ProcessWorker`. `machine`: where it is, or was last.
    """

    _context: WorkerContext  # of the last `open`

    def __init__(
        self, name: str, model: ClusterModel, group: InstanceGroup, clock: ClockNs, *, depth: int = DEPTH
    ) -> None:
        config = model.config
        self.name = name
        self.state = StateAdapter()
        self.has_state = False
        self.is_on_gpu = False
        self.route_group: object = None
        self.outage = works
        self.depth = depth
        self.ended = ""
        self.has_answered = False
        self.on_end: Callable[[], None] | None = None
        self.machine = ""
        self.reader = OutputReader(config.name, config.outputs, batches=config.max_batch_size > 0)
        self._model = model
        self._group = group
        self._clock = clock
        self._numbers = count(1)
        self._names = {spec.name: j for j, spec in enumerate(config.outputs)}
        self._arena: Arena | None = None  # where processes read outputs; used on the reading thread only
        self._connection: _Connection | None = None
        self._is_closed = False
        self._given_up = ""
        self._opening: Started | None = None  # while its instance is not open yet

    @property
    def running(self) -> Batch | None:
        """The batch that has been there for the longest time."""
        return next(iter(self.batches), None)

    @property
    def batches(self) -> list[Batch]:
        """All batches that are under way there."""
        connection = self._connection
        return [] if connection is None else [run.batch for run in [*connection.runs.values()]]

    # ------------------------------------------------------------------ opening and closing, on other threads

    def open(self, context: WorkerContext) -> None:
        """Start an actor, connect to it, and wait until its instance is open. Blocks; called on a loader's thread.
        Raises the model's exception, or Unavailable. May be called again after `on_end`.
        """
        self._context = context
        model, cluster = self._model, self._model.cluster
        job = model.job(self.name, self._group)
        where = self._where
        try:
            started = cluster.engine.start(job, model.needs, cluster.give_up_s)
        except Unavailable as error:
            raise Unavailable(f"{where}: {error}") from None
        self.machine = started.machine
        self._opening = started
        try:
            if self._given_up:
                raise Unavailable(self._given_up)
            connection = _Connection(self, started, job)
            is_pure = connection.wait_until_open()
        except BaseException as error:
            cluster.engine.kill(started)
            if self._given_up:
                raise Unavailable(f"{where}: {self._given_up}") from None
            if isinstance(error, Unavailable):
                raise Unavailable(f"{where}, machine '{started.machine}': {error}") from None
            raise
        finally:
            self._opening = None
        model.is_pure = bool(is_pure)
        self._connection, self.ended = connection, ""
        if self._is_closed:  # checked last: `close` sets it before it looks for a connection
            connection.end()
            return
        connection.serve(context)

    def give_up(self, why: str) -> None:
        """As `RunsElsewhere.give_up`. One that still waits for a machine goes on waiting, as long as that may take."""
        self._given_up = f"its process was ended: {why}"
        started = self._opening
        if started is not None:
            self._model.cluster.engine.kill(started)

    def close(self) -> None:
        """End the actor after its running batches. Blocks; called on a thread."""
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            connection.end()

    def share(self) -> None:
        """From now on processes read its outputs."""
        if self._arena is None:
            self._arena = Arena()

    def take(self, nbytes: int) -> Any:
        """Memory for the block of a reply, on the reading thread."""
        return HOST.take(nbytes) if self._arena is None else self._arena.lease(nbytes)

    # ------------------------------------------------------------------ batches, on the event loop

    def run(self, batch: Batch) -> Outcome | None:
        """Send a batch. Returns None where its outcome comes later."""
        connection = self._connection
        if connection is None:
            return Unavailable(f"instance '{self.name}' is not running")
        work = self.state.work(batch.tickets)
        batch.started_ns = self._clock()
        number = next(self._numbers)
        run = connection.runs[number] = _Run(batch, work.rows)
        nbytes = 0
        for column in work.inputs:
            nbytes += column.nbytes
        try:
            if nbytes <= SENT_ON_LOOP_BYTES_MAX:
                message, block = self._packed(number, run, work)
                connection.send_soon(message, block)
            else:
                connection.later(partial(self._send, connection, number, run, work))
        except OSError:
            return None  # the connection has ended, which its reading thread is about to tell
        except Exception:
            connection.runs.pop(number, None)
            raise
        return None

    def finish(self, batch: Batch, outcome: Outcome) -> tuple[Outcome, Sequence[Ticket]]:
        """As `Worker.finish`; it has no state."""
        return outcome, ()

    def recall(self, batch: Batch) -> None:
        """It takes no batches with routes."""

    def kill(self, why: str) -> None:
        """End its actor at once, for this reason."""
        connection = self._connection
        if connection is not None:
            connection.kill(why)

    def _packed(self, number: int, run: _Run, work: Work) -> tuple[bytes, Outgoing]:
        """A batch as a message and a block. Raises FlowserveError."""
        block = Outgoing()
        places, run.taken = add_inputs(work, self._model.config.inputs, block)
        names = work.wanted
        wanted = (
            [[self._names[one] for one in names[0]]]
            if names.count(names[0]) == len(names)
            else [[self._names[one] for one in some] for some in names]
        )
        facts = [*map(request_facts, work.requests)] if any(map(any, map(request_facts, work.requests))) else None
        about: Sequence[int] = ()
        text = b""
        if facts is not None or run.batch.contexts:
            about, text = encode_about(facts, run.batch.contexts)
        return encode_run(number, 0, 0, work.rows, wanted, (0, 0), places, (), about, text), block

    def _send(self, connection: _Connection, number: int, run: _Run, work: Work) -> None:
        """Pack and send a batch, on the sending thread."""
        try:
            message, block = self._packed(number, run, work)
            del work
            connection.link.send(message, block.finish(block.nbytes), block.nbytes)
        except (OSError, EOFError):
            raise
        except Exception as error:
            if connection.runs.pop(number, None) is not None:
                failed = error if isinstance(error, FlowserveError) else cannot_start(self, run.batch, error)
                self._context.completions.add(run.batch, failed.with_traceback(None))

    # ------------------------------------------------------------------ the end of its actor, on the event loop

    def lost(self, connection: _Connection, why: str) -> None:
        """Its connection has ended: it takes no batches until it is opened again. Those that it has fail when it is
        known how the actor ended (`fail`).
        """
        if self._connection is not connection:
            return
        self._connection = None
        self.ended = f"{self._where}: {why}"
        if self.on_end is not None:
            self.on_end()

    def fail(self, connection: _Connection, end: ActorEnd) -> None:
        """Fail the batches of a connection that has ended."""
        kind = MachineLost if end.with_machine else InstanceDied
        error = kind(f"{self._where}: {end.text}")
        runs, connection.runs = connection.runs, {}
        for run in runs.values():
            self._context.completions.waiting.append((run.batch, error))
        self._context.wake()

    @property
    def _where(self) -> str:
        return f"model '{self._model.config.name}', instance '{self.name}'"


@dataclass(slots=True, eq=False)
class _Run:
    """A batch that was sent, or is being sent."""

    batch: Batch
    rows: Sequence[int]
    taken: Sequence[int] = ()


class _Connection:
    """The connection to one actor, with its two threads. `runs`: its batches, by number, in order."""

    def __init__(self, worker: ClusterWorker, started: Started, job: ActorJob) -> None:
        """Connect to an actor. Blocks. Raises Unavailable."""
        self.runs: dict[int, _Run] = {}
        self._worker = worker
        self._started = started
        self._engine = worker._model.cluster.engine
        self._why = ""  # the server's own reason for the end
        self._silences = 0
        self._silences_max = OPENING_SILENCES_MAX
        self._sent = 0
        self._outgoing: SimpleQueue[Send | None] = SimpleQueue()
        self._context: WorkerContext | None = None
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
            self.link.send(pack(frames.HELLO, (), versions()))
        except (Unavailable, OSError, EOFError) as error:
            self.link.discard()
            raise Unavailable(f"{address}: {error}") from None
        self._sender = threading.Thread(target=self._send_all, name=f"flowserve to {worker.name}", daemon=True)
        self._sender.start()

    def wait_until_open(self) -> int:
        """Whether its model is pure, once the instance is open. Blocks. Raises why it is not open."""
        try:
            while True:
                message, _ = self.link.read(HOST.take, self._on_silence)
                self._silences = 0
                kind, words, text = unpack(message)
                if kind == protocol.READY and len(words) == 2:
                    return words[1]
                if kind == protocol.BROKEN:
                    raise decode_error(json.loads(text))
                if kind != frames.PONG:
                    raise Garbled(f"a message of kind {kind}")
        except (EOFError, OSError) as error:
            end = self._engine.end_of(self._started)
            failed: FlowserveError = Unavailable(f"{end.text} while its instance was opened ({error})")
        except ValueError as error:  # also Garbled
            failed = ModelFailed(f"an invalid message while the instance was opened: {error}")
        except FlowserveError as error:
            failed = error
        self._stop()
        raise failed

    def serve(self, context: WorkerContext) -> None:
        """Read replies from now on."""
        self._context = context
        self._silences_max = SILENCES_MAX
        threading.Thread(target=self._read_all, name=f"flowserve from {self._worker.name}", daemon=True).start()

    def end(self) -> None:
        """Have the actor end after its batches, and wait for that. Blocks."""
        self._why = "it was closed"
        self._outgoing.put(partial(self.link.send, pack(protocol.END, ())))
        timer = threading.Timer(CLOSE_S_MAX, self.link.close)
        timer.daemon = True
        timer.start()
        try:
            if self._context is not None:
                self._ended.wait()
            else:
                self._stop()
        finally:
            timer.cancel()

    def kill(self, why: str) -> None:
        """End it at once, for this reason. On any thread."""
        self._why = why
        self._engine.kill(self._started)
        self.link.close()

    # ------------------------------------------------------------------ sending

    def send_soon(self, message: bytes, block: Outgoing) -> None:
        """Send a small frame, on the event loop."""
        buffers = block.finish(block.nbytes)
        if not self._outgoing.empty() or not self.link.try_send(message, buffers, block.nbytes, self.later):
            self.later(partial(self.link.send, message, buffers, block.nbytes))

    def later(self, send: Send) -> None:
        """Have the sending thread do it."""
        self._outgoing.put(send)

    def _send_all(self) -> None:
        while (send := self._outgoing.get()) is not None:
            try:
                send()
            except (OSError, EOFError) as error:  # the reading thread ends the connection
                log.debug("instance %s: cannot send: %s", self._worker.name, error)
                self.link.close()
            del send  # releases the tensors

    # ------------------------------------------------------------------ reading

    def _read_all(self) -> None:
        ended: EOFError | None = None
        try:
            while True:
                message, block = self.link.read(self._worker.take, self._on_silence)
                self._silences = 0
                kind, words, text = unpack(message)
                if kind in (protocol.DONE, protocol.FAILED):
                    self._reply(kind, words, text, block)
                elif kind != frames.PONG:
                    raise Garbled(f"a message of kind {kind}")
                del block
        except EOFError as error:
            ended = error
        except Exception as error:  # whatever a message leads to, it concerns this actor only
            what = str(error) if isinstance(error, Garbled) else f"{type(error).__name__}: {error}"
            self._engine.kill(self._started)
            self._why = f"its process sent an invalid message ({what}); it was ended"
        machine = self._started.machine
        self._tell(self._worker.lost, self._why or f"its connection to machine '{machine}' ended: {ended}")
        self._stop()
        self._ended.set()
        self._tell(self._worker.fail, ActorEnd(self._why) if self._why else self._how_it_ended(ended))

    def _tell(self, what: Callable[[_Connection, Any], None], about: object) -> None:
        """Call it on the event loop, where there still is one."""
        assert self._context is not None
        with suppress(trio.RunFinishedError):
            self._context.token.run_sync_soon(what, self, about)

    def _how_it_ended(self, error: EOFError | None) -> ActorEnd:
        end = self._engine.end_of(self._started)
        self._engine.kill(self._started)  # an actor that lives without its connection is of no use
        if isinstance(error, _Silent) and not end.with_machine:
            end = ActorEnd(f"machine '{self._started.machine}' does not answer ({error})", with_machine=True)
        log.error("%s: %s", self._worker.name, end.text)
        return end

    def _on_silence(self) -> None:
        if self.link.sent != self._sent:  # it takes what is sent: a large batch is on its way
            self._sent = self.link.sent
            self._silences = 0
        self._silences += 1
        if self._silences >= self._silences_max:
            raise _Silent(f"nothing was heard from it for {self._silences} s")
        self._outgoing.put(self._ping)

    def _ping(self) -> None:
        self.link.send(pack(frames.PING, ()))
        self._sent = self.link.sent  # a ping that was taken by the kernel is no sign of the other end

    def _reply(self, kind: int, words: Sequence[int], text: bytes, block: Any) -> None:
        """Complete a batch, on the reading thread. Raises Garbled."""
        if len(words) < 4 or words[2]:
            raise Garbled("a reply that is cut off, or of a route")
        run = self.runs.pop(words[1], None)
        if run is None:
            raise Garbled(f"a reply to batch {words[1]}, which it does not have")
        batch = run.batch
        outcome: Outcome
        try:
            if kind == protocol.FAILED:
                outcome = decode_error(json.loads(text))
            else:
                outcome = self._results(run, words, text, block)
        except Exception:
            self.runs[words[1]] = run  # it fails with the connection
            raise
        self._worker.has_answered = True
        for following in [*self.runs.values()][:1]:  # begins now; until now it waited there, as in a queue
            following.batch.started_ns = self._worker._clock()
        assert self._context is not None
        self._context.completions.add(batch, outcome)

    def _results(self, run: _Run, words: Sequence[int], text: bytes, block: Any) -> Results:
        if len(words) < 9:
            raise Garbled("a reply that is cut off")
        _, gathered_ns, computed_ns, segment, offset, nbytes = words[3:9]
        if nbytes != (0 if block is None else len(block)) or segment not in (0, frames.BLOCK) or offset:
            raise Garbled("a reply with another block than it announces")
        told: dict[str, Any] = json.loads(text) if text else {}
        reader, rows = self._worker.reader, run.rows
        notes = decode_notes(told.pop("", None), reader.names, len(rows)) if text else None
        unlike: Collection[str] = () if notes is None else notes.unlike
        if block is not None:
            block.flags.writeable = False
        outputs, placed = reader.read(words, 9, block, rows, unlike)
        # The clocks of two machines differ: the computation is put at the end of the time that the batch was away.
        now_ns = self._worker._clock()
        took_ns = min(max(computed_ns - gathered_ns, 0), now_ns - run.batch.started_ns)
        results = Results(outputs, _NONE, now_ns - took_ns, now_ns, (), placed, _NONE, (), run.taken, notes)
        if told:
            members = {int(m): one for m, one in told.items()}
            if not members.keys() <= set(range(len(rows))) or None in members.values():
                raise Garbled("a reply about a member that does not exist, or is to run again")
            results.parameters = {m: one for m, one in members.items() if isinstance(one, dict)}
            results.errors = {m: decode_error(one) for m, one in members.items() if not isinstance(one, dict)}
        return results

    def _stop(self) -> None:
        """End the connection and the sending thread. On the thread that reads."""
        self.link.close()
        self._outgoing.put(None)
        self._sender.join()
        self.link.discard()


class _Silent(EOFError):
    """Nothing was heard for too long."""
