"""The only module that reads a clock.

Decides that server time is integer nanoseconds of the clock by which trio sleeps, and the only conversion between the
two, by rounding (truncation could wake a task one nanosecond before its deadline, and a test clock that jumps would
never reach the deadline). Wall-clock time is only shown. Also decides how a thread with long work lets the event loop
run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import trio
from trio.lowlevel import current_clock

ClockNs = Callable[[], int]

SECOND_NS = 1_000_000_000
_PAUSE_S = 1e-4


# The same clock in a program without a trio loop.
thread_clock: ClockNs = time.perf_counter_ns


def running_clock() -> ClockNs:
    """The clock of the running trio loop, in nanoseconds. May be read from any thread when the loop runs in real time.

    trio's system clock is `time.perf_counter` plus an offset, so the counter is read directly, at a third of the cost;
    under a test clock the loop's own time is read.
    """
    clock = current_clock()
    # By name, because trio exports neither this class nor a test clock that could be imported without pytest.
    if type(clock).__name__ == "SystemClock":
        return time.perf_counter_ns
    return lambda: round(clock.current_time() * SECOND_NS)


def trio_deadline(deadline_ns: int, now_ns: int) -> float:
    """The loop's time at which `deadline_ns` is reached, given that it is `now_ns` now."""
    return trio.current_time() + (deadline_ns - now_ns) / SECOND_NS


def wall_clock_ns() -> int:
    """Nanoseconds since the epoch, for values that clients compare with their own clocks. Never used for a decision."""
    return time.time_ns()


def wall_clock_ms() -> int:
    """Milliseconds since the epoch, for "last inference" and similar values. Never used for a decision."""
    return time.time_ns() // 1_000_000


def pause_thread() -> None:
    """Let the event loop's thread have the interpreter. Called on another thread between steps of long work. Raises
    trio's `Cancelled` if the task that waits for this thread was cancelled.
    """
    trio.from_thread.check_cancelled()
    time.sleep(_PAUSE_S)  # without a sleep, this thread gets the interpreter back before the other is awake
