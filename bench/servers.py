"""The servers that are measured: their commands, how they are started, loaded and stopped, and their configuration.

Every server listens on 127.0.0.1 and runs in a process group of its own, which is stopped as a whole.
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

from bench import wrk
from bench.load import LoadFailed, Measured

READY_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 10.0

FLOWSERVE: Final = "flowserve"
TRITON: Final = "triton"
BEFORE: Final = "before"

# The names under which Debian's packages install them.
ALLOCATORS: Final = (
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4",
    "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2",
)

_LISTENING = re.compile(r"http://127\.0\.0\.1:(\d+)")


class BenchFailed(Exception):
    """The measurement cannot continue; the text has the reason and the end of the server's log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `pid` is the root of its process tree, `log` the file of its output."""

    name: str
    pid: int
    port: int
    log: Path


def flowserve_command(repository: Path, python_execution: str, program: Sequence[str] = ()) -> list[str]:
    """The command of a server. `program` is another flowserve than that of this interpreter."""
    return [
        *(program or (sys.executable, "-m", "flowserve")),
        *("run", str(repository), "--http-port", "0", "--python-execution", python_execution),
    ]


def other_flowserve(against: str) -> tuple[list[str], Path | None]:
    """The command of another flowserve and its working directory: of a checkout (run by this interpreter), of the
    Python of a virtual environment, or `against` itself as a command."""
    path = Path(against)
    if path.is_dir():
        return [sys.executable, "-m", "flowserve"], path.resolve()
    if path.is_file() and path.name.startswith("python"):
        # Not the current directory, whose flowserve would be found before the installed one.
        return [str(path.absolute()), "-m", "flowserve"], path.absolute().parent
    return shlex.split(against), None


def triton_command(repository: Path, port: int) -> list[str]:
    """The command in the environment variable TRITONSERVER, with the repository and the HTTP port as its arguments."""
    return [*shlex.split(os.environ["TRITONSERVER"]), str(repository), str(port)]


def triton_environment() -> dict[str, str]:
    """Triton is run with tcmalloc or jemalloc, as its documentation recommends, where the library is installed."""
    if "LD_PRELOAD" not in os.environ:
        for library in ALLOCATORS:
            if Path(library).exists():
                return {"LD_PRELOAD": library}
    return {}


def triton_allocator() -> str:
    """The file name of the library that is preloaded, "" for none."""
    return Path(triton_environment().get("LD_PRELOAD") or os.environ.get("LD_PRELOAD", "")).name


def configuration(against: str = "") -> list[str]:
    """One line for each server that is measured: the Python that runs it, its origin, its allocator."""
    lines = [f"{FLOWSERVE}: {_described([sys.executable], None)}"]
    if against:
        program, folder = other_flowserve(against)
        python = program[1:] == ["-m", "flowserve"]
        lines.append(f"{BEFORE}: {_described(program[:1], folder) if python else against}")
    if os.environ.get("TRITONSERVER"):
        preload = triton_environment().get("LD_PRELOAD") or os.environ.get("LD_PRELOAD") or "no other allocator"
        lines.append(
            f"{TRITON}: {os.environ['TRITONSERVER']}, preloaded: {preload}; the same models, dims and instances, each "
            "model.py in a process of its own, ONNX files run by a model.py"
        )
    return lines


# Run by the interpreter that is described. Debian's Python is the one below /usr.
_DESCRIBE: Final = """
import platform, sys
from pathlib import Path
import flowserve
debian = sys.base_prefix == "/usr" and Path("/etc/debian_version").exists()
print("Python", platform.python_version(), "of Debian" if debian else "not of Debian, in " + sys.base_prefix,
      "runs", Path(flowserve.__file__).parent)
"""


def _described(python: Sequence[str], folder: Path | None) -> str:
    done = subprocess.run(
        [*python, "-c", _DESCRIBE], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30
    )
    if done.returncode:
        raise BenchFailed(f"{python[0]} cannot import flowserve: {done.stdout.strip()}")
    return done.stdout.strip()


def free_port() -> int:
    """A free port, for servers that cannot choose one themselves."""
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
    server, process = start(
        name, command, log, port=port, ready_path=ready_path, environment=environment, folder=folder
    )
    try:
        yield server
        if process.poll() is not None:
            raise BenchFailed(f"{name} ended by itself with status {process.returncode}:\n{_tail(log)}")
    finally:
        stop(process)


def start(
    name: str,
    command: Sequence[str],
    log: Path,
    *,
    port: int = 0,
    ready_path: str = "/v2/health/ready",
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> tuple[Server, subprocess.Popen[bytes]]:
    """As `serving`, for a server that the caller ends, at the latest with `stop`."""
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
        return Server(name, process.pid, _wait_ready(name, process, log, port, ready_path), log), process
    except BaseException:
        stop(process)
        raise


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


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process group, then kill it: a server's children may outlive it."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def run_load(
    folder: Path,
    server: Server,
    concurrency: int,
    warmup_s: float,
    seconds: float,
    *,
    client: str = "own",
    rate: float = 0.0,
    cycle: bool = False,
) -> Measured:
    """One run of the "own" load generator in its own process, or of "wrk". Raises BenchFailed with its message.

    `rate`: requests per second of an open loop, 0 for a closed one. `cycle`: each connection sends all requests in turn
    (`wrk` always does).
    """

    def failed(text: str) -> BenchFailed:
        return BenchFailed(f"{server.name}, concurrency {concurrency}: {text}\n{_tail(server.log)}".strip())

    if client == "wrk":
        try:
            return wrk.measure(folder, server.port, server.pid, concurrency, warmup_s, seconds)
        except LoadFailed as error:
            raise failed(str(error)) from error
    command = [
        *(sys.executable, "-m", "bench.load", str(folder)),
        *("--port", str(server.port), "--server-pid", str(server.pid)),
        *("--concurrency", str(concurrency), "--warmup", str(warmup_s), "--seconds", str(seconds)),
        *("--rate", str(rate), *(["--cycle"] if cycle else [])),
    ]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=warmup_s + seconds + 60.0)
    except subprocess.TimeoutExpired as error:
        raise failed("the load generator did not end") from error
    if finished.returncode:
        raise failed(finished.stderr.strip())
    return Measured(**json.loads(finished.stdout))
