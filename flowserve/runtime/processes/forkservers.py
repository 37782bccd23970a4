"""The forkserver processes from the server's side: one for each Python in which models run.

Decides how a forkserver is started, that it reports when it is ready, the error for a Python that cannot run one, and
that an ended forkserver is replaced. `backends/worker/forkserver.py` is the code of that process; `children.py` handles
its children. Linux only.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from flowserve.errors import Unavailable
from flowserve.runtime.processes.log_level import share_log_level

log = logging.getLogger("flowserve.runtime")

# The oldest version that the code of worker processes supports.
PYTHON_MIN: Final = (3, 10)
# The server's own Python uses the server's module path. Another Python uses its own path, plus the server's flowserve
# package only. It may be any version, so this code has only syntax that all of them read.
_BOOTSTRAP: Final = """
import json, os, sys
settings = json.loads(sys.argv.pop(1))
path, package, oldest, libraries = [settings.pop(name) for name in ("path", "package", "oldest", "libraries")]
def refuse(why):
    os.write(settings["orders"], json.dumps({"error": why}).encode())
    sys.exit(1)
if path is None:
    if sys.path[:1] == [""]:
        del sys.path[0]
    rest = os.environ.get("LD_LIBRARY_PATH", "")[len(libraries):].lstrip(":")
    if rest:
        os.environ["LD_LIBRARY_PATH"] = rest
    else:
        os.environ.pop("LD_LIBRARY_PATH", None)
    if sys.version_info[:2] < tuple(oldest):
        refuse("it has Python %d.%d, and models need %d.%d or newer" % (sys.version_info[:2] + tuple(oldest)))
    try:
        import numpy
    except Exception as error:
        text = str(error).strip().split("\\n")[-1]  # the last line of numpy's long message has the cause
        refuse("numpy, which every model needs, cannot be imported there: %s: %s" % (type(error).__name__, text))
    import importlib.util
    spec = importlib.util.spec_from_file_location("flowserve", package[0] + "/__init__.py",
                                                  submodule_search_locations=package)
    sys.modules["flowserve"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["flowserve"])
else:
    sys.path[:] = path
from flowserve.backends.worker.forkserver import main
main(**settings)
"""

# Time for a forkserver to end before it is killed.
FORKSERVER_END_S_MAX: Final = 2.0
_STDERR_TAIL_BYTES: Final = 1000
# A fork would copy a library's locks in their current state, but not its threads.
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python in which models can run. `command`: its arguments are appended to it.

    `variables`: added to the server's environment variables, None removes one. `libraries`: the prefix that the command
    adds to LD_LIBRARY_PATH, for itself and not for its children. `is_own`: it is the server's.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str | None]
    libraries: str = ""
    is_own: bool = False

    def environment(self) -> dict[str, str]:
        """The environment variables with which it is started."""
        together = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), **self.variables}
        return {name: value for name, value in together.items() if value is not None}


def start(
    command: Sequence[str],
    settings: Mapping[str, Any],
    descriptors: Sequence[str],
    environment: Mapping[str, str],
    stderr: int | None,
) -> subprocess.Popen[bytes]:
    """Start the process. `descriptors`: the settings that are numbers of descriptors, which it gets. Raises OSError."""
    return subprocess.Popen(
        [*command, "-c", _BOOTSTRAP, json.dumps(settings)],
        pass_fds=[settings[name] for name in descriptors],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=dict(environment),
        start_new_session=True,  # a Ctrl-C at the terminal is for the server only
    )


class ForkServer:
    """The forkserver of one interpreter; started at its first use, and again after it has ended. On any thread; every
    method blocks.
    """

    def __init__(self, interpreter: Interpreter, listen: Callable[[socket.socket], object]) -> None:
        """`listen` receives the socket on which a ready process reports ended children, until the socket closes."""
        self._interpreter = interpreter
        self._listen = listen
        self._lock = threading.Lock()  # one fork request at a time
        self._process: _Process | None = None
        self._closed = ""  # why no process starts any more

    def start(self) -> Mapping[str, Any]:
        """Wait until it is ready. Returns the properties of its Python. Raises Unavailable if it does not start."""
        with self._lock:
            return self._running().facts

    def order(self, name: str, entry: str, fds: tuple[int, int, int]) -> tuple[int, int, socket.socket]:
        """Fork a child. Returns its process id, a pidfd, and the socket on which its end will be reported. Raises
        Unavailable.
        """
        with self._lock:
            return self._running().order(name, entry, fds)

    def hang_up(self, why: str = "the server is ending") -> None:
        """End it and all its children; it never starts again. Pending calls raise Unavailable with `why`."""
        self._closed = why
        process = self._process
        if process is not None:
            process.hang_up()

    def wait(self) -> None:
        """Wait for its end; kill it after FORKSERVER_END_S_MAX."""
        process = self._process
        if process is not None:
            process.wait_or_kill()

    def _running(self) -> _Process:
        self._refuse_where_closed()
        process = self._process
        if process is not None and process.popen.poll() is not None:
            log.error("the process that starts models has ended, and all of them with it; starting another")
            process.hang_up()
            process = None
        if process is None:
            process = self._process = _Process(self._interpreter)
            try:
                self._refuse_where_closed()  # checked again: `hang_up` sets `_closed` before it reads `_process`
                process.wait_ready()
            except BaseException:
                self._process = None
                process.give_up()
                self._refuse_where_closed()
                raise
            self._listen(process.reports)
        return process

    def _refuse_where_closed(self) -> None:
        if self._closed:
            raise Unavailable(self._closed) from None


class _Process:
    """One forkserver process and the server's ends of its sockets. It ends when the socket for orders is closed."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.facts: Mapping[str, Any] = {}
        self._is_hung_up = False
        self._orders, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reports, reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reports.setblocking(False)
        # If another Python does not start, its stderr (or that of its shell) has the reason.
        self._stderr_fd = None if interpreter.is_own else os.memfd_create("stderr")
        with orders, reports:
            fds = {"orders": orders.fileno(), "reports": reports.fileno(), "log_level": share_log_level()}
            settings = {
                **fds,
                "path": sys.path if interpreter.is_own else None,
                "package": [str(resources.files("flowserve"))],
                "oldest": PYTHON_MIN,
                "libraries": interpreter.libraries,
                "parent": os.getpid(),
                "environment": {name: os.environ.get(name) for name in _ONE_THREAD},
            }
            try:
                self.popen = start(interpreter.command, settings, [*fds], interpreter.environment(), self._stderr_fd)
            except OSError as error:
                self._orders.close()
                self.reports.close()
                self._close_stderr()
                raise Unavailable(f"its Python does not start: {error.strerror}") from None

    def wait_ready(self) -> None:
        """Wait until it has sent its facts. Raises Unavailable if it ends before."""
        try:
            word, _ = self._receive()
            if not word:
                raise Unavailable(f"its Python does not start{self._stderr_tail()}")
            self.facts = json.loads(word)
            if "error" in self.facts:
                raise Unavailable(self.facts["error"])
        finally:
            self._close_stderr()

    def order(self, name: str, entry: str, fds: tuple[int, int, int]) -> tuple[int, int, socket.socket]:
        try:
            socket.send_fds(self._orders, [json.dumps({"name": name, "entry": entry}).encode()], fds)
        except OSError:
            raise Unavailable("the process that starts models has ended") from None
        answer, received = self._receive()
        if not answer:
            raise Unavailable("the process that starts models has ended")
        reply = json.loads(answer)
        if "error" in reply:
            raise Unavailable(reply["error"])
        return int(reply["pid"]), received[0], self.reports

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            answer, received, _, _ = socket.recv_fds(self._orders, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return b"", []
        return answer, received

    def _stderr_tail(self) -> str:
        if self._stderr_fd is None or self._is_hung_up:
            return ""
        self.wait_or_kill()
        begin = max(os.fstat(self._stderr_fd).st_size - _STDERR_TAIL_BYTES, 0)
        text = os.pread(self._stderr_fd, _STDERR_TAIL_BYTES, begin).decode(errors="replace").strip()
        return f": {text.splitlines()[-1].strip()}" if text else ""

    def _close_stderr(self) -> None:
        fd, self._stderr_fd = self._stderr_fd, None
        if fd is not None:
            os.close(fd)

    def hang_up(self) -> None:
        self._is_hung_up = True
        with suppress(OSError):
            self._orders.shutdown(socket.SHUT_RDWR)
        self._orders.close()

    def give_up(self) -> None:
        """Kill a process that did not become ready, with its group: the activation script may have started others."""
        self.hang_up()
        self.reports.close()
        if self.popen.returncode is None:  # until it is reaped, its group's number is not reused
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def wait_or_kill(self) -> None:
        try:
            self.popen.wait(FORKSERVER_END_S_MAX)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
