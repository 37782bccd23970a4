"""The processes that this one hands batches on to.

Decided here: which batches go on: those whose answer is the usual one and lies where the next process can read it. They
go where that process hears the server too, on the server's own end of that socket. So a batch comes behind whatever the
server has said before, for instance of the memory that it lies in, and costs that process no second socket to listen
to. What is the same for all that go the same path is known here, too.
"""

from __future__ import annotations

import marshal
import socket
from collections.abc import Sequence
from typing import Any

from flowserve.backends.child.protocol import MARSHAL_VERSION, MESSAGE_BYTES_MAX, RUN
from flowserve.backends.child.usual import Usual

# By which numbers others know this one's segments, the peer that follows, what it reads, and what it is asked for.
Onward = tuple[dict[int, int], int, list[tuple[int, int]], tuple[str, ...]]


class Peers:
    """Where they are reached, by the server's numbers for them, and what follows on each path."""

    def __init__(self) -> None:
        self._onward: dict[int, socket.socket] = {}
        self._paths: dict[int, Onward] = {}

    def lead(
        self,
        path: int,
        names: dict[int, int],
        peer: int,
        inputs: list[tuple[int, int]],
        wanted: tuple[str, ...],
        gone: Sequence[int],
    ) -> None:
        """What follows on a path; those that are `gone` nothing takes any more."""
        for one in gone:
            self._paths.pop(one, None)
        self._paths[path] = names, peer, inputs, wanted

    def know(self, number: int, gone: Sequence[int], fd: int) -> None:
        """Whom the server calls `number` is reached there; those it calls so are no more. Takes `fd`."""
        for one in gone:
            self._onward.pop(one).close()
        self._onward[number] = socket.socket(fileno=fd)

    def hand_on(
        self,
        usual: Usual,
        words: Sequence[int],
        rows: list[int],
        requests: Sequence[tuple[Any, ...]] | None,
        path: int,
        passed: tuple[int, ...],
        places: tuple[Any, ...],
        news: list[tuple[Any, Any]],
    ) -> bool:
        """Hand on a batch of a relay, of which `words` say that it was answered as `usual`. False where it does not go
        on from here, with nothing done.
        """
        number, kept, gathered_ns, computed_ns, segment, offset = words[:6]
        names, peer, inputs, wanted = self._paths[path]
        known = names.get(segment)
        if known is None:
            return False
        made = []
        for (shape, _, start), size in zip(usual.pieces, usual.placed, strict=True):
            made.append((known, offset + start, size, shape, rows))
        places = (*places, made)
        come_home, ended = news[0]
        columns = []
        for i, j in inputs:
            columns.append(places[i][j])
        relay = (path, (*passed, kept, gathered_ns, computed_ns, segment, offset), places, news[1:])
        said_onward: Any = (RUN, number, come_home, ended, columns, rows, requests, wanted, None, relay)
        message = marshal.dumps(said_onward, MARSHAL_VERSION)
        if len(message) > MESSAGE_BYTES_MAX:
            return False
        try:
            self._onward[peer].send(message)  # without a wait: the server's sockets are like that
        except OSError:  # nobody is there any more, or reads just now
            return False
        return True
