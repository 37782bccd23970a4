"""What a process said that was made for one question (backends/child/task.py).

Decided here: how long it is listened to, and that one that says nothing whole has failed as it ended. It knows neither
the question nor who asks.
"""

from __future__ import annotations

import select
from typing import Any

from flowserve.backends.child import task
from flowserve.backends.child.protocol import MESSAGE_BYTES_MAX
from flowserve.errors import ModelFailed
from flowserve.runtime.children import Child


def answer_of(child: Child) -> Any:
    """Blocks until it has ended. Raises what it raised, or ModelFailed with how it ended."""
    with child.socket:
        message = _all_of(child)
    try:
        return task.answered(message)
    except ValueError:
        raise ModelFailed(child.how_it_ended()) from None


def _all_of(child: Child) -> bytes:
    """Everything it says until its end."""
    poll = select.poll()
    poll.register(child.socket, select.POLLIN)
    poll.register(child.pidfd, select.POLLIN)
    parts: list[bytes] = []
    while True:
        is_over = any(number == child.pidfd for number, _ in poll.poll())
        try:
            part = child.socket.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            if is_over:
                return b"".join(parts)
            continue
        except ConnectionError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)
