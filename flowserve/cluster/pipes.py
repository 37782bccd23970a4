"""Objects that a process gets from the process that has started it, by its standard input.

Decides their form: pickled, behind their length. Only a server, or the process of a machine that it has started, writes
them, and the reader trusts it as it trusts its own command line; nothing is unpickled in the other direction, nor from
a socket (`frames`). Callers: `agents` and `machine` write; `actor`, `machine` and `ray_agent` read.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO, Final

_LENGTH: Final = struct.Struct("<Q")


def read_pickled(source: BinaryIO) -> Any:
    """The next object; None at the end."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return pickle.loads(source.read(*_LENGTH.unpack(head)))


def pickled(thing: object) -> bytes:
    """As `read_pickled` reads it."""
    data = pickle.dumps(thing)
    return _LENGTH.pack(len(data)) + data
