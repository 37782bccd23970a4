"""The clients of the growth measurements: a load with checked responses, single requests, a probe of the event loop.

Used by the parts. All raise BenchFailed with the reason when a response is missing or wrong.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.load import Measured
from bench.servers import BenchFailed, Server, run_load

ANSWER_LIMIT_S: Final = 30.0
PROBE_PAUSE_S: Final = 0.001

REQUESTS_PER_SECOND: Final = "requests/s"
CPU_US: Final = "CPU us/request"
P99_MS: Final = "p99 ms"
MEMORY_MIB: Final = "memory MiB"
MEBIBYTE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """`seconds` are measured in each run, after `warmup_s`; `client`: the "own" load generator, or "wrk"."""

    seconds: float
    warmup_s: float
    client: str

    def run(self, folder: Path, server: Server, concurrency: int) -> Measured:
        """A closed loop. `wrk` does not read the numbers, so that before it the own generator checks all responses."""
        if self.client != "wrk":
            return run_load(folder, server, concurrency, self.warmup_s, self.seconds)
        run_load(folder, server, concurrency, 0.0, self.warmup_s)
        return run_load(folder, server, concurrency, 0.0, self.seconds, client=self.client)


def figures_of(measured: Measured) -> dict[str, float]:
    return {
        REQUESTS_PER_SECOND: measured.requests / measured.seconds,
        CPU_US: measured.server_cpu_s / measured.requests * 1e6,
        P99_MS: measured.p99_ms,
    }


class Client:
    """One persistent connection that waits for each response."""

    def __init__(self, server: Server) -> None:
        try:
            self._socket = socket.create_connection(("127.0.0.1", server.port), ANSWER_LIMIT_S)
        except OSError as error:
            raise BenchFailed(f"{server.name} does not accept a connection: {error}") from error
        self._name = server.name

    def ask(self, request: bytes) -> bytes:
        """Send a whole request, and return the body of its response, which must have status 200."""
        try:
            self._socket.sendall(request)
            response = http.client.HTTPResponse(self._socket)
            response.begin()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise BenchFailed(f"{self._name} did not answer {_first_line(request)}: {error!r}") from error
        if response.status != 200:
            text = body[:1000].decode(errors="replace")
            raise BenchFailed(f"{self._name} answered {_first_line(request)} with {response.status}: {text}")
        return body

    def close(self) -> None:
        self._socket.close()


def _first_line(request: bytes) -> str:
    return request.partition(b"\r\n")[0].decode(errors="replace")


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


class Probe:
    """Asks /v2/health/live again and again and keeps the longest time until a response."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.failure: BenchFailed | None = None


@contextlib.contextmanager
def probing(server: Server) -> Iterator[Probe]:
    """Probe the server, from a thread of its own, until the block ends."""
    probe, ended = Probe(), threading.Event()

    def ask() -> None:
        try:
            with contextlib.closing(Client(server)) as client:
                while True:
                    began = time.perf_counter()
                    client.ask(get("/v2/health/live"))
                    probe.longest_s = max(probe.longest_s, time.perf_counter() - began)
                    if ended.wait(PROBE_PAUSE_S):
                        break
        except BenchFailed as error:
            probe.failure = error

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield probe
    finally:
        ended.set()
        thread.join()
    if probe.failure:
        raise probe.failure
