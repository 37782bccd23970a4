"""A list of calls made by several threads at once.

Decided here: that the caller is one of those threads, that the others take from the same list until it is empty, and
that nobody waits for a thread which comes when everything is done. What the calls do, and whether that is worth it, is
decided by whoever makes them.

A thread that is busy elsewhere, or not woken in time, costs nothing: the others make its calls.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")


class Lanes:
    """So many threads, one of which is whoever calls `map`; the others are started when there is a use for them. One
    `map` at a time.
    """

    def __init__(self, count: int) -> None:
        self.count: Final = count
        self._asked: queue.SimpleQueue[_Calls[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def map(self, function: Callable[[int], T], count: int) -> list[T]:
        """`function(0)` to `function(count - 1)`, in any order and several at a time. Returns when no call is under
        way. Raises what a call raised; then some may not have been made.
        """
        helpers = min(self.count, count) - 1
        if helpers <= 0:
            return [function(number) for number in range(count)]
        calls = _Calls(function, count, helpers)
        self._start(helpers)
        for _ in range(helpers):
            self._asked.put(calls)
        return calls.finish()

    def close(self) -> None:
        """End the threads. Called once, after the last `map`."""
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start(self, helpers: int) -> None:
        while len(self._threads) < helpers:
            # Daemon: a call that never returns must not keep the process alive past its exit timeout.
            thread = threading.Thread(target=self._serve, name="flowserve lane", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self) -> None:
        while (calls := self._asked.get()) is not None:
            calls.help()
            del calls  # it holds what was made


class _Calls(Generic[T]):
    """The calls of one `map`. What several threads touch is taken and added by single operations of a deque."""

    def __init__(self, function: Callable[[int], T], count: int, helpers: int) -> None:
        self._function = function
        self._left = deque(range(count))
        self._made: dict[int, T] = {}
        self._failed: deque[BaseException] = deque()
        self._places = deque(range(helpers))  # one for each helper that may still join
        self._helpers = helpers
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each that joined and found nothing left

    def help(self) -> None:
        try:
            self._places.pop()
        except IndexError:
            return
        self._take()
        self._over.put(None)

    def finish(self) -> list[T]:
        """The caller's part."""
        self._take()
        joined = self._helpers
        while self._places:
            try:
                self._places.pop()
            except IndexError:
                break
            joined -= 1
        for _ in range(joined):
            self._over.get()
        if self._failed:
            error = self._failed[0]
            self._failed.clear()  # or it would hold this frame, and this frame it
            try:
                raise error
            finally:
                del error
        return [self._made[number] for number in range(len(self._made))]

    def _take(self) -> None:
        left = self._left
        try:
            while left:
                try:
                    number = left.popleft()
                except IndexError:
                    return
                self._made[number] = self._function(number)
        except BaseException as error:  # whatever it is: the caller raises it
            self._failed.append(error)
            left.clear()
