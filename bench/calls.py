"""Calls of Python functions for each request, by function: a figure that does not depend on the machine's other load.

A call is a "call" event of `sys.setprofile`: of a function, a generator that is resumed, or a comprehension. Counted
are those of flowserve's and trio's functions, in the server's main thread and in each worker process. The server runs
as `flowserve run` does, with a thread that reports the counts; a worker process counts by itself and writes its counts
when its model is finalised. Start-up disappears in the rounding over many requests.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import trio

import flowserve
from bench.in_process import NAME
from bench.repositories import Onnxruntime, write_repository
from bench.requests import infer_request
from bench.servers import BenchFailed, serving
from bench.works import WORKS, Work

REQUESTS: Final = 400  # counted, one at a time
_WARM_UP: Final = 400
_PACKAGES: Final = {
    name: str(Path(found).parent) for name, found in (("flowserve", flowserve.__file__), ("trio", trio.__file__))
}
_TIMEOUT_S: Final = 30.0

# Added to a model.py that runs in a process: counts what its process does, from its first batch to its end.
_TRACED: Final = """

def _count_calls():
    import collections, json, os, sys

    counts = collections.Counter()
    execute = TritonPythonModel.execute.__code__

    def profile(frame, event, argument):
        if event == "call":
            counts[frame.f_code] += 1

    class Traced(TritonPythonModel):
        def initialize(self, args):
            self.path = os.path.join(args["model_repository"], "calls.json")
            sys.setprofile(profile)

        def finalize(self):
            sys.setprofile(None)
            found = {f"{code.co_filename}:{code.co_name}:{code.co_firstlineno}": n for code, n in counts.items()}
            with open(self.path, "w") as file:
                json.dump([counts[execute], found], file)

    return Traced


TritonPythonModel = _count_calls()
"""


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls for one request or batch, by function: "file:name:line"."""

    subject: str
    functions: Mapping[str, int]

    def of(self, package: str) -> tuple[int, int]:
        """The calls of the functions of a package, and the number of their files."""
        found = {name: count for name, count in self.functions.items() if f"/{package}/" in f"/{name}"}
        return sum(found.values()), len({name.split(":")[0] for name in found})

    def __str__(self) -> str:
        (own, own_files), (trio_calls, trio_files) = self.of("flowserve"), self.of("trio")
        line = f"{self.subject:<62} {own:>4} calls in {own_files:>2} files"
        return f"{line}, of trio {trio_calls:>3} in {trio_files}" if trio_calls else line


def _rounded(counts: Mapping[str, int], requests: int) -> dict[str, int]:
    """The functions of flowserve and trio that were called for each request."""
    found = {}
    for name, count in counts.items():
        each = round(count / requests)
        for package, folder in _PACKAGES.items():
            if each and name.startswith(f"{folder}/"):
                found[package + name.removeprefix(folder)] = each
    return found


def measure_calls(say: Callable[[str], None]) -> list[Calls]:
    """Count the calls of one request at a time: one `model.py` and a chain of three, each in processes and inline, and
    a small ONNX model inside a program.
    """
    found: list[Calls] = []
    for work in (WORKS["identity"], WORKS["chain"]):
        for execution in ("process", "inline"):
            say(f"{work.name}, {execution}")
            found += _served(work, execution)
    say("ONNX in process")
    found.append(_in_process())
    return found


def _served(work: Work, execution: str) -> list[Calls]:
    with tempfile.TemporaryDirectory(prefix="bench-calls-") as folder:
        repository = Path(folder, "models")
        write_repository(work, repository, Onnxruntime.BACKEND, varying=True)
        if execution == "process":
            for model in repository.glob("*/1/model.py"):
                model.write_text(model.read_text() + _TRACED)
        control = f"{folder}/control"
        command = [sys.executable, "-m", "bench.calls", control, "run", str(repository)]
        command += ["--http-port", "0", "--python-execution", execution]
        with serving("flowserve", command, Path(folder, "log"), environment={}, folder=Path.cwd()) as server:
            request = infer_request(work.name, work.rows(1))
            with socket.create_connection(("127.0.0.1", server.port), _TIMEOUT_S) as sock:
                for _ in range(_WARM_UP):
                    _exchange(sock, request)
                before = report(control)
                for _ in range(REQUESTS):
                    _exchange(sock, request)
                after = report(control)
        counts = {name: count - before.get(name, 0) for name, count in after.items()}
        where = "in a process" if execution == "process" else execution
        found = [Calls(f"{work.name}, {where}: the server, a request", _rounded(counts, REQUESTS))]
        for path in sorted(repository.glob("*/calls.json")):
            batches, counts = json.loads(path.read_text())
            subject = f"{work.name}, {where}: the process of {path.parent.name}, a batch"
            found.append(Calls(subject, _rounded(counts, batches)))
    return found


def _exchange(sock: socket.socket, request: bytes) -> None:
    sock.sendall(request)
    received = sock.recv(65536)  # a small response comes in one piece
    if not received.startswith(b"HTTP/1.1 200 "):
        raise BenchFailed(f"the traced server answered {received[:200]!r}")


def report(control: str) -> Any:
    """The counts so far of the server with this control socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_TIMEOUT_S)
        sock.connect(control)
        with sock.makefile("rb") as file:
            counts: dict[str, int] = json.load(file)
    return counts


def _in_process() -> Calls:
    net = next(step for step in WORKS["mlp"].steps if step.model == "mlp_net")
    work = Work(NAME, "", (replace(net, inputs={"X": "X"}, output="Y"),))
    counts: Counter[CodeType] = Counter()
    with tempfile.TemporaryDirectory(prefix="bench-calls-") as folder:
        write_repository(work, Path(folder), Onnxruntime.BACKEND)

        async def run() -> None:
            async with flowserve.Engine(folder) as engine:
                row = work.rows(1)
                for i in range(2 * _WARM_UP + REQUESTS):  # the engine chooses the execution in the first ones
                    if i == 2 * _WARM_UP:
                        sys.setprofile(_counter(counts))
                    await engine.infer(NAME, {"X": row})
                sys.setprofile(None)

        trio.run(run)
    return Calls("a small ONNX model, in process: await Engine.infer", _rounded(_named(counts), REQUESTS))


def _counter(counts: Counter[CodeType]) -> Callable[[FrameType, str, Any], None]:
    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counts[frame.f_code] += 1

    return profile


def _named(counts: Mapping[CodeType, int]) -> dict[str, int]:
    named: Counter[str] = Counter()
    for code, count in [*counts.items()]:  # another thread goes on counting
        named[f"{code.co_filename}:{code.co_name}:{code.co_firstlineno}"] += count
    return dict(named)


def _serve_counts(control: socket.socket, counts: Counter[CodeType]) -> None:
    while True:
        connection, _ = control.accept()
        with connection:
            connection.sendall(json.dumps(_named(counts)).encode())


def main() -> int:
    """Run the command line of flowserve, and count the calls of its main thread. The first argument is the path of a
    socket: each connection to it gets the counts so far.
    """
    from flowserve.cli.main import main as run

    control = socket.socket(socket.AF_UNIX)
    control.bind(sys.argv.pop(1))
    control.listen()
    counts: Counter[CodeType] = Counter()
    threading.Thread(target=_serve_counts, args=(control, counts), daemon=True).start()
    sys.setprofile(_counter(counts))
    return run()


if __name__ == "__main__":
    sys.exit(main())
