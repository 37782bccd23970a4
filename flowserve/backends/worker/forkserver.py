"""The forkserver: imports the modules that all worker processes need once, then forks a worker for each instance.

Decides the state of a worker at its start (a session, log, signals and random numbers of its own, nothing of other
workers), and that no process remains: the end of the server ends the forkserver, and the forkserver ends its workers
and all processes that they started. Only the forkserver can reap them, so it reports to the server how each of them
ended.

The forkserver is the subreaper of its descendants: a process whose parent ends becomes its child, also a daemon in a
session of its own. To know by which worker such an orphan was started, each worker writes its process id into a
resource limit that every descendant inherits and that no kernel since 2.4.25 enforces (RLIMIT_LOCKS). When a worker has
ended, the forkserver kills its children that carry that number, then the children that these leave behind, until there
are none. It kills only its own children, which only it can reap, so a process id cannot have passed to another process.

It has one thread: a fork copies only the thread that forks, and the locks of all others in their current state. What a
worker does is decided by the function that it runs. Linux only.

Callers: runtime/ starts it as a process and sends it orders.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter, FileIO, TextIOWrapper
from types import FrameType
from typing import Any, Final, NoReturn, cast

ORDER_BYTES_MAX: Final = 65536
REPORT: Final = struct.Struct("=ii")  # process id, wait status
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_RLIMIT_LOCKS: Final = 10  # without effect; holds the process id of the worker that a process descends from
_PIDFD_OPEN: Final = 434  # the same number on every machine
# Severities as in sd-daemon(3), which the server reads from the beginning of a line.
_SEVERITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
# Out of memory, the kernel should kill a worker before the server.
_OOM_SCORE_ADDED: Final = 200
# Time between SIGTERM and SIGKILL. It starts again with each worker that ends.
_TERM_MS: Final = 200

# Modules that every worker imports.
PRELOADED: Final = ("numpy", "flowserve.backends.worker.main", "flowserve.backends.python.backend")

STOP_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})  # of the server

# The function that a worker runs: it takes the number of its socket, and its arguments.
EntryPoint = Callable[[int, bytes], None]


def main(*, orders: int, reports: int, parent: int, log_level: int, environment: Mapping[str, str | None]) -> None:
    """Runs the forkserver, and every worker. Does not return in a worker.

    `orders` and `reports` are sockets, `parent` is the server's process id. `environment` is restored once numpy is
    loaded: until then it limits numpy to one thread. When all modules are loaded, facts about this Python are sent on
    `orders`. `log_level` is a file of one byte, the level of the logger `flowserve`, which may change at any time.
    """
    # SIGTERM means that the server's process has ended, or its thread that started the forkserver; or that a whole
    # group of processes is stopped: then the server still needs its workers for the requests that it has accepted.
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, _nothing)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    level = mmap.mmap(log_level, 1, prot=mmap.PROT_READ)
    os.close(log_level)
    for module in PRELOADED:
        importlib.import_module(module)
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    facts = {"python": "{}.{}.{}".format(*sys.version_info[:3]), "has_bf16": "ml_dtypes" in sys.modules}
    os.write(orders, json.dumps(facts).encode())
    gc.collect()
    gc.freeze()  # keeps memory shared, because the garbage collector of a worker does not write to it
    child = ForkLoop(socket.socket(fileno=orders), socket.socket(fileno=reports), parent).run()
    if child is not None:
        child(level)


class ForkLoop:
    """Takes orders, forks, reaps and reports. `run` returns when the server ends, and in every worker."""

    def __init__(self, orders: socket.socket, reports: socket.socket, parent: int) -> None:
        self._orders = orders
        self._reports = reports
        self._parent = parent
        self._pid = os.getpid()
        self._alive: set[int] = set()
        self._ended: set[int] = set()  # ended workers whose processes may still run
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> WorkerStart | None:
        """Returns None when the server and all workers have ended; in a worker, the start of that worker."""
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._orders, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while os.getppid() == self._parent:
            for number, _ in poll.poll():
                if number == self._woken:
                    self._reap()
                    continue
                order, fds = self._receive()
                if not order:
                    self._end_all()
                    return None
                child = self._fork(json.loads(order), fds)
                if child is not None:
                    return child
        self._end_all()
        return None

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            order, fds, _, _ = socket.recv_fds(self._orders, ORDER_BYTES_MAX, 3, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return b"", []
        return order, fds

    def _fork(self, order: Mapping[str, str], fds: list[int]) -> WorkerStart | None:
        """Answers the order with the worker's process id and a pidfd, or with the error. Returns a value in the worker
        only.
        """
        why = ""
        try:
            pid = os.fork()
        except OSError as error:
            pid, why = -1, f"it cannot be started: {error.strerror}"
        if pid == 0:
            self._leave()
            return WorkerStart(order["name"], order["entry"], self._pid, *fds)
        for fd in fds:
            os.close(fd)
        if why:
            self._answer({"error": why}, [])
            return None
        self._alive.add(pid)
        self._ended.discard(pid)  # an earlier process had the same number
        pidfd = _pidfd_open(pid)  # only this process can reap it, so the process id is still valid
        self._answer({"pid": pid}, [pidfd])
        os.close(pidfd)
        return None

    def _answer(self, answer: Mapping[str, Any], fds: list[int]) -> None:
        with suppress(ConnectionError):  # the server is gone; the next poll reports it
            socket.send_fds(self._orders, [json.dumps(answer).encode()], fds)

    def _leave(self) -> None:
        """In a worker: close what belongs to the forkserver."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._orders.close()
        self._reports.close()
        os.close(self._woken)
        os.close(self._wakes)

    def _reap(self) -> None:
        """Reap all processes that have ended and report the workers among them. Kill the processes that ended workers
        started, which would otherwise accumulate with every restart.
        """
        with suppress(BlockingIOError):
            while os.read(self._woken, 512):
                pass
        with suppress(ChildProcessError):  # none is left
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._reap_one(ended.si_pid)
        if self._ended:
            orphans = [pid for pid in _children_of(self._pid) if _worker_of(pid) in self._ended]
            for pid in orphans:
                _kill(pid)  # its end wakes this process, which then finds the children that it left
            if not orphans:
                self._ended.clear()

    def _reap_one(self, pid: int) -> None:
        is_worker = pid in self._alive
        if is_worker:
            _kill_group(pid)  # before it is reaped: until then its number is not reused
        _, status = os.waitpid(pid, 0)
        if is_worker:
            self._alive.discard(pid)
            self._ended.add(pid)
            with suppress(ConnectionError):
                self._reports.send(REPORT.pack(pid, status))

    def _end_all(self) -> None:
        """SIGTERM first: workers that handle it get _TERM_MS. Then all processes that they started are killed."""
        for pid in self._alive:
            os.kill(pid, signal.SIGTERM)
        woken = select.poll()
        woken.register(self._woken, select.POLLIN)
        while self._alive and woken.poll(_TERM_MS):
            self._reap()
        while True:
            for pid in self._alive:
                _kill_group(pid)
            left = _children_of(self._pid)
            for pid in left:
                _kill(pid)
            if not left or not woken.poll(_TERM_MS):  # if no further process ends, the rest are stuck in the kernel
                return
            self._reap()


@dataclass
class WorkerStart:
    """Runs a worker, called when no frame of the forkserver is on the stack any more. Ends the process."""

    name: str
    entry: str
    parent: int
    socket_fd: int
    log_fd: int
    arguments_fd: int

    def __call__(self, level: mmap.mmap) -> NoReturn:
        """`level`: its byte is the level of the logger `flowserve`."""
        status = 1
        try:
            self._settle(level)
            with open(self.arguments_fd, "rb") as file:
                file.seek(0)  # server and worker share the position, which is after what the server wrote
                arguments = file.read()
            module, _, function = self.entry.partition(":")
            entry = cast("EntryPoint", getattr(importlib.import_module(module), function))
            entry(self.socket_fd, arguments)
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            # As at the end of any interpreter, but without freeing its objects, which would only copy shared memory.
            with suppress(BaseException):
                atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with suppress(BaseException):
                    stream.flush()
            os._exit(status)

    def _settle(self, level: mmap.mmap) -> None:
        with suppress(OSError, ValueError):  # the hard limit is lower: orphans then live until the forkserver ends
            pid, (_, hard) = os.getpid(), resource.getrlimit(_RLIMIT_LOCKS)
            resource.setrlimit(_RLIMIT_LOCKS, (pid, hard))
        os.setsid()  # no signals from a terminal, and a process group of its own for the processes that it starts
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.parent:
            os._exit(1)  # the forkserver ended before the signal was set up
        prctl(_PR_SET_NAME, self.name.encode()[:15])
        # A whole group of processes may get SIGTERM (systemd sends it): the server drains, and needs its workers.
        for number in STOP_SIGNALS:
            signal.signal(number, _nothing)
        _wait_during_forks(STOP_SIGNALS, self._disown)
        os.dup2(self.log_fd, 1)
        os.dup2(self.log_fd, 2)
        os.close(self.log_fd)
        _write_lines(level)
        faulthandler.enable()  # the log gets the stack of a crash
        _be_killed_first()
        random = sys.modules.get("numpy.random")
        if random is not None:
            random.seed()  # otherwise all workers draw the same numbers

    def _disown(self) -> None:
        """In a process that a model forks: signals have their default action, and the socket is replaced, so that it
        cannot answer in the model's place. It may call other models (bls_client.py).
        """
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is _nothing:
                signal.signal(number, signal.SIG_DFL)
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nowhere, self.socket_fd, inheritable=False)
            os.close(nowhere)


class WorkerLogFormatter(logging.Formatter):
    """A record as one line that begins with its severity. The lines of a traceback follow; all lines but the last are
    marked as continued.
    """

    def format(self, record: logging.LogRecord) -> str:
        severity = next((number for level, number in _SEVERITIES if record.levelno >= level), 7)
        *above, last = super().format(record).split("\n")
        return "".join(f"<{severity}+>{line}\n" for line in above) + f"<{severity}>{last}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")


def _write_lines(level: mmap.mmap) -> None:
    """Flush output line by line: a crash must not lose what was printed before."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        # The forkserver's streams were created for a file, not for a pipe.
        raw = BufferedWriter(FileIO(number, "w", closefd=False))
        stream = TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(WorkerLogFormatter("%(message)s"))
    handler.addFilter(lambda record: record.levelno >= level[0])
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.getLogger("flowserve").setLevel(logging.DEBUG)


def _be_killed_first() -> None:
    with suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
        score = int(file.read())
        file.seek(0)
        file.write(str(min(score + _OOM_SCORE_ADDED, 1000)))


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it may have ended, or run as another user
        os.kill(pid, signal.SIGKILL)


def _children_of(parent: int) -> list[int]:
    """The children of this process, including those that have ended and are not yet reaped."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:  # it may end meanwhile
            if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                found.append(int(entry))
    return found


def _worker_of(pid: int) -> int:
    """The process id of the worker that this process descends from. Another number if it is unknown."""
    try:
        return resource.prlimit(pid, _RLIMIT_LOCKS)[0]
    except OSError:  # it has ended, or runs as another user
        return 0


def _wait_during_forks(signals: frozenset[signal.Signals], in_child: Callable[[], None]) -> None:
    """From now on, a signal that is sent to a forked process waits until `in_child` has returned there. Its parent may
    send it at once, and the handler that the process begins with would take it without effect. Signals that the model
    itself blocks stay blocked.

    A handler of the model may run, fork and raise inside of a Python function, so C functions block the signals before
    the fork and unblock them in the parent.
    """
    own = threading.local()  # `blocked`: by the model, before the fork

    def note() -> None:
        own.blocked = signals & signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def block_again() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, own.__dict__.pop("blocked", ()))

    def unblock_in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals - own.__dict__.pop("blocked", frozenset()))

    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, signals)
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, signals)
    # Called in the order of registration, those before a fork in reverse.
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=in_child)
    os.register_at_fork(before=note, after_in_parent=block_again, after_in_child=unblock_in_child)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handler of signals that only interrupt."""


def _pidfd_open(pid: int) -> int:
    """`os.pidfd_open`, which is missing in Pythons built for an old C library, such as conda's. Raises OSError."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    fd: int = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, pid, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
