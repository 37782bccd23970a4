"""Whether members of a batch that lie apart are copied together for one run, or run one after the other as they lie.

Decided here, by measurement. One run for many rows is worth much where a row is little work, and nothing where a single
row keeps all cores busy: then the copy is all that comes of it, and for images it is a good part of the whole. Only
members of many bytes are weighed; what is small, or lies side by side, runs together without a question.

This file does not know models, sessions or clocks.
"""

from __future__ import annotations

from collections import deque
from typing import Final

# Below this a copy costs less than a run of its own does before it computes anything.
MEMBER_BYTES_MIN: Final = 64 * 1024
_TRIES: Final = 4  # batches in a row that a way is tried with
_KNOWN: Final = 8  # of the latest batches count
_NEARLY: Final = 1.1  # where both ways are about as quick the copy is saved: it takes memory and cores from others
_RETRY_MIN: Final = 32  # batches until the other way is tried again; doubled whenever it loses ...
_RETRY_MAX: Final = 4096  # ... up to this, since on some devices it loses by far


class Ways:
    """Chooses for one instance. A way is as quick as its quickest batch of late: whatever else the machine does only
    ever adds.

    Always true: the other way is tried again for ever, ever more rarely while it loses.
    """

    __slots__ = ("_batches", "_is_apart", "_is_trial", "_recent_ns", "_retry")

    def __init__(self) -> None:
        self._is_apart = False  # the way that is preferred
        self._is_trial = False  # the other one is being tried
        self._batches = 0  # since that began or ended
        self._retry = _TRIES
        # Per row, of each way: together, apart.
        self._recent_ns: tuple[deque[float], deque[float]] = (deque(maxlen=_KNOWN), deque(maxlen=_KNOWN))

    def is_apart(self) -> bool:
        """How the next batch whose members lie apart runs."""
        return self._is_apart != self._is_trial

    def measured(self, rows: int, duration_ns: int) -> None:
        """A batch of `rows` rows ran the way that was said, and took so long, copying included."""
        self._recent_ns[self.is_apart()].append(duration_ns / rows)
        self._batches += 1
        if self._is_trial:
            if self._batches == _TRIES:
                self._decide()
        elif self._batches == self._retry:
            self._is_trial = True
            self._batches = 0
            self._recent_ns[self.is_apart()].clear()

    def _decide(self) -> None:
        together, apart = self._recent_ns
        before, self._is_apart = self._is_apart, min(apart) < _NEARLY * min(together)
        is_again = before == self._is_apart and self._retry >= _RETRY_MIN
        self._retry = min(2 * self._retry, _RETRY_MAX) if is_again else _RETRY_MIN
        self._is_trial = False
        self._batches = 0
