"""The agent of a Ray cluster: a child process of the server, and the only module that imports ray.

Ray starts threads, handles signals and may abort the process that it is used in, so it has a process of its own. Actors
are started, placed and watched through Ray; batches go over each actor's own socket. Decides how the needs of an
instance are passed to Ray, how a model's files are sent to a machine that does not have them (once, through Ray's
object store), the error when the cluster cannot place an instance, and how an actor ended: as Ray reports it, if Ray
knows; a machine is lost when the process of Ray there does not answer, which Ray itself notices later.

Actors are detached: they continue when this process ends, and end when their server's connection does, or if no server
connects. Their names begin with the server's name, by which the next agent finds them.

Started by `agents.RayCluster`; requests and answers are described there.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO, Final

import ray
import ray.exceptions
import ray.util

from flowserve.elsewhere.cluster.actor import Actor
from flowserve.elsewhere.cluster.agents import ADD, ADDED, ASK, ENDED, FAILED, KILL, READY, START, STARTED
from flowserve.elsewhere.cluster.base import ActorJob, InstanceJob, MachineNeeds
from flowserve.elsewhere.cluster.files import archive_of, files_here
from flowserve.elsewhere.cluster.pipes import Answers, read_pickled, standard_pipes
from flowserve.errors import FlowserveError, Unavailable
from flowserve.memory.heap import tune_malloc

log = logging.getLogger("flowserve.elsewhere.cluster")

NAMESPACE: Final = "flowserve"
_PROBE_S: Final = 2.0  # limit for the process of Ray on a machine to answer
_KNOWN_S: Final = 2.0  # limit for Ray to detect the end of an actor
_UNUSED_S_MAX: Final = 600.0  # how long an actor waits for the call that makes it serve; files may take minutes
_CALLS_AT_ONCE: Final = 3  # of one actor: `serve`, which runs its batches, and short calls


class RayActor:
    """An actor in a process of Ray's."""

    def __init__(self, job: ActorJob) -> None:
        tune_malloc()
        # Its agent may end before it has reported this actor to its server.
        self._unused = threading.Timer(_UNUSED_S_MAX, os._exit, (1,))
        self._unused.daemon = True
        self._unused.start()
        self._actor = Actor(job, ray.util.get_node_ip_address())

    def where(self) -> tuple[str, int, int, str]:
        """Its address, its process, and its node."""
        context = ray.get_runtime_context()
        return ray.util.get_node_ip_address(), self._actor.port, os.getpid(), context.get_node_id()

    def lacks_files(self, job: InstanceJob) -> bool:
        """Whether the model's files are not on this machine."""
        try:
            files_here(job.files, job.digest, None)
        except Unavailable:
            return True
        return False

    def take_files(self, job: InstanceJob, pieces: Sequence[Any]) -> None:
        """Unpack the model's files from these references."""
        files_here(job.files, job.digest, lambda: (ray.get(piece) for piece in pieces))

    def add(self, job: InstanceJob) -> None:
        """Open an instance; the model's files are there."""
        self._actor.add(job)

    def serve(self) -> None:
        """Run batches until the connection ends, and with it this process."""
        self._unused.cancel()
        self._actor.serve(lambda: os._exit(1))
        os._exit(0)

    def ping(self) -> None:
        """Returns if the actor is running."""


class _Agent:
    def __init__(self, answers: Answers, server: str) -> None:
        self._tell = answers.tell
        self._server = server
        self._handles: dict[int, Any] = {}
        self._kept: dict[int, Any] = {}  # the references of calls that do not return
        self._pieces: dict[str, list[Any]] = {}  # the pieces of archives, by digest
        self._packing = threading.Lock()

    def run(self, source: BinaryIO) -> None:
        while (request := read_pickled(source)) is not None:
            kind, number, *arguments = request
            work = {START: self._start, ADD: self._add, KILL: self._kill, ASK: self._tell_end}[kind]
            threading.Thread(target=self._guarded, args=(work, number, arguments), daemon=True).start()

    def _guarded(self, work: Any, number: int, arguments: Sequence[Any]) -> None:
        try:
            work(number, *arguments)
        except Exception as error:
            log.exception("a request to Ray failed")
            self._tell(FAILED, number, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    # ------------------------------------------------------------------ starting

    def _start(self, number: int, job: ActorJob, needs: MachineNeeds, give_up_s: float) -> None:
        resources = dict(needs.resources)
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 1),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "name": self._name(number),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": 0,
            "max_concurrency": _CALLS_AT_ONCE,
        }
        if "memory" in resources:
            options["memory"] = resources.pop("memory")
        if needs.labels:
            options["label_selector"] = dict(needs.labels)
        handle = ray.remote(RayActor).options(**options).remote(job)
        self._handles[number] = handle
        try:
            host, port, process, node = ray.get(handle.where.remote(), timeout=give_up_s)
        except ray.exceptions.GetTimeoutError:
            ray.kill(handle)
            self._tell(FAILED, number, _shortage(needs, give_up_s))
            return
        except ray.exceptions.RayError as error:
            ray.kill(handle)
            self._tell(FAILED, number, _reason(error))
            return
        self._kept[number] = handle.serve.remote()
        self._tell(STARTED, number, host, port, process, _label_of(node), node)

    def _add(self, number: int, job: InstanceJob) -> None:
        handle = self._handle(number)
        if handle is None:
            self._tell(FAILED, number, "its process has ended")
            return
        try:
            if ray.get(handle.lacks_files.remote(job)):
                ray.get(handle.take_files.remote(job, self._pieces_of(job)))
            ray.get(handle.add.remote(job))
        except ray.exceptions.RayError as error:
            self._tell(FAILED, number, _reason(error))
            return
        self._tell(ADDED, number)

    def _pieces_of(self, job: InstanceJob) -> list[Any]:
        with self._packing:
            if job.digest not in self._pieces:
                self._pieces[job.digest] = [ray.put(piece) for piece in archive_of(job.files)]
            return self._pieces[job.digest]

    # ------------------------------------------------------------------ ends

    def _kill(self, number: int) -> None:
        handle = self._handle(number)
        if handle is not None:
            ray.kill(handle)
        self._forget(number)

    def _tell_end(self, number: int, machine: str, node: str) -> None:
        text, with_machine = self._end_of(number, machine, node)
        self._tell(ENDED, number, text, with_machine)

    def _end_of(self, number: int, machine: str, node: str) -> tuple[str, bool]:
        lost = f"machine '{machine}' is lost"
        if not _answers(node):
            return lost, True
        handle = self._handle(number)
        if handle is None:
            return f"its process on machine '{machine}' has ended", False
        try:
            ray.get(handle.ping.remote(), timeout=_KNOWN_S)
        except ray.exceptions.ActorDiedError as error:
            return f"its process on machine '{machine}' has ended: {_reason(error)}", False
        except (ray.exceptions.RayError, TimeoutError):
            if not _answers(node):
                return lost, True
            return f"its process on machine '{machine}' cannot be reached", False
        return f"the connection to its process on machine '{machine}' ended", False

    def _handle(self, number: int) -> Any:
        handle = self._handles.get(number)
        if handle is None:  # started by a previous agent
            try:
                handle = ray.get_actor(self._name(number), NAMESPACE)
            except ValueError:
                return None
            self._handles[number] = handle
        return handle

    def _forget(self, number: int) -> None:
        self._handles.pop(number, None)
        self._kept.pop(number, None)

    def _name(self, number: int) -> str:
        return f"{self._server}-{number}"


def _answers(node: str) -> bool:
    """Whether the process of Ray on a node answers. Raises nothing: an unknown node is one that is gone."""
    for known in ray.nodes():
        if known["NodeID"] == node:
            if not known["Alive"]:
                return False
            try:
                address = known["NodeManagerAddress"], known["NodeManagerPort"]
                socket.create_connection(address, timeout=_PROBE_S).close()
            except OSError:
                return False
            return True
    return False


def _label_of(node: str) -> str:
    """The name of a node's machine: its host name, and a part of the node's id, because two nodes may have the same
    host name.
    """
    name = next((one["NodeName"] for one in ray.nodes() if one["NodeID"] == node), "")
    return f"{name}/{node[:8]}"


def _shortage(needs: MachineNeeds, give_up_s: float) -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    wanted = {"CPU": 1.0, **needs.resources}
    asked = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
    found = ", ".join(f"{name} {free.get(name, 0):g} free of {total.get(name, 0):g}" for name in wanted)
    labels = ", ".join(f"{name}={value}" for name, value in needs.labels.items())
    where = f" on a machine with {labels}" if labels else ""
    return f"asks for {asked}{where}, and got no machine within {give_up_s:g} s; the cluster has {found}"


def _reason(error: Exception) -> str:
    """The text of an error of Ray's, without addresses and advice."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, FlowserveError):
        return str(cause)
    lines = [line for line in str(error).splitlines() if line and not line.startswith(("\t", " "))]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__


def main() -> None:
    """Serve the requests of standard input until it ends. Arguments: the cluster's address, the server's name."""
    address, server, *switches = sys.argv[1:]
    source, answers = standard_pipes()
    agent = _Agent(answers, server)
    if "insecure" not in switches and os.environ.get("RAY_AUTH_MODE") != "token":
        hint = "set it for the cluster and for this server, or give --cluster-insecure in a private network"
        danger = "every program that reaches Ray's ports can run code there"
        answers.tell(FAILED, 0, f"RAY_AUTH_MODE is not 'token': {danger}; {hint}")
        return
    try:
        ray.init(address=address, namespace=NAMESPACE, configure_logging=False, log_to_driver=False)
    except Exception as error:  # ray raises many kinds
        answers.tell(FAILED, 0, f"no cluster of Ray answers at {address}: {str(error).splitlines()[0]}")
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent by the terminal; the server ends this process
    answers.tell(READY, 0, ray.__version__)
    agent.run(source)
    ray.shutdown()


if __name__ == "__main__":
    # Ray finds the class by the name of its module, and in this process the module's name is `__main__`.
    from flowserve.elsewhere.cluster import ray_agent

    ray_agent.main()
