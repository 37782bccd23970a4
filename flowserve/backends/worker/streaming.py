"""The driver of a decoupled model: responses are sent when the model sends them, on any thread.

Decides that a separate thread receives messages, because the thread that runs the model may block in a send until a
message arrives; a model with one response per request does not need that thread. Everything else about an instance is
in driver.py.

Callers: main.py and elsewhere/cluster/actor.py, through `drive`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from flowserve.backends.base import ClockNs, Instance, Sent
from flowserve.backends.credit import CreditSender
from flowserve.backends.worker import messages
from flowserve.backends.worker.driver import Driver
from flowserve.backends.worker.messages import Garbled, Job, encode_error, encode_notes, pack
from flowserve.backends.worker.port import DriverPort, ReceivedBatch
from flowserve.errors import FlowserveError

_EARLY_MAX: Final = 4096  # grants that arrived before their batch; only those of the next batch can


class StreamDriver(Driver):
    """Drives an open instance of a decoupled model."""

    def __init__(self, port: DriverPort, job: Job, instance: Instance, clock: ClockNs) -> None:
        super().__init__(port, job, instance, clock)
        self._batches: queue.SimpleQueue[ReceivedBatch | None] = queue.SimpleQueue()
        # Weak: a sender that the model has freed needs no messages.
        self._senders: WeakValueDictionary[tuple[int, int], WorkerSender] = WeakValueDictionary()
        self._early: dict[tuple[int, int], int] = {}
        self._unwanted: set[tuple[int, int]] = set()  # cancelled, perhaps before their batch arrived
        self._goes_on: dict[tuple[int, int], tuple[int, int]] = {}  # members of the next batch
        self._given_back: dict[tuple[int, int], WorkerSender] = {}  # senders of requests that run again
        self._garbled: Garbled | None = None  # why no more messages are received
        self._executor = threading.current_thread()

    def run(self) -> None:
        threading.Thread(target=self._listen, name="flowserve messages", daemon=True).start()
        while (batch := self._batches.get()) is not None:
            if self._port.begin(batch):
                self._run(batch)
        if self._garbled is not None:
            raise self._garbled

    def _listen(self) -> None:
        try:
            while (batch := self._port.receive(self._take)) is not None:
                self._batches.put(batch)
        except OSError:
            pass  # the socket is closed
        except Garbled as error:
            self._garbled = error
        for sender in [*self._senders.values()]:
            sender.withdraw()
        self._batches.put(None)

    def _take(self, kind: int, words: Sequence[int]) -> None:
        if kind not in messages.OF_STREAMS:
            super()._take(kind, words)
        number, *rest = messages.read_fields(messages.TO_INSTANCE, kind, words)
        if kind == messages.GRANT:
            self._granted((number, rest[0]), rest[1], [*zip(rest[2::2], rest[3::2], strict=True)])
        elif kind == messages.WITHDRAW:
            self._withdrawn((number, rest[0]))
        else:
            for member, earlier_number, earlier_member in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
                self._goes_on[number, member] = earlier_number, earlier_member

    def _granted(self, key: tuple[int, int], count: int, blocks: Sequence[tuple[int, int]]) -> None:
        if blocks:
            self._port.give_back(blocks)
        sender = self._senders.get(key)
        if sender is not None:
            sender.grant(count)
        elif len(self._early) < _EARLY_MAX:
            self._early[key] = self._early.get(key, 0) + count

    def _withdrawn(self, key: tuple[int, int]) -> None:
        if len(self._unwanted) < _EARLY_MAX:
            self._unwanted.add(key)  # first, because another thread may create the sender now
        sender = self._senders.get(key)
        if sender is not None:
            sender.withdraw()
            self._given_back.pop(key, None)

    def _execute(self, batch: ReceivedBatch) -> tuple[Any, tuple[int, int], Any]:
        senders = [self._sender(batch.number, m) for m in range(len(batch.rows))]
        self._early.clear()
        self._unwanted.clear()
        self._goes_on.clear()
        work = self._work(batch)
        work.senders = senders
        results = self._instance.run(work, self._clock)
        for m in results.rescheduled:
            self._given_back[senders[m].key] = senders[m]
            if senders[m].is_cancelled():  # cancelled meanwhile
                self._given_back.pop(senders[m].key, None)
        text = dict.fromkeys(results.rescheduled) or None
        nothing = [[None] * len(batch.rows)] * len(self._job.outputs)
        return text, (results.gathered_ns, results.computed_ns), self._port.place(batch, nothing)

    def _sender(self, number: int, m: int) -> WorkerSender:
        earlier = self._goes_on.get((number, m))
        sender = None if earlier is None else self._given_back.pop(earlier, None)
        if sender is None:
            sender = WorkerSender(self, number, m)
            self._senders[sender.key] = sender
            sender.grant(self._early.pop(sender.key, 0))
            if sender.key in self._unwanted or earlier is not None:
                sender.withdraw()
        return sender

    # ------------------------------------------------------------------ for its senders, on any thread

    def answer(self, number: int, member: int, sent: Sent) -> None:
        if sent.is_last:
            self._given_back.pop((number, member), None)
        text: Any = dict(sent.parameters) or None
        if sent.notes is not None:
            text = [dict(sent.parameters), encode_notes(sent.notes)]
        self._port.respond([number, member, int(sent.is_last), sent.infer_ns, sent.output_ns], sent.outputs, text)

    def over(self, number: int, member: int, error: FlowserveError | None) -> None:
        self._given_back.pop((number, member), None)
        if error is not None:
            self._has_failed = True  # the loss of a GPU is checked after the run, or after the next one
        self._port.send(pack(messages.OVER, [number, member], None if error is None else encode_error(error)))

    def waits(self, number: int, member: int) -> None:
        is_inside = threading.current_thread() is self._executor
        self._port.send(pack(messages.WAITS, [number, member, int(is_inside)]))


class WorkerSender(CreditSender):
    """The `Sender` of one request to the model of this process."""

    def __init__(self, server: StreamDriver, number: int, member: int) -> None:
        super().__init__()
        self._server = server
        self._is_over = False
        self.key = (number, member)

    def _tell_answer(self, sent: Sent) -> None:
        self._quietly(partial(self._server.answer, *self.key, sent))
        self._is_over = sent.is_last

    def _tell_over(self, error: FlowserveError | None) -> None:
        if not self._is_over:  # a later exception of the model belongs to the batch, not to this request
            self._is_over = True
            self._quietly(partial(self._server.over, *self.key, error))

    def _tell_waits(self) -> None:
        self._quietly(partial(self._server.waits, *self.key))

    def _quietly(self, send: Any) -> None:
        try:
            send()
        except OSError:
            self.withdraw()  # the server is gone


def drive(port: DriverPort, job: Job, instance: Instance, clock: ClockNs) -> None:
    """Run the batches of an open instance. Raises as `Driver.run`."""
    (StreamDriver if job.decoupled else Driver)(port, job, instance, clock).run()
