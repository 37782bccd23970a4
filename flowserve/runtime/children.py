"""Child processes, as the server sees them: how one is ordered, how its end is noticed and called.

Decided here: the words for how a process ended. Its end is the end of the process, told by its pidfd, and nothing else:
a process that it has forked may hold its socket open, and a slow answer is not a death. What starts the processes that
fork and reap is forkservers.py, what a child prints child_log.py's; what runs in it, and what its end means for
requests, is decided elsewhere. Linux only.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final, Protocol

import trio

from flowserve.backends.child.forkserver import REPORT
from flowserve.backends.child.protocol import LOST_GPU
from flowserve.errors import Unavailable
from flowserve.runtime.child_log import ChildLog
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.forkservers import ForkServer, Interpreter, own_interpreter

log = logging.getLogger("flowserve.runtime")


def _is_supported() -> bool:
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # Python built for, or running on, a kernel before 5.3; or a container forbids it
        return False
    return True


# Whether this system has what children need.
SUPPORTED: Final = _is_supported()

# How long the forkserver may take to say how a child ended that has ended.
REPORT_S_MAX: Final = 0.5

OnEnd = Callable[["Child"], None]


class Child:
    """One process. `socket` is our end of a non-blocking SOCK_SEQPACKET pair, closed by whoever talks over it.

    `ended` is "" while it lives, then says who ended and how. It is set on the loop, and `on_end` is called there.
    `reports`: where its forkserver says how it ended, closed once nothing comes any more.
    """

    def __init__(
        self, name: str, model: str, pid: int, pidfd: int, sock: socket.socket, log_fd: int, reports: socket.socket
    ) -> None:
        self.name = name
        self.model = model
        self.pid = pid
        self.pidfd = pidfd
        self.socket = sock
        self.log_fd = log_fd
        self.reports = reports
        self.ended = ""
        self.on_end: OnEnd | None = None
        self.why = ""  # why we killed it, where we did
        self._is_over = threading.Event()
        # With the object and not before, so that nobody waits for or kills somebody else under a number used again.
        weakref.finalize(self, os.close, pidfd)

    def kill(self, number: signal.Signals = signal.SIGKILL, why: str = "") -> None:
        """Harmless when it has ended. `why` is said instead of the signal."""
        self.why = self.why or why
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ended in time. Blocks; for other threads than the loop's."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def how_it_ended(self) -> str:
        """`ended`, of a process that has ended or is about to. Blocks; for other threads than the loop's."""
        self._is_over.wait(2 * REPORT_S_MAX)
        return self.ended or f"model '{self.model}', instance '{self.name}': its process ended"

    def over(self, how: str) -> None:
        """It has ended. Called once, on the loop."""
        self.ended = f"model '{self.model}', instance '{self.name}': {self.why or f'its process {how}'}"
        self._is_over.set()
        tell, self.on_end = self.on_end, None
        if tell is not None:
            try:
                tell(self)
            except Exception:  # the others are watched over all the same
                log.exception("what the end of instance %s means could not be dealt with", self.name)


class Spawn(Protocol):
    """`Children.spawn`, in one Python environment or another."""

    def __call__(self, name: str, entry: str, arguments: bytes, *, log_name: str) -> Child: ...


class Children:
    """All child processes of a server. Made on the loop, where `run` must be running; `spawn` is for other threads.

    `is_closed`: nothing starts any more.
    """

    def __init__(self, clock: ClockNs) -> None:
        self._clock = clock
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()  # around who there is to be hung up
        self._forkservers: weakref.WeakSet[ForkServer] = weakref.WeakSet()
        self._own = self.forkserver(own_interpreter())
        self._nursery: trio.Nursery | None = None
        self.is_closed = False
        self._alive: set[Child] = set()
        self._statuses: dict[int, int] = {}
        self._reported = trio.Event()  # replaced with each report

    def forkserver(self, interpreter: Interpreter) -> ForkServer:
        """One more that children can come from, for as long as somebody has it; whoever does not need it any more hangs
        it up.
        """
        made = ForkServer(interpreter, self._listen_soon)
        with self._lock:
            self._forkservers.add(made)
        return made

    def spawn(
        self, name: str, entry: str, arguments: bytes, *, log_name: str, forkserver: ForkServer | None = None
    ) -> Child:
        """Start a process that calls `entry` ("module:function") with its socket's number and `arguments`.

        Blocks for as long as a fork takes, the first time until the forkserver has imported what it needs. Raises
        Unavailable where no process can be had. `log_name` is the model that what it prints is logged under.
        `forkserver`: the one that it comes from, where that is not the server's own Python.
        """
        with (
            ExitStack() as theirs,
            ExitStack() as ours,
        ):  # the child's ends are closed here, ours where it comes to nothing
            sock, its_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.callback(sock.close)
            theirs.callback(its_sock.close)
            log_fd, its_log_fd = os.pipe2(os.O_CLOEXEC)
            ours.callback(os.close, log_fd)
            theirs.callback(os.close, its_log_fd)
            arguments_fd = os.memfd_create("arguments")
            theirs.callback(os.close, arguments_fd)
            os.set_blocking(log_fd, False)
            sock.setblocking(False)
            with open(arguments_fd, "wb", closefd=False) as file:
                file.write(arguments)
            try:
                if self.is_closed:
                    raise Unavailable("the server is ending")
                fds = (its_sock.fileno(), its_log_fd, arguments_fd)
                pid, pidfd, reports = (forkserver or self._own).order(name, entry, fds)
            except Unavailable as error:
                raise Unavailable(f"model '{log_name}', instance '{name}': {error}") from None
            child = Child(name, log_name, pid, pidfd, sock, log_fd, reports)
            self._token.run_sync_soon(self._adopt, child)
            ours.pop_all()
        return child

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch over them. Ends by cancellation, after `close`."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def close(self) -> None:
        """End the forkservers and with them whatever still lives, within a bounded time. Nothing starts afterwards."""
        self.is_closed = True
        for child in self._alive:
            child.why = child.why or "ended with the server"
        with self._lock:
            forkservers = [*self._forkservers]
        for forkserver in forkservers:
            forkserver.hang_up()
        async with trio.open_nursery() as nursery:
            for forkserver in forkservers:
                nursery.start_soon(trio.to_thread.run_sync, forkserver.wait)
        with trio.move_on_after(REPORT_S_MAX):
            while self._alive:
                await self._reported.wait()

    # ------------------------------------------------------------------ starting

    def _listen_soon(self, reports: socket.socket) -> None:
        self._token.run_sync_soon(self._listen, reports)

    def _listen(self, reports: socket.socket) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._read_reports, reports, name="forkserver")

    def _adopt(self, child: Child) -> None:
        if self._nursery is None or self.is_closed:
            child.kill(why="started while the server ends")
            child.over("")
            os.close(child.log_fd)
            return
        self._alive.add(child)
        self._nursery.start_soon(self._watch, child, name=f"watch {child.name}")

    # ------------------------------------------------------------------ ending

    async def _read_reports(self, reports: socket.socket) -> None:
        """How children ended, for as long as their forkserver lives."""
        with reports:
            while True:
                try:
                    report = reports.recv(REPORT.size)
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(reports)
                    continue
                if not report:
                    break
                pid, status = REPORT.unpack(report)
                self._statuses[pid] = status
                self._wake()
        self._wake()  # whoever waits for a report of that forkserver's waits in vain

    def _wake(self) -> None:
        self._reported.set()
        self._reported = trio.Event()

    async def _watch(self, child: Child) -> None:
        with ChildLog(child.log_fd, child.model, self._clock) as printed:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(printed.read, name=f"log of {child.name}")
                await trio.lowlevel.wait_readable(child.pidfd)
                nursery.cancel_scope.cancel()
            printed.read_last_words()
        with trio.move_on_after(REPORT_S_MAX):
            while child.pid not in self._statuses and child.reports.fileno() >= 0:
                await self._reported.wait()
        self._alive.discard(child)
        child.over(_how(self._statuses.pop(child.pid, None)))
        self._wake()


def _how(status: int | None) -> str:
    """In words, how a process with this wait status ended; None: the forkserver did not live to tell."""
    if status is None:
        return "ended together with the process that had started it"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"was killed by signal {number} ({signal.Signals(number).name})"
        except ValueError:  # the real-time ones have no names
            return f"was killed by signal {number}"
    code = os.waitstatus_to_exitcode(status)
    if code == LOST_GPU:
        return "lost the GPU and ended: a kernel went astray, as the log says"
    return f"ended with exit status {code}"
