"""A worker process from its start to its end.

Decides the order of its steps (`serve`): make the instance, open it, run batches until the server sends END or has
ended, close it. Which process runs an instance that shares one is decided in sharing.py. How batches are run is decided
in driver.py. It does not know the event loop, queues or graphs, nor which backend it runs.

Decides how a model's code is executed once in a process of its own, for example to complete its configuration
(`run_task`). The result is sent as JSON, in as many messages as needed, and is complete when the process has ended. It
does not know the function, nor how the result is used.

Started by forkserver.py.
"""

from __future__ import annotations

import json
import logging
import pickle
import socket
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

from flowserve.backends.base import BlsClient, CallsModels, Instance, KnowsReadiness, Remote
from flowserve.backends.worker.bls_client import WorkerBlsClient
from flowserve.backends.worker.messages import BROKEN, MESSAGE_BYTES_MAX, READY, Garbled, Job, encode_error, pack
from flowserve.backends.worker.readiness import answer_on_thread
from flowserve.backends.worker.sharing import Host, claim_host, hand_over
from flowserve.backends.worker.shm import SharedMemoryPort
from flowserve.backends.worker.streaming import drive
from flowserve.errors import FlowserveError, ModelFailed
from flowserve.memory.heap import tune_malloc
from flowserve.memory.segment import number_segments_from

log = logging.getLogger("flowserve.child")


def serve(socket_fd: int, arguments: bytes) -> None:
    """Run one instance until the server sends END or has ended. `arguments` are a pickled `Job`, which only the server
    writes: pickle is used in this direction only.
    """
    job: Job = pickle.loads(arguments)
    tune_malloc()  # as in the server, for the same large arrays
    shared = job.remote.shared
    if not shared:
        number_segments_from((job.number << 32) + 1)
        _serve(socket_fd, job)
        return
    while (listener := claim_host(shared)) is None:
        if hand_over(socket_fd, arguments, shared):
            return
    number_segments_from((job.number << 32) + 1)
    with listener:
        _serve(socket_fd, job, Host(listener, shared, _serve_seat))


def _serve_seat(socket_fd: int, arguments: bytes) -> None:
    """Run one of several instances of this process, on a thread of its own."""
    job: Job = pickle.loads(arguments)
    number_segments_from((job.number << 32) + 1, of_thread=True)
    _serve(socket_fd, job)


def _serve(socket_fd: int, job: Job, host: Host | None = None) -> None:
    """`host`: serves the other instances of this process, once the first instance is open."""
    with socket.socket(fileno=socket_fd) as sock:
        sock.setblocking(True)
        port = SharedMemoryPort(sock, job, perf_counter_ns)
        connect = partial(WorkerBlsClient, job.model, sock, perf_counter_ns, port.end_route)
        try:
            instance = open_instance(job.remote.call, job, connect)
        except FlowserveError as error:
            port.send(pack(BROKEN, (), encode_error(error)))
            return
        if isinstance(instance, KnowsReadiness) and (objection := instance.readiness()) is not None:
            answer_on_thread(sock, objection)
        if host is not None:
            host.start()
        try:
            port.send(pack(READY, ()))
            drive(port, job, instance, perf_counter_ns)
        except ConnectionError:
            log.debug("instance %s: the server is gone", job.instance)
        except Garbled as error:
            log.error("instance %s: its process got an invalid message, and ends: %s", job.instance, error)
            raise SystemExit(1) from None
        instance.close()


def open_instance(make: Callable[[], Instance], job: Job, connect: Callable[[], BlsClient]) -> Instance:
    """Make an instance and open it; `connect` makes the connection of one that calls models. Raises FlowserveError, and
    logs any other exception of the model.
    """
    try:
        instance = make()
        if isinstance(instance, CallsModels):
            instance.call_through(connect())
        instance.open()
        return instance
    except FlowserveError:
        raise
    except Exception as error:
        log.exception("instance %s: opening failed", job.instance)
        what = f"model '{job.model}', instance '{job.instance}': {type(error).__name__}: {error}"
        raise ModelFailed(what) from None


def run_task(socket_fd: int, arguments: bytes) -> None:
    """Call the function of the pickled `Remote` in `arguments`, and send its result or error."""
    remote: Remote = pickle.loads(arguments)
    try:
        text = json.dumps({"answer": remote.call()})
    except FlowserveError as error:
        place = [error.place.file, error.place.line] if error.place else []
        text = json.dumps({"error": encode_error(error), "place": place})
    except Exception as error:
        log.exception("%s failed", remote.entry)
        text = json.dumps({"error": encode_error(ModelFailed(f"{type(error).__name__}: {error}"))})
    message = text.encode()
    with socket.socket(fileno=socket_fd) as sock:
        sock.setblocking(True)
        for start in range(0, len(message), MESSAGE_BYTES_MAX):
            sock.send(message[start : start + MESSAGE_BYTES_MAX])
