"""Work of requests that takes too long for the event loop: on threads, a few at once.

Decides the size from which a body or tensor is decoded, copied and encoded on a thread, and how many such threads an
event loop has at once, depending on how much the work delays the event loop. Other requests wait for a free thread.
Does not know the work. Callers: `http` and `grpc`, in trio's tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import trio
from trio.lowlevel import RunVar

from flowserve.errors import FlowserveError
from flowserve.runtime.clock import pause_thread

Result = TypeVar("Result")
Pause = Callable[[], None]

# This many bytes of JSON, of BYTES elements or of a client's memory take at most 25 ms.
INLINE_BYTES_MAX: Final = 1 << 19
_BLOCKING_AT_ONCE: Final = 4  # each may hold a whole expanded body
_STEPPING_AT_ONCE: Final = 2  # the event loop waits for a step of each
_HOLDING_AT_ONCE: Final = 1

# A limiter belongs to one event loop; a process may have several.
_blocking: Final[RunVar[trio.CapacityLimiter]] = RunVar("flowserve blocking work")
_stepping: Final[RunVar[trio.CapacityLimiter]] = RunVar("flowserve work in steps")
_holding: Final[RunVar[trio.CapacityLimiter]] = RunVar("flowserve work that holds the interpreter")


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run work that blocks, but does not hold the interpreter for long. A client that leaves does not wait for it."""
    limiter = _limiter(_blocking, _BLOCKING_AT_ONCE)
    try:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
    except (FlowserveError, MemoryError) as error:
        raise _without_frames(error) from None


async def in_steps(work: Callable[[Pause], Result]) -> Result:
    """Run work that holds the interpreter. It calls its argument between short steps; there it ends if the task was
    cancelled, which waits for that.
    """
    try:
        return await trio.to_thread.run_sync(work, pause_thread, limiter=_limiter(_stepping, _STEPPING_AT_ONCE))
    except (FlowserveError, MemoryError) as error:
        raise _without_frames(error) from None


async def in_one_piece(work: Callable[[], Result]) -> Result:
    """Run work that holds the interpreter and cannot be divided into steps, for up to 100 ms."""
    try:
        return await trio.to_thread.run_sync(work, limiter=_limiter(_holding, _HOLDING_AT_ONCE))
    except (FlowserveError, MemoryError) as error:
        raise _without_frames(error) from None


def _without_frames(error: Exception) -> Exception:
    """The error, to be raised again. trio's frame refers to the error and the error's traceback to all frames: a cycle
    that would keep the body of a refused request in memory until the next garbage collection.
    """
    error.__context__ = None
    return error.with_traceback(None)


def _limiter(variable: RunVar[trio.CapacityLimiter], total: int) -> trio.CapacityLimiter:
    """This event loop's limiter."""
    try:
        return variable.get()
    except LookupError:
        limiter = trio.CapacityLimiter(total)
        variable.set(limiter)
        return limiter
