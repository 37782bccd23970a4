"""Asks the code of a model in a worker process whether it is ready, and answers there.

Decides that this has a socket and a thread of its own, since the process may be running a batch meanwhile; a model
without such code has neither. A question is one byte, the answer the objection as text, empty for none. A process that
the model forks does not answer.

Callers: main.py in the process; `runtime.workers` in the server.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from flowserve.backends.worker.messages import READINESS, pack

_BYTES_MAX: Final = 4096
_ENDED: Final = "its process has ended"


def answer_on_thread(server: socket.socket, objection: Callable[[], str]) -> None:
    """In the process: answer questions from now on, until the server closes its socket."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        socket.send_fds(server, [pack(READINESS, ())], [there.fileno()])
    threading.Thread(target=_answer, args=(here, objection), name="flowserve readiness", daemon=True).start()


def _answer(questions: socket.socket, objection: Callable[[], str]) -> None:
    pid = os.getpid()
    with questions, suppress(OSError):
        while questions.recv(1):
            answer = objection()
            if os.getpid() != pid:  # the model's code has forked and returned in both processes
                os._exit(0)
            questions.send(b"\0" + answer.encode()[: _BYTES_MAX - 1])


def ask(process: socket.socket) -> str:
    """In the server: the objection of the process, or "". Blocks; on a thread, one at a time."""
    try:
        process.send(b"\0")
        answer = process.recv(_BYTES_MAX)
    except OSError:
        return _ENDED
    return answer[1:].decode(errors="replace") if answer else _ENDED
