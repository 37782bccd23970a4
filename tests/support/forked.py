"""Processes of tests that are forked from one that has imported their modules, which is half of the work of a start.

* `serving` is that of flowserve.testing.serve. A start with variables of its own is a new interpreter, as for users,
  and so are all those of tests/cli, tests/docs and tests/packaging.
* `start_forkserver` is that of runtime/processes/forkservers.py, for engines in the process of the tests.

Does not know what a server does. Each process of tests has a template process of each kind. For each start it forks a
watcher, which forks the new process, and writes its process id and, at its end, its exit status to a pipe. Linux only;
elsewhere each start is a new interpreter.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from flowserve.testing import serve
from flowserve.testing.serve import Served

ROOT: Final = Path(__file__).resolve().parent.parent.parent
IS_POSSIBLE: Final = sys.platform == "linux"
MESSAGE_BYTES_MAX: Final = 200_000
DESCRIPTORS_MAX: Final = 8
# The interpreter reads it when it starts.
PYTHONPATH: Final = os.environ.get("PYTHONPATH")
# What most servers import.
OF_A_SERVER: Final = (
    "flowserve.cli.main",
    "flowserve.cli.run",
    "flowserve.http.api.app",
    "flowserve.grpc.server",
    "flowserve.runtime.remote.worker",
    "flowserve.backends.onnx.backend",
    "flowserve.backends.python.backend",
    "encodings.idna",
    "encodings.utf_8_sig",
)
# What a forkserver imports.
OF_A_FORKSERVER: Final = ("numpy", "flowserve.backends.worker.main", "flowserve.backends.python.backend")


@contextmanager
def serving(repository: Path, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[Served]:
    """As flowserve.testing.serve.serving."""
    is_plain = environment is None and os.environ.get("PYTHONPATH") == PYTHONPATH and IS_POSSIBLE
    start = _start_server if is_plain else serve.started
    with serve.serving(repository, *options, environment=environment, start=start) as served:
        yield served


def _start_server(arguments: Sequence[str], stderr: IO[str], environment: Mapping[str, str]) -> ForkedProcess:
    reading, output = os.pipe()
    try:
        order = {"arguments": [*arguments], "environment": dict(environment)}
        return _template("_serve", OF_A_SERVER).start(order, output, stderr.fileno(), stdout=open(reading))
    finally:
        os.close(output)


def start_forkserver(
    command: Sequence[str],
    settings: Mapping[str, Any],
    descriptors: Sequence[str],
    environment: Mapping[str, str],
    stderr: int | None,
) -> ForkedProcess:
    """A forkserver of this interpreter. `descriptors`: the settings that are numbers of descriptors."""
    order = {"settings": dict(settings), "descriptors": [*descriptors], "environment": dict(environment)}
    given = [settings[name] for name in descriptors]
    return _template("_fork_workers", OF_A_FORKSERVER).start(order, 2 if stderr is None else stderr, *given)


class ForkedProcess:
    """A process with the methods of subprocess.Popen that are used. `report` is the reading end of its pipe."""

    def __init__(self, report: IO[bytes], stdout: IO[str] | None) -> None:
        self.stdout = stdout
        self.returncode: int | None = None
        self._report = report
        self._lock = threading.Lock()
        self.pid = int(report.readline())

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                ready, _, _ = select.select([self._report], [], [], timeout)
                if not ready:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
                self.returncode = int(self._report.readline())
                self._report.close()
            return self.returncode

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """A template process, as the tests see it. `entry`: the function of this module that a new process calls."""

    def __init__(self, entry: str, modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), entry, *modules]
            # A pipe, as that of each server, because Python asks only at its start whether it can seek in it.
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, stdout=subprocess.PIPE)
        atexit.register(self._end)

    def start(self, order: Mapping[str, Any], *descriptors: int, stdout: IO[str] | None = None) -> ForkedProcess:
        status, report = os.pipe()
        try:
            message = json.dumps([os.getcwd(), order]).encode()
            socket.send_fds(self._socket, [message], [report, *descriptors])
        finally:
            os.close(report)
        return ForkedProcess(open(status, "rb", buffering=0), stdout)

    def _end(self) -> None:
        self._socket.close()
        self._process.communicate()


@cache
def _template(entry: str, modules: Sequence[str]) -> Template:
    return Template(entry, modules)


# ------------------------------------------------------------------------------------------------ the template process


def _main(number: str, entry: str, *modules: str) -> int:
    """Fork processes until the tests end. Returns in each of them too, with its exit status."""
    for name in modules:
        import_module(name)
    gc.collect()
    gc.freeze()
    orders = socket.socket(fileno=int(number))
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if not message:
            return 0
        if not os.fork():
            orders.close()
            if pid := os.fork():
                _watch(pid, *descriptors)
            os.close(descriptors[0])
            folder, order = json.loads(message)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(order["environment"])
            begin: Callable[..., int] = globals()[entry]
            return begin(order, *descriptors[1:])
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(pid: int, report: int, *others: int) -> NoReturn:
    for descriptor in others:
        os.close(descriptor)
    os.write(report, b"%d\n" % pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, status = os.waitpid(pid, 0)
    os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(descriptor: int, number: int) -> None:
    os.dup2(descriptor, number)
    os.close(descriptor)


def _serve(order: Mapping[str, Any], stdout: int, stderr: int) -> int:
    _become(stdout, 1)
    _become(stderr, 2)
    gc.unfreeze()  # a server decides itself what is frozen
    from flowserve import __main__ as program

    sys.argv = [program.__file__, *order["arguments"]]
    return program.main()


def _fork_workers(order: Mapping[str, Any], stderr: int, *descriptors: int) -> int:
    os.setsid()
    _become(stderr, 2)
    for number in (0, 1):
        _become(os.open(os.devnull, os.O_RDWR), number)
    from flowserve.backends.worker.forkserver import main

    settings = {**order["settings"], **dict(zip(order["descriptors"], descriptors, strict=True))}
    sys.path[:] = settings.pop("path")
    for name in ("package", "oldest", "libraries"):
        del settings[name]
    main(**{**settings, "parent": os.getppid()})  # its parent is the watcher
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
