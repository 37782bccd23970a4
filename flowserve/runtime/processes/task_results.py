"""The result of a process that runs one task (backends/worker/task.py).

Decides how long the result is read, and that an incomplete result fails with how the process ended. Does not know the
task or its caller.
"""

from __future__ import annotations

import select
from typing import Any

from flowserve.backends.worker import task
from flowserve.backends.worker.protocol import MESSAGE_BYTES_MAX
from flowserve.errors import ModelFailed
from flowserve.runtime.processes.children import Child


def task_result(child: Child) -> Any:
    """The result of the task. Blocks until the process has ended. Raises the task's error, or ModelFailed with how the
    process ended.
    """
    with child.socket:
        message = _all_of(child)
    try:
        return task.parse_result(message)
    except ValueError:
        raise ModelFailed(child.how_it_ended()) from None


def _all_of(child: Child) -> bytes:
    """All bytes that the process sends until its end."""
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
