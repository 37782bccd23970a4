"""The servers that are measured: how each is started, asked and stopped.

Decided here: the commands, and that whatever was started is gone afterwards. Every server listens on 127.0.0.1 and runs
in a process group of its own, which is all that is ever signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.load import Measured

READY_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 10.0

FLOWSERVE: Final = "flowserve"
TRITON: Final = "triton"
BEFORE: Final = "before"

_LISTENING = re.compile(r"http://127\.0\.0\.1:(\d+)")


class BenchFailed(Exception):
    """The measurement cannot go on; the text says why, with what the server itself said."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `pid` is the root of its process tree."""

    name: str
    pid: int
    port: int


def flowserve_command(repository: Path, python_execution: str, program: Sequence[str] = ()) -> list[str]:
    """`program` is another flowserve than the one that this interpreter finds."""
    return [
        *(program or (sys.executable, "-m", "flowserve")),
        *("run", str(repository), "--http-port", "0", "--python-execution", python_execution),
    ]


def other_flowserve(against: str) -> tuple[list[str], Path | None]:
    """How another flowserve is called, and in which folder: a checkout is run by this interpreter from its folder,
    anything else is a command."""
    folder = Path(against)
    if folder.is_dir():
        return [sys.executable, "-m", "flowserve"], folder
    return shlex.split(against), None


def triton_command(repository: Path, port: int) -> list[str]:
    """What the environment variable TRITONSERVER names, with the repository and the HTTP port as its arguments."""
    return [*shlex.split(os.environ["TRITONSERVER"]), str(repository), str(port)]


def free_port() -> int:
    """A port nobody listens on now; for servers that cannot choose one themselves."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(
    name: str,
    command: Sequence[str],
    log: Path,
    *,
    port: int = 0,
    ready_path: str = "/v2/health/ready",
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> Iterator[Server]:
    """Run `command` until the block ends, in `folder` where one is given. With port 0 the server chooses, and prints
    the address it listens on.

    Raises BenchFailed, with the end of its log, when it ends early or is not ready within READY_LIMIT_S.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            cwd=folder,
            start_new_session=True,
        )
    try:
        yield Server(name, process.pid, _wait_ready(name, process, log, port, ready_path))
        if process.poll() is not None:
            raise BenchFailed(f"{name} ended by itself with status {process.returncode}:\n{_tail(log)}")
    finally:
        _stop(process)


def _wait_ready(name: str, process: subprocess.Popen[bytes], log: Path, port: int, ready_path: str) -> int:
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchFailed(f"{name} did not start: it ended with status {process.returncode}:\n{_tail(log)}")
        if not port and (found := _LISTENING.search(log.read_text(errors="replace"))):
            port = int(found[1])
        if port and _answers(f"http://127.0.0.1:{port}{ready_path}"):
            return port
        time.sleep(0.05)
    raise BenchFailed(f"{name} was not ready within {READY_LIMIT_S:.0f} seconds:\n{_tail(log)}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the group to end, then make it end: a server's children may outlive it, so it is always signalled twice."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def run_load(folder: Path, server: Server, concurrency: int, warmup_s: float, seconds: float) -> Measured:
    """One run of the load generator in its own process. Raises BenchFailed with its complaint."""
    command = [
        *(sys.executable, "-m", "bench.load", str(folder)),
        *("--port", str(server.port), "--server-pid", str(server.pid)),
        *("--concurrency", str(concurrency), "--warmup", str(warmup_s), "--seconds", str(seconds)),
    ]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=warmup_s + seconds + 60.0)
    except subprocess.TimeoutExpired as error:
        raise BenchFailed(f"{server.name}, concurrency {concurrency}: the load generator did not end") from error
    if finished.returncode:
        raise BenchFailed(f"{server.name}, concurrency {concurrency}: {finished.stderr.strip()}")
    return Measured(**json.loads(finished.stdout))
