"""Where a request's time goes, by package: calls of Python functions and CPU time, of this flowserve and of another.

The server runs as `flowserve run` does, with a thread that reports counts. In one run every call of a Python function
is counted, with `sys.setprofile`, which makes the server slower; in another run, the function that is on the CPU is
noted 250 times in a second of CPU time of the main thread, with a signal. System calls and C functions belong to the
function of Python that calls them; the share of the kernel is counted by the kernel, for all packages together.

This file is also the program of that server. It imports nothing of bench/ there, so that another checkout's flowserve
can be measured, from whose folder it is started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Final

SAMPLE_S: Final = 0.004
_WARM_UP_S: Final = 0.5
# Of a package that is not shown by itself.
_SMALL: Final = 0.01


@dataclass(frozen=True, slots=True)
class Profile:
    """One server at one concurrency: for each request, by package, the calls and the CPU time in microseconds.
    `kernel_us` of the CPU time are the kernel's.
    """

    server: str
    concurrency: int
    calls: Mapping[str, float]
    cpu_us: Mapping[str, float]
    kernel_us: float

    def __str__(self) -> str:
        total_us, calls = sum(self.cpu_us.values()), sum(self.calls.values())
        lines = [f"{self.server}, concurrency {self.concurrency}: calls, CPU us, share of the CPU time"]
        packages = sorted(self.cpu_us.keys() | self.calls.keys(), key=lambda one: -self.cpu_us.get(one, 0.0))
        shown = [one for one in packages if self.cpu_us.get(one, 0.0) >= _SMALL * total_us]
        rows = [(one, self.calls.get(one, 0.0), self.cpu_us[one]) for one in shown]
        rest = (
            calls - sum(self.calls.get(one, 0.0) for one in shown),
            total_us - sum(self.cpu_us[one] for one in shown),
        )
        rows += [
            ("(all others)", *rest),
            ("(together)", calls, total_us),
            ("(of it in the kernel)", 0.0, self.kernel_us),
        ]
        for name, count, cpu_us in rows:
            lines.append(f"  {name:<24}{count:>8.1f}{cpu_us:>9.1f}{cpu_us / total_us:>6.0%}")
        return "\n".join(lines)


def package_of(path: str) -> str:
    """The package of a function by its file: two levels of flowserve, or the library it belongs to."""
    name = path.replace("<attrs generated methods trio.", "/trio/").replace(
        "<attrs generated methods outcome.", "/trio/"
    )
    parts = name.split("/")
    if parts[-1] == "model.py":
        return "model.py"
    if "flowserve" in parts:
        inside = parts[len(parts) - parts[::-1].index("flowserve") :]
        return "/".join(inside[:2]) if len(inside) > 2 else inside[0].removesuffix(".py")
    for library in ("trio", "numpy", "onnxruntime", "httptools"):
        if library in parts:
            return library
    return "trio" if "outcome" in parts else "other"


def measure_packages(
    against: str, concurrencies: Sequence[int], rounds: int, seconds: float, say: Callable[[str], None]
) -> list[Profile]:
    """Profile the chain inline, with varying dims, at each concurrency: of this flowserve and of the checkout `against`
    in turns, medians of `rounds`. Raises BenchFailed.
    """
    from bench.repositories import Onnxruntime, write_repository
    from bench.requests import write_requests
    from bench.servers import BEFORE, FLOWSERVE
    from bench.works import WORKS

    servers = {FLOWSERVE: Path.cwd()}
    if against:
        servers[BEFORE] = Path(against).resolve()
    work = WORKS["chain"]
    found: dict[tuple[str, int], list[Profile]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-packages-") as folder:
        repository, requests = Path(folder, "models"), Path(folder, "requests")
        write_repository(work, repository, Onnxruntime.BACKEND, varying=True)
        write_requests(work, requests, max(concurrencies))
        for number in range(rounds):
            for concurrency in concurrencies:
                for name, root in servers.items():
                    say(f"round {number + 1} of {rounds}, {name}, concurrency {concurrency}")
                    calls, _ = _run(root, repository, requests, "calls", concurrency, seconds)
                    cpu_us, kernel_us = _run(root, repository, requests, "cpu", concurrency, seconds)
                    profile = Profile(name, concurrency, calls, cpu_us, kernel_us)
                    found.setdefault((name, concurrency), []).append(profile)
    return [_middle(profiles) for profiles in found.values()]


def _middle(profiles: Sequence[Profile]) -> Profile:
    def medians(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {key: median([one.get(key, 0.0) for one in of]) for key in {key for one in of for key in one}}

    return Profile(
        profiles[0].server,
        profiles[0].concurrency,
        medians([one.calls for one in profiles]),
        medians([one.cpu_us for one in profiles]),
        median([one.kernel_us for one in profiles]),
    )


def _run(
    root: Path, repository: Path, requests: Path, what: str, concurrency: int, seconds: float
) -> tuple[dict[str, float], float]:
    """One run of a server: for each request by package the calls, or the CPU time in microseconds; and that of the
    kernel.
    """
    from bench.calls import report
    from bench.servers import BenchFailed, run_load, serving

    with tempfile.TemporaryDirectory(prefix="bench-packages-") as folder:
        control = f"{folder}/control"
        command = [sys.executable, __file__, what, control, "run", str(repository)]
        command += ["--http-port", "0", "--python-execution", "inline"]
        with serving("flowserve", command, Path(folder, "log"), environment={}, folder=root) as server:
            run_load(requests, server, concurrency, 0.0, _WARM_UP_S)
            before = report(control)
            measured = run_load(requests, server, concurrency, 0.0, seconds)
            after = report(control)
    if not measured.requests:
        raise BenchFailed("no request was answered")
    counts: Counter[str] = Counter()
    for path, count in after["counts"].items():
        counts[package_of(path)] += count - before["counts"].get(path, 0)
    kernel_us = (after["kernel_s"] - before["kernel_s"]) / measured.requests * 1e6
    scale = 1 / measured.requests
    if what == "cpu":  # the samples divide the CPU time between the packages
        scale *= (after["cpu_s"] - before["cpu_s"]) * 1e6 / max(1, sum(counts.values()))
    return {name: count * scale for name, count in counts.items() if count}, kernel_us


# ---------------------------------------------------------------------- the server's program


def _count_calls(counts: Counter[CodeType]) -> None:
    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            counts[frame.f_code] += 1

    sys.setprofile(profile)


def _sample(counts: Counter[CodeType]) -> None:
    def note(number: int, frame: FrameType | None) -> None:
        if frame is not None:
            counts[frame.f_code] += 1

    signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)


def _serve(control: socket.socket, counts: Counter[CodeType]) -> None:
    while True:
        connection, _ = control.accept()
        times = os.times()
        found: Counter[str] = Counter()
        for code, count in [*counts.items()]:  # the main thread goes on counting
            found[code.co_filename] += count
        report = {"counts": found, "cpu_s": times.user + times.system, "kernel_s": times.system}
        with connection:
            connection.sendall(json.dumps(report).encode())


def main() -> int:
    """Run the command line of the flowserve of the current directory. The first arguments are "calls" or "cpu", and the
    path of a socket: each connection to it gets the counts so far.
    """
    sys.path[0] = os.getcwd()
    from flowserve.cli.main import main as run

    start = {"calls": _count_calls, "cpu": _sample}[sys.argv.pop(1)]
    control = socket.socket(socket.AF_UNIX)
    control.bind(sys.argv.pop(1))
    control.listen()
    counts: Counter[CodeType] = Counter()
    threading.Thread(target=_serve, args=(control, counts), daemon=True).start()
    start(counts)
    return run()


if __name__ == "__main__":
    sys.exit(main())
