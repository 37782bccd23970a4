"""The processes that fork models' processes, as the server sees them: one for each Python that models run in.

Decided here: what such a process is started with, that it says when it is ready, what is said of a Python that cannot
be one, and that another takes its place when it has ended. What it does is backends/child/forkserver.py's, what becomes
of its children children.py's. Linux only.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flowserve.errors import Unavailable

log = logging.getLogger("flowserve.runtime")

# What runs in children is written for it, and numpy is all that it needs besides.
PYTHON_MIN: Final = (3, 10)
# The server's own Python finds modules where the server finds them. Another one finds its own, and of the server's
# flowserve alone. It may be any Python, so this is written for all of them.
_BEGIN: Final = """
import json, os, sys
told = json.loads(sys.argv.pop(1))
path, package, oldest, libraries = [told.pop(name) for name in ("path", "package", "oldest", "libraries")]
def refuse(why):
    os.write(told["orders"], json.dumps({"error": why}).encode())
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
        said = str(error).strip().split("\\n")[-1]  # numpy tells at length what may be the matter, and then what it is
        refuse("numpy, which every model needs, cannot be imported there: %s: %s" % (type(error).__name__, said))
    import importlib.util
    spec = importlib.util.spec_from_file_location("flowserve", package[0] + "/__init__.py",
                                                  submodule_search_locations=package)
    sys.modules["flowserve"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["flowserve"])
else:
    sys.path[:] = path
from flowserve.backends.child.forkserver import main
main(**told)
"""

# How long it may take to end.
END_S_MAX: Final = 2.0
_LAST_WORDS_BYTES_MAX: Final = 1000
# A library with threads of its own would be copied by a fork without them, with its locks as they stand.
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that models can run in: `command` is what its arguments are put behind.

    `variables`: what its environment has besides the server's, None for what it has not. `libraries`: what the command
    puts before LD_LIBRARY_PATH, which is for itself and not for what it starts. `is_own`: it is the server's.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str | None]
    libraries: str = ""
    is_own: bool = False

    def environment(self) -> dict[str, str]:
        """What it is started with."""
        together = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), **self.variables}
        return {name: value for name, value in together.items() if value is not None}


def own_interpreter() -> Interpreter:
    """The server's."""
    return Interpreter((sys.executable,), {}, is_own=True)


class ForkServer:
    """The process that forks for one interpreter; started when it is first needed, and again when it has ended. On any
    thread; none of it is quick.
    """

    def __init__(self, interpreter: Interpreter, listen: Callable[[socket.socket], object]) -> None:
        """`listen` takes the socket on which a process that is ready reports ends, until it closes."""
        self._interpreter = interpreter
        self._listen = listen
        self._lock = threading.Lock()  # one order at a time
        self._process: _Process | None = None
        self._closed = ""  # why nothing starts any more

    def start(self) -> Mapping[str, Any]:
        """Wait until it is ready. Returns what it says of its Python; raises Unavailable where that cannot be."""
        with self._lock:
            return self._running().facts

    def order(self, name: str, entry: str, fds: tuple[int, int, int]) -> tuple[int, int, socket.socket]:
        """Wait until a child is there. Returns its process id, a pidfd, and the socket on which its end is going to be
        reported. Raises Unavailable.
        """
        with self._lock:
            return self._running().order(name, entry, fds)

    def hang_up(self, why: str = "the server is ending") -> None:
        """It ends, and all its children; nothing starts afterwards. Wakes whoever waits for it, who is told `why`."""
        self._closed = why
        process = self._process
        if process is not None:
            process.hang_up()

    def wait(self) -> None:
        """Until it has ended, by force where it takes too long."""
        process = self._process
        if process is not None:
            process.wait_or_kill()

    def _running(self) -> _Process:
        self._refuse_where_closed()
        process = self._process
        if process is not None and process.has_ended():
            log.error("the process that starts models has ended, and all of them with it; starting another")
            process.hang_up()
            process = None
        if process is None:
            process = self._process = _Process(self._interpreter)
            try:
                self._refuse_where_closed()  # looked at again: `hang_up` sets it first, then hangs up what it finds
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
    """One such process, and our ends of the sockets to it. Its lifeline is the socket for orders."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.facts: Mapping[str, Any] = {}
        self._is_hung_up = False
        self._orders, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reports, reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reports.setblocking(False)
        # Why another Python does not start is told by it, or by whatever could not start it.
        self._said = None if interpreter.is_own else os.memfd_create("said")
        with orders, reports:
            fds = (orders.fileno(), reports.fileno())
            told = {
                "path": sys.path if interpreter.is_own else None,
                "package": [str(Path(__file__).parents[1])],
                "oldest": PYTHON_MIN,
                "libraries": interpreter.libraries,
                "orders": fds[0],
                "reports": fds[1],
                "parent": os.getpid(),
                "log_level": logging.getLogger("flowserve").getEffectiveLevel(),
                "environment": {name: os.environ.get(name) for name in _ONE_THREAD},
            }
            try:
                self._process = subprocess.Popen(
                    [*interpreter.command, "-c", _BEGIN, json.dumps(told)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._said,
                    env=interpreter.environment(),
                    start_new_session=True,  # a Ctrl-C at the terminal is for the server only
                )
            except OSError as error:
                self._orders.close()
                self.reports.close()
                self._forget_what_it_said()
                raise Unavailable(f"its Python does not start: {error.strerror}") from None

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_ready(self) -> None:
        """Raises Unavailable where it never will be."""
        try:
            self.facts = self._facts()
        finally:
            self._forget_what_it_said()

    def _facts(self) -> Mapping[str, Any]:
        word, _ = self._heard()
        if not word:
            raise Unavailable(f"its Python does not start{self._last_words()}")
        facts: dict[str, Any] = json.loads(word)
        if "error" in facts:
            raise Unavailable(facts["error"])
        return facts

    def order(self, name: str, entry: str, fds: tuple[int, int, int]) -> tuple[int, int, socket.socket]:
        try:
            socket.send_fds(self._orders, [json.dumps({"name": name, "entry": entry}).encode()], fds)
        except OSError:
            raise Unavailable("the process that starts models has ended") from None
        answer, received = self._heard()
        if not answer:
            raise Unavailable("the process that starts models has ended")
        said = json.loads(answer)
        if "error" in said:
            raise Unavailable(said["error"])
        return int(said["pid"]), received[0], self.reports

    def _heard(self) -> tuple[bytes, list[int]]:
        try:
            answer, received, _, _ = socket.recv_fds(self._orders, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return b"", []
        return answer, received

    def _last_words(self) -> str:
        if self._said is None or self._is_hung_up:
            return ""
        self.wait_or_kill()
        begin = max(os.fstat(self._said).st_size - _LAST_WORDS_BYTES_MAX, 0)
        said = os.pread(self._said, _LAST_WORDS_BYTES_MAX, begin).decode(errors="replace").strip()
        return f": {said.splitlines()[-1].strip()}" if said else ""

    def _forget_what_it_said(self) -> None:
        said, self._said = self._said, None
        if said is not None:
            os.close(said)

    def hang_up(self) -> None:
        self._is_hung_up = True
        with suppress(OSError):
            self._orders.shutdown(socket.SHUT_RDWR)
        self._orders.close()

    def give_up(self) -> None:
        """It never became ready. What it waits for itself, the script that activates may have started."""
        self.hang_up()
        self.reports.close()
        if self._process.returncode is None:  # until it is reaped, its group's number is nobody else's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_or_kill(self) -> None:
        try:
            self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
