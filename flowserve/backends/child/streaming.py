"""A decoupled model's process: answers leave whenever the model sends them, on whatever thread.

Decided here: that a thread of its own reads the socket, since the one that runs the model may stand in a send that
waits for what comes there; a model that answers once does without that thread and its hand-over. Answers are placed
and sent one at a time. Everything else about a child's life is main.py's.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from flowserve.backends.base import Instance, Sent, Work
from flowserve.backends.child.inputs import Run
from flowserve.backends.child.main import Job, Server, Told
from flowserve.backends.child.protocol import ANSWER, END, GOES_ON, GRANT, NOTHING, OVER, WAITS, WITHDRAW, pack, said
from flowserve.backends.child.usual import Usual
from flowserve.backends.credit import CreditSender
from flowserve.errors import FlowserveError
from flowserve.memory.arena import Place

_EARLY_MAX: Final = 4096  # grants that came before their batch; there are only those of the batch that comes next


class StreamServer(Server):
    """Drives an open instance of a decoupled model."""

    def __init__(self, sock: socket.socket, job: Job, instance: Instance) -> None:
        super().__init__(sock, job, instance)
        self._messages: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        # Held by the model's own senders; a model that lets go of one has nothing more to hear.
        self._senders: WeakValueDictionary[tuple[int, int], ProcessSender] = WeakValueDictionary()
        self._early: dict[tuple[int, int], int] = {}
        self._unwanted: set[tuple[int, int]] = set()  # withdrawn, perhaps before their batch
        self._goes_on: dict[tuple[int, int], tuple[int, int]] = {}  # members of the batch that comes next
        self._given_back: dict[tuple[int, int], ProcessSender] = {}  # of requests that are to run again
        self._one_by_one = threading.Lock()
        self._executor = threading.current_thread()

    def run(self) -> None:
        threading.Thread(target=self._listen, name="flowserve messages", daemon=True).start()
        super().run()

    def _next_message(self) -> tuple[Any, ...] | None:
        return self._messages.get()

    def _listen(self) -> None:
        try:
            while (message := super()._next_message()) is not None:
                if message[0] == GRANT:
                    self._granted(*message[1:])
                elif message[0] == WITHDRAW:
                    self._withdrawn(message[1:])
                elif message[0] == GOES_ON:
                    self._goes_on |= {(message[1], m): (number, there) for m, number, there in message[2]}
                else:
                    self._messages.put(message)
                    if message[0] == END:
                        return
        except (OSError, ValueError):
            pass  # the socket is closed
        for sender in [*self._senders.values()]:
            sender.withdraw()
        self._messages.put(None)

    def _granted(self, number: int, member: int, count: int, come_home: Sequence[Place]) -> None:
        if come_home:
            with self._one_by_one:
                self._outputs.come_home(come_home)
        key = (number, member)
        sender = self._senders.get(key)
        if sender is not None:
            sender.grant(count)
        elif len(self._early) < _EARLY_MAX:
            self._early[key] = self._early.get(key, 0) + count

    def _withdrawn(self, key: tuple[int, int]) -> None:
        if len(self._unwanted) < _EARLY_MAX:
            self._unwanted.add(key)  # first: the sender may be made in this very moment
        sender = self._senders.get(key)
        if sender is not None:
            sender.withdraw()
            self._given_back.pop(key, None)

    def _run(self, number: int, come_home: Sequence[Place], *rest: Any) -> None:
        if come_home:
            with self._one_by_one:
                self._outputs.come_home(come_home)
        super()._run(number, (), *rest)

    def _answer(
        self,
        run: Run,
        words: list[int],
        columns: Sequence[Any],
        rows: list[int],
        requests: Sequence[tuple[Any, ...]] | None,
        wanted: list[tuple[str, ...]],
        contexts: list[str] | None,
    ) -> tuple[Usual | None, Any]:
        count = len(rows)
        senders = [self._sender(run.number, m) for m in range(count)]
        self._early.clear()
        self._unwanted.clear()
        self._goes_on.clear()
        may_write = [[True] * count] * len(columns)
        given = self._inputs.take(run, columns, count)
        work = Work(given, rows, Told(requests, count), wanted, may_write, senders, contexts)
        results = self._instance.run(work, self._clock)
        words += (results.gathered_ns, results.computed_ns, 0, 0, 0, *[NOTHING] * len(self._job.outputs))
        for m in results.rescheduled:
            self._given_back[senders[m].key] = senders[m]
            if senders[m].is_cancelled():  # meanwhile
                self._given_back.pop(senders[m].key, None)
        return None, dict.fromkeys(results.rescheduled) or None

    def _sender(self, number: int, m: int) -> ProcessSender:
        earlier = self._goes_on.get((number, m))
        sender = None if earlier is None else self._given_back.pop(earlier, None)
        if sender is None:
            sender = ProcessSender(self, number, m)
            self._senders[sender.key] = sender
            sender.grant(self._early.pop(sender.key, 0))
            if sender.key in self._unwanted or earlier is not None:
                sender.withdraw()
        return sender

    def _send(self, message: bytes) -> None:
        with self._one_by_one:
            super()._send(message)

    # ------------------------------------------------------------------ for its senders, on any thread

    def answer(self, number: int, member: int, sent: Sent) -> None:
        first = next((tensor for tensor in sent.outputs if tensor is not None), None)
        rows = first.stop - first.start if first is not None and self._job.batches else 1
        with self._one_by_one:
            placed = self._outputs.place([[one] for one in sent.outputs])
            words = [number, member, sent.infer_ns, sent.output_ns, rows, *placed]
            super()._send(pack(ANSWER, words, dict(sent.parameters) or None))

    def over(self, number: int, member: int, error: FlowserveError | None, *, is_empty: bool) -> None:
        self._given_back.pop((number, member), None)
        if error is not None:
            self._has_failed = True  # looked into when the run is over, or the next one
        self._send(pack(OVER, [number, member, int(is_empty)], None if error is None else said(error)))

    def waits(self, number: int, member: int) -> None:
        is_inside = threading.current_thread() is self._executor
        self._send(pack(WAITS, [number, member, int(is_inside)]))


class ProcessSender(CreditSender):
    """Where a model in this process sends its answers to one request."""

    def __init__(self, server: StreamServer, number: int, member: int) -> None:
        super().__init__()
        self._server = server
        self.key = (number, member)

    def _tell_answer(self, sent: Sent) -> None:
        self._quietly(partial(self._server.answer, *self.key, sent))

    def _tell_over(self, error: FlowserveError | None, *, is_empty: bool = False) -> None:
        self._quietly(partial(self._server.over, *self.key, error, is_empty=is_empty))

    def _tell_waits(self) -> None:
        self._quietly(partial(self._server.waits, *self.key))

    def _quietly(self, tell: Any) -> None:
        try:
            tell()
        except OSError:
            self.withdraw()  # the server is gone, and nobody wants anything any more
