"""An actor: a process on another machine with the instances of one model, or of each model of a segment.

Decides the life cycle of an actor: open a socket on the machine's address, wait for the one connection that knows the
secret, open instances as their jobs arrive, and end with the connection. Each instance has a thread, where its model is
loaded and its batches run one after the other in the order of arrival. The same backends run here as in the server and
its worker processes, and their exceptions become the same messages. Another thread reads messages and batches, and
answers pings. An actor that receives nothing from its server for `SERVER_SILENCES_MAX` seconds ends, so that no actor
remains when a server or its machine is lost.

Decides how a batch passes its route (`scheduling/route.py`), all of whose stages are instances here: each thread passes
it to the next one without copying the outputs, and the last replies. A batch returns earlier, with the outputs of all
stages that it has passed, if a member failed, an output cannot be passed on as it is, or it was recalled.

A model that raises fails its batch; an invalid message ends the actor.

Does not know an engine: `python -m flowserve.cluster.actor` is a process of the local one, and other engines run
`Actor` in processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, BinaryIO, Final

from flowserve.backends import registry
from flowserve.backends.base import (
    NO_FILES,
    Answer,
    BlsCall,
    CallsModels,
    Cells,
    Instance,
    LoadedModel,
    Results,
    RunsInProcess,
    Work,
)
from flowserve.backends.worker import protocol
from flowserve.backends.worker.driver import BatchRequests, stage_words, text_about
from flowserve.backends.worker.protocol import Garbled, RouteHop, RunMessage, encode_error, pack, unpack
from flowserve.backends.worker.tensors import OutputWriter
from flowserve.cluster import frames
from flowserve.cluster.agents import FAILED, STARTED
from flowserve.cluster.base import ActorJob, InstanceJob, versions
from flowserve.cluster.files import files_here
from flowserve.cluster.frames import Buffer, OutgoingArena, inputs_of_block
from flowserve.cluster.link import ActorLink, greet_server, server_context
from flowserve.cluster.pipes import read_pickled, standard_pipes
from flowserve.errors import FlowserveError, ModelFailed, Unavailable, Unsupported, told
from flowserve.memory.column import Column, whole_output
from flowserve.memory.heap import tune_malloc
from flowserve.memory.pool import HOST
from flowserve.memory.segment import Segment
from flowserve.values import Array, Request, TensorSpec, fits

log = logging.getLogger("flowserve.child")

SERVER_SILENCES_MAX: Final = 15  # seconds; the server sends something every second
CONNECT_S: Final = 60.0  # limit for the server to connect
ORPHAN_S: Final = 30.0  # limit for a batch whose server is gone
_PLAIN_REQUEST: Final = Request({}, None, *protocol.PLAIN_FACTS)  # its attributes are only read


class Actor:
    """A process with instances. `port`: where it listens, on all addresses of `host`."""

    def __init__(self, job: ActorJob, host: str) -> None:
        """Open the socket. Raises Unavailable if that is not possible, or the files of TLS cannot be used."""
        self._job = job
        self._jobs: SimpleQueue[InstanceJob | None] = SimpleQueue()
        self._tls = None if job.tls is None else server_context(job.tls)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=4)
        except OSError as error:
            raise Unavailable(f"cannot listen on {host}: {error.strerror or error}") from None
        self.port: int = self._listener.getsockname()[1]

    def add(self, job: InstanceJob) -> None:
        """Open an instance once the server is connected, and answer on its connection. On any thread."""
        self._jobs.put(job)

    def serve(self, end_process: Callable[[], None] | None = None) -> None:
        """Run the instances until the connection ends. Returns if no server connects. `end_process`: called when a
        batch still runs `ORPHAN_S` after that.
        """
        try:
            link = self._accept()
        finally:
            self._listener.close()
        if link is None:
            log.error("actor %s: no server has connected for %g s", self._job.name, CONNECT_S)
            return
        session = _Session(link, self._job.name, self._jobs, end_process)
        try:
            session.run()
        finally:
            session.close()

    def _accept(self) -> ActorLink | None:
        self._listener.settimeout(CONNECT_S)
        while True:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                return None
            link = ActorLink(sock, self._tls, is_server=True)
            if greet_server(link, self._job.secret):
                return link
            link.discard()
            log.warning("actor %s: refused a connection that does not know the secret", self._job.name)


class _Run:
    """A batch in this actor. `stage`: its current stage of its route; as `is_recalled`, changed only while the lock of
    its session is held. `made`: the results of the stages before that one.
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
        self.made: list[_Made] = []
        self.inputs: Sequence[Column] = ()  # inputs of the stage, if an earlier stage computed them
        self.wanted: Sequence[tuple[int, ...]] = ()  # wanted outputs of the stage, by member, or one entry for all

    @property
    def message(self) -> RunMessage:
        """The decoded message. Decoded on the thread that runs the first stage. Raises Garbled."""
        if self._message is None:
            message = self._message = protocol.decode_run(*self._source)
            if not message.rows or message.passed:
                raise Garbled("a batch without members, or with results")
            self.wanted = message.wanted
        return self._message

    @property
    def is_at_end(self) -> bool:
        """Whether no stage follows."""
        return self.stage == len(self.message.later) // 2


@dataclass(slots=True, eq=False)
class _Made:
    """The results of a stage: `columns[j]` is output j, None if it is not wanted."""

    specs: Sequence[TensorSpec]
    columns: Sequence[Column | None]
    times: tuple[int, int]

    def words(self, message: RunMessage, arena: OutgoingArena | None) -> Sequence[int]:
        """The numbers of a PASSED message. `arena`: receives the outputs; None if they are not sent."""
        if arena is None:
            sizes = [0 if column is None else column.nbytes for column in self.columns]
            return [0, *self.times, 0, 0, len(sizes), *chain.from_iterable((0, size, 0) for size in sizes)]
        outputs = [[None] * len(message.rows) if column is None else column for column in self.columns]
        placed = OutputWriter(self.specs, _show, arena).place(outputs, None)
        wanted = tuple([j for j, column in enumerate(self.columns) if column is not None])
        words = stage_words(message._replace(wanted=[wanted]), 0, self.times, placed)
        assert words is not None  # each output is one tensor
        return words


class _Session:
    """The instances and the batches of one connection."""

    def __init__(
        self,
        link: ActorLink,
        name: str,
        jobs: SimpleQueue[InstanceJob | None],
        end_process: Callable[[], None] | None,
    ) -> None:
        self._link = link
        self._name = name
        self._jobs = jobs
        self._end_process = end_process
        self._hello: SimpleQueue[bytes | None] = SimpleQueue()
        self._instances: dict[int, _Instance] = {}
        self._given_up: set[int] = set()  # instances that ended before their jobs came
        self._runs: dict[int, _Run] = {}  # batches on a route
        self._lock = threading.Lock()
        self._silences = 0
        self._reader = threading.Thread(target=self._read, name="frames", daemon=True)

    def run(self) -> None:
        """Open and run instances until the server, or the connection, ends."""
        self._reader.start()
        hello = self._hello.get()
        if hello is None:
            return
        if (theirs := json.loads(hello)) != versions():
            ours = f"the machine of the instance {_listed(versions())}"
            what = f"the server has flowserve, Python and numpy {_listed(theirs)}, {ours}"
            error = Unavailable(f"{what}; install the same versions on both")
            self.tell(0, pack(protocol.BROKEN, (), encode_error(error)))
            return
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if job.number in self._given_up:
                    continue
                one = self._instances[job.number] = _Instance(job, self)
            one.thread.start()
        for one in [*self._instances.values()]:
            one.work.put(None)
            one.thread.join()

    def close(self) -> None:
        """End the connection and the reading thread."""
        self._link.close()
        self._reader.join()
        self._link.discard()

    # ------------------------------------------------------------------ for instances, on their threads

    def tell(self, instance: int, message: bytes, block: Sequence[Buffer] = (), nbytes: int = 0) -> None:
        """Send a message of an instance; 0: of the actor. Raises FlowserveError if it is too large."""
        try:
            self._link.send(instance, message, block, nbytes)
        except (OSError, EOFError):
            log.debug("actor %s: the server is gone", self._name)

    def broke(self, error: Exception) -> None:
        """The server sent an invalid message: end the actor."""
        log.error("actor %s: its process got an invalid message, and ends: %s", self._name, error)
        self._link.close()

    def advance(self, run: _Run) -> bool:
        """Advance a batch to its next stage. False if it was recalled."""
        with self._lock:
            run.stage += not run.is_recalled
            return not run.is_recalled

    def forget(self, run: _Run) -> None:
        """Remove a batch that is about to return."""
        self._runs.pop(run.number, None)

    def instance(self, number: int) -> _Instance | None:
        """The instance with that number; None if it is not open."""
        return self._instances.get(number)

    # ------------------------------------------------------------------ on the reading thread

    def _read(self) -> None:
        try:
            while True:
                instance, message, block = self._link.read(HOST.take, self._on_silence)
                self._silences = 0
                self._take(instance, *unpack(message), block)
                del block
        except (EOFError, OSError) as error:
            log.debug("actor %s: the server is gone: %s", self._name, error)
        except Exception as error:
            self.broke(error)
        self._hello.put(None)
        self._jobs.put(None)
        if self._end_process is not None:
            orphan = threading.Timer(ORPHAN_S, self._end_process)
            orphan.daemon = True
            orphan.start()

    def _take(self, number: int, kind: int, words: Sequence[int], text: bytes, block: Array | None) -> None:
        """Process one message. Raises Garbled."""
        if kind == frames.PING:
            self.tell(0, pack(frames.PONG, ()))
        elif kind == frames.HELLO:
            self._hello.put(text)
        elif kind == protocol.CANCEL and len(words) == 2:
            self._recall(words[1])
        elif kind == protocol.END and not number:
            self._jobs.put(None)
        elif kind == protocol.END:
            with self._lock:
                ending = self._instances.pop(number, None)
                if ending is None:
                    self._given_up.add(number)
                else:
                    ending.work.put(None)
        elif (instance := self._instances.get(number)) is None:
            raise Garbled(f"a message of kind {kind} to instance {number}")
        elif kind == protocol.RUN:
            run = _Run(words, text, block)
            if run.route:
                self._runs[run.number] = run
            instance.work.put(run)
        elif kind == protocol.ROUTE:
            try:
                route, hop, _ = protocol.decode_route(words)
            except (LookupError, ValueError):
                raise Garbled("a route that is cut off") from None
            instance.routes[route] = hop
        else:
            raise Garbled(f"a message of kind {kind}")

    def _recall(self, number: int) -> None:
        run = self._runs.get(number)
        if run is not None:  # None if it has returned
            with self._lock:
                run.is_recalled, stage = True, run.stage
            self.tell(0, pack(frames.RECALLED, (number, stage)))

    def _on_silence(self) -> None:
        self._silences += 1
        if self._silences >= SERVER_SILENCES_MAX:
            raise EOFError(f"nothing was heard for {SERVER_SILENCES_MAX} s")


class _Instance:
    """One instance, on a thread of its own. `work`: its batches; None ends it. `routes`: the next stage of each."""

    def __init__(self, job: InstanceJob, session: _Session) -> None:
        self.work: SimpleQueue[_Run | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=job.name, daemon=True)
        self.routes: dict[int, RouteHop] = {}
        self._job = job
        self._session = session
        self._batches = job.config.max_batch_size > 0
        self._names = [spec.name for spec in job.config.outputs]

    def _serve(self) -> None:
        session, number = self._session, self._job.number
        try:
            model, instance = self._open()
        except Exception as error:
            if not isinstance(error, FlowserveError):
                log.exception("instance %s: opening failed", self._job.name)
                what = f"model '{self._job.config.name}', instance '{self._job.name}': {type(error).__name__}: {error}"
                error = ModelFailed(what)
            session.tell(number, pack(protocol.BROKEN, (), encode_error(error)))
            return
        try:
            is_pure = model.is_pure or self._job.config.parameters.get("pure", "") == "true"
            session.tell(number, pack(protocol.READY, (int(is_pure),)))
            while (run := self.work.get()) is not None:
                self._run(instance, run)
                del run
        except Exception as error:
            session.broke(error)
        finally:
            try:
                instance.close()
                model.close()
            except Exception:
                log.exception("closing instance %s failed", self._job.name)
            session.tell(number, pack(frames.CLOSED, ()))

    def _open(self) -> tuple[LoadedModel, Instance]:
        """Load the model and open its instance."""
        job = self._job
        files = files_here(job.files, job.digest, None)
        model = registry.find(job.config.backend).load(job.config, files, job.options)
        try:
            # An instance that is alone in its process has fewer restrictions than one that shares it.
            instance = (
                model.remote(job.name, job.group).call()
                if job.is_alone and isinstance(model, RunsInProcess)
                else model.instance(job.name, job.group)
            )
            if isinstance(instance, CallsModels):
                instance.call_through(_NoCalls(job.config.name))
            instance.open()
        except BaseException:
            model.close()
            raise
        return model, instance

    # ------------------------------------------------------------------ one batch

    def _run(self, instance: Instance, run: _Run) -> None:
        try:
            results = instance.run(self._work(run), perf_counter_ns)
            text = text_about(results, is_on_route=bool(run.route))
            if text is None and not run.is_at_end and self._hand_on(run, results):
                return
            self._reply(run, results, text)
        except Garbled:
            raise
        except FlowserveError as error:  # also raised for a reply that is larger than a frame
            self._fail(run, error)
        except Exception as error:
            # A backend's own fault: its traceback belongs in the log, never in a response.
            log.exception("instance %s failed", self._job.name)
            what = told(error, str(error), len(run.message.rows))
            self._fail(run, ModelFailed(f"model '{self._job.config.name}', instance '{self._job.name}' failed: {what}"))

    def _work(self, run: _Run) -> Work:
        message = run.message
        rows, count = message.rows, len(message.rows)
        names = self._names
        try:
            wanted = [tuple([names[j] for j in outputs]) for outputs in run.wanted]
        except IndexError:
            raise Garbled("an output that does not exist is asked for") from None
        if len(wanted) == 1:
            wanted *= count
        elif len(wanted) != count:
            raise Garbled("outputs are asked for by other members")
        requests: Sequence[Request] = [_PLAIN_REQUEST] * count
        contexts = None
        if message.about:
            facts, by_stage = protocol.decode_about(message.about, message.text, count)
            if facts is not None:
                requests = BatchRequests(facts)
            contexts = by_stage[run.stage] if run.stage < len(by_stage) else None
        inputs = run.inputs
        if not run.stage:
            config = self._job.config
            held = HOST.take(0) if run.block is None else run.block
            inputs = inputs_of_block(message.columns, config.inputs, rows, held, config.name, self._batches)
        # The block belongs to this batch only; outputs of a stage may have other readers.
        may_write = [[not run.stage] * count] * len(inputs)
        return Work(inputs, rows, requests, wanted, may_write, contexts=contexts)

    def _hand_on(self, run: _Run, results: Results) -> bool:
        """Pass a batch to the instance of the next stage. False if it returns to the server instead: it was recalled,
        or an output is not one tensor of the whole batch that the next model accepts.
        """
        hop = self.routes.get(run.route)
        following = None if hop is None else self._session.instance(hop.peer)
        if hop is None or following is None:
            return False
        rows = run.message.rows
        columns: list[Column | None] = [None] * len(results.outputs)
        for j in run.wanted[0]:
            column = columns[j] = whole_output(results.outputs[j], rows)
            if column is None or sum(map(len, column.pieces)) != sum(rows):
                return False
        made = [*run.made, _Made(self._job.config.outputs, columns, (results.gathered_ns, results.computed_ns))]
        inputs = [column for stage, j in hop.inputs if (column := made[stage].columns[j]) is not None]
        if not following.takes(inputs) or not self._session.advance(run):
            return False
        run.made, run.inputs, run.wanted, run.block = made, inputs, [hop.outputs], None
        following.work.put(run)
        return True

    def takes(self, columns: Sequence[Column]) -> bool:
        """Whether these columns, of a whole batch, have the types and dims of the configuration."""
        specs = self._job.config.inputs
        firsts = [column.pieces[0] for column in columns]
        return len(specs) == len(firsts) and all(
            first.dtype == spec.dtype.numpy and fits(first.shape[1:], spec.dims)
            for spec, first in zip(specs, firsts, strict=True)
        )

    def _reply(self, run: _Run, results: Results, text: Any) -> None:
        """Answer a batch. The outputs of earlier stages are sent if it has not passed its whole route."""
        arena = OutgoingArena()
        is_whole = text is None and run.is_at_end
        passed = [one.words(run.message, None if is_whole else arena) for one in run.made]
        rows = run.message.rows if self._batches else None
        placed = OutputWriter(self._job.config.outputs, _show, arena).place(results.outputs, rows)
        times = results.gathered_ns, results.computed_ns
        words = [run.number, len(passed), *chain.from_iterable(passed), 0, *times, *placed.words()]
        self._send(run, pack(protocol.DONE, words, text), arena)

    def _fail(self, run: _Run, error: FlowserveError) -> None:
        arena = OutgoingArena()
        passed = [one.words(run.message, arena) for one in run.made]
        words = [run.number, len(passed), *chain.from_iterable(passed), 0]
        self._send(run, pack(protocol.FAILED, words, encode_error(error)), arena)

    def _send(self, run: _Run, message: bytes, arena: OutgoingArena) -> None:
        self._session.forget(run)
        self._session.tell(self._job.number, message, arena.block.finish(arena.nbytes), arena.nbytes)


def _show(segment: Segment) -> None:
    """Not needed: blocks are sent, not shared."""


class _NoCalls:
    """The `BlsClient` of a model on another machine, whose only connection to the server is its batches."""

    clock = staticmethod(perf_counter_ns)

    def __init__(self, model: str) -> None:
        self._model = model

    def begin(self, call: BlsCall, answered: Callable[[Answer], None]) -> Callable[[bool], None]:
        raise self._refusal(f"call model '{call.model}'")

    def wait(self, is_there: Callable[[], bool]) -> None:
        raise self._refusal("wait for a call")

    def awaited_on(self, loop: asyncio.AbstractEventLoop) -> AbstractContextManager[None]:
        raise self._refusal("wait for a call")

    def ask(self, what: str, arguments: Sequence[Any], files: Mapping[str, bytes] = NO_FILES) -> Any:
        raise self._refusal("load models, or have metrics of its own")

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None, count: int) -> Cells:
        raise self._refusal("have metrics of its own")

    def drop(self, family: int) -> None:
        """No effect: there are no metrics."""

    def is_withdrawn(self, member: int) -> bool:
        """Always False: this is unknown here."""
        return False

    def close(self) -> None:
        """No effect: there is nothing to release."""

    def _refusal(self, what: str) -> Unsupported:
        return Unsupported(
            f"model '{self._model}' runs on another machine, from where it cannot {what}; remove it from the placement "
            "file"
        )


def _listed(texts: object) -> str:
    return ", ".join(map(str, texts)) if isinstance(texts, list) else str(texts)


def main() -> None:
    """A process of the local engine. It reads an `ActorJob` from standard input, writes its port to standard output,
    then reads `InstanceJob`s, and ends when standard input does, as its machine does.
    """
    source, answers = standard_pipes()
    job = read_pickled(source)
    assert isinstance(job, ActorJob)
    tune_malloc()
    try:
        actor = Actor(job, "127.0.0.1")
    except FlowserveError as error:
        answers.tell(FAILED, str(error))
        return
    answers.tell(STARTED, actor.port)
    threading.Thread(target=_add_all, args=(actor, source), name="lifeline", daemon=True).start()
    actor.serve(lambda: os._exit(1))


def _add_all(actor: Actor, source: BinaryIO) -> None:
    try:
        while (job := read_pickled(source)) is not None:
            actor.add(job)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
