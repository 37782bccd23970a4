"""One load in every replica or in none: the protocol between the parent and the replicas.

Decides the two phases. The parent calls `prepare` in each replica, which answers once the load is prepared beside what
it serves; then it calls `decide` in those that prepared it, with the errors of all: they put it in force without the
models that failed anywhere, or drop it. A replica that ends meanwhile takes no part. Does not know what a model is, nor
which load is next (`operations`). Callers: `operations` has the parent's side, `replica` the other.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import trio

from flowserve.errors import FlowserveError, Internal, Unavailable
from flowserve.replicas.link import LinkClosed, ProcessLink, error_named
from flowserve.runtime.group import Agree, Errors

_log = logging.getLogger("flowserve.replicas")

ToldErrors = dict[str, list[Any]]  # by the name of the model: the class, the text and the version


class Member(Protocol):
    """A replica that takes part, as the parent sees it."""

    number: int
    link: ProcessLink


async def in_each(members: Sequence[Member], ask: Callable[[Member], Awaitable[object]]) -> list[FlowserveError]:
    """Ask all members at once. Returns the errors, the first to arrive first; a member that has ended has none."""
    failures: list[FlowserveError] = []

    async def ask_one(member: Member) -> None:
        try:
            await ask(member)
        except LinkClosed:
            return
        except FlowserveError as error:
            failures.append(error)

    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(ask_one, member)
    return failures


class GroupLoad:
    """The parent's side of one load, known to the replicas by its number."""

    def __init__(self, number: int, operation: Mapping[str, Any], data: bytes) -> None:
        self._number, self._operation, self._data = number, operation, data
        self._prepared: list[Member] = []
        self._errors: ToldErrors = {}

    async def carry_out(self, members: Sequence[Member]) -> None:
        """Raises the first error of the load as a whole; errors of single models are the replicas' to report."""
        failures = await in_each(members, self._prepare)
        is_dropped = bool(failures)
        failures += await in_each(self._prepared, lambda member: self._decide(member, is_dropped=is_dropped))
        if failures:
            raise failures[0]

    async def _prepare(self, member: Member) -> None:
        found, _ = await member.link.call("prepare", [self._number, self._operation], self._data)
        self._prepared.append(member)
        for name, told in found.items():
            self._errors.setdefault(name, told)

    async def _decide(self, member: Member, *, is_dropped: bool) -> None:
        await member.link.call("decide", [self._number, self._errors, is_dropped])


class ReplicaLoad:
    """A replica's side of one load. `load` loads the models, and calls its argument when everything is prepared. `run`
    is a task of its own: `prepare` and `decide` are calls of the parent, between which the load waits.
    """

    def __init__(self, load: Callable[[Agree], Awaitable[object]]) -> None:
        self._load = load
        self._prepared = trio.Event()  # or it ended before that
        self._decided = trio.Event()
        self._ended = trio.Event()
        self._found: Errors = {}
        self._verdict: Errors = {}
        self._is_dropped = False
        self._failure: FlowserveError | None = None

    async def run(self) -> None:
        """Load the models."""
        try:
            await self._load(self._agree)
        except FlowserveError as error:
            self._failure = error
        except Exception as error:
            _log.exception("an operation on models failed")
            self._failure = Internal(f"{type(error).__name__}: {error}")
        finally:
            self._prepared.set()
            self._ended.set()

    async def prepare(self) -> ToldErrors:
        """Wait until it is prepared. Returns this replica's errors; raises an error of the load as a whole."""
        await self._prepared.wait()
        if self._failure is not None:
            raise self._failure
        return {name: [type(error).__name__, str(error), error.version] for name, error in self._found.items()}

    async def decide(self, verdict: ToldErrors, *, is_dropped: bool) -> None:
        """Put it in force without the models that failed anywhere, or drop it. Returns once that is done; raises an
        error of the load as a whole.
        """
        self._verdict = {name: error_named(*told) for name, told in verdict.items()}
        self._is_dropped = is_dropped
        self._decided.set()
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    async def _agree(self, found: Errors) -> Errors:
        self._found = found
        self._prepared.set()
        await self._decided.wait()
        if self._is_dropped:
            raise Unavailable("another worker of this server could not prepare it")
        return self._verdict
