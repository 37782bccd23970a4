"""The parent process of `flowserve run --workers N`: it has the ports, and serves nothing itself.

Decides which replica gets a connection (the ready one with the fewest), how replicas are started and how their ends are
detected, that an operation on models is put in force by all replicas or by none (`operations`), how their figures are
added up (`observe/combined.py`), and on which replica a sequence is. A connection is accepted here and handed over with
its descriptor, because the kernel spreads few connections unevenly over sockets that share a port
(docs/decisions/0041). When a replica is started or restarted is decided in `supervision`, what a frame is in `link`.
Does not know HTTP, models or requests. Caller: `cli`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from flowserve.backends.cores import SHARED_BY
from flowserve.errors import FlowserveError, Invalid
from flowserve.observe.combined import Former, combined
from flowserve.replicas.link import NOTHING, Handler, LinkClosed, ProcessLink, Result
from flowserve.replicas.operations import GroupOperations
from flowserve.replicas.replica import HTTP, METRICS_PORT, ReplicaPlace
from flowserve.replicas.supervision import Ask, Check, Decision, EndAll, Kill, Start, State, Supervision
from flowserve.runtime.clock import SECOND_NS, running_clock
from flowserve.temporary import WORKERS, claim, give_up

_log = logging.getLogger("flowserve.replicas")

_ACCEPTS_MAX: Final = 64  # in a row, before the event loop continues
_ACCEPT_PAUSE_S: Final = 0.05
# How long after the exit timeout a replica may live: it ends itself before, with a reason.
_KILL_AFTER_S: Final = 2.0
_CODE: Final = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('{sep}'); "
    "from flowserve.cli.main import main; sys.exit(main(sys.argv[2:], replica=sys.argv[1]))"
)
_SOCKET_PATH_BYTES_MAX: Final = 107  # unix(7): sun_path, without its zero
_SOCKET_NAME_BYTES: Final = len("/http-255")
_FEW_SOCKETS: Final = "no file descriptors left: connections wait"


@dataclass(frozen=True, slots=True)
class Ports:
    """The listening sockets, which the parent accepts from: `http`, and `metrics` for the separate port, or none.
    `grpc`: the address and the port on which every replica listens; None: gRPC is not served.
    """

    http: Sequence[socket.socket]
    metrics: Sequence[socket.socket] = ()
    grpc: tuple[str, int] | None = None


@dataclass(slots=True, eq=False)
class _Process:
    """A running replica. `passed`: connections that it was given, the last of them in `turn`; `taken`: those that it
    says it took; `open_here`: how many of them it has open.
    """

    number: int
    process: subprocess.Popen[bytes]
    link: ProcessLink
    hand_over: socket.socket
    passed: int = 0
    turn: int = 0
    taken: int = 0
    open_here: int = 0
    is_serving: bool = False  # it takes connections
    is_stopping: bool = False  # it refuses new requests
    reports: dict[str, Any] = field(default_factory=dict)  # its last ones, by kind

    @property
    def connections(self) -> int:
        return self.open_here + self.passed - self.taken


class Parent:
    """`words`: the command line of a replica. `on_ready` is called when the first replica serves. A replica whose event
    loop does not answer for `silence_s` is killed; 0: never.
    """

    def __init__(
        self,
        count: int,
        words: Sequence[str],
        ports: Ports,
        exit_timeout_s: float,
        on_ready: Callable[[], None],
        *,
        silence_s: float = 0,
    ) -> None:
        self._count = count
        self._words = [*words]
        self._ports = ports
        self._exit_timeout_s = exit_timeout_s
        self._on_ready = on_ready
        self._clock = running_clock()
        self._silence_s = silence_s
        self._supervision = Supervision(count, round(silence_s * SECOND_NS))
        self._processes: dict[int, _Process] = {}
        self._has_news = trio.Event()  # the next restart may be due at another time
        self._can_pass = trio.Event()  # set while a replica takes connections
        self._status: int | None = None
        self._ended = trio.Event()
        self._sequences: dict[int | str, int] = {}  # the replica on which each is
        self._former: dict[str, Former] = {}  # the figures of replicas that ended, by kind
        self._operations = GroupOperations(self._serving)
        self._is_stopping = False
        self._turns = 0

    async def run(self, folder: Path, stop: trio.Event) -> int:
        """Serve until `stop` and the end of every replica. `folder`: for sockets between processes, of this user only.
        Returns the exit status.
        """
        self._folder = folder
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for kind, listeners in ((HTTP, self._ports.http), (METRICS_PORT, self._ports.metrics)):
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, kind)
            nursery.start_soon(self._restart)
            nursery.start_soon(self._stop_when, stop)
            self._carry_out(self._supervision.begin(self._clock()))
            await self._ended.wait()
            nursery.cancel_scope.cancel()
        return self._status or 0

    # ------------------------------------------------------------------ connections

    async def _accept(self, listener: socket.socket, kind: str) -> None:
        while True:
            await self._can_pass.wait()  # until then connections wait in the kernel
            await trio.lowlevel.wait_readable(listener)
            try:
                for _ in range(_ACCEPTS_MAX):
                    if not self._can_pass.is_set():
                        break
                    sock, _address = listener.accept()
                    with sock:
                        await self._pass(sock, kind)
            except BlockingIOError:
                pass
            except OSError as error:
                _log.warning("%s", error.strerror or _FEW_SOCKETS)
                await trio.sleep(_ACCEPT_PAUSE_S)

    async def _pass(self, sock: socket.socket, kind: str) -> None:
        """Hand a connection over to the replica with the fewest; among equals, to the one whose last connection is
        oldest. A replica with a full socket, because its event loop is blocked, gets none.
        """
        while True:
            for one in sorted(self._serving(), key=lambda one: (one.connections, one.turn)):
                try:
                    socket.send_fds(one.hand_over, [kind.encode()], [sock.fileno()])
                except OSError:  # it ended, or its socket is full
                    continue
                one.passed += 1
                self._turns += 1
                one.turn = self._turns
                return
            if self._is_stopping and not self._serving():
                return
            await trio.sleep(_ACCEPT_PAUSE_S)

    def _serving(self) -> list[_Process]:
        """The ready replicas that are not stopping; if there are none, those that are stopping; before the first is
        ready, those that only answer health checks.
        """
        serving = [one for one in self._processes.values() if one.is_serving]
        ready = [one for one in serving if self._supervision.state(one.number) is State.READY]
        return [one for one in ready if not one.is_stopping] or ready or serving

    def _update_can_pass(self) -> None:
        if self._serving():
            self._can_pass.set()
        elif self._can_pass.is_set():
            self._can_pass = trio.Event()

    # ------------------------------------------------------------------ processes

    async def _restart(self) -> None:
        while True:
            self._has_news = trio.Event()
            next_ns = self._supervision.next_ns()
            left_s = float("inf") if next_ns is None else max(next_ns - self._clock(), 0) / 1e9
            with trio.move_on_after(left_s):
                await self._has_news.wait()
            self._carry_out(self._supervision.due(self._clock()))

    async def _stop_when(self, stop: trio.Event) -> None:
        await stop.wait()
        self._is_stopping = True
        self._carry_out(self._supervision.stop(self._clock()))
        await trio.sleep(self._exit_timeout_s + _KILL_AFTER_S)
        for one in self._processes.values():
            _log.error("worker %d did not end within the exit timeout: it is killed", one.number + 1)
            one.process.kill()

    def end_all_at_once(self) -> None:
        """End all replicas at once, as a second stop signal does."""
        for one in self._processes.values():
            one.process.send_signal(signal.SIGINT)

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Start):
                self._nursery.start_soon(self._live, decision.replica)
            elif isinstance(decision, Ask):
                if decision.replica in self._processes:
                    self._processes[decision.replica].process.send_signal(signal.SIGTERM)
            elif isinstance(decision, Check):
                self._nursery.start_soon(self._check, decision.replica)
            elif isinstance(decision, Kill):
                _log.error("worker %d has not answered for %g s: it is killed", decision.replica + 1, self._silence_s)
                self._processes[decision.replica].process.kill()
            elif isinstance(decision, EndAll):
                self._status = decision.status
                self._ended.set()
        self._has_news.set()

    async def _check(self, number: int) -> None:
        one = self._processes.get(number)
        if one is None:  # it ended meanwhile
            return
        with suppress(LinkClosed):
            await one.link.call("check")
            self._supervision.answered(number)

    async def _live(self, number: int) -> None:
        """Run one replica from its start to its end."""
        try:
            one = self._start(number)
        except OSError as error:
            _log.error("worker %d cannot be started: %s", number + 1, error.strerror)
            self._carry_out(self._supervision.ended(number, 1, self._clock()))
            return
        if self._is_stopping:  # since the process was started
            one.process.send_signal(signal.SIGTERM)
        async with trio.open_nursery() as nursery:
            await nursery.start(one.link.run)
            # A thread of its own: all of trio's would wait where there are many workers.
            own = trio.CapacityLimiter(1)
            status = await trio.to_thread.run_sync(one.process.wait, abandon_on_cancel=True, limiter=own)
            nursery.cancel_scope.cancel()
        was_ready = self._supervision.state(number) is State.READY
        one.hand_over.close()
        del self._processes[number]
        for kind, report in one.reports.items():
            self._former.setdefault(kind, Former()).add(kind, report)
        self._sequences = {key: where for key, where in self._sequences.items() if where != number}
        for other in self._processes.values():
            other.link.tell("ended", number)
        decisions = self._supervision.ended(number, status, self._clock())
        if not self._is_stopping:
            after = "; it is started again" if self._supervision.state(number) is State.WAITING else ""
            _log.error("worker %d ended %s%s", number + 1, _ending(status), after)
        self._carry_out(decisions)
        self._update_can_pass()
        if was_ready:
            self._choose_leader()

    def _start(self, number: int) -> _Process:
        ours, theirs = socket.socketpair()
        hand_over, takes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hand_over.setblocking(False)
        shown = [*self._ports.http, *self._ports.metrics]
        place = ReplicaPlace(
            number,
            self._count,
            str(self._folder),
            theirs.fileno(),
            takes.fileno(),
            [one.fileno() for one in self._ports.http],
            [one.fileno() for one in self._ports.metrics],
            self._ports.grpc,
        )
        code = _CODE.format(sep=os.pathsep)
        command = [sys.executable, "-c", code, os.pathsep.join(sys.path), place.as_text(), *self._words]
        # The words include what variables say.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLOWSERVE_")}
        environment[SHARED_BY] = str(self._count)
        with theirs, takes:
            try:
                process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno(), takes.fileno(), *(one.fileno() for one in shown)],
                    env=environment,
                    start_new_session=True,  # Ctrl-C in a terminal reaches the parent only
                )
            except OSError:
                ours.close()
                hand_over.close()
                raise
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        one = _Process(number, process, ProcessLink(stream, self._handlers(number)), hand_over)
        self._processes[number] = one
        return one

    # ------------------------------------------------------------------ calls of replicas

    def _handlers(self, number: int) -> Mapping[str, Handler]:
        named: dict[str, Callable[[int, Any, bytes], Any]] = {
            "serving": self._on_serving,
            "stopping": self._on_stopping,
            "leaving": self._on_leaving,
            "ready": self._on_ready_replica,
            "connections": self._on_connections,
            "report": self._on_report,
            "claim": self._on_claim,
            "release": self._on_release,
            "change": self._on_change,
            "operate": self._on_operate,
        }
        return {name: partial(handler, number) for name, handler in named.items()}

    def _on_serving(self, number: int, _: Any, __: bytes) -> Result:
        self._processes[number].is_serving = True
        self._update_can_pass()
        return NOTHING

    def _on_stopping(self, number: int, _: Any, __: bytes) -> Result:
        """The replica was asked to stop, perhaps only this one: new connections go to the others."""
        self._processes[number].is_stopping = True
        return NOTHING

    def _on_leaving(self, number: int, _: Any, __: bytes) -> Result:
        """The replica takes no more connections, except those that were handed over before this response."""
        self._processes[number].is_serving = False
        self._update_can_pass()
        return NOTHING

    async def _on_ready_replica(self, number: int, done: int, _: bytes) -> Result:
        """The replica has loaded its models and carried out the first `done` remembered operations. Returns the
        operations that it has missed; if there are none, it serves from now on.
        """
        async with self._operations.alone():
            missing, data = self._operations.after(done)
            if missing:
                return missing, data
            is_first = all(self._supervision.state(n) is not State.READY for n in range(self._count))
            self._carry_out(self._supervision.ready(number, self._clock()))
        self._update_can_pass()
        self._choose_leader()
        if is_first and self._on_ready is not None:
            ready, self._on_ready = self._on_ready, lambda: None
            ready()
        _log.info("worker %d of %d is ready", number + 1, self._count)
        return NOTHING

    def _on_connections(self, number: int, told: Sequence[int], _: bytes) -> Result:
        one = self._processes[number]
        one.open_here, one.taken = told
        return NOTHING

    async def _on_report(self, number: int, kind: str, _: bytes) -> Result:
        """The figures of all replicas, added up, with the last figures of replicas that ended or are about to."""
        told: dict[int, Any] = {}

        async def ask(one: _Process) -> None:
            with suppress(LinkClosed, FlowserveError):
                value, data = await one.link.call("report", kind)
                told[one.number] = one.reports[kind] = data if value is None else value

        everyone = [*self._processes.values()]
        former = self._former.get(kind, Former()).copy()  # before the others are asked: one may end meanwhile
        async with trio.open_nursery() as nursery:
            for one in self._serving():
                nursery.start_soon(ask, one)

        def add_up() -> Any:
            for one in everyone:
                if one.number not in told and kind in one.reports:
                    former.add(kind, one.reports[kind])
            return combined(kind, [told[number] for number in sorted(told)], former)

        total = await trio.to_thread.run_sync(add_up)
        return (None, total) if isinstance(total, bytes) else (total, b"")

    def _on_claim(self, number: int, asked: Sequence[Any], _: bytes) -> Result:
        """The replica that has a sequence. An unknown sequence begins at the replica that asks, if its request may
        begin one.
        """
        key, begins = asked
        where = self._sequences.get(key)
        if where is None and begins:
            where = self._sequences[key] = number
        return (number if where is None else where), b""

    def _on_release(self, number: int, keys: Sequence[Any], _: bytes) -> Result:
        for key in keys:
            if self._sequences.get(key) == number:
                del self._sequences[key]
        return NOTHING

    async def _on_change(self, number: int, change: Sequence[Any], _: bytes) -> Result:
        return await self._to_its_end(self._operations.change, number, *change)

    async def _on_operate(self, number: int, operation: Any, data: bytes) -> Result:
        return await self._to_its_end(self._operations.operate, operation, data)

    async def _to_its_end(self, carry_out: Callable[..., Awaitable[None]], *arguments: Any) -> Result:
        """Carry out an operation of all replicas even if the one that asked for it ends meanwhile: the others would
        wait for the decision. Raises its error.
        """
        failures: list[Exception] = []
        ended = trio.Event()

        async def run() -> None:
            try:
                await carry_out(*arguments)
            except Exception as error:  # unexpected ones also go to the replica that asked
                failures.append(error)
            finally:
                ended.set()

        self._nursery.start_soon(run)
        await ended.wait()
        if failures:
            raise failures[0]
        return NOTHING

    def _choose_leader(self) -> None:
        """The first ready replica follows the repository, in mode poll."""
        ready = [one for one in self._serving() if self._supervision.state(one.number) is State.READY]
        for one in ready[:1]:
            one.link.tell("lead")


def _ending(status: int) -> str:
    return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for the sockets between the processes of one server, accessible to this user only. Raises Invalid if it
    cannot be created, or its path is too long for a socket's.
    """
    try:
        folder, lock = claim(WORKERS)
    except OSError as error:
        raise Invalid(f"no folder for temporary files can be created: {error.strerror}; set TMPDIR") from None
    try:
        if len(os.fsencode(folder)) + _SOCKET_NAME_BYTES > _SOCKET_PATH_BYTES_MAX:
            raise Invalid(f"the path of the folder for temporary files is too long for sockets: {folder}; set TMPDIR")
        yield Path(folder)
    finally:
        give_up(folder, lock)
