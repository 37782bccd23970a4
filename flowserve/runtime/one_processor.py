"""The processor that the loop and models' processes share while requests come one by one.

Decided here: who is held there, how the loop waits there, and that everybody, and all that a model has started
meanwhile, gets all processors back. Processes that wake each other in turn never run at the same time. On a processor
each, every one of them has to wake one that sleeps, and finds its caches cold; a hypervisor may have given it to
somebody else. When this is worth it is decided in comparison.py, when requests come one by one in alone.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import trio

from flowserve.memory.syscalls import processor_teller
from flowserve.runtime.children import Child

Answers = list[tuple[int, int]]
# What a model starts while its process is held has one processor too, for so long at most; and nobody is held for
# longer without a request.
_LOOK_S: Final = 1.0


class _Held(NamedTuple):
    had: set[int]  # processors
    known: set[int]  # threads and processes that were there before


class OneProcessor:
    """That of a server. Touched on the loop. `era`: another one whenever all were let go."""

    def __init__(self) -> None:
        self.era = 0
        self._held: dict[Child, _Held] = {}
        self._one: set[int] = set()
        self._waits = 0
        self._tells_processor = processor_teller()
        self._begun = trio.Event()  # set where there is somebody to look after

    def hold(self, children: Iterable[Child]) -> None:
        """They run where the loop runs now until `let_go`, as far as that is allowed."""
        try:
            if not self._held:
                self._one = {self._tells_processor()} & os.sched_getaffinity(0)
            for child in children:
                had = os.sched_getaffinity(child.pid)
                if self._one and self._one < had and child not in self._held:
                    known = {*_threads(child.pid), *_started(child.pid, child.pid)}
                    os.sched_setaffinity(child.pid, self._one)  # of its first thread, which executes
                    self._held[child] = _Held(had, known)
        except OSError:  # a container may forbid it, or one of them has just ended
            pass
        if self._held:
            self._begun.set()

    def wait(self, poll: Callable[[int], Answers], within_ms: int, *, here: bool) -> Answers:
        """`poll` so long for who is held. `here`: and be woken where they are."""
        self._waits += 1
        if not here or not self._held:
            return poll(within_ms)
        processors = os.sched_getaffinity(0)
        if not self._one < processors:
            return poll(within_ms)
        try:
            os.sched_setaffinity(0, self._one)  # of this thread alone, which starts no other meanwhile
        except OSError:
            return poll(within_ms)
        try:
            return poll(within_ms)
        finally:
            with suppress(OSError):  # somebody may have given it others meanwhile
                os.sched_setaffinity(0, processors)

    def let_go(self) -> None:
        """Whoever is held, is not any more."""
        if self._held:
            self.era += 1
            self._give_back()
            for child, held in self._held.items():
                if not child.ended:
                    self._free(child.pid, held.had)
            self._held = {}

    async def run(self) -> None:
        """Look after those who are held, for ever. Ends only by cancellation."""
        while True:
            await self._begun.wait()
            waits = self._waits
            await trio.sleep(_LOOK_S)
            if self._waits == waits:
                self.let_go()
            self._give_back()
            if not self._held:  # a server that is idle wakes up for nothing
                self._begun = trio.Event()

    def _give_back(self) -> None:
        """What models have started meanwhile gets what they had before."""
        for child, held in self._held.items():
            if not child.ended:
                for thread in [*_new(child.pid, held.known)]:
                    held.known.add(thread)
                    self._free(thread, held.had)

    def _free(self, thread: int, processors: set[int]) -> None:
        with suppress(OSError):  # it may have ended
            if os.sched_getaffinity(thread) == self._one:  # else somebody has chosen others for it
                os.sched_setaffinity(thread, processors)


def _threads(pid: int) -> Iterator[int]:
    with suppress(OSError):  # it may have ended
        yield from map(int, os.listdir(f"/proc/{pid}/task"))


def _started(pid: int, thread: int) -> Iterator[int]:
    """Processes that one thread has started."""
    with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:  # not every kernel tells
        yield from map(int, file.read().split())


def _new(pid: int, known: set[int]) -> Iterator[int]:
    """Threads of a process that are not known, and all of the processes that these or its first one have started."""
    for thread in _threads(pid):
        if thread not in known:
            yield thread
        if thread not in known or thread == pid:
            for process in _started(pid, thread):
                if process not in known:
                    yield from _new(process, known)
