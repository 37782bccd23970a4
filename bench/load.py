"""The load generator of `python -m bench`, in a process of its own: that of `flowserve bench`, with checked responses.

`python -m bench.load FOLDER --port P ...` sends the bytes of FOLDER/<i>.request, checks the responses and prints one
JSON object at the end. Connection i repeats request i, or with `--cycle` sends all requests in turn, each connection
from a place of its own. Every response must have status 200, and its body must end with the FP32 numbers in
FOLDER/<i>.answer; the first that does not ends the run with status 1.

The generator shares the machine with the server, so its own CPU time is reported.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.processes import cpu_seconds
from flowserve.cli.client import Address
from flowserve.cli.load import LoadConnection, Repeated, check_status, loop_of, poisson_ns
from flowserve.errors import FlowserveError

# Comparing 600 KB costs about as much as receiving them: larger responses are compared as a whole only once in
# WHOLE_EVERY responses, otherwise ENDS_BYTES at both ends.
LARGE_BYTES: Final = 16384
WHOLE_EVERY: Final = 16
ENDS_BYTES: Final = 256

# Results of other kernels or batch sizes differ by rounding; the result of another request differs by far more.
RELATIVE_TOLERANCE: Final = 1e-3
ABSOLUTE_TOLERANCE: Final = 1e-5


class LoadFailed(FlowserveError):
    """A response was wrong; the text shows what arrived."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run without its warm-up. CPU in seconds over that time, latencies in milliseconds."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    load_cpu_s: float
    server_cpu_s: float


class Sample:
    """A request, the numbers that end its response, and the byte strings found to equal them within the tolerance."""

    __slots__ = ("accepted", "numbers", "request")

    def __init__(self, request: bytes, numbers: bytes) -> None:
        self.request = request
        self.numbers = numbers
        self.accepted: set[bytes] = set()


class Comparing(Repeated):
    """A client that sends `samples` in turn, and compares the responses."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        super().__init__(samples[0].request)
        self._samples = itertools.cycle(samples)
        self._sample = samples[0]
        self._answered = 0

    def next(self) -> bytes:
        self._sample = next(self._samples)
        return self._sample.request

    def answered(self, connection: LoadConnection) -> None:
        """Raises LoadFailed unless the response ends with the expected numbers, Invalid for an error status."""
        if connection.status != 200:
            check_status(connection)
        self._answered += 1
        body, numbers = connection.body, self._sample.numbers
        size = len(numbers)
        if len(body) < size:
            raise LoadFailed(f"a response of {len(body)} bytes where {size} bytes were expected")
        if size > LARGE_BYTES and self._answered % WHOLE_EVERY:
            first = len(body) - size
            if body[first : first + ENDS_BYTES] == numbers[:ENDS_BYTES] and body[-ENDS_BYTES:] == numbers[-ENDS_BYTES:]:
                return
        received = bytes(body[len(body) - size :])
        # The comparison comes first: a lookup in the set would hash all of a large response.
        if received == numbers or received in self._sample.accepted:
            return
        got, wanted = np.frombuffer(received, "<f4"), np.frombuffer(numbers, "<f4")
        if not np.allclose(got, wanted, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE):
            raise LoadFailed(f"wrong numbers: got {got[:8]} ..., wanted {wanted[:8]} ...")
        if size <= LARGE_BYTES:
            self._sample.accepted.add(received)


def read_samples(folder: Path) -> list[Sample]:
    """All requests of a folder, in the order of their numbers."""
    paths = sorted(folder.glob("*.request"), key=lambda path: int(path.stem))
    return [Sample(path.read_bytes(), path.with_suffix(".answer").read_bytes()) for path in paths]


def measure(
    folder: Path,
    port: int,
    server_pid: int,
    concurrency: int,
    warmup_s: float,
    seconds: float,
    *,
    rate: float = 0.0,
    cycle: bool = False,
) -> Measured:
    """Run the closed loop, or with `rate` (requests per second) the open loop, over `concurrency` connections.

    Raises FlowserveError if a response is wrong or missing, or the server does not accept the connections.
    """
    samples = read_samples(folder)
    clients = []
    for i in range(concurrency):
        # In turn, connections that began with neighbours would soon all send the same request at the same time.
        first = i * (len(samples) // concurrency | 1 if cycle else 1) % len(samples)
        clients.append(Comparing(samples[first:] + samples[:first] if cycle else samples[first : first + 1]))
    with loop_of(Address("127.0.0.1", port), clients, _raise) as loop:

        def drive(for_s: float, seed: int) -> list[int]:
            return loop.open(poisson_ns(rate, for_s, seed)) if rate else loop.closed(for_s)

        if rate:
            _exact_timers()
        drive(warmup_s, 1)
        server_before, load_before, began = cpu_seconds(server_pid), time.process_time(), time.perf_counter()
        latencies = drive(seconds, 2)
        server_after, load_after, ended = cpu_seconds(server_pid), time.process_time(), time.perf_counter()
        loop.finish()
    if not latencies:
        raise LoadFailed(f"no response within {seconds} seconds")
    p50, p99 = np.percentile(np.array(latencies), (50, 99)) / 1e6
    return Measured(
        requests=len(latencies),
        seconds=ended - began,
        p50_ms=float(p50),
        p99_ms=float(p99),
        load_cpu_s=load_after - load_before,
        server_cpu_s=server_after - server_before,
    )


def _raise(error: FlowserveError) -> None:
    raise error


def _exact_timers() -> None:
    """Let this process's timers end within a microsecond instead of 50."""
    set_timer_slack = 29  # PR_SET_TIMERSLACK in linux/prctl.h
    ctypes.CDLL(None).prctl(set_timer_slack, 1000, 0, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description="the load generator of python -m bench")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--server-pid", type=int, required=True, help="root of the process tree whose CPU time is read")
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--warmup", type=float, required=True, help="seconds that are not measured")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second of an open loop; 0: closed loop")
    parser.add_argument("--cycle", action="store_true", help="every connection sends all requests in turn")
    options = parser.parse_args()
    try:
        measured = measure(
            options.folder,
            options.port,
            options.server_pid,
            options.concurrency,
            options.warmup,
            options.seconds,
            rate=options.rate,
            cycle=options.cycle,
        )
    except FlowserveError as error:
        sys.exit(f"bench.load: {error}")
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
