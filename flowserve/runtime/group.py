"""What a server that is one of several behind a port asks of the others.

Decides the interface between an engine with its front ends and the processes around it (`replicas/`), that an engine
alone has no group, and how a request that is sent on is marked. Does not know how others are reached. Callers: http,
grpc, loading.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from flowserve.errors import FlowserveError
from flowserve.repository.override import Override

# The name of the header, or of gRPC's metadata, with which a request is sent on, and how often one may be: its sequence
# may move while it is on its way, but no request goes round in circles.
FORWARDED: Final = "flowserve-forwarded"
FORWARDS_MAX: Final = 3
LOST: Final = "the worker that has this sequence has ended, and the sequence with it"

Errors = Mapping[str, FlowserveError]  # by the name of the model
# Told this server's errors when everything is prepared; returns those of all servers, which are then dropped.
Agree = Callable[[Errors], Awaitable[Errors]]


class Group(Protocol):
    """The servers behind one port, as one of them sees them. `leads`: whether this one follows the repository."""

    leads: bool

    async def report(self, kind: str) -> Any:
        """The figures of all servers together, of a kind of `observe.combined`."""

    async def change(self, name: str, arguments: Sequence[Any]) -> None:
        """Make a change in all others that was made here. Raises the error of one that could not."""

    async def load(self, name: str, override: Override | None) -> None:
        """Load a model in all servers or in none."""

    async def unload(self, name: str, *, dependents: bool, waits: bool) -> None:
        """Unload a model in all servers. `waits`: until its last requests have finished."""

    async def follow(self, changed: Sequence[str], gone: Sequence[str]) -> None:
        """Load what changed in the repository, and unload what is gone, in all servers."""

    async def owner(self, sequence_id: int | str, *, begins: bool) -> int | None:
        """The number of the server that has a sequence; None: this one."""

    def socket_of(self, server: int, protocol: str) -> str:
        """The path of the socket on which another server takes requests from this one; `protocol` is http or grpc."""


async def change(
    group: Group | None,
    name: str,
    apply: Callable[..., object],
    *arguments: Any,
    undo: Callable[[], object] | None = None,
) -> None:
    """Change a setting here with `apply`, and then in the other servers. `undo` takes it back where one refuses it."""
    apply(*arguments)
    if group is None:
        return
    try:
        await group.change(name, arguments)
    except FlowserveError:
        if undo is not None:
            undo()
        raise
