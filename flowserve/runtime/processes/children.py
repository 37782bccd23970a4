"""Child processes from the server's side: their start, output and end, and the result of a task's process.

Decides the text for how a process ended; when its output is read, and how much of it is still read after it has ended;
and that an incomplete result of a task fails with how the process ended. Only its pidfd reports the end of a process: a
process that it forked may keep its socket open, and a slow response is not an end. `forkservers.py` starts the
processes that fork and reap; `printed.py` splits the output into records and limits them; `backends/worker/main.py` is
the code of a task's process. Does not know what runs in a child, nor the effect of its end on requests. Linux only.
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
from contextlib import ExitStack, closing, suppress
from typing import Any, Final, Protocol

import trio

from flowserve.backends.worker.forkserver import REPORT
from flowserve.backends.worker.messages import LOST_GPU, MESSAGE_BYTES_MAX, parse_result
from flowserve.errors import ModelFailed, Unavailable
from flowserve.observe.log_fields import of
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.processes.forkservers import ForkServer, Interpreter
from flowserve.runtime.processes.printed import OF_LINES, Printed, Record

log = logging.getLogger("flowserve.runtime")


def _is_supported() -> bool:
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # Python built for, or running on, a kernel before 5.3; or a container forbids it
        return False
    return True


# Whether this system supports child processes.
SUPPORTED: Final = _is_supported()

# How long to wait for the forkserver's report after a child has ended.
REPORT_S_MAX: Final = 0.5

# A process that closed its socket is about to end; if it lives on, it cannot be reached and is killed.
EOF_GRACE_S: Final = 1.0

_READ_BYTES: Final = 65536
# The bytes that are still read after a process has ended; processes that it started may keep its pipe and write on.
_FINAL_OUTPUT_BYTES_MAX: Final = 1 << 20


class Child:
    """One process. `socket`: the server's end of a non-blocking SOCK_SEQPACKET pair, which its user closes.

    `ended`: "" while it lives, then which instance ended and how. It is set on the loop, and `on_end` is called there.
    `reports`: the socket for its forkserver's reports, closed once the forkserver has ended.
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
        self.on_end: Callable[[Child], None] | None = None
        self.why = ""  # why the server killed it, if it did
        self._is_over = threading.Event()
        self._hung_up = trio.Event()
        # Not closed earlier: while the descriptor is open, its number cannot refer to another process.
        weakref.finalize(self, os.close, pidfd)

    def kill(self, number: signal.Signals = signal.SIGKILL, why: str = "") -> None:
        """Send a signal; no effect on an ended process. `why` replaces the signal in the text of its end."""
        self.why = self.why or why
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def hung_up(self) -> None:
        """The process closed its socket: it is killed if it does not end soon. On the event loop."""
        self._hung_up.set()

    async def end_after_hanging_up(self) -> None:
        """Kill the process if it lives EOF_GRACE_S after it closed its socket. Cancelled when it ends."""
        await self._hung_up.wait()
        await trio.sleep(EOF_GRACE_S)
        self.kill(why="its process closed its connection to the server; it was killed")

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ends within `timeout_s` seconds. Blocks; not on the loop's thread."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def how_it_ended(self) -> str:
        """`ended`, of a process that has ended or is about to. Blocks; not on the loop's thread."""
        self._is_over.wait(2 * REPORT_S_MAX)
        return self.ended or f"model '{self.model}', instance '{self.name}': its process ended"

    def over(self, how: str) -> None:
        """Record the end of the process, and call `on_end`. Called once, on the loop."""
        self.ended = f"model '{self.model}', instance '{self.name}': {self.why or f'its process {how}'}"
        self._is_over.set()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            try:
                on_end(self)
            except Exception:  # the other children stay supervised
                log.exception("what the end of instance %s means could not be dealt with", self.name)


class SpawnChild(Protocol):
    """`Children.spawn` for one Python environment."""

    def __call__(self, name: str, entry: str, arguments: bytes, *, log_name: str) -> Child: ...


class Children:
    """All child processes of a server. Created on the loop, where `run` must be running; `spawn` is for other threads.

    `is_closed`: no process starts any more.
    """

    def __init__(self, clock: ClockNs) -> None:
        self._clock = clock
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()  # guards `_forkservers`
        self._forkservers: weakref.WeakSet[ForkServer] = weakref.WeakSet()
        self._own = self.forkserver(Interpreter((sys.executable,), {}, is_own=True))
        self._nursery: trio.Nursery | None = None
        self.is_closed = False
        self._alive: set[Child] = set()
        self._statuses: dict[int, int] = {}
        self._reported = trio.Event()  # replaced with each report

    def forkserver(self, interpreter: Interpreter) -> ForkServer:
        """A new forkserver. It is referenced weakly; its owner must call `hang_up`."""
        made = ForkServer(interpreter, lambda reports: self._token.run_sync_soon(self._listen, reports))
        with self._lock:
            self._forkservers.add(made)
        return made

    def spawn(
        self, name: str, entry: str, arguments: bytes, *, log_name: str, forkserver: ForkServer | None = None
    ) -> Child:
        """Start a process that calls `entry` ("module:function") with its socket's number and `arguments`.

        Blocks for the duration of a fork, the first time until the forkserver has imported its modules. Raises
        Unavailable if no process can be started. `log_name`: the model under whose name its output is logged.
        `forkserver`: None for the server's own Python.
        """
        with (
            ExitStack() as theirs,
            ExitStack() as ours,
        ):  # the child's ends are always closed here, the server's on an error
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
        """Supervise the children. Cancelled after `close`."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def close(self) -> None:
        """End the forkservers and all their children, within a bounded time. No process starts afterwards."""
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
        """Read a forkserver's reports of ended children until it ends."""
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
        self._wake()  # no further reports of this forkserver: end the waits for them

    def _wake(self) -> None:
        self._reported.set()
        self._reported = trio.Event()

    async def _watch(self, child: Child) -> None:
        with closing(ChildLog(child.log_fd, child.model, self._clock)) as printed:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(printed.read, name=f"log of {child.name}")
                nursery.start_soon(child.end_after_hanging_up, name=f"end of {child.name}")
                await trio.lowlevel.wait_readable(child.pidfd)
                nursery.cancel_scope.cancel()
            printed.read_rest()
        with trio.move_on_after(REPORT_S_MAX):
            while child.pid not in self._statuses and child.reports.fileno() >= 0:
                await self._reported.wait()
        self._alive.discard(child)
        child.over(_how(self._statuses.pop(child.pid, None)))
        self._wake()


def _how(status: int | None) -> str:
    """The text for a wait status; None: the forkserver ended before it reported one."""
    if status is None:
        return "ended together with the process that had started it"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"was killed by signal {number} ({signal.Signals(number).name})"
        except ValueError:  # real-time signals have no names
            return f"was killed by signal {number}"
    code = os.waitstatus_to_exitcode(status)
    if code == LOST_GPU:
        return "lost the GPU and ended: a kernel went astray, as the log says"
    return f"ended with exit status {code}"


class ChildLog:
    """Logs the output from `fd`, which it owns, under the name of `model`."""

    def __init__(self, fd: int, model: str, clock: ClockNs) -> None:
        self._fd = fd
        self._log = logging.getLogger(f"flowserve.model.{model}")
        self._fields = of(model=model)
        self._printed = Printed()
        self._clock = clock

    def close(self) -> None:
        os.close(self._fd)
        self._write(self._printed.rest())

    async def read(self) -> None:
        """Read until the pipe is closed, or until cancelled."""
        while True:
            with trio.move_on_after(self._printed.wait_s) as timeout:
                await trio.lowlevel.wait_readable(self._fd)
            if timeout.cancelled_caught:
                self._write(self._printed.wait_is_over())
            elif not self._read_piece():
                return

    def read_rest(self) -> None:
        """Read what is left in the pipe after the process has ended."""
        with suppress(BlockingIOError):
            for _ in range(0, _FINAL_OUTPUT_BYTES_MAX, _READ_BYTES):
                if not self._read_piece():
                    return

    def _read_piece(self) -> int:
        piece = os.read(self._fd, _READ_BYTES)
        self._write(self._printed.take(piece, self._clock()))
        return len(piece)

    def _write(self, records: list[Record]) -> None:
        for level, text in records:
            self._log.log(level, "%s", text, extra={OF_LINES: "\n" in text, **self._fields})


def task_result(child: Child) -> Any:
    """The result of the task. Blocks until the process has ended. Raises the task's error, or ModelFailed with how the
    process ended.
    """
    with child.socket:
        message = _all_of(child)
    try:
        return parse_result(message)
    except ValueError:
        raise ModelFailed(child.how_it_ended()) from None


def _all_of(child: Child) -> bytes:
    """All bytes that the process sends until its end."""
    poll = select.poll()
    poll.register(child.socket, select.POLLIN)
    poll.register(child.pidfd, select.POLLIN)
    parts: list[bytes] = []
    while True:
        is_over = any(number == child.pidfd for number, _ in poll.poll())
        try:
            part = child.socket.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            if is_over:
                return b"".join(parts)
            continue
        except ConnectionError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)
