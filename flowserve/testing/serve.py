"""A server in its own process, for end-to-end tests and measurements.

Decides how it is started (on a free port of this machine), when it counts as started (it prints its address), and that
it is stopped at the end of the block. Does not know the served models.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

START_S_MAX = 90.0  # a start slower than this is a failure; the examples take about two seconds
STOP_S_MAX = 60.0


class Process(Protocol):
    """A started process, as subprocess.Popen has it. `stdout` is the reading end of its standard output."""

    @property
    def pid(self) -> int: ...
    @property
    def stdout(self) -> IO[str] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


# Starts `flowserve` with these arguments, standard error and environment.
Start = Callable[[Sequence[str], IO[str], Mapping[str, str]], Process]


@dataclass(slots=True)
class Served:
    """A running server. `lines` is its output up to and including the line with its address.

    `log_path` is the file of its standard error, which exists as long as the server runs.
    """

    base_url: str
    process: Process
    lines: list[str]
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> str:
        """`127.0.0.1:PORT`, in tritonclient's format."""
        return self.base_url.removeprefix("http://")

    @property
    def port(self) -> int:
        return int(self.base_url.rpartition(":")[2])

    @property
    def grpc_address(self) -> str:
        """`127.0.0.1:PORT` of gRPC, if it is enabled."""
        (line,) = [line for line in self.lines if line.startswith("gRPC on ")]
        return line.removeprefix("gRPC on ")

    @property
    def log(self) -> str:
        """Its standard error so far."""
        return self.log_path.read_text()

    def stop(self, number: signal.Signals = signal.SIGTERM, within_s: float = STOP_S_MAX) -> int:
        """Send the signal and wait. Returns the exit status; raises subprocess.TimeoutExpired."""
        self.process.send_signal(number)
        return self.process.wait(within_s)


class DidNotServe(Exception):
    """The process ended before it listened. `status` is its exit status, `lines` and `log` its output."""

    def __init__(self, status: int, lines: Sequence[str], log: str) -> None:
        super().__init__(f"flowserve run ended with status {status}:\n{log}")
        self.status = status
        self.lines = list(lines)
        self.log = log


def started(
    arguments: Sequence[str], stderr: IO[str], environment: Mapping[str, str], python: str = sys.executable
) -> subprocess.Popen[str]:
    """`python -m flowserve ARGUMENTS`."""
    command = [python, "-m", "flowserve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=dict(environment))


@contextmanager
def serving(
    repository: Path, *options: str, environment: Mapping[str, str] | None = None, start: Start = started
) -> Iterator[Served]:
    """`python -m flowserve run REPOSITORY OPTIONS` on a free port, until the block ends.

    `options` come last and so win over the defaults: without `--allow-grpc true` it serves HTTP only. `start` starts
    the process: `partial(started, python=...)` with another interpreter. Raises DidNotServe.
    """
    quiet = ["--http-port", "0", "--allow-grpc", "false"]
    arguments = ["run", str(repository), *quiet, *options]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log_file:
        process = start(arguments, log_file, {**os.environ, **(environment or {})})
        try:
            lines = _read_until_listening(process)
            if process.poll() is not None or not lines or not lines[-1].startswith("listening on "):
                raise DidNotServe(process.wait(STOP_S_MAX), lines, Path(log_file.name).read_text())
            yield Served(lines[-1].removeprefix("listening on "), process, lines, Path(log_file.name))
        finally:
            _end(process)


def _read_until_listening(process: Process) -> list[str]:
    assert process.stdout is not None
    too_late = threading.Timer(START_S_MAX, process.kill)
    too_late.start()
    lines = []
    try:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("listening on "):
                break
    finally:
        too_late.cancel()
    return lines


def _end(process: Process) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.stdout is not None
    process.stdout.close()
