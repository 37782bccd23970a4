"""The processor that the loop and models' processes share while requests come one by one.

Decided here: who is held there, how the loop waits there, and that everybody, and all that a model has started
meanwhile, gets all processors back. Processes that wake each other in turn never run at the same time. On a processor
each, every one of them has to wake one that sleeps, and finds its caches cold; a hypervisor may have given it to
somebody else. When this is worth it is decided in comparison.py, when requests come one by one in alone.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

import trio

from flowserve.memory.syscalls import processor_teller
from flowserve.runtime.children import Child

Answers = list[tuple[int, int]]
# Nobody is held for longer, and no longer has what a model starts meanwhile one processor: whoever is still asked is
# held anew, where the loop runs by then.
_HELD_S: Final = 1.0
# Of one thread: the processes that it has started. Not every kernel tells.
_STARTED: Final = "/proc/{}/task/{}/children"


class _Held(NamedTuple):
    had: set[int]  # processors
    known: set[int]  # threads and processes that were there before
    reaped: bytes  # as `_reaped` told then


class OneProcessor:
    """That of a server. Touched on the loop. `era`: another one whenever all were let go, or are to be held anew."""

    def __init__(self) -> None:
        self.era = 0
        self._held: dict[Child, _Held] = {}
        self._one: set[int] = set()
        self._tells_processor = processor_teller()
        self._can_give_back = os.path.exists(_STARTED.format(os.getpid(), os.getpid()))
        self._begun = trio.Event()  # set where somebody was to be held

    def hold(self, children: Iterable[Child]) -> None:
        """They run where the loop runs now until `let_go`, as far as that is allowed."""
        if not self._can_give_back:
            return
        try:
            if not self._held:
                self._one = {self._tells_processor()} & os.sched_getaffinity(0)
            for child in children:
                had = os.sched_getaffinity(child.pid)
                if self._one and self._one < had and child not in self._held:
                    known = {*_threads(child.pid), *_started(child.pid, child.pid)}
                    reaped = _reaped(child.pid)
                    os.sched_setaffinity(child.pid, self._one)  # of its first thread, which executes
                    self._held[child] = _Held(had, known, reaped)
        except OSError:  # a container may forbid it, or one of them has just ended
            pass
        self._begun.set()

    def wait(self, poll: Callable[[int], Answers], within_ms: int, *, here: bool) -> Answers:
        """`poll` so long for who is held. `here`: and be woken where they are."""
        if not here or not self._held:
            return poll(within_ms)
        processors = os.sched_getaffinity(0)
        if not self._one < processors:
            return poll(within_ms)
        try:
            with suppress(OSError):
                os.sched_setaffinity(0, self._one)  # of this thread alone, which starts no other meanwhile
            return poll(within_ms)
        finally:
            self._free(0, processors)

    def let_go(self) -> None:
        """Whoever is held, is not any more."""
        if self._held:
            self.era += 1
            for child, held in self._held.items():
                if not child.ended:
                    self._give_back(child.pid, held)
                    if _reaped(child.pid) != held.reaped:
                        self._give_back_orphans(child.pid, held)
            self._held = {}

    async def run(self) -> None:
        """See to it that nobody is held for long, for ever. Ends only by cancellation."""
        while True:
            await self._begun.wait()
            await trio.sleep(_HELD_S)
            self.let_go()
            self.era += 1  # who could not be held may be by now
            self._begun = trio.Event()  # a server that is idle wakes up for nothing

    def _give_back(self, pid: int, held: _Held) -> None:
        """A process, and what it has started meanwhile, get what it had before. Each of them does before it is looked
        for what it has started: what comes later has it anyway.
        """
        had, known, _ = held
        self._free(pid, had)
        threads = [pid]
        while new := [thread for thread in _threads(pid) if thread not in known]:
            known.update(new)
            threads += new
            if True not in [self._free(thread, had) for thread in new]:
                break
        for process in {process for thread in threads for process in _started(pid, thread)} - known:
            self._give_back(process, held)

    def _give_back_orphans(self, pid: int, held: _Held) -> None:
        """The same for those in its session whose parent has ended: no process tells of them any more."""
        for process in _numbers("/proc"):
            if process not in held.known and _session(process) == pid and _session(_parent(process)) != pid:
                self._give_back(process, held)

    def _free(self, thread: int, processors: set[int]) -> bool:
        """Whether it was held, as far as can be told."""
        try:
            has = os.sched_getaffinity(thread)
            if has == processors:
                return False
            if has != self._one and not self._is_refused(thread, has):
                return False  # somebody has chosen others for it
            os.sched_setaffinity(thread, processors)
        except OSError:  # it may have ended
            return False
        return True

    def _is_refused(self, thread: int, has: set[int]) -> bool:
        """Whether the one was taken from the whole container, and the thread that had only that got others for as long.
        Raises OSError.
        """
        try:
            os.sched_setaffinity(thread, self._one)
        except OSError:
            return True
        os.sched_setaffinity(thread, has)
        return False


def _threads(pid: int) -> list[int]:
    return _numbers(f"/proc/{pid}/task")


def _numbers(folder: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:  # whom it is about may have ended
        return []


def _started(pid: int, thread: int) -> list[int]:
    """Processes that one thread has started."""
    try:
        with open(_STARTED.format(pid, thread)) as file:
            return [int(number) for number in file.read().split()]
    except OSError:  # it may have ended
        return []


def _stat(pid: int) -> list[bytes]:
    """What the kernel tells of a process after its name: proc(5), from the third field on. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _reaped(pid: int) -> bytes:
    """Changes when one that the process has started has ended, and it knows: its page faults were added up then."""
    try:
        return _stat(pid)[8]
    except OSError:  # it may have ended
        return b""


def _parent(pid: int) -> int:
    try:
        return int(_stat(pid)[1])
    except OSError:
        return 0


def _session(pid: int) -> int:
    try:
        return os.getsid(pid) if pid else 0
    except OSError:
        return 0
