"""The load generator: a closed loop over a fixed number of connections, in a process of its own.

`python -m bench.load FOLDER --port P ...` sends the bytes of FOLDER/<i>.request on connection i, reads the answer,
checks it, sends again, and prints one JSON object at the end. Every answer must have status 200 and a Content-Length,
and its body must end with the FP32 numbers in FOLDER/<i>.answer; the first that does not ends the run with status 1.

Decided here: what a request costs the generator (it shares the machine with the server, so that cost is kept small and
is reported) and how far an answer is checked. It does not know what the bytes mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.processes import cpu_seconds

# Nothing heard from any connection for so long: the server hangs.
SILENCE_LIMIT_S: Final = 10.0

# To compare 600 KB costs about as much as to receive them, so large answers are compared whole only now and then ...
LARGE_BYTES: Final = 16384
WHOLE_EVERY: Final = 16
# ... and otherwise by this much at both ends.
ENDS_BYTES: Final = 256

# Two builds of a kernel, or two batch sizes, round differently; another request's answer differs by far more.
RELATIVE_TOLERANCE: Final = 1e-3
ABSOLUTE_TOLERANCE: Final = 1e-5

_HEAD_ROOM: Final = 65536


class LoadFailed(Exception):
    """The server did not do what was asked; the text says what came instead."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run saw between its warm-up and its end. CPU in seconds over that time, latencies in milliseconds."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    load_cpu_s: float
    server_cpu_s: float


class Connection:
    """One keep-alive connection with at most one request under way."""

    __slots__ = (
        *("_answer", "_answers", "_heads", "_request", "_view"),
        *("buffer", "end", "filled", "sent", "socket", "started_ns"),
    )

    def __init__(self, port: int, request: bytes, answer: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=SILENCE_LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._request = memoryview(request)
        self._answer = answer
        # Byte strings found to hold the right numbers, so that the slow comparison runs once for each.
        self._answers: set[bytes] = set()
        # Heads seen before and the length of the body each announces: a server repeats itself.
        self._heads: dict[bytes, int] = {}
        self.buffer = bytearray(len(answer) + _HEAD_ROOM)
        self._view = memoryview(self.buffer)
        self.filled = 0  # bytes of the answer that are here
        self.end = 0  # its whole length, 0 until its head has been read
        self.sent = 0
        self.started_ns = 0

    def start(self, now_ns: int) -> bool:
        """Begin the next request; False when the socket cannot take all of it now."""
        self.filled = self.end = self.sent = 0
        self.started_ns = now_ns
        return self.go_on_sending()

    def go_on_sending(self) -> bool:
        while self.sent < len(self._request):
            try:
                self.sent += self.socket.send(self._request[self.sent :] if self.sent else self._request)
            except BlockingIOError:
                return False
        return True

    def receive(self) -> bool:
        """Take what the socket holds; True when the answer is complete. Raises LoadFailed."""
        try:
            count = self.socket.recv_into(self._view[self.filled :] if self.filled else self._view)
        except BlockingIOError:
            return False
        if count == 0:
            raise LoadFailed(f"the server closed the connection after {self.filled} bytes of an answer")
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
                raise LoadFailed(f"an answer of {self.end} bytes where {len(self._answer)} bytes were expected")
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
        raise LoadFailed(f"an answer without Content-Length: {head.decode(errors='replace')}")

    def check(self, whole: bool) -> None:
        """Raise LoadFailed unless the complete answer ends with the right numbers."""
        size = len(self._answer)
        first = self.end - size
        if first < 0:
            raise LoadFailed(f"an answer of {self.end} bytes, head included, where {size} bytes were expected")
        if size > LARGE_BYTES and not whole:
            view, answer = self._view, self._answer
            if (
                view[first : first + ENDS_BYTES] == answer[:ENDS_BYTES]
                and view[self.end - ENDS_BYTES : self.end] == answer[-ENDS_BYTES:]
            ):
                return
        numbers = bytes(self._view[first : self.end])
        # The plain comparison comes first: to look a large answer up in the set would hash all of it.
        if numbers == self._answer or numbers in self._answers:
            return
        got, wanted = np.frombuffer(numbers, "<f4"), np.frombuffer(self._answer, "<f4")
        if not np.allclose(got, wanted, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE):
            raise LoadFailed(f"wrong numbers: got {got[:8]} ..., wanted {wanted[:8]} ...")
        if size <= LARGE_BYTES:
            self._answers.add(numbers)


class Loop:
    """All connections of one run on one epoll."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._by_fd = {connection.socket.fileno(): connection for connection in connections}
        self._epoll = select.epoll()
        for fd in self._by_fd:
            self._epoll.register(fd, select.EPOLLIN)
        self._idle = set(self._by_fd)
        self._answered = 0

    def drive(self, seconds: float) -> list[int]:
        """Keep every connection busy for so long; return the latency of each answer that came, in nanoseconds."""
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

    def finish(self) -> None:
        """Wait for the requests under way, so that the server is left in peace, and checked to the last answer."""
        while len(self._idle) < len(self._by_fd):
            self._idle |= {connection.socket.fileno() for connection in self._completed()}

    def close(self) -> None:
        self._epoll.close()

    def _completed(self) -> list[Connection]:
        completed = []
        events = self._epoll.poll(SILENCE_LIMIT_S)
        if not events:
            raise LoadFailed(f"no answer on any connection for {SILENCE_LIMIT_S:.0f} seconds")
        for fd, event in events:
            connection = self._by_fd[fd]
            if event & select.EPOLLOUT and connection.go_on_sending():
                self._epoll.modify(fd, select.EPOLLIN)
            if event & ~select.EPOLLOUT and connection.receive():
                self._answered += 1
                connection.check(whole=self._answered % WHOLE_EVERY == 0)
                completed.append(connection)
        return completed

    def _start(self, connection: Connection, now_ns: int) -> None:
        if not connection.start(now_ns):
            self._epoll.modify(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)


def measure(folder: Path, port: int, server_pid: int, concurrency: int, warmup_s: float, seconds: float) -> Measured:
    """Run the closed loop. Raises LoadFailed, OSError when the server cannot be reached."""
    with contextlib.ExitStack() as stack:
        connections = []
        for i in range(concurrency):
            request, answer = ((folder / f"{i}.{kind}").read_bytes() for kind in ("request", "answer"))
            connections.append(Connection(port, request, answer))
            stack.enter_context(connections[-1].socket)
        loop = stack.enter_context(contextlib.closing(Loop(connections)))
        loop.drive(warmup_s)
        server_before, load_before, began = cpu_seconds(server_pid), time.process_time(), time.perf_counter()
        latencies = loop.drive(seconds)
        server_after, load_after, ended = cpu_seconds(server_pid), time.process_time(), time.perf_counter()
        loop.finish()
    if not latencies:
        raise LoadFailed(f"no request was answered within {seconds} seconds")
    p50, p99 = np.percentile(np.array(latencies), (50, 99)) / 1e6
    return Measured(
        requests=len(latencies),
        seconds=ended - began,
        p50_ms=float(p50),
        p99_ms=float(p99),
        load_cpu_s=load_after - load_before,
        server_cpu_s=server_after - server_before,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description="the load generator of python -m bench")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--server-pid", type=int, required=True, help="whose CPU time, with its children, is read")
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--warmup", type=float, required=True, help="seconds that are not measured")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    try:
        measured = measure(
            options.folder, options.port, options.server_pid, options.concurrency, options.warmup, options.seconds
        )
    except (LoadFailed, OSError) as error:
        sys.exit(f"bench.load: {error}")
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
