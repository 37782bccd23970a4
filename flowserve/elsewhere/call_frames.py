"""The calls of one process in an actor: the port of its `RemoteCalls` on the connection to another machine.

Decides that tensors travel as bytes in both directions, in frames with a number of their own, and that the numbers of a
metric are those that the actor has sent last. Does not know what is called. At the other end is cluster/relay.py.
Called by tcp.py, on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from flowserve.backends.worker.messages import (
    HOME_BLOCKS_MAX,
    MESSAGE_BYTES_MAX,
    Garbled,
    ResultColumn,
    encode_result,
    encode_server_reply,
    read_fields,
)
from flowserve.elsewhere.cluster import frames
from flowserve.elsewhere.cluster.frames import Outgoing, part_of_block
from flowserve.errors import Internal
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.model_calls.call_socket import TOO_LONG
from flowserve.runtime.model_calls.remote_calls import RemoteCalls
from flowserve.values import BY_NUMPY, Array

_HOME_BYTES: Final = 16 * HOME_BLOCKS_MAX  # what the actor adds to a message


class FrameSender(Protocol):
    """The connection: an `ActorConnection`."""

    def send_soon(self, number: int, message: bytes, block: Outgoing) -> None: ...


class CallFrames:
    """The port of the calls of one process in an actor: frames with a number of their own. `cells` are the numbers of
    its metrics, which are sent when they have changed.
    """

    def __init__(
        self,
        connection: FrameSender,
        address: int,
        channels: dict[int, CallFrames],
        clock: ClockNs,
        make: Callable[[CallFrames], RemoteCalls],
    ) -> None:
        self._connection = connection
        self._address = address
        self._channels = channels
        self._clock = clock
        self._cells: dict[int, _SentCells] = {}
        self.calls = make(self)

    def take(self, kind: int, words: Sequence[int], text: bytes, block: Array | None) -> None:
        """Process a message of the process."""
        if kind == frames.CALLS_ENDED:
            self.calls.close()
        elif kind == frames.CELLS:
            (number,) = read_fields(frames.KINDS, kind, words)
            cells = self._cells.get(number)
            if cells is not None and block is not None:  # None if the metric was dropped, or refused
                cells.take(block.view(np.float64).tolist(), self._clock())
        else:
            self.calls.take(kind, words, text, lambda *place: _memory(block, *place))

    def result(
        self, number: int, is_last: bool, error: Sequence[str] | None, outputs: Mapping[str, Array], parameters: Any
    ) -> None:
        block = Outgoing()
        columns: list[ResultColumn] = []
        for name, array in outputs.items():
            start, nbytes = block.add([array])
            where = (frames.BLOCK, start, nbytes) if nbytes else b""
            columns.append((name, BY_NUMPY[array.dtype].number, array.shape, where))
        message = encode_result(number, is_last, 0, (), error, columns, parameters)
        if len(message) > MESSAGE_BYTES_MAX - _HOME_BYTES:
            raise Internal(TOO_LONG)
        self._connection.send_soon(self._address, message, block)

    def reply(self, number: int, error: Sequence[str] | None, answer: Any) -> None:
        self._connection.send_soon(self._address, encode_server_reply(number, (), error, answer), Outgoing())

    def cells(self, number: int, family: int, cells: Array, *, is_gauge: bool) -> list[float]:
        shown = self._cells[number] = _SentCells(family, cells.tolist(), is_gauge=is_gauge)
        return shown.numbers

    def drop(self, family: int) -> None:
        self._cells = {number: one for number, one in self._cells.items() if one.family != family}

    def close(self) -> None:
        self._channels.pop(self._address, None)


class _SentCells:
    """The numbers of one metric."""

    def __init__(self, family: int, numbers: list[float], *, is_gauge: bool) -> None:
        self.family = family
        self.numbers = numbers
        self._is_gauge = is_gauge
        self._set_ns = numbers[0]  # by the clock of the other machine

    def take(self, numbers: Sequence[float], now_ns: int) -> None:
        """Take over numbers that have changed. The time of a gauge is compared between machines, so it is the time at
        which the server learns of it.
        """
        if len(numbers) != len(self.numbers):
            raise Garbled("a metric with another number of cells")
        if not self._is_gauge:
            self.numbers[:] = numbers
            return
        if numbers[0] != self._set_ns:
            self._set_ns = numbers[0]
            self.numbers[0] = float(now_ns)
        self.numbers[1:] = numbers[1:]


def _memory(block: Array | None, segment: int, offset: int, nbytes: int) -> Array:
    """The memory of a call's tensors. Raises Garbled."""
    found: Array | None = part_of_block(block, segment, offset, nbytes)
    return np.empty(0, np.uint8) if found is None else found
