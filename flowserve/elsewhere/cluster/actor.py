"""An actor: a process on another machine with the instances of one model, or of each model of a segment.

Decides the life cycle of an actor: open a socket on the machine's address, wait for the one connection that knows the
secret, open instances as their jobs arrive, and end with the connection. Each instance has a thread, where its model is
loaded and its batches run one after the other in the order of arrival, by the driver of worker processes. Another
thread reads messages and batches, and answers pings. An actor that receives nothing from its server for
`SERVER_SILENCES_MAX` seconds ends, so that no actor remains when a server or its machine is lost.

How a batch runs is decided in backends/worker/driver.py, and how it passes several instances in port.py. An invalid
message ends the actor.

Does not know an engine: `python -m flowserve.elsewhere.cluster.actor` is a process of the local one, and other engines
run `Actor` in processes of their own.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import perf_counter_ns
from typing import BinaryIO, Final
from weakref import ref

from flowserve.backends import registry
from flowserve.backends.base import Instance, KnowsReadiness, RunsInProcess
from flowserve.backends.worker import messages
from flowserve.backends.worker.bls_client import WorkerBlsClient
from flowserve.backends.worker.main import open_instance
from flowserve.backends.worker.messages import Garbled, Job, encode_error, pack, read_fields, unpack
from flowserve.backends.worker.readiness import answer_on_thread
from flowserve.backends.worker.streaming import drive
from flowserve.elsewhere.cluster import frames
from flowserve.elsewhere.cluster.agents import FAILED, STARTED
from flowserve.elsewhere.cluster.base import ActorJob, InstanceJob, versions
from flowserve.elsewhere.cluster.files import files_here
from flowserve.elsewhere.cluster.frames import Buffer
from flowserve.elsewhere.cluster.link import ActorLink, greet_server, server_context
from flowserve.elsewhere.cluster.pipes import read_pickled, standard_pipes
from flowserve.elsewhere.cluster.port import FramePort, Routed
from flowserve.elsewhere.cluster.relay import Relay
from flowserve.errors import FlowserveError, Unavailable
from flowserve.memory.heap import tune_malloc
from flowserve.memory.pool import HOST
from flowserve.values import Array

log = logging.getLogger("flowserve.child")

SERVER_SILENCES_MAX: Final = 15  # seconds; the server sends something every second
CONNECT_S: Final = 60.0  # limit for the server to connect
ORPHAN_S: Final = 30.0  # limit for a batch whose server is gone


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


class _Session:
    """The instances and the batches of one connection."""

    def __init__(
        self,
        link: ActorLink,
        name: str,
        jobs: SimpleQueue[InstanceJob | None],
        end_process: Callable[[], None] | None,
    ) -> None:
        self.routed = Routed(self.tell)
        self.relay = Relay(self.tell, self.broke)
        self._link = link
        self._name = name
        self._jobs = jobs
        self._end_process = end_process
        self._hello: SimpleQueue[bytes | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._given_up: set[int] = set()  # instances that ended before their jobs came
        self._lock = threading.Lock()  # held while an instance is added or removed
        self._silences = 0
        self._reader = threading.Thread(target=self._read, name="frames", daemon=True)
        this = ref(self)

        def forked() -> None:
            session = this()
            if session is not None:
                session._link.disown()
                session.relay.disown()

        os.register_at_fork(after_in_child=forked)

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
            self.tell(0, pack(messages.BROKEN, (), encode_error(error)))
            return
        while (job := self._jobs.get()) is not None:
            instance = _Instance(job, self)
            with self._lock:
                if job.number in self._given_up:
                    continue
                self.routed.ports[job.number] = instance.port
            thread = threading.Thread(target=instance.serve, name=job.name, daemon=True)
            self._threads.append(thread)
            thread.start()
        for port in [*self.routed.ports.values()]:
            port.end()
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """End the connection and the reading thread."""
        self._link.close()
        self._reader.join()
        self.relay.close()
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
        self.end()

    def end(self) -> None:
        """End the actor, by its connection."""
        self._link.close()

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
        elif kind == messages.CANCEL:
            (batch,) = read_fields(messages.TO_INSTANCE, kind, words)
            stage = self.routed.recall(batch)
            if stage is not None:  # None if the batch has returned
                self.tell(0, pack(frames.RECALLED, (batch, stage)))
        elif kind == messages.END and not number:
            self._jobs.put(None)
        elif kind == messages.END:
            with self._lock:
                ending = self.routed.ports.pop(number, None)
                if ending is None:
                    self._given_up.add(number)
                else:
                    ending.end()
        elif number >= frames.CALLS_FROM:
            self.relay.take(number - frames.CALLS_FROM, kind, words, text, block)
        elif kind == frames.ASK:
            self.relay.ask(number)
        elif (port := self.routed.ports.get(number)) is None:
            raise Garbled(f"a message of kind {kind} to instance {number}")
        else:
            port.take(kind, words, text, block)

    def _on_silence(self) -> None:
        self._silences += 1
        if self._silences >= SERVER_SILENCES_MAX:
            raise EOFError(f"nothing was heard for {SERVER_SILENCES_MAX} s")


class _Instance:
    """One instance, which is opened and driven on a thread of its own."""

    def __init__(self, job: InstanceJob, session: _Session) -> None:
        config = job.config
        self._job = job
        self._session = session
        self._close_model: Callable[[], None] = _nothing  # of the model, once it is loaded
        self._is_pure = False
        self._socket: socket.socket | None = None
        batches = config.max_batch_size > 0
        self._facts = Job(config.name, job.name, config.inputs, config.outputs, batches, config.decoupled)
        self.port = FramePort(job.number, self._facts, session.routed)

    def serve(self) -> None:
        """Load the model, open the instance and run its batches until its port ends."""
        session, number = self._session, self._job.number
        try:
            instance = open_instance(self._make, self._facts, self._connect)
            if isinstance(instance, KnowsReadiness) and (objection := instance.readiness()) is not None:
                answer_on_thread(self._line(), objection)
        except FlowserveError as error:
            self._close_model()
            self._disconnect()
            session.tell(number, pack(messages.BROKEN, (), encode_error(error)))
            return
        try:
            is_pure = self._is_pure or self._job.config.parameters.get("pure", "") == "true"
            session.tell(number, pack(messages.READY, (int(is_pure),)))
            drive(self.port, self._facts, instance, perf_counter_ns)
        except SystemExit:  # it has lost its GPU, which only a new process can use
            session.end()
        except Exception as error:
            session.broke(error)
        finally:
            try:
                instance.close()
                self._close_model()
            except Exception:
                log.exception("closing instance %s failed", self._job.name)
            self._disconnect()
            session.tell(number, pack(frames.CLOSED, ()))

    def _make(self) -> Instance:
        """Load the model and make its instance."""
        job = self._job
        files = files_here(job.files, job.digest, None)
        model = registry.find(job.config.backend).load(job.config, files, job.options)
        self._close_model, self._is_pure = model.close, model.is_pure
        # An instance that is alone in its process has fewer restrictions than one that shares it.
        if job.is_alone and isinstance(model, RunsInProcess):
            made: Instance = model.remote(job.name, job.group).call()
            return made
        return model.instance(job.name, job.group)

    def _connect(self) -> WorkerBlsClient:
        """The connection of a model that calls others."""
        return WorkerBlsClient(self._facts.model, self._line(), perf_counter_ns, self.port.end_route)

    def _line(self) -> socket.socket:
        """The instance's socket to the relay, made when it is needed."""
        if self._socket is None:
            self._socket = self._session.relay.connect(self._job.number)
        return self._socket

    def _disconnect(self) -> None:
        """End the calls of the model."""
        if self._socket is not None:
            self._session.relay.disconnect(self._job.number)
            self._socket.close()


def _nothing() -> None:
    """There is no model yet."""


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
