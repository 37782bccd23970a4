"""The load generator: a closed or an open loop over a fixed number of connections, in a process of its own.

`python -m bench.load FOLDER --port P ...` sends the bytes of FOLDER/<i>.request, checks the responses and prints one
JSON object at the end. Connection i repeats request i, or with `--cycle` sends all requests in turn, each connection
from a place of its own. Every response must have status 200 and a Content-Length, and its body must end with the FP32
numbers in FOLDER/<i>.answer; the first that does not ends the run with status 1.

* Closed loop: each connection sends its next request when the previous one is answered.
* Open loop (`--rate`): requests are due at the times of a Poisson process and wait for a free connection. The latency
  counts from the time at which a request was due.

The generator shares the machine with the server, so its own CPU time is kept small and reported.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.processes import cpu_seconds

# Without a response on any connection for this long, the server hangs.
SILENCE_LIMIT_S: Final = 10.0

# Comparing 600 KB costs about as much as receiving them: larger responses are compared as a whole only once in
# WHOLE_EVERY responses, otherwise ENDS_BYTES at both ends.
LARGE_BYTES: Final = 16384
WHOLE_EVERY: Final = 16
ENDS_BYTES: Final = 256

# Results of other kernels or batch sizes differ by rounding; the result of another request differs by far more.
RELATIVE_TOLERANCE: Final = 1e-3
ABSOLUTE_TOLERANCE: Final = 1e-5

_HEAD_ROOM: Final = 65536


class LoadFailed(Exception):
    """A response was missing or wrong; the text shows what arrived."""


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
        self.request = memoryview(request)
        self.numbers = numbers
        self.accepted: set[bytes] = set()


class Connection:
    """One persistent connection with at most one request in flight. It sends `samples` in turn."""

    __slots__ = (
        *("_heads", "_request", "_sample", "_samples", "_view"),
        *("buffer", "end", "filled", "sent", "socket", "started_ns"),
    )

    def __init__(self, port: int, samples: Sequence[Sample]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=SILENCE_LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._samples = itertools.cycle(samples)
        self._sample = samples[0]
        self._request = samples[0].request
        # Response heads that were parsed already, with the body length each announces.
        self._heads: dict[bytes, int] = {}
        self.buffer = bytearray(max(len(sample.numbers) for sample in samples) + _HEAD_ROOM)
        self._view = memoryview(self.buffer)
        self.filled = 0  # bytes of the response in the buffer
        self.end = 0  # its total length, 0 until its head is complete
        self.sent = 0
        self.started_ns = 0

    def start(self, started_ns: int) -> bool:
        """Send the next request; False when the socket cannot take all of it now."""
        self._sample = next(self._samples)
        self._request = self._sample.request
        self.filled = self.end = self.sent = 0
        self.started_ns = started_ns
        return self.go_on_sending()

    def go_on_sending(self) -> bool:
        while self.sent < len(self._request):
            try:
                self.sent += self.socket.send(self._request[self.sent :] if self.sent else self._request)
            except BlockingIOError:
                return False
        return True

    def receive(self) -> bool:
        """Read from the socket; True when the response is complete. Raises LoadFailed."""
        try:
            count = self.socket.recv_into(self._view[self.filled :] if self.filled else self._view)
        except BlockingIOError:
            return False
        if count == 0:
            raise LoadFailed(f"the server closed the connection after {self.filled} bytes of a response")
        self.filled += count
        if not self.end:
            head_end = self.buffer.find(b"\r\n\r\n", 0, self.filled)
            if head_end < 0:
                return False
            head = bytes(self._view[:head_end])
            length = self._heads.get(head)
            if length is None:
                length = self._heads[head] = self._body_length(head)
            self.end = head_end + 4 + length
            if self.end > len(self.buffer):
                expected = len(self._sample.numbers)
                raise LoadFailed(f"a response of {self.end} bytes where {expected} bytes were expected")
        if self.filled > self.end:
            raise LoadFailed(f"{self.filled - self.end} bytes more than Content-Length announced")
        return self.filled == self.end

    def _body_length(self, head: bytes) -> int:
        status, *lines = head.split(b"\r\n")
        if status.split(b" ", 2)[1:2] != [b"200"]:
            raise LoadFailed(bytes(self._view[: min(self.filled, 1000)]).decode(errors="replace"))
        for line in lines:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                return int(value)
        raise LoadFailed(f"a response without Content-Length: {head.decode(errors='replace')}")

    def check(self, whole: bool) -> None:
        """Raise LoadFailed unless the complete response ends with the expected numbers."""
        numbers = self._sample.numbers
        size = len(numbers)
        first = self.end - size
        if first < 0:
            raise LoadFailed(f"a response of {self.end} bytes, head included, where {size} bytes were expected")
        if size > LARGE_BYTES and not whole:
            view = self._view
            if (
                view[first : first + ENDS_BYTES] == numbers[:ENDS_BYTES]
                and view[self.end - ENDS_BYTES : self.end] == numbers[-ENDS_BYTES:]
            ):
                return
        received = bytes(self._view[first : self.end])
        # The comparison comes first: a lookup in the set would hash all of a large response.
        if received == numbers or received in self._sample.accepted:
            return
        got, wanted = np.frombuffer(received, "<f4"), np.frombuffer(numbers, "<f4")
        if not np.allclose(got, wanted, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE):
            raise LoadFailed(f"wrong numbers: got {got[:8]} ..., wanted {wanted[:8]} ...")
        if size <= LARGE_BYTES:
            self._sample.accepted.add(received)


class Loop:
    """All connections of one run on one epoll."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._by_fd = {connection.socket.fileno(): connection for connection in connections}
        self._epoll = select.epoll()
        for fd in self._by_fd:
            self._epoll.register(fd, select.EPOLLIN)
        self._idle = set(self._by_fd)
        self._answered = 0

    def closed(self, seconds: float) -> list[int]:
        """Keep every connection busy for that long; return the latency of each response in nanoseconds."""
        latencies: list[int] = []
        now = time.perf_counter_ns()
        end = now + round(seconds * 1e9)
        for fd in self._idle:
            self._start(self._by_fd[fd], now)
        self._idle.clear()
        while now < end:
            for connection in self._completed():
                now = time.perf_counter_ns()
                latencies.append(now - connection.started_ns)
                self._start(connection, time.perf_counter_ns())
        return latencies

    def open(self, due_ns: Sequence[int]) -> list[int]:
        """Send a request at each of these times after now; return all latencies, counted from those times."""
        latencies: list[int] = []
        began = time.perf_counter_ns()
        future = deque(began + due for due in due_ns)
        waiting: deque[int] = deque()
        while len(latencies) < len(due_ns):
            now = time.perf_counter_ns()
            while future and future[0] <= now:
                waiting.append(future.popleft())
            while waiting and self._idle:
                self._start(self._by_fd[self._idle.pop()], waiting.popleft())
            until_next_s = max(0.0, (future[0] - time.perf_counter_ns()) / 1e9) if future else None
            for connection in self._completed(until_next_s):
                latencies.append(time.perf_counter_ns() - connection.started_ns)
                self._idle.add(connection.socket.fileno())
        return latencies

    def finish(self) -> None:
        """Wait for the requests in flight, and check their responses too."""
        while len(self._idle) < len(self._by_fd):
            self._idle |= {connection.socket.fileno() for connection in self._completed()}

    def close(self) -> None:
        self._epoll.close()

    def _completed(self, limit_s: float | None = None) -> list[Connection]:
        """The connections whose responses completed; waits for events, for `limit_s` at most where it is given."""
        completed = []
        if limit_s is None:
            events = self._epoll.poll(SILENCE_LIMIT_S)
            if not events:
                raise LoadFailed(f"no response on any connection for {SILENCE_LIMIT_S:.0f} seconds")
        else:
            # epoll's own timeout has a resolution of a millisecond, longer than the time between two requests.
            select.select([self._epoll], [], [], limit_s)
            events = self._epoll.poll(0)
        for fd, event in events:
            connection = self._by_fd[fd]
            if event & select.EPOLLOUT and connection.go_on_sending():
                self._epoll.modify(fd, select.EPOLLIN)
            if event & ~select.EPOLLOUT and connection.receive():
                self._answered += 1
                connection.check(whole=self._answered % WHOLE_EVERY == 0)
                completed.append(connection)
        return completed

    def _start(self, connection: Connection, started_ns: int) -> None:
        if not connection.start(started_ns):
            self._epoll.modify(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)


def poisson_ns(rate: float, seconds: float, seed: int) -> list[int]:
    """The times of a Poisson process of `rate` events per second, in nanoseconds from 0 to `seconds`."""
    generator, now, times = random.Random(seed), 0.0, []
    while (now := now + generator.expovariate(rate)) < seconds:
        times.append(round(now * 1e9))
    return times


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

    Raises LoadFailed, and OSError when the server does not accept the connections.
    """
    samples = read_samples(folder)
    with contextlib.ExitStack() as stack:
        connections = []
        for i in range(concurrency):
            # In turn, connections that began with neighbours would soon all send the same request at the same time.
            first = i * (len(samples) // concurrency | 1 if cycle else 1) % len(samples)
            own = samples[first:] + samples[:first] if cycle else samples[first : first + 1]
            connections.append(Connection(port, own))
            stack.enter_context(connections[-1].socket)
        loop = stack.enter_context(contextlib.closing(Loop(connections)))

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
    except (LoadFailed, OSError) as error:
        sys.exit(f"bench.load: {error}")
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
