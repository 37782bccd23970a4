"""The connection of one instance in another process to the server, as its worker sees it.

Decides nothing; this is the contract between a worker (worker.py) and the two kinds of connections: to a worker process
(shm.py), where tensors travel as places in shared memory, and to an actor on another machine (elsewhere/), where
they travel as bytes. The worker does not know which of them it has. At the other end is a port of backends/worker/.

`open`, `close`, `give_up` and `kill` are called on any thread, everything else on the event loop, where the port calls
`RemoteWorker.take` for each message, and `down` and `lost` at the end of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from flowserve.backends.base import Work
from flowserve.memory.arena import Arena
from flowserve.runtime.remote.run import RemoteRun
from flowserve.scheduling.batch import Batch


class RemotePort(Protocol):
    """`runs`: the batches that are under way, by number, of all workers between which a batch may pass; `run_numbers`
    are theirs, and no number is used again when the instance is opened again. `depth`: the
    batches that the instance takes at once. `route_group`: the port's workers hand batches to those of the same group.
    """

    runs: dict[int, RemoteRun]
    run_numbers: Iterator[int]
    depth: int
    route_group: object
    computes_apart: bool
    machine: str  # the other machine that has the instance, or had it last; "" for this one
    arena: Arena | None  # memory of this machine that the process reads its inputs from

    def open(self, worker: Any) -> None:
        """Start the instance of this worker. Blocks. Raises the model's exception, or an error if its process ended or
        could not be started. May be called again after that, and after the worker was notified of its end.
        """

    def serve(self) -> None:
        """The instance is open, and the worker is ready for its messages: those that follow are read on the event loop.
        On the thread of `open`.
        """

    def close(self) -> None:
        """End the instance after its running batches. Blocks."""

    def give_up(self, why: str) -> None:
        """Abort a pending `open`, which raises on its thread. No effect once the instance is open."""

    def kill(self, why: str) -> None:
        """End the process of the instance immediately. No effect if there is none."""

    def garbled(self, what: str) -> None:
        """Its process sent an invalid message: end it."""

    def end(self, why: str) -> None:
        """As `kill`, also while the instance is being opened; its messages are not read any more."""

    def path_of(self, batch: Batch) -> Sequence[Any]:
        """The workers that a batch will pass, beginning with this one's; none if the instance is not open."""

    def pack(self, work: Work) -> Any:
        """Prepare the inputs of a batch. Raises FlowserveError, or MemoryError."""

    def send(self, run: RemoteRun, work: Work, packed: Any) -> None:
        """Send a batch, and set its memory. Raises as `pack`, and OSError if it cannot be sent."""

    def tell(self, message: bytes) -> None:
        """Send a message without tensors. Dropped if the process has ended."""

    def recall(self, run: RemoteRun) -> None:
        """Have a batch return from its route as early as possible."""

    def free_words(self) -> Sequence[int]:
        """The blocks of the instance that the server does not read any more, as words; they are told with a GRANT."""

    def share(self) -> None:
        """Place outputs in memory that other processes of this machine read, from now on."""

    def readiness(self) -> Callable[[], str] | None:
        """As `AsksModel.readiness`."""

    @property
    def has_free_blocks(self) -> bool:
        """Whether there are such blocks."""

    def release_idle(self, *, is_quiet: bool) -> None:
        """Have the process release memory that it has not used for a while."""
