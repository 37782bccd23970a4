"""Child processes, as the server sees them: how one is ordered, what it prints, how its end is noticed.

Decided here: when the forkserver (backends/child/forkserver.py, which does the forking and reaping) is started, how
much of what a model prints reaches the log, and the words for how a process ended. Its end is the end of the process,
told by its pidfd, and nothing else: a process that it has forked may hold its socket open, and a slow answer is not a
death. What runs in a child, and what its end means for requests, is decided elsewhere. Linux only.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final, Self

import trio

from flowserve.backends.child.forkserver import REPORT
from flowserve.errors import Unavailable
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.printed import Printed
from flowserve.runtime.tracebacks import OF_LINES, Record

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

# It finds modules where the server finds them.
_BEGIN: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from flowserve.backends.child.forkserver import main
main(**json.loads(sys.argv.pop(1)))
"""

# How long the forkserver may take to say how a child ended that has ended, and to end itself.
REPORT_S_MAX: Final = 0.5
END_S_MAX: Final = 2.0
# A library with threads of its own would be copied by a fork without them, with its locks as they stand.
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_READ_BYTES: Final = 65536
# How much of what a process printed at its end is still read; others that it started may hold its pipe and print on.
_LAST_WORDS_BYTES_MAX: Final = 1 << 20

OnEnd = Callable[["Child"], None]


class Child:
    """One process. `socket` is our end of a non-blocking SOCK_SEQPACKET pair, closed by whoever talks over it.

    `ended` is "" while it lives, then says who ended and how. It is set on the loop, and `on_end` is called there.
    """

    def __init__(self, name: str, model: str, pid: int, pidfd: int, sock: socket.socket, log_fd: int) -> None:
        self.name = name
        self.model = model
        self.pid = pid
        self.pidfd = pidfd
        self.socket = sock
        self.log_fd = log_fd
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
            tell(self)


class _ForkServer:
    """The process that forks, and our ends of the sockets to it. Its lifeline is the socket for orders."""

    def __init__(self) -> None:
        self.orders, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reports, reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reports.setblocking(False)
        with orders, reports:
            fds = (orders.fileno(), reports.fileno())
            settings = {
                "orders": fds[0],
                "reports": fds[1],
                "parent": os.getpid(),
                "log_level": logging.getLogger("flowserve").getEffectiveLevel(),
                "environment": {name: os.environ.get(name) for name in _ONE_THREAD},
            }
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, json.dumps(sys.path), json.dumps(settings)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
                start_new_session=True,  # a Ctrl-C at the terminal is for the server only
            )

    def order(self, name: str, entry: str, fds: tuple[int, int, int]) -> tuple[int, int]:
        """Blocks until the child is there. Returns its process id and a pidfd."""
        try:
            socket.send_fds(self.orders, [json.dumps({"name": name, "entry": entry}).encode()], fds)
            answer, received, _, _ = socket.recv_fds(self.orders, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            answer, received = b"", []
        if not answer:
            raise Unavailable("the process that starts models has ended")
        said = json.loads(answer)
        if "error" in said:
            raise Unavailable(said["error"])
        return int(said["pid"]), received[0]

    def hang_up(self) -> None:
        """It ends, and all its children. Wakes whoever waits for an answer."""
        with suppress(OSError):
            self.orders.shutdown(socket.SHUT_RDWR)
        self.orders.close()


class Children:
    """All child processes of a server. Made on the loop, where `run` must be running; `spawn` is for other threads."""

    def __init__(self, clock: ClockNs) -> None:
        self._clock = clock
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()  # around the forkserver: one order at a time
        self._server: _ForkServer | None = None
        self._nursery: trio.Nursery | None = None
        self._is_closed = False
        self._alive: set[Child] = set()
        self._statuses: dict[int, int] = {}
        self._reported = trio.Event()  # replaced with each report

    def spawn(self, name: str, entry: str, arguments: bytes, *, log_name: str) -> Child:
        """Start a process that calls `entry` ("module:function") with its socket's number and `arguments`.

        Blocks for as long as a fork takes, the first time until the forkserver has imported what it needs. Raises
        Unavailable where no process can be had. `log_name` is the model that what it prints is logged under.
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
                pid, pidfd = self._order(name, entry, (its_sock.fileno(), its_log_fd, arguments_fd))
            except Unavailable as error:
                raise Unavailable(f"model '{log_name}', instance '{name}': {error}") from None
            child = Child(name, log_name, pid, pidfd, sock, log_fd)
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
        """End the forkserver and with it whatever still lives, within a bounded time. Nothing starts afterwards."""
        self._is_closed = True
        for child in self._alive:
            child.why = child.why or "ended with the server"
        server, self._server = self._server, None
        if server is not None:
            server.hang_up()
            await trio.to_thread.run_sync(_wait_or_kill, server.process)
        with trio.move_on_after(REPORT_S_MAX):
            while self._alive:
                await self._reported.wait()

    # ------------------------------------------------------------------ starting

    def _order(self, name: str, entry: str, fds: tuple[int, int, int]) -> tuple[int, int]:
        with self._lock:
            if self._is_closed:
                raise Unavailable("the server is ending")
            server = self._server
            if server is None or server.process.poll() is not None:
                if server is not None:
                    log.error("the process that starts models has ended, and all of them with it; starting another")
                    server.hang_up()
                server = self._server = _ForkServer()
                self._token.run_sync_soon(self._listen, server)
            if self._is_closed:  # looked at again: `close` sets it first, then hangs up what it finds
                server.hang_up()
            return server.order(name, entry, fds)

    def _listen(self, server: _ForkServer) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._read_reports, server, name="forkserver")

    def _adopt(self, child: Child) -> None:
        if self._nursery is None or self._is_closed:
            child.kill(why="started while the server ends")
            child.over("")
            os.close(child.log_fd)
            return
        self._alive.add(child)
        self._nursery.start_soon(self._watch, child, name=f"watch {child.name}")

    # ------------------------------------------------------------------ ending

    async def _read_reports(self, server: _ForkServer) -> None:
        """How children ended, for as long as the forkserver lives."""
        with server.reports as reports:
            while True:
                try:
                    report = reports.recv(REPORT.size)
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(reports)
                    continue
                if not report:
                    return
                pid, status = REPORT.unpack(report)
                self._statuses[pid] = status
                self._wake()

    def _wake(self) -> None:
        self._reported.set()
        self._reported = trio.Event()

    async def _watch(self, child: Child) -> None:
        with _Log(child, self._clock) as printed:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(printed.read, name=f"log of {child.name}")
                await trio.lowlevel.wait_readable(child.pidfd)
                nursery.cancel_scope.cancel()
            printed.read_last_words()
        with trio.move_on_after(REPORT_S_MAX):
            while child.pid not in self._statuses:
                await self._reported.wait()
        self._alive.discard(child)
        child.over(_how(self._statuses.pop(child.pid, None)))
        self._wake()


class _Log:
    """What one child prints, read until the block ends."""

    def __init__(self, child: Child, clock: ClockNs) -> None:
        self._fd = child.log_fd
        self._log = logging.getLogger(f"flowserve.model.{child.model}")
        self._printed = Printed()
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self._write(self._printed.rest())

    async def read(self) -> None:
        """Until its end, or for ever."""
        while True:
            with trio.move_on_after(self._printed.patience_s) as patience:
                await trio.lowlevel.wait_readable(self._fd)
            if patience.cancelled_caught:
                self._write(self._printed.nothing_more())
            elif not self._read_piece():
                return

    def read_last_words(self) -> None:
        """What lies in the pipe once the process has ended."""
        with suppress(BlockingIOError):
            for _ in range(0, _LAST_WORDS_BYTES_MAX, _READ_BYTES):
                if not self._read_piece():
                    return

    def _read_piece(self) -> int:
        piece = os.read(self._fd, _READ_BYTES)
        self._write(self._printed.take(piece, self._clock()))
        return len(piece)

    def _write(self, records: list[Record]) -> None:
        for level, text in records:
            self._log.log(level, "%s", text, extra={OF_LINES: "\n" in text})


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
    return f"ended with exit status {os.waitstatus_to_exitcode(status)}"


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
