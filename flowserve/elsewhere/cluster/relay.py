"""The calls of models in an actor: between the sockets of their processes and the actor's connection.

Decides that a model in an actor calls others as one in a worker process does (backends/worker/bls_client.py), through a
socket and shared memory of its machine: so a process that the model has forked has calls of its own here too, and the
server's end of these sockets is this relay. It passes the messages on, with the tensors behind them as bytes, under a
number for each socket; and what it passes back it writes to memory that only that process reads.

Decides that metrics, which are counted in shared memory, are sent when they have changed: at most every `SHOWN_EVERY_S`
seconds, and before a message that asks for their values or ends them. Also passes on the question whether a model is
ready, which its code answers on a thread (backends/worker/readiness.py).

Does not know what is called, nor models. One thread reads all sockets, writes to them and sends; it is started with the
first socket. Called by actor.py.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

import numpy as np

from flowserve.backends.base import METRIC, METRIC_VALUE
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import (
    INLINE_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    Garbled,
    ResultColumn,
    encode_error,
    encode_result,
    encode_server_reply,
    pack,
    receive,
    repack,
)
from flowserve.elsewhere.cluster import frames
from flowserve.elsewhere.cluster.port import Tell
from flowserve.errors import FlowserveError, Internal
from flowserve.memory.arena import Arena, BlockAddress, aligned
from flowserve.memory.segment import Lease, Segment, new_number
from flowserve.values import Array

log = logging.getLogger("flowserve.child")

SHOWN_EVERY_S: Final = 0.5


class Relay:
    """The sockets of one actor. `tell` sends a message on its connection, blocking; `broke` ends the actor, in which no
    call would be answered any more.
    """

    def __init__(self, tell: Tell, broke: Callable[[Exception], None]) -> None:
        self.tell = tell
        self._broke = broke
        self._selector = selectors.DefaultSelector()
        self._todo: deque[Callable[[], None]] = deque()  # for the relay's thread
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ, self._do)
        self._lines: dict[int, _Line] = {}
        self._channels: dict[int, _Channel] = {}
        self._numbers = count(1)
        self._thread: threading.Thread | None = None
        self._is_closed = False

    # ------------------------------------------------------------------ on any thread

    def connect(self, instance: int) -> socket.socket:
        """The socket on which an instance announces those of its calls, and of questions about its readiness."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setblocking(False)
        self._post(lambda: self._add_line(instance, here))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="calls of models", daemon=True)
            self._thread.start()
        return there

    def disconnect(self, instance: int) -> None:
        """An instance has ended, and with it its calls and metrics."""
        self._post(lambda: self._end_line(instance))

    def take(self, channel: int, kind: int, words: Sequence[int], text: bytes, block: Array | None) -> None:
        """Pass a message of the server on. Raises Garbled."""
        if kind not in (messages.RESULT, messages.SERVER_REPLY):
            raise Garbled(f"a message of kind {kind} about calls")
        self._post(lambda: self._pass_back(channel, kind, words, text, block))

    def ask(self, instance: int) -> None:
        """The server asks whether the model of that instance is ready."""
        self._post(lambda: self._ask(instance))

    def close(self) -> None:
        """The connection has ended: no call is answered any more."""
        self._is_closed = True
        if self._thread is None:
            self._discard()
        else:
            self._post(lambda: None)
            self._thread.join()

    def disown(self) -> None:
        """This is a process that a model has forked: close the copies of all sockets, so that the processes at their
        other ends notice the end of the actor.
        """
        for line in self._lines.values():
            line.close()
        for channel in self._channels.values():
            channel.sock.close()

    def _post(self, what: Callable[[], None]) -> None:
        self._todo.append(what)
        with suppress(BlockingIOError):  # it is about to be woken
            os.write(self._wakes, b"\0")

    # ------------------------------------------------------------------ on the relay's thread

    def _run(self) -> None:
        try:
            self._pass_all()
        except Exception as error:
            log.exception("the calls of models cannot be passed on any more")
            self._broke(error)

    def _pass_all(self) -> None:
        while not self._is_closed:
            has_metrics = any(channel.metrics for channel in self._channels.values())
            for key, events in self._selector.select(SHOWN_EVERY_S if has_metrics else None):
                if self._selector.get_map().get(key.fd) is key:  # else an earlier event has changed or closed it
                    key.data(events)
            for channel in [*self._channels.values()]:
                channel.show_metrics()
        for number in [*self._lines]:
            self._end_line(number)
        self._discard()

    def _discard(self) -> None:
        self._selector.close()
        os.close(self._woken)
        os.close(self._wakes)

    def _do(self, events: int) -> None:
        with suppress(BlockingIOError):
            while os.read(self._woken, 512):
                pass
        while self._todo:
            self._todo.popleft()()

    def _add_line(self, instance: int, sock: socket.socket) -> None:
        line = self._lines[instance] = _Line(instance, sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda events: self._announced(line))

    def _announced(self, line: _Line) -> None:
        """An instance, or a process that its model has forked, announces a socket."""
        message = receive(line.sock)
        if message is None:  # `disconnect` follows
            self._selector.unregister(line.sock)
            return
        kind, words, _, fds = message
        if not fds:
            log.error("a call of a model cannot be passed on: this process has as many files open as it may")
            return  # its caller gets an error, since its socket has no other end
        sock = socket.socket(fileno=fds[0])
        sock.setblocking(False)
        if kind == messages.CALLS:
            number = next(self._numbers)
            channel = self._channels[number] = _Channel(number, line.instance, sock, self)
            self._selector.register(sock, selectors.EVENT_READ, channel.ready)
            self.tell(line.instance, pack(messages.CALLS, (number, words[1])), (), 0)
        else:
            line.questions = sock
            self._selector.register(sock, selectors.EVENT_READ, lambda events: self._objected(line))
            self.tell(line.instance, pack(messages.READINESS, ()), (), 0)

    def _objected(self, line: _Line) -> None:
        assert line.questions is not None
        answer = line.questions.recv(MESSAGE_BYTES_MAX)
        if not answer:
            self._selector.unregister(line.questions)
            return
        self.tell(line.instance, repack(frames.OBJECTION, (), answer[1:]), (), 0)

    def _ask(self, instance: int) -> None:
        line = self._lines.get(instance)
        if line is not None and line.questions is not None:
            with suppress(OSError):  # it ends
                line.questions.send(b"\0")

    def _end_line(self, instance: int) -> None:
        line = self._lines.pop(instance, None)
        if line is None:
            return
        for channel in [*self._channels.values()]:
            if channel.instance == instance:
                self.end(channel)
        for sock in (line.sock, line.questions):
            if sock is not None:
                with suppress(KeyError):  # its process has closed it
                    self._selector.unregister(sock)
        line.close()

    def end(self, channel: _Channel) -> None:
        """A process has closed its socket, or its instance has ended."""
        if self._channels.pop(channel.number, None) is None:
            return
        channel.show_metrics()
        self._selector.unregister(channel.sock)
        channel.sock.close()
        self.tell(frames.CALLS_FROM + channel.number, pack(frames.CALLS_ENDED, ()), (), 0)

    def write_when_possible(self, channel: _Channel, *, has_unsent: bool) -> None:
        """Whether the socket is to be watched for room."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if has_unsent else 0)
        self._selector.modify(channel.sock, events, channel.ready)

    def _pass_back(self, number: int, kind: int, words: Sequence[int], text: bytes, block: Array | None) -> None:
        channel = self._channels.get(number)
        if channel is not None:  # None if its process has ended meanwhile
            channel.take(kind, words, text, block)


class _Line:
    """The socket of one instance. `questions`: about its readiness."""

    def __init__(self, instance: int, sock: socket.socket) -> None:
        self.instance = instance
        self.sock = sock
        self.questions: socket.socket | None = None

    def close(self) -> None:
        self.sock.close()
        if self.questions is not None:
            self.questions.close()


class _SentMetric:
    """The numbers of one metric, in this block of its process, and those that were sent."""

    def __init__(self, family: int, block: BlockAddress, cells: Array) -> None:
        self.family = family
        self.block = block
        self.cells = cells
        self.sent = bytes(cells.nbytes)


class _Channel:
    """The calls of one process."""

    def __init__(self, number: int, instance: int, sock: socket.socket, relay: Relay) -> None:
        self.number = number
        self.instance = instance
        self.sock = sock
        self.metrics: dict[int, _SentMetric] = {}  # by the number of the request that showed them
        self._relay = relay
        self._address = frames.CALLS_FROM + number
        self._segments: dict[int, Segment] = {}
        self._come_home: deque[BlockAddress] = deque()  # the process's blocks that are not read any more
        self._arena = Arena()
        self._shown: set[int] = set()
        self._lent: dict[int, Lease] = {}  # results that the process has not read yet, by token
        self._tokens = count(1)
        self._unsent: deque[tuple[bytes, int]] = deque()  # messages, each with a descriptor or -1

    # ------------------------------------------------------------------ from the process

    def ready(self, events: int) -> None:
        """The socket can be read, or written."""
        try:
            if events & selectors.EVENT_WRITE:
                self._send_unsent()
            if events & selectors.EVENT_READ:
                self._read()
        except Exception:  # an error about one process must not end the calls of the others
            log.exception("a message about a call of a model cannot be passed on")
            self._relay.end(self)

    def _read(self) -> None:
        try:
            message = receive(self.sock)
        except BlockingIOError:
            return
        if message is None:
            self._relay.end(self)
            return
        kind, words, text, fds = message
        if kind == messages.SEGMENT:
            (fd,) = fds
            self._segments[words[1]] = Segment.read_shared(fd, new_number())
        elif kind == messages.READ:
            del self._lent[words[1]]
        elif kind in (messages.CALL, messages.SERVER_REQUEST):
            self._pass_on(kind, words, text)
        else:
            if kind == messages.DROP:
                self._drop(words[1])
            self._relay.tell(self._address, repack(kind, words[1:], text), (), 0)

    def _pass_on(self, kind: int, words: Sequence[int], text: bytes) -> None:
        segment, offset, nbytes = words[4:7]
        memory = self._segments[segment].memory[offset : offset + nbytes]
        asked: list[Any] = json.loads(text) if kind == messages.SERVER_REQUEST else [""]
        what = asked[0]
        if what == METRIC:
            self.metrics[words[1]] = _SentMetric(asked[1][0], (segment, offset), memory)
        else:
            self._come_home.append((segment, offset))
        if what == METRIC_VALUE:
            self.show_metrics()
        place = (frames.BLOCK, 0, nbytes) if nbytes else (0, 0, 0)
        onward = repack(kind, (*words[1:4], *place, *words[7:]), text)
        try:
            self._relay.tell(self._address, onward, [memory.data] if nbytes else (), nbytes)
        except FlowserveError as error:  # it is larger than a frame
            home = self._free_blocks()
            if kind == messages.CALL:
                self._send(encode_result(words[1], True, 0, home, encode_error(error), ()))
            else:
                self._send(encode_server_reply(words[1], home, encode_error(error), None))

    def _drop(self, family: int) -> None:
        """The process does not count in a family any more: its blocks are free."""
        self.show_metrics()
        for number, metric in [*self.metrics.items()]:
            if metric.family == family:
                del self.metrics[number]
                self._come_home.append(metric.block)

    def show_metrics(self) -> None:
        """Send the numbers of metrics that have changed."""
        for number, metric in self.metrics.items():
            now = metric.cells.tobytes()
            if now != metric.sent:
                metric.sent = now
                self._relay.tell(self._address, pack(frames.CELLS, (number,)), [now], len(now))

    # ------------------------------------------------------------------ to the process

    def take(self, kind: int, words: Sequence[int], text: bytes, block: Array | None) -> None:
        """Pass a message of the server on."""
        try:
            if kind == messages.RESULT:
                self._take_result(words, text, block)
            else:
                self._take_reply(words, text)
        except Exception:
            log.exception("the answer to a call of a model cannot be passed on")
            self._relay.end(self)

    def _take_result(self, words: Sequence[int], text: bytes, block: Array | None) -> None:
        number, is_last, _, _, error, columns, parameters = messages.decode_result(words, text)
        home = self._free_blocks()
        try:
            token, placed = self._place(columns, block)
        except MemoryError as none:
            why = Internal(f"the answer of a called model cannot be handed on: {none}")
            token, placed, error = 0, [], encode_error(why)
        self._send(encode_result(number, is_last, token, home, error, placed, parameters))

    def _take_reply(self, words: Sequence[int], text: bytes) -> None:
        number, _, error, answer = messages.decode_server_reply(words, text)
        if error is not None and (metric := self.metrics.pop(number, None)) is not None:
            self._come_home.append(metric.block)
        self._send(encode_server_reply(number, self._free_blocks(), error, answer))

    def _place(self, columns: Sequence[ResultColumn], block: Array | None) -> tuple[int, list[ResultColumn]]:
        """The columns in memory that the process reads, or in the message, and the token of that memory, 0 for none."""
        total = 0 if block is None else len(block)
        flats: list[Array] = []
        for _, _, _, where in columns:
            if isinstance(where, bytes):
                flats.append(np.frombuffer(where, np.uint8))
                continue
            _, start, nbytes = where
            if block is None or start + nbytes > total:
                raise Garbled("an output that is not within its block")
            flats.append(block[start : start + nbytes])
        if total <= INLINE_BYTES_MAX:
            return 0, [(*column[:3], flat.tobytes()) for column, flat in zip(columns, flats, strict=True)]
        starts, size = [], 0
        for flat in flats:
            starts.append(aligned(size))
            size = starts[-1] + flat.nbytes
        lease = self._arena.lease(size)
        segment = lease.segment
        if segment.number not in self._shown:
            self._send(pack(messages.ATTACH, (segment.number,)), segment.open_for_reading())
            self._shown.add(segment.number)
        placed: list[ResultColumn] = []
        for column, flat, start in zip(columns, flats, starts, strict=True):
            segment.memory[lease.offset + start : lease.offset + start + flat.nbytes] = flat
            placed.append((*column[:3], (segment.number, lease.offset + start, flat.nbytes)))
        token = next(self._tokens)
        self._lent[token] = lease
        return token, placed

    def _free_blocks(self) -> list[BlockAddress]:
        return [self._come_home.popleft() for _ in range(min(len(self._come_home), messages.HOME_BLOCKS_MAX))]

    def _send(self, message: bytes, fd: int = -1) -> None:
        self._unsent.append((message, fd))
        if len(self._unsent) == 1:
            self._send_unsent()

    def _send_unsent(self) -> None:
        while self._unsent:
            message, fd = self._unsent[0]
            try:
                socket.send_fds(self.sock, [message], [] if fd < 0 else [fd])
            except BlockingIOError:
                break
            except OSError:
                pass  # the process has ended, which reading reports
            del self._unsent[0]
            if fd >= 0:
                os.close(fd)
        self._relay.write_when_possible(self, has_unsent=bool(self._unsent))
