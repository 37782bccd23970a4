"""The process that makes children: it imports once what all of them need, then forks one for each instance.

Decided here: what a child finds when it begins (its own session, log, signals and random numbers, nothing of its
sisters'), and that nobody is left behind: whatever ends the server ends this process, and this process ends its
children and whatever they started. Only this process can reap them, so it tells the server how each of them ended.

One thread, always: a fork copies only the thread that forks, and the locks of all the others as they stand. What its
children do is the matter of the function they run. Linux only.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from types import FrameType
from typing import Any, Final, NoReturn, cast

from flowserve.memory.syscalls import pidfd_open

ORDER_BYTES_MAX: Final = 65536
REPORT: Final = struct.Struct("=ii")  # process id, wait status
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
# Severities as in sd-daemon(3), which the server reads from the beginning of a line.
_SEVERITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
# The kernel, out of memory, should choose a model before it chooses the server.
_OOM_SCORE_ADDED: Final = 200
# Between the signal that asks and the one that does not; starts again with each child that ends.
_TERM_MS: Final = 200

# What every child of ours would import first anyway.
PRELOADED: Final = ("numpy", "flowserve.backends.child.main", "flowserve.backends.python_whole")

# What a child does: it is called with its socket's number and its arguments.
Entry = Callable[[int, bytes], None]


def main(*, orders: int, reports: int, parent: int, log_level: int, environment: Mapping[str, str | None]) -> None:
    """The whole life of the process, and of every child. Does not return in a child.

    `orders` and `reports` are sockets, `parent` is the server's process id. `environment` is restored once numpy is
    loaded: until then it keeps numpy to one thread. Once everything is loaded it says on `orders` what it is.
    """
    # SIGTERM says that the server's process ended, or the thread in it that started us; or that somebody stops a whole
    # group of processes, and then the server still needs its models to finish what it has accepted.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, _nothing)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for module in PRELOADED:
        importlib.import_module(module)
    _restore(environment)
    os.write(orders, json.dumps(_facts()).encode())
    gc.collect()
    gc.freeze()  # what is shared now stays shared: the collector of a child does not write into it
    child = ForkServer(socket.socket(fileno=orders), socket.socket(fileno=reports), parent).run()
    if child is not None:
        child(log_level)


def _facts() -> dict[str, Any]:
    """What the server wants to know of the Python that this is."""
    return {"python": "{}.{}.{}".format(*sys.version_info[:3]), "has_bf16": "ml_dtypes" in sys.modules}


class ForkServer:
    """Takes orders, forks, reaps, reports. `run` returns at the end of the server, and in every child."""

    def __init__(self, orders: socket.socket, reports: socket.socket, parent: int) -> None:
        self._orders = orders
        self._reports = reports
        self._parent = parent
        self._pid = os.getpid()
        self._alive: set[int] = set()
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> Beginning | None:
        """Returns None when the server is gone and everybody here with it; in a child, what that child is to do."""
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

    def _fork(self, order: Mapping[str, str], fds: list[int]) -> Beginning | None:
        """Answers the order with the child's process id and a pidfd, or with what went wrong. Returns in the child."""
        why = ""
        try:
            pid = os.fork()
        except OSError as error:
            pid, why = -1, f"it cannot be started: {error.strerror}"
        if pid == 0:
            self._leave()
            return Beginning(order["name"], order["entry"], self._pid, *fds)
        for fd in fds:
            os.close(fd)
        if why:
            self._answer({"error": why}, [])
            return None
        self._alive.add(pid)
        pidfd = pidfd_open(pid)  # nobody but us can reap it, so the number is still its own
        self._answer({"pid": pid}, [pidfd])
        os.close(pidfd)
        return None

    def _answer(self, answer: Mapping[str, Any], fds: list[int]) -> None:
        with suppress(ConnectionError):  # the server is gone; the next poll says so
            socket.send_fds(self._orders, [json.dumps(answer).encode()], fds)

    def _leave(self) -> None:
        """In a child: what is the forkserver's own is none of its business."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._orders.close()
        self._reports.close()
        os.close(self._woken)
        os.close(self._wakes)

    def _reap(self) -> None:
        """Report who ended, after ending what that child has started itself: it would pile up with every restart."""
        with suppress(BlockingIOError):
            while os.read(self._woken, 512):
                pass
        while self._alive:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            pid: int = ended.si_pid
            _kill_group(pid)  # before it is reaped: until then its number is nobody else's
            _, status = os.waitpid(pid, 0)
            self._alive.discard(pid)
            with suppress(ConnectionError):
                self._reports.send(REPORT.pack(pid, status))

    def _end_all(self) -> None:
        """Those that handle SIGTERM get a moment."""
        for pid in self._alive:
            os.kill(pid, signal.SIGTERM)
        woken = select.poll()
        woken.register(self._woken, select.POLLIN)
        while self._alive and woken.poll(_TERM_MS):
            self._reap()
        for pid in self._alive:
            _kill_group(pid)
            os.kill(pid, signal.SIGKILL)  # it may not have come to having a group of its own
        for pid in self._alive:
            os.waitpid(pid, 0)


class Beginning:
    """A child's life, called where nothing of the forkserver is on the stack any more. Ends the process."""

    def __init__(self, name: str, entry: str, parent: int, socket_fd: int, log_fd: int, arguments_fd: int) -> None:
        self._name = name
        self._entry = entry
        self._parent = parent
        self._socket_fd = socket_fd
        self._log_fd = log_fd
        self._arguments_fd = arguments_fd

    def __call__(self, level: int) -> NoReturn:
        """`level`: what is logged in `flowserve`."""
        status = 1
        try:
            self._settle(level)
            with open(self._arguments_fd, "rb") as file:
                file.seek(0)  # the server wrote it, and the two share one position
                arguments = file.read()
            module, _, function = self._entry.partition(":")
            entry = cast("Entry", getattr(importlib.import_module(module), function))
            entry(self._socket_fd, arguments)
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            # As at the end of any interpreter, except that its memory is not taken apart, which would only copy it.
            with suppress(BaseException):
                atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with suppress(BaseException):
                    stream.flush()
            os._exit(status)

    def _settle(self, level: int) -> None:
        os.setsid()  # no terminal's signals, and a group of its own for whatever it starts
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._parent:
            os._exit(1)  # the forkserver ended before it could have told us
        prctl(_PR_SET_NAME, self._name.encode()[:15])
        # A group of processes may be told to stop (systemd does): the server drains, and still needs its models.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _nothing)
        os.register_at_fork(after_in_child=self._disown)
        os.dup2(self._log_fd, 1)
        os.dup2(self._log_fd, 2)
        os.close(self._log_fd)
        _write_lines(level)
        faulthandler.enable()  # a crash says in the log where it happened
        _be_killed_first()
        random = sys.modules.get("numpy.random")
        if random is not None:
            random.seed()  # or all children would draw the same numbers

    def _disown(self) -> None:
        """In a process that a model forks: it dies of signals as any does, and cannot answer in the model's place."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is _nothing:
                signal.signal(number, signal.SIG_DFL)
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nowhere, self._socket_fd, inheritable=False)
            os.close(nowhere)


class LineFormatter(logging.Formatter):
    """A record as one line that begins with its severity; those of a traceback follow, and all but the last say that
    there is more.
    """

    def format(self, record: logging.LogRecord) -> str:
        severity = next((number for level, number in _SEVERITIES if record.levelno >= level), 7)
        *above, last = super().format(record).split("\n")
        return "".join(f"<{severity}+>{line}\n" for line in above) + f"<{severity}>{last}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")


def _write_lines(level: int) -> None:
    """What is printed leaves line by line: a crash must not take with it what was said before."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        # The forkserver's own was made for a file, not for a pipe.
        raw = BufferedWriter(FileIO(number, "w", closefd=False))
        stream = TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.getLogger("flowserve").setLevel(level)


def _be_killed_first() -> None:
    with suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
        score = int(file.read())
        file.seek(0)
        file.write(str(min(score + _OOM_SCORE_ADDED, 1000)))


def _restore(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _nothing(number: int, frame: FrameType | None) -> None:
    """A signal that only interrupts."""


def prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
