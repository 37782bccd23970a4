"""On the loop or on a thread: where an instance runs its next batch, by measurement.

Decided here: a batch whose size class is measured to cost less than the hop to a thread (and no more than the loop
can spare) runs inline; one that turns out slow goes back to the thread. Pure: durations come in as nanoseconds. A hop
to a thread costs 50 to 80 us when nothing else is in flight, and the loop hands the interpreter over twice.
"""

from __future__ import annotations

from typing import Final

# A run this short is cheaper on the loop: the hop and the hand-over of the interpreter cost as much.
INLINE_BELOW_NS: Final = 150_000
# And this long it keeps other connections waiting too long. Between the two a place is kept, so that it does not flap.
THREAD_ABOVE_NS: Final = 400_000
# The first runs of a size allocate and warm caches; they are not representative.
_FIRST_RUNS: Final = 3
# A size that was sent back to the thread is looked at again only after that many runs there.
_RUNS_BEFORE_RETRY: Final = 200


class _SizeClass:
    __slots__ = ("best_ns", "inline", "mean_ns", "runs")

    def __init__(self) -> None:
        self.inline = False
        self.runs = 0  # since the place last changed
        self.best_ns = 1 << 62  # on the thread: the shortest run; contention only ever adds
        self.mean_ns = 0.0  # inline: moving average


class Placement:
    """Chooses for one model, per size class of batches (powers of two of the row count)."""

    def __init__(self) -> None:
        self._classes: dict[int, _SizeClass] = {}

    def is_inline(self, rows: int) -> bool:
        """Whether a batch of `rows` rows should run on the loop now."""
        found = self._classes.get(rows.bit_length())
        return found is not None and found.inline

    def measured(self, rows: int, duration_ns: int, *, inline: bool) -> None:
        """A batch took that long. Sizes that were never measured run on the thread."""
        size = self._classes.get(rows.bit_length())
        if size is None:
            size = self._classes[rows.bit_length()] = _SizeClass()
        size.runs += 1
        if inline:
            # Clipped, so that one run during which the kernel preempted this process does not move the model.
            size.mean_ns += (min(duration_ns, 2 * THREAD_ABOVE_NS) - size.mean_ns) / 8
            if size.mean_ns > THREAD_ABOVE_NS:
                size.inline = False
                size.runs = -_RUNS_BEFORE_RETRY
                size.best_ns = 1 << 62
        elif size.runs > 0 and duration_ns < size.best_ns:
            size.best_ns = duration_ns
            if size.runs > _FIRST_RUNS and duration_ns < INLINE_BELOW_NS:
                size.inline = True
                size.mean_ns = float(duration_ns)
                size.runs = 0
        elif size.runs > _FIRST_RUNS and size.best_ns < INLINE_BELOW_NS:
            size.inline = True
            size.mean_ns = float(size.best_ns)
            size.runs = 0
