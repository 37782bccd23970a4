"""Objects that a process receives on its standard input from its parent process, and its answers.

Decides their form: an object is its length, then its pickle; an answer is a line of JSON on the standard output. Only a
server, or the process of a machine that it has started, writes objects, and the reader trusts it as it trusts its own
command line; nothing is unpickled in the other direction, nor from a socket (`frames`). Callers: `agents` and `machine`
write; `actor`, `machine` and `ray_agent` read.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import threading
from typing import Any, BinaryIO, Final

_LENGTH: Final = struct.Struct("<Q")


def read_pickled(source: BinaryIO) -> Any:
    """The next object; None at the end."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return pickle.loads(source.read(*_LENGTH.unpack(head)))


def pickled(thing: object) -> bytes:
    """The object in the form that `read_pickled` reads."""
    data = pickle.dumps(thing)
    return _LENGTH.pack(len(data)) + data


class Answers:
    """The answers of this process to its parent process, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def tell(self, *what: object) -> None:
        """Write one answer. No effect once the other process has ended."""
        line = json.dumps(what).encode() + b"\n"
        with self._lock:
            try:
                os.write(self._descriptor, line)
            except OSError:
                return


def standard_pipes() -> tuple[BinaryIO, Answers]:
    """The requests to this process, and the writer of its answers. From now on the standard input of this process is
    empty, and its standard output is its standard error, so that no library reads requests or writes between answers.
    """
    answers, source = Answers(os.dup(1)), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return source, answers
