"""Servers forked from a process that has imported flowserve: importing it takes half of the CPU time of a start.

`serving` is that of flowserve.testing.serve; a start with variables of its own is a new interpreter, as for users, and
so are all those of tests/cli, tests/docs and tests/packaging. Does not know what a server does.

One template process for each process of tests. For each start it forks a watcher, which forks the server, and writes
its process id and, at its end, its exit status to a pipe. Linux only; elsewhere each start is a new interpreter.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Final

from flowserve.testing import serve
from flowserve.testing.serve import Served

ROOT: Final = Path(__file__).resolve().parent.parent.parent
MESSAGE_BYTES_MAX: Final = 200_000
# The interpreter reads it when it starts.
PYTHONPATH: Final = os.environ.get("PYTHONPATH")
# What most servers import.
PRELOADED: Final = (
    "flowserve.cli.main",
    "flowserve.cli.run",
    "flowserve.http.api.app",
    "flowserve.grpc.server",
    "flowserve.runtime.workers.process",
    "flowserve.backends.onnx.backend",
    "flowserve.backends.python.backend",
    "encodings.idna",
    "encodings.utf_8_sig",
)


@contextmanager
def serving(repository: Path, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[Served]:
    """As flowserve.testing.serve.serving."""
    is_plain = environment is None and os.environ.get("PYTHONPATH") == PYTHONPATH and sys.platform == "linux"
    start = _template().start if is_plain else serve.started
    with serve.serving(repository, *options, environment=environment, start=start) as served:
        yield served


class ForkedProcess:
    """A process with the methods of subprocess.Popen that tests use. `report` is the reading end of its pipe."""

    def __init__(self, report: IO[bytes], stdout: IO[str]) -> None:
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

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The template process, as the tests see it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            # A pipe, as that of each server, because Python asks only at its start whether it can seek in it.
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, stdout=subprocess.PIPE)
        atexit.register(self._end)

    def start(self, command: Sequence[str], stderr: IO[str], environment: Mapping[str, str]) -> ForkedProcess:
        """`command` without the interpreter and `-m flowserve`."""
        reading, output = os.pipe()
        status, report = os.pipe()
        try:
            message = json.dumps([[*command], os.getcwd(), dict(environment)]).encode()
            socket.send_fds(self._socket, [message], [output, stderr.fileno(), report])
        finally:
            os.close(output)
            os.close(report)
        return ForkedProcess(open(status, "rb", buffering=0), open(reading))

    def _end(self) -> None:
        self._socket.close()
        self._process.communicate()


_templates: list[Template] = []


def _template() -> Template:
    if not _templates:
        _templates.append(Template())
    return _templates[0]


# ------------------------------------------------------------------------------------------------ the template process


def _main() -> int:
    """Fork servers until the tests end. Returns in each server too, with its exit status."""
    # A server imports itself what is missing here.
    for name in PRELOADED:
        import_module(name)
    gc.collect()
    gc.freeze()
    orders = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, MESSAGE_BYTES_MAX, 3)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if not message:
            return 0
        if not os.fork():
            orders.close()
            return _watch(message, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(message: bytes, stdout: int, stderr: int, report: int) -> int:
    pid = os.fork()
    if not pid:
        os.close(report)
        return _serve(message, stdout, stderr)
    os.close(stdout)
    os.close(stderr)
    os.write(report, b"%d\n" % pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, status = os.waitpid(pid, 0)
    os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _serve(message: bytes, stdout: int, stderr: int) -> int:
    command, folder, environment = json.loads(message)
    for descriptor, number in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    gc.unfreeze()
    from flowserve import __main__ as program

    sys.argv = [program.__file__, *command]
    return program.main()


if __name__ == "__main__":
    sys.exit(_main())
