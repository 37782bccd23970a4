"""The server's side of the processes that start actors (agents): machines of the local engine, and Ray's agent.

Decides the requests to an agent (on its standard input, pickled: the agent trusts its server) and its answers (one line
of JSON each; an invalid one is ignored), and that an agent ends when its standard input does.

  START number job needs seconds    answered by STARTED number host port process, or FAILED number text; Ray's agent
                                    adds the name of the machine, and of Ray's node
  ADD number job                    that actor is to open an instance; answered by ADDED number, or FAILED
  KILL number                       end that actor at once
  ASK number machine node           to Ray's agent: how did this actor end? Answered by ENDED
  ENDED number text [with_machine]  an actor has ended
  READY 0 version                   Ray's agent has found the cluster; or FAILED 0 text

Decides which machine of the local engine gets an actor (the one with the fewest), and that such a machine counts as
lost when its process ends. `RayCluster` has one agent, which is started again when it ends; the actors of the previous
one continue, and the new one can answer requests about them.

Does not know models. Caller: runtime/.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Final
from uuid import uuid4

from flowserve.elsewhere.cluster.base import ActorEnd, ActorJob, InstanceJob, MachineNeeds, Started
from flowserve.elsewhere.cluster.pipes import pickled
from flowserve.errors import Unavailable

log = logging.getLogger("flowserve.elsewhere.cluster")

START: Final = "start"
ADD: Final = "add"
KILL: Final = "kill"
ASK: Final = "ask"
STARTED: Final = "started"
ADDED: Final = "added"
FAILED: Final = "failed"
ENDED: Final = "ended"
READY: Final = "ready"

_END_S: Final = 5.0  # limit for an agent to answer how an actor ended
_MACHINE_S: Final = 0.3  # limit for detecting that a local machine ended with its actor
_FILES_S: Final = 600.0  # limit for sending a model's files
_CLOSE_S: Final = 10.0
_GONE: Final = (ENDED, None)


class Agent:
    """One agent's process. `on_end` is called on a thread of its own when it has ended."""

    def __init__(self, module: str, arguments: Sequence[str], on_end: Callable[[Agent], None]) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process_id = self._process.pid
        self._lock = threading.Lock()
        self._first: SimpleQueue[tuple[Any, ...]] = SimpleQueue()  # READY, or why not
        self._answers: dict[int, SimpleQueue[tuple[Any, ...]]] = {0: self._first}
        self._ends: dict[int, SimpleQueue[tuple[Any, ...]]] = {}
        self._on_end = on_end
        self.is_gone = threading.Event()
        threading.Thread(target=self._read, name=f"agent {module}", daemon=True).start()

    def tell(self, *request: object) -> None:
        """Send a request. No effect if the agent has ended."""
        assert self._process.stdin is not None
        data = pickled(request)
        with self._lock:
            try:
                self._process.stdin.write(data)
                self._process.stdin.flush()
            except (OSError, ValueError):
                return  # callers that wait for an answer are notified of its end

    def start(self, number: int, job: ActorJob, needs: MachineNeeds, give_up_s: float) -> tuple[Any, ...]:
        """The fields of its answer STARTED. Raises Unavailable."""
        self._ends[number] = SimpleQueue()
        try:
            return self.ask(
                START, number, job, needs, give_up_s, within_s=give_up_s + _END_S
            )  # the agent gives up first
        except Unavailable:
            self._ends.pop(number, None)
            raise

    def ask(self, kind: str, number: int, *arguments: object, within_s: float) -> tuple[Any, ...]:
        """The fields of the answer to a request about an actor. Raises Unavailable, also if none arrives in time."""
        answers = self._answers[number] = SimpleQueue()
        try:
            if self.is_gone.is_set():
                raise Unavailable("the process that starts instances has ended")
            self.tell(kind, number, *arguments)
            try:
                answer, *words = answers.get(timeout=within_s)
            except Empty:
                what = "started" if kind == START else "sent its model"
                raise Unavailable(f"it was not {what} within {within_s:g} s") from None
            if answer == FAILED:
                raise Unavailable(str(words[0]))
            if answer not in (STARTED, ADDED):
                raise Unavailable("the process that starts instances has ended")
            return tuple(words)
        finally:
            del self._answers[number]

    def await_ready(self, give_up_s: float) -> None:
        """Wait for READY. Raises Unavailable."""
        try:
            kind, *words = self._first.get(timeout=give_up_s)
        except Empty:
            raise Unavailable(f"the cluster did not answer within {give_up_s:g} s") from None
        if kind != READY:
            raise Unavailable(str(words[0]) if kind == FAILED else "the process that uses the cluster has ended")

    def end_of(self, number: int, timeout_s: float = _END_S) -> tuple[Any, ...] | None:
        """The fields of ENDED for an actor. None if the agent does not answer, () if it does not know or has ended
        itself.
        """
        ends = self._ends.setdefault(number, SimpleQueue())
        if self.is_gone.is_set():
            return ()
        try:
            _, *words = ends.get(timeout=timeout_s)
        except Empty:
            return None
        if words == [None]:
            return ()
        self._ends.pop(number, None)
        return tuple(words)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """End it, and wait for that."""
        self._close_input()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with self._lock, suppress(OSError):  # if it has ended
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    kind, number, *words = json.loads(line)
                except ValueError:
                    log.warning("an agent wrote what is no answer: %s", line[:200])
                    continue
                waiting = self._ends if kind == ENDED else self._answers
                if number in waiting:
                    waiting[number].put((kind, *words))
        self._process.wait()
        self.is_gone.set()
        self._close_input()
        for one in (*self._answers.values(), *self._ends.values()):
            one.put(_GONE)
        self._on_end(self)


class LocalCluster:
    """`count` machines that are processes of this one, for a first try and for tests. What an instance needs of its
    machine is ignored.
    """

    def __init__(self, count_: int) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._closing = False
        self._on: dict[str, set[int]] = {}
        self._agents: dict[str, Agent] = {}
        for number in range(1, count_ + 1):
            name = f"local-{number}"
            self._agents[name] = Agent("flowserve.elsewhere.cluster.machine", (), self._lost)
            self._on[name] = set()

    def start(self, job: ActorJob, needs: MachineNeeds, give_up_s: float) -> Started:
        """As `ClusterEngine.start`."""
        with self._lock:
            number = next(self._numbers)
            if not self._on:
                raise Unavailable("no machine of the cluster is left")
            name = min(self._on, key=lambda one: (len(self._on[one]), one))
            self._on[name].add(number)
        try:
            host, port, process = self._agents[name].start(number, job, needs, give_up_s)
        except Unavailable as error:
            self._forget(name, number)
            raise Unavailable(f"machine '{name}': {error}") from None
        return Started(number, host, port, name, process)

    def add(self, started: Started, job: InstanceJob) -> None:
        """As `ClusterEngine.add`."""
        self._agents[started.machine].ask(ADD, started.number, job, within_s=_FILES_S)

    def end_of(self, started: Started) -> ActorEnd:
        """As `ClusterEngine.end_of`."""
        agent = self._agents[started.machine]
        words = agent.end_of(started.number)
        if words and words[0]:
            # The actors of a machine's process end with it, and their ends may be detected first.
            agent.is_gone.wait(_MACHINE_S if "exit status 0" in words[0] else 0)
        self._forget(started.machine, started.number)
        if agent.is_gone.is_set():
            return ActorEnd(f"machine '{started.machine}' is lost", with_machine=True)
        return ActorEnd(f"{words[0]} on machine '{started.machine}'" if words else "its connection ended")

    def kill(self, started: Started) -> None:
        """As `ClusterEngine.kill`."""
        self._agents[started.machine].tell(KILL, started.number)

    @property
    def is_reachable(self) -> bool:
        """As `ClusterEngine.is_reachable`."""
        return bool(self._on)

    def machines(self) -> Sequence[str]:
        """As `ClusterEngine.machines`."""
        with self._lock:
            return [*self._on]

    def processes(self) -> dict[str, int]:
        """The process of each running machine."""
        return {name: self._agents[name].process_id for name in self.machines()}

    def close(self) -> None:
        """As `ClusterEngine.close`."""
        self._closing = True
        for agent in self._agents.values():
            agent.close()

    def _forget(self, name: str, number: int) -> None:
        with self._lock:
            if name in self._on:
                self._on[name].discard(number)

    def _lost(self, agent: Agent) -> None:
        name = next(name for name, one in self._agents.items() if one is agent)
        with self._lock:
            self._on.pop(name, None)
        if not self._closing:
            log.error("machine '%s' is lost: its process %d has ended", name, agent.process_id)


class RayCluster:
    """The machines of a cluster of Ray at `address`. Its agent is started again when it ends."""

    def __init__(self, address: str, *, is_insecure: bool = False, give_up_s: float = 60.0) -> None:
        """Find the cluster. Blocks. Raises Unavailable if it does not answer within `give_up_s`."""
        # Other servers may use the same cluster, and earlier ones may have left actors that are about to end.
        self._arguments = (address, f"server-{uuid4().hex[:12]}", *(["insecure"] if is_insecure else []))
        self._give_up_s = give_up_s
        self._numbers = count(1)
        self._nodes: dict[int, str] = {}
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._agent: Agent | None = None
        self._starting: Agent | None = None  # until it is ready
        self._current()

    def start(self, job: ActorJob, needs: MachineNeeds, give_up_s: float) -> Started:
        """As `ClusterEngine.start`."""
        number = next(self._numbers)
        host, port, process, machine, node = self._current().start(number, job, needs, give_up_s)
        self._nodes[number] = node
        self._names[node] = machine
        return Started(number, host, port, machine, process)

    def add(self, started: Started, job: InstanceJob) -> None:
        """As `ClusterEngine.add`."""
        self._current().ask(ADD, started.number, job, within_s=_FILES_S)

    def end_of(self, started: Started) -> ActorEnd:
        """As `ClusterEngine.end_of`."""
        node = self._nodes.get(started.number, "")
        try:
            agent = self._current()
            agent.tell(ASK, started.number, started.machine, node)
            words = agent.end_of(started.number)
        except Unavailable as error:
            return ActorEnd(f"its connection ended, and Ray cannot be asked why: {error}")
        if not words:
            return ActorEnd(f"its process on machine '{started.machine}' cannot be reached")
        if words[1]:
            self._names.pop(node, None)
        return ActorEnd(words[0], with_machine=bool(words[1]))

    def kill(self, started: Started) -> None:
        """As `ClusterEngine.kill`."""
        self._nodes.pop(started.number, None)
        agent = self._agent
        if agent is not None:
            agent.tell(KILL, started.number)

    @property
    def is_reachable(self) -> bool:
        """As `ClusterEngine.is_reachable`: whether the process that uses Ray is running."""
        agent = self._agent
        return agent is not None and not agent.is_gone.is_set()

    def machines(self) -> Sequence[str]:
        """As `ClusterEngine.machines`: those that were used."""
        return [*self._names.values()]

    @property
    def process(self) -> int:
        """The process of the agent."""
        return self._current().process_id

    def close(self) -> None:
        """As `ClusterEngine.close`."""
        self._closing = True
        starting = self._starting
        if starting is not None:
            starting.kill()  # otherwise this waits for a cluster that may not answer
        with self._lock:
            if self._agent is not None:
                self._agent.close()

    def _current(self) -> Agent:
        """The agent; started if there is none. Raises Unavailable."""
        with self._lock:
            if self._agent is None or self._agent.is_gone.is_set():
                if self._closing:
                    raise Unavailable("the server ends")
                agent = self._starting = Agent("flowserve.elsewhere.cluster.ray_agent", self._arguments, self._ended)
                try:
                    agent.await_ready(self._give_up_s)
                except Unavailable:
                    agent.kill()
                    raise
                finally:
                    self._starting = None
                self._agent = agent
            return self._agent

    def _ended(self, agent: Agent) -> None:
        if agent is self._agent and not self._closing:
            log.error("the process that uses Ray (%d) has ended; it is started again", agent.process_id)
            with suppress(Unavailable):  # the next request tries again
                self._current()
