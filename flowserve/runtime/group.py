"""The interface of a server to the other servers behind the same port.

Decides the interface between an engine with its front ends and the processes around it (`replicas/`), that a single
engine has no group, how a forwarded request is marked, and how often one is forwarded. Does not know how other servers
are reached. Callers: http, grpc, loading.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from flowserve.errors import FlowserveError
from flowserve.repository.override import Override

# The name of the header, or of gRPC's metadata, that says how often a request was forwarded.
FORWARDED: Final = "flowserve-forwarded"
_FORWARDS_MAX: Final = 3  # its sequence may move meanwhile, but a request must not be forwarded in circles
LOST: Final = "the worker that has this sequence has ended, and the sequence with it"

Errors = Mapping[str, FlowserveError]  # by the name of the model
# Called with this server's errors when everything is prepared; returns the errors of all servers; models with errors
# are dropped.
Agree = Callable[[Errors], Awaitable[Errors]]


class Group(Protocol):
    """The servers behind one port, as seen by one of them. `leads`: whether this one follows the repository."""

    leads: bool

    async def report(self, kind: str) -> Any:
        """The figures of all servers together, of a kind of `observe.combined`."""

    async def change(self, name: str, arguments: Sequence[Any]) -> None:
        """Make a change in all others that was made here. Raises the error of a server that could not."""

    async def load(self, name: str, override: Override | None) -> None:
        """Load a model in all servers or in none."""

    async def unload(self, name: str, *, dependents: bool, waits: bool) -> None:
        """Unload a model in all servers. `waits`: until its last requests have finished."""

    async def follow(self, changed: Sequence[str], gone: Sequence[str]) -> None:
        """Load changed models of the repository, and unload removed ones, in all servers."""

    async def owner(self, sequence_id: int | str, *, begins: bool) -> int | None:
        """The number of the server that has a sequence; None: this one."""

    def socket_of(self, server: int, protocol: str) -> str:
        """The path of the socket on which another server takes requests from this one; `protocol` is http or grpc."""


def forwards_of(value: str) -> int:
    """How often a request was forwarded, by its header."""
    return int(value) if value in ("0", "1", "2") else _FORWARDS_MAX


async def elsewhere(group: Group, sequence_id: int | str, *, begins: bool, forwards: int) -> int | None:
    """The other server to which a request of a sequence is forwarded; None: it runs here."""
    return None if forwards >= _FORWARDS_MAX else await group.owner(sequence_id, begins=begins)


async def change(
    group: Group | None,
    name: str,
    apply: Callable[..., object],
    *arguments: Any,
    undo: Callable[[], object] | None = None,
) -> None:
    """Change a setting here with `apply`, and then in the other servers. `undo` reverts it here if another server
    refuses it.
    """
    apply(*arguments)
    if group is None:
        return
    try:
        await group.change(name, arguments)
    except FlowserveError:
        if undo is not None:
            undo()
        raise
