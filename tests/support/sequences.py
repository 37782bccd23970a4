"""Many clients of one stateful model in simulated time: the real scheduler, a model that adds up, and a clock.

Decides the events of sequences (unfinished and restarted sequences, disconnects, pipelined requests, deaths of
instances), and the expected responses. One seed gives one history. A lost, mixed-up or doubled request shows as a wrong
sum, a missing response, or a slot that is occupied at the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random

from flowserve.errors import Cancelled, InstanceDied, Invalid, Unavailable
from flowserve.graph.plan import make_plan
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame, filler_frame, request_frame
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import BatchPolicy
from flowserve.scheduling.rate_limit.limiter import Limiter
from flowserve.scheduling.scheduler import Scheduler
from flowserve.scheduling.sequence.batcher import Sequences
from flowserve.scheduling.sequence.sequence import RequestSequence, SequencePolicy
from flowserve.scheduling.sequence.strategies import Direct, Oldest
from flowserve.simulation.deployment import BatchResults
from tests.support.recorder import rows_of, simple_model
from tests.support.strategies import plain_graph

PLAN = make_plan(plain_graph(simple_model(0)))
IDLE_NS = 100_000
SLOTS = 4


def slots_taken(batcher: Sequences) -> int:
    """The number of slots that a sequence holds."""
    return sum(slot.sequence is not None for slots in batcher.slots.values() for slot in slots)


class Asked:
    """One request: which sequence, its flags, and the number it adds."""

    def __init__(self, client: Client, number: int, *, start: bool, end: bool) -> None:
        self.client = client
        self.number = number
        self.start = start
        self.end = end


class Client:
    """One sequence: its numbers, and where it begins again, ends or is cancelled."""

    def __init__(self, key: int, random: Random, *, is_troubled: bool) -> None:
        self.key = key
        length = random.randint(1, 8)
        numbers = [random.randint(1, 1000) for _ in range(length)]
        fate = random.random() if is_troubled else 1.0
        self.restarts_at = random.randrange(length) if 0.05 <= fate < 0.10 else 0
        self.leaves_at = random.randrange(length) if 0.10 <= fate < 0.15 else -1
        self.runs_ahead = random.random() < 0.3
        ends = fate >= 0.05
        self.requests = [
            Asked(self, number, start=i in (0, self.restarts_at), end=ends and i == length - 1)
            for i, number in enumerate(numbers)
        ]
        self.sent = 0
        self.sums: list[int] = []  # the responses
        self.is_over = False  # its sequence has ended, or it was cancelled
        self.is_excused = False

    def expected(self, count: int) -> list[int]:
        """The sums of its first `count` answers."""
        sums: list[int] = []
        for asked in self.requests[:count]:
            sums.append(asked.number + (0 if asked.start else sums[-1]))
        return sums


def _identify(frame: Frame) -> tuple[int, bool, bool]:
    asked: Asked = frame.request
    return asked.client.key, asked.start, asked.end


class SequenceSim:
    """`SequenceSim(seed, clients).run()` runs to the end. The first violated property raises AssertionError."""

    def __init__(self, seed: int, clients: int, *, deaths: bool = False) -> None:
        self._random = Random(seed)
        self.batcher = self._batcher()
        self.scheduler = Scheduler(Limiter() if self._random.random() < 0.25 else None)
        self._deaths = deaths
        self.time = 0
        self.answers = 0
        self.queue = ModelQueue(PLAN.nodes[0].model, self.batcher, ["one", "two"], is_pure=self._random.random() < 0.5)
        self.scheduler.models.add(self.queue)
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._tie = count()
        self._frames: dict[Asked, Frame] = {}
        self._seats: dict[RequestSequence, str] = {}
        at = 0
        self.clients = [Client(1 + n, self._random, is_troubled=True) for n in range(clients)]
        for client in self.clients:
            at += self._random.randint(0, 4_000)
            self._at(at, partial(self._send, client))

    def _batcher(self) -> Sequences:
        policy = SequencePolicy("a", SLOTS, IDLE_NS)
        delay_ns = self._random.choice((0, 0, 300))
        if self._random.random() < 0.5:
            return Direct(policy, _identify, filler_frame(None), self._random.choice((0.0, 0.5)), delay_ns)
        return Oldest(policy, _identify, BatchPolicy.simple(self._random.randint(1, 4), delay_ns))

    def run(self) -> SequenceSim:
        """Run until no event is left; then every resource must be returned."""
        while True:
            instants = [self._agenda[0][0]] if self._agenda else []
            deadline = self.scheduler.next_deadline()
            if deadline is not None:
                instants.append(max(deadline, self.time))
            if not instants:
                break
            self.time = min(instants)
            while self._agenda and self._agenda[0][0] <= self.time:
                heapq.heappop(self._agenda)[2]()
            while (decisions := self.scheduler.schedule(self.time)) is not None:
                for frame in decisions.finished:
                    self._answered(frame)
                for batch in decisions.batches:
                    self._run(batch)
            self.scheduler.check()
        assert self.scheduler.in_flight == 0
        assert not self._frames, "a request was never answered"
        assert (len(self.batcher), self.batcher.live, slots_taken(self.batcher)) == (0, 0, 0), (
            "a slot is taken in the end"
        )
        for client in self.clients:
            if not client.is_excused:
                assert client.sums == client.expected(len(client.requests)), f"client {client.key} lost an answer"
        return self

    def _at(self, time: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._tie), act))

    # ------------------------------------------------------------------ clients

    def _send(self, client: Client) -> None:
        if client.is_over or client.sent == len(client.requests):
            return
        asked = client.requests[client.sent]
        leaves = client.sent == client.leaves_at
        client.sent += 1
        frame = request_frame(PLAN, [self.queue], [rows_of()], self.time, next(self._tie), asked)
        self._frames[asked] = frame
        self.scheduler.submit(frame)
        if leaves:
            self._at(self.time + self._random.randint(0, 900), partial(self._leave, asked))
        elif client.runs_ahead:
            self._at(self.time + self._random.randint(0, 500), partial(self._send, client))

    def _leave(self, asked: Asked) -> None:
        frame = self._frames.pop(asked, None)
        asked.client.is_over = asked.client.is_excused = True
        if frame is not None:
            self.scheduler.cancel(frame)
            self.scheduler.cancel(frame)  # repeated calls have no effect

    def _answered(self, frame: Frame) -> None:
        asked: Asked = frame.request
        client = asked.client
        assert self._frames.pop(asked, None) is frame, "a request was answered twice"
        self.answers += 1
        if frame.record.error is None:
            client.sums.append(frame.tensors[1].content)
            assert client.sums == client.expected(len(client.sums)), f"client {client.key} got a wrong sum"
            if not client.runs_ahead:
                self._at(self.time + self._random.randint(0, 500), partial(self._send, client))
            return
        assert client.is_excused, f"client {client.key} is to blame for nothing and got: {frame.record.error}"
        assert isinstance(frame.record.error, Cancelled | InstanceDied | Invalid | Unavailable)
        client.is_over = True

    # ------------------------------------------------------------------ the model

    def _run(self, batch: Batch) -> None:
        real = [ticket for ticket in batch.tickets if ticket.sequence is not None]
        keys = [ticket.sequence.id for ticket in real]
        assert len(set(keys)) == len(keys), "a batch holds two requests of one sequence"
        assert real, "a batch without requests"
        for n, ticket in enumerate(batch.tickets):
            line = ticket.sequence
            if line is None:
                assert isinstance(self.batcher, Direct)
                continue
            assert self._seats.setdefault(line, batch.instance) == batch.instance, "a sequence changed its instance"
            if isinstance(self.batcher, Direct) and line.slot is not None and len(real) == len(batch.tickets) > 1:
                assert n <= line.slot.number
        ns = self._random.randint(0, 400)
        if ns:
            self._at(self.time + ns, partial(self._return, batch))
        else:
            self._return(batch)

    def _return(self, batch: Batch) -> None:
        if self._deaths and self._random.random() < 0.01:
            self._die(batch)
            return
        if self.queue.is_pure and len(batch.tickets) > 1 and self._random.random() < 0.05:
            self.scheduler.complete(batch, [], Unavailable("once more"), self.time)  # retried in halves
            return
        column = []
        for ticket in batch.tickets:
            total = 0
            if ticket.sequence is not None:
                asked: Asked = ticket.frame.request
                total = asked.number + (0 if asked.start else ticket.sequence.memory)
                ticket.sequence.memory = total
            handle = rows_of()
            handle.content = total
            column.append(handle)
        self.scheduler.complete(batch, [BatchResults([column])], None, self.time)

    def _die(self, batch: Batch) -> None:
        for slot in self.batcher.slots[batch.instance]:
            if slot.sequence is not None:
                self._excuse(slot.sequence)
        for ticket in batch.tickets:
            if ticket.sequence is not None:
                self._excuse(ticket.sequence)
        self.scheduler.complete(batch, [], InstanceDied("it died"), self.time)
        self.queue.take_away(batch.instance)
        after_ns = self._random.randint(1, 5_000)
        self._at(self.time + after_ns, lambda: self.queue.give_back(batch.instance))

    def _excuse(self, line: RequestSequence) -> None:
        assert isinstance(line.id, int)
        self.clients[line.id - 1].is_excused = True
