"""The connection of one instance to its server, as its driver sees it.

Decides nothing; this is the contract between a driver (driver.py, streaming.py) and the two kinds of connections: in a
worker process (shm.py), where tensors travel as places in shared memory, and in an actor on another machine,
where they travel as bytes behind their message. The driver does not know which of them it has.

Methods are called on the thread of the driver; `respond` and `send` on any thread. `receive` is called on one thread,
which for a decoupled model is not that of the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flowserve.memory.column import Column

# Processes a message that the port does not know: its kind and its words. Raises Garbled.
TakeMessage = Callable[[int, Sequence[int]], None]


class ReceivedBatch(Protocol):
    """A batch that is to run, at its current stage: the fields of `RunMessage` that a driver reads."""

    @property
    def number(self) -> int: ...
    @property
    def route(self) -> int: ...
    @property
    def stage(self) -> int: ...
    @property
    def rows(self) -> list[int]: ...
    @property
    def wanted(self) -> Sequence[tuple[int, ...]]: ...
    @property
    def about(self) -> Sequence[int]: ...
    @property
    def text(self) -> bytes: ...


class DriverPort(Protocol):
    """The connection of an instance, and the memory of its tensors."""

    def receive(self, take: TakeMessage) -> Any:
        """Wait for the next `ReceivedBatch`; None if the instance is to end, or its server has ended. Messages that the
        port does not know go to `take`. Raises Garbled, and OSError at the end of the server.
        """

    def begin(self, batch: Any) -> bool:
        """Called before a batch runs. False if it must not run here any more; the server knows that."""

    def inputs(self, batch: Any) -> Sequence[Column]:
        """The inputs of the batch that has begun."""

    def may_write(self, batch: Any) -> bool:
        """Whether the model may write to its inputs."""

    def place(self, batch: Any, outputs: Sequence[Sequence[Any]]) -> Any:
        """Take over the outputs of the batch. What it returns goes to `reply`."""

    def reply(self, batch: Any, text: Any, times: tuple[int, int], placed: Any) -> None:
        """The batch is over: hand it on to the next stage of its route, or return it to the server. `text` is that of
        DONE; None as `placed`: it failed, and the text is that of FAILED. The caller has dropped its tensors.
        """

    def respond(self, head: Sequence[int], outputs: Sequence[Any], text: Any) -> None:
        """Send one response of a decoupled model: an ANSWER, whose words begin with `head`."""

    def send(self, message: bytes) -> None:
        """Send a message without tensors."""

    def give_back(self, blocks: Sequence[tuple[int, int]]) -> None:
        """The server does not read these blocks of outputs any more."""
