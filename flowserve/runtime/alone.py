"""Whether the loop waits in place for a model's process to answer, instead of sleeping until it is told.

Decided here: it does while requests come one by one, to models that are quick. Then there is nothing else to do
meanwhile, and to be told costs a turn of the loop for every step, as much as a cheap step itself. That somebody else
came a loop that waits cannot see; so every now and then it does not. Pure: durations come in as nanoseconds. This file
knows no process, and nothing of what is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flowserve.scheduling.batch import Batch

# So many batches in a row that were a request alone, and the next is taken to be alone too ...
STREAK: Final = 64
# ... but of so many one is not waited for, and whoever comes meanwhile is seen beside it. Several who come together are
# seen as they come: this finds the one who always comes while another is waited for. It takes longer, and is too rare
# to be what a 99th percentile shows.
LOOK_EVERY: Final = 128
# A model is quick whose answers take no longer than this; others would be kept waiting too long.
QUICK_NS: Final = 300_000
# The longest wait; relays have one of their own. One that the kernel made slow counts as this, so that it does not send
# the model away by itself.
WAIT_NS_MAX: Final = 1_000_000


class Occupancy:
    """What runs in all processes of a server, as far as it tells whether a request is alone. Touched on the loop.

    `on_company` is called where requests came one by one, and do not any more, or one of them takes long.
    """

    __slots__ = ("_on_company", "_running", "_stamp", "_streak")

    def __init__(self, on_company: Callable[[], None]) -> None:
        self._on_company = on_company
        self._running = 0
        self._streak = 0
        self._stamp = 0  # of the last request: its own steps beside each other are no company

    def begins(self, batch: Batch) -> bool:
        """A batch is sent to its process. Whether it is taken to be alone."""
        tickets = batch.tickets
        # Some of several may be nobody's, where slots of sequences are empty.
        stamp = tickets[0].flow.stamp if len(tickets) == 1 else 0
        if stamp and (not self._running or stamp == self._stamp):
            self._streak += 1
        else:
            if self._streak > STREAK:
                self._on_company()
            self._streak = 0
        self._stamp = stamp
        self._running += 1
        return self._streak > STREAK and self._streak % LOOK_EVERY != 0

    @property
    def is_quiet(self) -> bool:
        """Whether requests come one by one."""
        return self._streak > STREAK

    @property
    def expects_one(self) -> bool:
        """Whether a request that comes now, and goes through processes by itself, is taken to be alone."""
        return self._streak > STREAK and not self._running and (self._streak + 1) % LOOK_EVERY != 0

    def passed_through(self) -> None:
        """One that was taken to be alone came and went."""
        self._streak += 1

    def waited_in_vain(self) -> None:
        """One that was taken to be alone is not back at once."""
        self._on_company()

    def ends(self) -> None:
        """A batch that began is back, or never will be."""
        self._running -= 1


class Pace:
    """How long one instance takes to answer: a moving average. What was never measured is not quick."""

    __slots__ = ("_mean_ns",)

    def __init__(self) -> None:
        self._mean_ns = float(WAIT_NS_MAX)

    @property
    def is_quick(self) -> bool:
        return self._mean_ns <= QUICK_NS

    @property
    def mean_ns(self) -> float:
        return self._mean_ns

    def took(self, duration_ns: int) -> None:
        """A batch took that long, from when it was sent until it was computed."""
        self._mean_ns += (min(duration_ns, WAIT_NS_MAX) - self._mean_ns) / 8
