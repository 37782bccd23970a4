"""Generations: the queue and instances of one load of a model version, and when they are closed.

Decides when a generation is over. Every object that can still send work to its queue references its pin: the
deployments that use it, and through them every request, batch and connection. So nothing is counted per request: when
the pin is freed, no holder is left. Does not know why a generation was replaced, nor what its workers are. Used by the
engine and by loading.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence

import trio

from flowserve.backends.base import LoadedModel
from flowserve.graph.types import ModelKey
from flowserve.runtime.workers.base import Worker
from flowserve.scheduling.model_queue import ModelQueue

log = logging.getLogger("flowserve.load")


class Pin:
    """Referenced by every object that may still send work to a generation."""

    __slots__ = ("__weakref__",)


class Generation:
    """One loading of one model version: its queue, its open instances, the model.

    `files` is held until everything is closed: a private folder is removed with its last reference.
    """

    def __init__(self, queue: ModelQueue, workers: Sequence[Worker], model: LoadedModel, files: object = None) -> None:
        self.queue = queue
        self.workers = tuple(workers)
        self.pin: Pin | None = Pin()
        self.closed = trio.Event()
        self._model: LoadedModel | None = model
        self._files = files
        self.open = list(self.workers)  # workers that are not closed yet
        self._is_closing = False
        self._watch: weakref.ref[Pin] | None = None

    def retire(self, over: Callable[[Generation], object]) -> None:
        """Give out its pin no more. `over` is called, on any thread, once no holder is left."""
        pin, self.pin = self.pin, None
        assert pin is not None, "a generation is retired once"
        self._watch = weakref.ref(pin, lambda _: over(self))

    async def close(self) -> None:
        """Close every instance, then the model. A second call waits for the end of the first."""
        if not self._is_closing:
            self._is_closing = True
            async with trio.open_nursery() as nursery:
                for worker in self.workers:
                    nursery.start_soon(self._close_worker, worker, name=f"close {worker.name}")
            if self._model is not None:
                await _in_thread_of_its_own(self._model.close)
            # References to this object that remain, such as the reference cycle through the watch, keep nothing large
            # alive.
            self.workers, self._model, self._files, self._watch = (), None, None, None
            self.closed.set()
        await self.closed.wait()

    async def _close_worker(self, worker: Worker) -> None:
        await _in_thread_of_its_own(worker.close)
        self.open.remove(worker)


class Generations:
    """All generations of a server. New requests run on the current one of a key, older ones on their first one."""

    def __init__(self, forget: Callable[[ModelQueue], None]) -> None:
        self._forget = forget  # removes an unreachable queue from the scheduler
        self._current: dict[ModelKey, Generation] = {}
        self._retired: set[Generation] = set()
        self._token = trio.lowlevel.current_trio_token()
        self._over, self._ended = trio.open_memory_channel[Generation](math.inf)

    def __getitem__(self, key: ModelKey) -> Generation:
        return self._current[key]

    def workers(self) -> list[Worker]:
        """Every instance that is not closed yet."""
        return [worker for generation in (*self._current.values(), *self._retired) for worker in generation.workers]

    def add(self, generation: Generation) -> None:
        """Make it the current one of its key; the previous one is retired."""
        key = generation.queue.key
        if key in self._current:
            self.retire(key)
        self._current[key] = generation

    def retire(self, key: ModelKey) -> Generation:
        """It gets no new holders; `run` closes it after the last one."""
        generation = self._current.pop(key)
        self._retired.add(generation)
        generation.retire(self._is_unused)
        return generation

    async def run(self) -> None:
        """Close generations that have ended, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(self._reap, await self._ended.receive(), name="reap")

    async def close(self, deadline: float) -> list[str]:
        """Close all generations, those with running instances last and only until `deadline` on the loop's clock.
        Returns the instances that did not close.
        """
        everything = [*self._current.values(), *self._retired]
        with trio.move_on_at(deadline):
            async with trio.open_nursery() as nursery:
                for generation in everything:
                    nursery.start_soon(generation.close)
        return sorted(worker.name for generation in everything for worker in generation.open)

    def _is_unused(self, generation: Generation) -> None:
        # May run on any thread, and in the garbage collector: wherever the last reference is dropped.
        try:
            self._token.run_sync_soon(self._over.send_nowait, generation)
        except trio.RunFinishedError:
            log.debug("a generation outlived the server")

    async def _reap(self, generation: Generation) -> None:
        self._forget(generation.queue)
        await generation.close()
        self._retired.discard(generation)


async def _in_thread_of_its_own(close: Callable[[], None]) -> None:
    """So that a model that hangs while it closes delays neither other models nor the end of the process."""
    try:
        await trio.to_thread.run_sync(close, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
    except Exception:
        log.exception("closing failed")
