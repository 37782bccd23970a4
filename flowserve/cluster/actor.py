"""An actor: one instance of a model on another machine, from its start to its end.

Decides the order of its life: open a socket on the machine's address, wait for the one connection that knows the
secret, load the model and open the instance, run batches one after the other in the order in which they come, and end
with the connection. The same backends run here as in the server and its worker processes, and their exceptions become
the same messages. While one batch runs, a thread reads the next into memory and answers pings. An actor that hears
nothing of its server for `SERVER_SILENCES_MAX` seconds ends: so none is left behind when a server or its machine is
lost.

Errors that were decided here: a model that raises fails its batch; a message that cannot be right ends the actor.

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
    RunsInProcess,
    Work,
)
from flowserve.backends.worker import protocol
from flowserve.backends.worker.driver import BatchRequests, text_about
from flowserve.backends.worker.protocol import Garbled, RunMessage, encode_error, pack, unpack
from flowserve.backends.worker.tensors import OutputWriter, Placed
from flowserve.cluster import frames
from flowserve.cluster.base import ActorJob, versions
from flowserve.cluster.files import Fetch, files_here
from flowserve.cluster.frames import OutgoingArena, inputs_of_block
from flowserve.cluster.link import ActorLink, greet_server, server_context
from flowserve.cluster.pipes import read_pickled
from flowserve.errors import FlowserveError, ModelFailed, Unavailable, Unsupported
from flowserve.memory.heap import tune_malloc
from flowserve.memory.pool import HOST
from flowserve.values import Array, Request

log = logging.getLogger("flowserve.child")

SERVER_SILENCES_MAX: Final = 15  # seconds; the server is heard every second
CONNECT_S: Final = 60.0  # for the server to come
ORPHAN_S: Final = 30.0  # for a batch whose server is gone
_PLAIN_REQUEST: Final = Request({}, None, *protocol.PLAIN_FACTS)  # its attributes are only read
_END: Final = (protocol.END, (), b"")

Message = tuple[int, Sequence[int], bytes]


class Actor:
    """One instance. `port`: where it listens, on all addresses of `host`."""

    def __init__(self, job: ActorJob, host: str, fetch: Fetch | None = None) -> None:
        """Open the socket. Raises Unavailable if that is not possible, or the files of TLS cannot be used. `fetch`: how
        the model's files are sent to this machine.
        """
        self._job = job
        self._fetch = fetch
        self._tls = None if job.tls is None else server_context(job.tls)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=4)
        except OSError as error:
            raise Unavailable(f"cannot listen on {host}: {error.strerror or error}") from None
        self.port: int = self._listener.getsockname()[1]

    def serve(self, end_process: Callable[[], None] | None = None) -> None:
        """Run the instance until the connection ends. Returns if no server comes. `end_process`: called when a batch
        goes on for `ORPHAN_S` after that.
        """
        try:
            link = self._accept()
        finally:
            self._listener.close()
        if link is None:
            log.error("instance %s: no server has connected for %g s", self._job.name, CONNECT_S)
            return
        session = _Session(link, self._job, self._fetch, end_process)
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
            log.warning("instance %s: refused a connection that does not know the secret", self._job.name)


class _Session:
    """The batches of one connection."""

    def __init__(
        self, link: ActorLink, job: ActorJob, fetch: Fetch | None, end_process: Callable[[], None] | None
    ) -> None:
        self._link = link
        self._end_process = end_process
        self._job = job
        self._fetch = fetch
        self._arrived: SimpleQueue[tuple[Message, Array | None]] = SimpleQueue()
        self._silences = 0
        self._reader = threading.Thread(target=self._read, name="frames", daemon=True)
        config = job.config
        self._batches = config.max_batch_size > 0
        self._names = [spec.name for spec in config.outputs]
        self._arena = OutgoingArena()
        self._outputs = OutputWriter(config.outputs, lambda segment: None, self._arena)

    def run(self) -> None:
        self._reader.start()
        message, _ = self._arrived.get()
        try:
            model, instance = self._open(message)
        except Exception as error:
            if not isinstance(error, FlowserveError):
                log.exception("instance %s: opening failed", self._job.name)
                what = f"model '{self._job.config.name}', instance '{self._job.name}': {type(error).__name__}: {error}"
                error = ModelFailed(what)
            self._tell(pack(protocol.BROKEN, (), encode_error(error)))
            return
        try:
            is_pure = model.is_pure or self._job.config.parameters.get("pure", "") == "true"
            self._tell(pack(protocol.READY, (int(is_pure),)))
            while True:
                (kind, words, text), block = self._arrived.get()
                if kind == protocol.END:
                    return
                self._run(instance, protocol.decode_run(words, text), block)
                block = None
        except Garbled as error:
            log.error("instance %s: its process got an invalid message, and ends: %s", self._job.name, error)
        finally:
            instance.close()
            model.close()

    def close(self) -> None:
        """End the connection and the reading thread."""
        self._link.close()
        self._reader.join()
        self._link.discard()

    def _open(self, hello: Message) -> tuple[LoadedModel, Instance]:
        """Load the model and open its instance, once the versions are known to agree."""
        kind, _, text = hello
        if kind != frames.HELLO:
            raise Unavailable("the server has ended, or speaks another protocol")
        theirs = json.loads(text)
        if theirs != versions():
            ours = f"the machine of the instance {_listed(versions())}"
            raise Unavailable(
                f"instance '{self._job.name}': the server has flowserve, Python and numpy {_listed(theirs)}, {ours}; "
                "install the same versions on both"
            )
        job = self._job
        files = files_here(job.files, job.digest, self._fetch)
        model = registry.find(job.config.backend).load(job.config, files, job.options)
        try:
            # An instance that has its process for itself may do more than one that shares it.
            instance = (
                model.remote(job.name, job.group).call()
                if isinstance(model, RunsInProcess)
                else model.instance(job.name, job.group)
            )
            if isinstance(instance, CallsModels):
                instance.call_through(_NoCalls(job.config.name))
            instance.open()
        except BaseException:
            model.close()
            raise
        return model, instance

    # ------------------------------------------------------------------ on the reading thread

    def _read(self) -> None:
        try:
            while True:
                message, block = self._link.read(HOST.take, self._on_silence)
                self._silences = 0
                kind, words, text = unpack(message)
                if kind == frames.PING:
                    self._link.send(pack(frames.PONG, ()))
                elif kind in (protocol.RUN, protocol.END, frames.HELLO):
                    self._arrived.put(((kind, words, text), block))
                else:
                    raise Garbled(f"a message of kind {kind}")
                del block
        except (EOFError, OSError) as error:
            log.debug("instance %s: the server is gone: %s", self._job.name, error)
        except Exception as error:
            log.error("instance %s: its process got an invalid message, and ends: %s", self._job.name, error)
        self._arrived.put((_END, None))
        if self._end_process is not None:
            orphan = threading.Timer(ORPHAN_S, self._end_process)
            orphan.daemon = True
            orphan.start()

    def _on_silence(self) -> None:
        self._silences += 1
        if self._silences >= SERVER_SILENCES_MAX:
            raise EOFError(f"nothing was heard for {SERVER_SILENCES_MAX} s")

    # ------------------------------------------------------------------ one batch

    def _run(self, instance: Instance, message: RunMessage, block: Array | None) -> None:
        number = message.number
        try:
            reply, placed = self._execute(instance, message, block)
        except Garbled:
            raise
        except FlowserveError as error:
            self._tell(pack(protocol.FAILED, (number, 0, 0), encode_error(error)))
            return
        except Exception as error:
            # A backend's own fault: its traceback belongs in the log, never in a response.
            log.exception("instance %s failed", self._job.name)
            what = f"model '{self._job.config.name}', instance '{self._job.name}' failed: {error}"
            self._tell(pack(protocol.FAILED, (number, 0, 0), encode_error(ModelFailed(what))))
            return
        finally:
            outgoing, self._arena.block = self._arena.block, frames.Outgoing()
        try:
            self._link.send(reply, outgoing.finish(placed.nbytes), placed.nbytes)
        except FlowserveError as error:  # larger than a frame
            self._tell(pack(protocol.FAILED, (number, 0, 0), encode_error(error)))
        except (OSError, EOFError):
            log.debug("instance %s: the server is gone", self._job.name)

    def _execute(self, instance: Instance, message: RunMessage, block: Array | None) -> tuple[bytes, Placed]:
        results = instance.run(self._work(message, block), perf_counter_ns)
        placed = self._outputs.place(results.outputs)
        words = [message.number, 0, 0, results.gathered_ns, results.computed_ns, *placed.words()]
        has_text = results.errors or results.parameters or results.rescheduled or results.notes
        return pack(protocol.DONE, words, text_about(results) if has_text else None), placed

    def _work(self, message: RunMessage, block: Array | None) -> Work:
        rows, count = message.rows, len(message.rows)
        if not count or message.stage or message.passed:
            raise Garbled("a batch without members, or of a route")
        names = self._names
        try:
            wanted = [tuple([names[j] for j in outputs]) for outputs in message.wanted]
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
            contexts = by_stage[0] if by_stage else None
        config = self._job.config
        held = HOST.take(0) if block is None else block
        inputs = inputs_of_block(message.columns, config.inputs, rows, held, config.name, self._batches)
        may_write = [[True] * count] * len(inputs)  # the block is this batch's own
        return Work(inputs, rows, requests, wanted, may_write, contexts=contexts)

    def _tell(self, message: bytes) -> None:
        try:
            self._link.send(message)
        except (OSError, EOFError):
            log.debug("instance %s: the server is gone", self._job.name)


class _NoCalls:
    """The `BlsClient` of a model on another machine, which has no way to the server but its batches."""

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
        """No metric exists."""

    def is_withdrawn(self, member: int) -> bool:
        """Not known here."""
        return False

    def close(self) -> None:
        """Nothing is held."""

    def _refusal(self, what: str) -> Unsupported:
        return Unsupported(
            f"model '{self._model}' runs on another machine, from where it cannot {what}; remove it from the placement "
            "file"
        )


def _listed(texts: object) -> str:
    return ", ".join(map(str, texts)) if isinstance(texts, list) else str(texts)


def main() -> None:
    """A process of the local engine: an `ActorJob` comes on standard input, the port is told on standard output, and
    the process ends with standard input, as its machine does.
    """
    told, source = os.dup(1), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # what the model prints is no answer
    job = read_pickled(source)
    assert isinstance(job, ActorJob)
    threading.Thread(target=_end_with, args=(source,), name="lifeline", daemon=True).start()
    tune_malloc()
    actor, answer = None, {}
    try:
        actor = Actor(job, "127.0.0.1")
        answer["port"] = actor.port
    except FlowserveError as error:
        answer["error"] = encode_error(error)
    try:
        os.write(told, json.dumps(answer).encode() + b"\n")
    except BrokenPipeError:  # its machine has ended
        return
    if actor is not None:
        actor.serve(lambda: os._exit(1))


def _end_with(source: BinaryIO) -> None:
    source.read(1)
    os._exit(0)


if __name__ == "__main__":
    main()
