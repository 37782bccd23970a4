"""The port of a worker process: sequenced packets and shared memory, in which tensors travel as places.

Decides how the process of an instance is started, opened and ended; that its messages are read on the event loop,
without a thread or task for each process; where the tensors of a batch are, in which memory of which process; and when
a route over processes is announced to them: once, with the first batch that takes it.

`ProcessPool` holds the objects that all process workers share: the starter of processes, the poller of their sockets,
and the batches in flight. Each process has a number of its own. ipc/ decides the transport of messages. Does not know
queues or callers, nor what follows from a message (worker.py). Made by factory.py; the engine makes the pool.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, Final, cast

import trio

from flowserve.backends.base import Remote, Results, Work
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import Garbled, Job, RouteHop, Stage, decode_error, encode_route, pack
from flowserve.backends.worker.readiness import ask
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, InstanceDied, Internal, ModelFailed
from flowserve.memory.segment import Lease
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.ipc.channel import Channel, Readiness, Unseen
from flowserve.runtime.ipc.tensors import InputPacker, Packed
from flowserve.runtime.loop import StepLoop
from flowserve.runtime.model_calls.call_socket import CallSocket
from flowserve.runtime.processes.children import Child, Children, SpawnChild
from flowserve.runtime.processes.environments import Environment, Environments
from flowserve.runtime.remote.run import RemoteRun
from flowserve.runtime.remote.worker import RemoteWorker, encode_batch
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.route import Route

log = logging.getLogger("flowserve.runtime")
# The time that an unloaded model has to finish and to finalise; at the end of the server the exit timeout applies.
CLOSE_S_MAX: Final = 600.0

_route_numbers = count(1)
_number_of = attrgetter("number")


class ProcessPool:
    """The worker processes of a server. Made on the event loop."""

    def __init__(self, clock: ClockNs, loop: StepLoop) -> None:
        self.clock = clock
        self.children = Children(clock)
        self.environments = Environments(self.children)
        self.spawn: SpawnChild = self.children.spawn
        self.readiness = Readiness(loop)
        self.runs: dict[int, RemoteRun] = {}  # the batches in the processes, by number
        self.run_numbers = count(1)
        self.process_numbers = count(1)  # taken on any thread

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve them. Ends by cancellation, after `close`."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.children.run)
            nursery.start_soon(self.readiness.run, name="sockets of worker processes")
            task_status.started()

    def within(self, environment: Environment) -> ProcessPool:
        """A pool with the same parts, for a model that runs in that environment."""
        within = copy(self)
        within.spawn = environment.spawn
        return within

    async def close(self) -> None:
        """End every process that still runs."""
        await self.children.close()
        self.environments.close()


class ProcessPort:
    """The connection of a worker process. `child` is that process and `channel` its channel while the instance is open
    there.

    `open`, on a loader's thread, sets `child`, `channel`, `_worker` and `_opening` before it posts `_begin`; from then
    until the end of the process only the event loop writes them. `close` and `give_up`, on other threads, read them and
    set `_is_closed` and `_given_up`.
    """

    machine = ""

    def __init__(
        self, name: str, config: ModelConfig, remote: Remote, packer: InputPacker, pool: ProcessPool, *, is_plain: bool
    ) -> None:
        """`is_plain`: the model is not decoupled and has no state."""
        self.runs = pool.runs
        self.run_numbers = pool.run_numbers
        self.depth = 1
        self.route_group: object = "process" if is_plain else None
        self.computes_apart = True
        self.child: Child | None = None
        self.channel: Channel | None = None
        self.packer = packer
        self.arena = packer.arena
        self.pack: Callable[[Work], Packed] = packer.pack
        batches = config.max_batch_size > 0
        self._name = name
        self._model = config.name
        self._job = Job(config.name, name, config.inputs, config.outputs, batches, config.decoupled, remote)
        self._pool = pool
        self._worker: RemoteWorker | None = None  # set by the last `open`
        self._is_closed = False
        self._opening: Child | None = None  # set while it is being opened; its model may already make calls
        self._given_up = ""

    # ------------------------------------------------------------------ opening and closing, on other threads

    def open(self, worker: RemoteWorker) -> None:
        self._worker = worker
        job = replace(self._job, number=next(self._pool.process_numbers))
        child = self._pool.spawn(self._name, messages.SERVE, pickle.dumps(job), log_name=self._model)
        channel = Channel(child.socket, job.number, self._model, self._pool.readiness)
        channel.on_calls = partial(worker.post, self._begin_early_calls, child)
        self._opening = child
        if self._given_up:
            child.kill(why=self._given_up)
        try:
            _await_open(child, channel)
        except BaseException:
            _drop(child, channel)
            raise
        finally:
            self._opening = None
        self.child, self.channel = child, channel

    def serve(self) -> None:
        child, channel, worker = self.child, self.channel, self._worker
        assert child is not None
        assert channel is not None
        assert worker is not None
        if self._is_closed:  # checked last: `close` sets it before it looks for a process
            self.child = self.channel = None
            _drop(child, channel)
            worker.post(worker.end_calls)
            return
        worker.post(self._begin, child)

    def kill(self, why: str) -> None:
        if self.child is not None:
            self.child.kill(why=why)

    def give_up(self, why: str) -> None:
        self._given_up = f"its process was killed: {why}"
        child = self._opening
        if child is not None:
            child.kill(why=self._given_up)

    def close(self) -> None:
        self._is_closed = True
        child, channel, worker = self.child, self.channel, self._worker
        if child is None or channel is None or worker is None:
            return
        with suppress(OSError):  # if it has already ended
            channel.end()
        if not child.wait(CLOSE_S_MAX):
            child.kill(why=f"its process was killed, because it had not ended {CLOSE_S_MAX:g} s after it was told to")
            log.error("model '%s', instance '%s': %s", self._model, self._name, child.why)
        worker.post(self._read_last)

    # ------------------------------------------------------------------ to the process

    def path_of(self, batch: Batch) -> Sequence[RemoteWorker]:
        workers = (self._worker,) if batch.route is None else batch.instances
        for worker in workers:
            if worker.port.channel is None:
                return ()
        return cast("Sequence[RemoteWorker]", workers)

    def send(self, run: RemoteRun, work: Work, packed: Packed) -> None:
        route = run.batch.route
        channels: list[Channel] = []
        for worker in run.workers:
            channels.append(worker.port.channel)  # noqa: PERF401  # a comprehension is one more call
        updates: list[Sequence[int]] = []  # by stage
        try:
            for channel in channels:
                updates.append(channel.take_update())  # noqa: PERF401
            number = 0 if route is None else _route_number(route, channels, run.workers)
            words: list[int] = []
            for update in updates:
                words += update
            message = encode_batch(run, number, packed.wanted, packed.facts, words, packed.columns)
            channels[0].send_batch(message, packed, self.packer)
        except Exception:
            restore_updates(channels, updates)
            raise
        run.memory = SharedRunMemory(run.batch, run.number, run.workers, channels, packed, updates)

    def tell(self, message: bytes) -> None:
        if self.channel is not None:
            self.channel.tell(message)

    def recall(self, run: RemoteRun) -> None:
        for i in run.ask():
            run.memory.channels[i].tell(pack(messages.CANCEL, (run.number,)))

    def free_words(self) -> Sequence[int]:
        words: list[int] = []
        free_blocks = () if self.channel is None else self.channel.free_blocks
        while free_blocks:
            words += free_blocks.popleft()
        return words

    def share(self) -> None:
        """No effect: outputs are in shared memory anyway."""

    def readiness(self) -> Callable[[], str] | None:
        questions = None if self.channel is None else self.channel.questions
        return None if questions is None else partial(ask, questions)

    @property
    def has_free_blocks(self) -> bool:
        return self.channel is not None and bool(self.channel.free_blocks)

    def release_idle(self, *, is_quiet: bool) -> None:
        if self.channel is not None:
            self.channel.release_idle(is_quiet=is_quiet)

    # ------------------------------------------------------------------ from the process, on the event loop

    def _begin(self, child: Child) -> None:
        child.on_end = self._ended
        if child.ended:
            self._ended(child)
        elif self.child is child and self.channel is not None and self._worker is not None:
            self.channel.on_calls = self._begin_calls
            self._pool.readiness.watch(child.socket.fileno(), self.read, self._worker.broke)

    def read(self) -> None:
        """Read the messages of the process, until a reply or its end."""
        channel, child, worker = self.channel, self.child, self._worker
        if channel is None or child is None or worker is None:
            return
        try:
            while (message := channel.read()) is not None:
                kind, words, text = message
                if kind == messages.CANCELLED:
                    self._cancelled(worker, words)
                elif worker.take(kind, words, text, channel.block):
                    return  # messages behind a reply, as GONE, remain for the next event: epoll is level-triggered
        except EOFError:
            self._pool.readiness.forget(child.socket.fileno())
            child.hung_up()
        except Garbled as error:
            self.garbled(str(error))
        except Exception as error:  # an error about a message concerns this process only
            self.garbled(f"{type(error).__name__}: {error}")

    def _cancelled(self, worker: RemoteWorker, words: Sequence[int]) -> None:
        run = self.runs.get(words[1])
        if run is not None and worker in run.workers:  # None if it has returned meanwhile
            run.answered(worker, words)
            worker.leave(run)

    def _ended(self, child: Child) -> None:
        """The process has ended. Its batches fail and are not retried: their effects are unknown."""
        worker = self._worker
        assert worker is not None
        runs = [run for run in self.runs.values() if self.channel in run.memory.channels]
        self._disconnect()
        sink = worker.down(child.ended)
        try:
            if sink is not None:
                sink.fail(InstanceDied(child.ended))
            for run in runs:  # also a batch that has passed this process on its route
                run.died(worker, child.ended)
                if run.batch.route is not None:
                    self.recall(run)
                worker.leave(run)
        finally:
            worker.context.wake()
            worker.report_end()

    def _read_last(self) -> None:
        """The process has ended as requested. Its last reply may have arrived since the event loop last read."""
        worker = self._worker
        assert worker is not None
        self.read()
        self._disconnect()
        worker.end_calls()
        worker.context.wake()

    def _disconnect(self) -> None:
        channel, child = self.channel, self.child
        self.channel = self.child = None
        if channel is not None and child is not None:
            self._pool.readiness.forget(child.socket.fileno())
            channel.close()

    def garbled(self, what: str) -> None:
        self.end(killed_for(what))

    def end(self, why: str) -> None:
        """Kill the process, also while it is opened, and read it no more."""
        if self.child is not None:
            self._pool.readiness.forget(self.child.socket.fileno())
            self.child.kill(why=why)
        elif self._opening is not None:
            self._opening.kill(why=why)

    # ------------------------------------------------------------------ calls of its model

    def _begin_early_calls(self, child: Child, fd: int, is_fork: bool) -> None:
        try:
            self._begin_calls(fd, is_fork)
        except Garbled as error:
            child.kill(why=killed_for(str(error)))

    def _begin_calls(self, fd: int, is_fork: bool) -> None:
        worker = self._worker
        assert worker is not None
        try:
            make = worker.begin_calls(is_fork=is_fork)
        except Garbled:
            os.close(fd)
            raise
        if make is None:
            os.close(fd)  # its calls fail
        else:
            CallSocket(fd, self.packer.arena, self._pool.readiness, make)


class SharedRunMemory:
    """The memory of one batch: the blocks of each stage's process, and what is held for it. `updates[i]` was sent with
    the batch to stage i.
    """

    __slots__ = ("_batch", "_number", "_packed", "_updates", "_workers", "channels", "copied", "taken")

    def __init__(
        self,
        batch: Batch,
        number: int,
        workers: Sequence[Any],
        channels: Sequence[Channel],
        packed: Packed,
        updates: Sequence[Sequence[int]],
    ) -> None:
        self.channels = channels
        self.copied = packed.copied
        self.taken = packed.taken
        self._batch = batch
        self._number = number
        self._workers = workers
        self._packed = packed
        self._updates = updates

    def block(self, i: int, segment: int, offset: int, nbytes: int) -> Lease | None:
        return self.channels[i].block(segment, offset, nbytes)

    def give_back(self, passed: Sequence[Stage]) -> bool:
        """As `RunMemory.give_back`. Does nothing if a model keeps reading one of the blocks, or if a later process may
        not have attached its segment.
        """
        last = len(passed)
        for i, stage in enumerate(passed):
            if stage.kept:
                return False
            for j in range(i + 1, last + 1):
                if stage.segment and stage.segment not in self.channels[j].attached:
                    return False
        for i, stage in enumerate(passed):
            if stage.segment:
                self.channels[i].free_blocks.append((stage.segment, stage.offset))
        return True

    def blocks(self, passed: Sequence[Stage], last: int) -> list[Lease | Exception | None]:
        """As `RunMemory.blocks`; a block is free again when its lease ends."""
        leases: list[Lease | Exception | None] = []
        for i, stage in enumerate(passed):
            nbytes = max([start + size for start, size, _ in stage.outputs], default=0)
            lease: Lease | Exception | None
            if nbytes and not self.channels[i].knows(stage.segment):  # announced on a socket that is not read yet
                self._workers[i].port.read()
            try:
                lease = self.channels[i].block(stage.segment, stage.offset, nbytes)
            except Unseen as unseen:
                lease = Internal(str(unseen))
            except Exception as error:
                lease = error.with_traceback(None)
            leases.append(lease)
            if isinstance(lease, Lease):
                for j in range(i + 1, last + 1):
                    self.channels[j].has_attached(lease.segment)
            if stage.kept:
                self.hold(i, leases[:i])
        return leases

    def hold(self, i: int, blocks: Sequence[Any]) -> None:
        self.channels[i].hold(self._number, blocks if i else self._packed.held)

    def unreached(self, first: int) -> None:
        restore_updates(self.channels[first:], self._updates[first:])

    def invalid(self, i: int, error: Exception) -> FlowserveError:
        """As `RunMemory.invalid`: the process is killed, unless it has been restarted."""
        worker = self._workers[i]
        what = str(error) if isinstance(error, Garbled) else f"{type(error).__name__}: {error}"
        if worker.port.channel is self.channels[i]:
            worker.port.garbled(what)
        return InstanceDied(f"{worker.where}: {killed_for(what)}")

    def settle(self, made: Sequence[Results], now_ns: int) -> None:
        """As `RunMemory.settle`. All processes have the same clock, but a model's code may have written these times."""
        begun_ns = self._batch.started_ns
        for results in made:
            if not begun_ns <= results.gathered_ns <= results.computed_ns <= now_ns:
                results.gathered_ns = min(max(results.gathered_ns, begun_ns), now_ns)
                results.computed_ns = min(max(results.computed_ns, results.gathered_ns), now_ns)
            begun_ns = results.computed_ns


def restore_updates(channels: Sequence[Channel], updates: Sequence[Sequence[int]]) -> None:
    """Undo `Channel.take_update`: these updates were not sent."""
    for channel, update in zip(channels, updates, strict=False):
        channel.restore_update(update)


def _route_number(route: Route, channels: Sequence[Channel], workers: Sequence[Any]) -> int:
    """The number of a route over these workers' processes. A new route is announced to them first, and routes over a
    process that has ended are forgotten.
    """
    known = cast("dict[tuple[int, ...], tuple[int, Sequence[Channel]]] | None", route.worker_data)
    if known is None:
        known = route.worker_data = {}
    key = tuple(map(_number_of, channels))
    found = known.get(key)
    if found is None:
        ended = [one for one, (_, over) in known.items() if any(channel.is_closed for channel in over)]
        gone = [known.pop(one)[0] for one in ended]
        found = next(_route_numbers), channels
        for i, read in enumerate(route.reads):
            here, following = channels[i], channels[i + 1]
            here.introduce(following)
            wanted = workers[i + 1].port.packer.indices(route.nodes[i + 1].wanted)
            here.tell(encode_route(found[0], RouteHop(following.number, wanted, read), gone))
        known[key] = found  # not earlier: the call raises if a socket cannot be sent
    return found[0]


def killed_for(what: str) -> str:
    """How a process ended that sent an invalid message."""
    return f"its process sent an invalid message ({what}); it was killed"


def _drop(child: Child, channel: Channel) -> None:
    channel.close()
    child.kill()


def _await_open(child: Child, channel: Channel) -> None:
    """Block until the instance is open. Raises the error of opening."""
    poll = select.poll()
    poll.register(child.socket, select.POLLIN)
    poll.register(child.pidfd, select.POLLIN)
    while True:
        ready = [number for number, _ in poll.poll()]
        try:
            message = channel.read()
        except EOFError:
            raise ModelFailed(child.how_it_ended()) from None
        except Garbled as error:
            raise ModelFailed(f"instance '{child.name}': its process sent an invalid message: {error}") from None
        if message is not None:
            kind, _, text = message
            if kind == messages.READY:
                return
            if kind == messages.BROKEN:
                raise decode_error(json.loads(text))
            raise ModelFailed(f"instance '{child.name}': its process sent an invalid message: a message of kind {kind}")
        if child.pidfd in ready:
            raise ModelFailed(child.how_it_ended())
