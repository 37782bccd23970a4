"""Operations on models, and changes of settings, in every replica or in none.

Decides the order: one load at a time, in its two phases (`two_phase`). An unload cannot fail, and does not wait for
loads, since it ends one that hangs. Decides also what is remembered for replicas that start later: the last operation
on each name, and the settings as they are. Does not know what a model is. Caller: `parent`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final

import trio

from flowserve.errors import FlowserveError
from flowserve.replicas.link import LinkClosed
from flowserve.replicas.two_phase import GroupLoad, Member, in_each

LOAD: Final = "load"
UNLOAD: Final = "unload"
FOLLOW: Final = "follow"  # the repository, in mode poll

# Changes and their inverses, which undo a change in the replicas that made it if another one failed.
_UNDO: Final = {"register": "unregister", "register_cuda": "unregister_cuda"}


class GroupOperations:
    """`members`: the replicas that serve now."""

    def __init__(self, members: Callable[[], Sequence[Member]]) -> None:
        self._members = members
        self._turn = trio.Lock()
        self._numbers = count(1)
        # By name of the model or the setting, in the order of the last operation on each.
        self._remembered: dict[tuple[str, str], tuple[int, Any, bytes]] = {}
        self._last = 0

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """A context during which no load is in progress."""
        async with self._turn:
            yield

    def after(self, number: int) -> tuple[list[Any], bytes]:
        """The remembered operations after that number, as [number, operation, bytes of its data], and the data."""
        found = sorted(one for one in self._remembered.values() if one[0] > number)
        return [[n, operation, len(data)] for n, operation, data in found], b"".join(data for _, _, data in found)

    async def operate(self, operation: dict[str, Any], data: bytes) -> None:
        """Carry out a load, an unload, or what follows from a changed repository. Raises its error."""
        if operation["kind"] == UNLOAD:
            failures = await in_each(self._members(), lambda one: one.link.call("unload", operation))
            if failures:
                raise failures[0]
            self._remember("model", operation["name"], operation, data)
            return
        async with self._turn:
            await GroupLoad(next(self._numbers), operation, data).carry_out(self._members())
            if operation["kind"] == LOAD:
                self._remember("model", operation["name"], operation, data)

    async def change(self, origin: int, name: str, arguments: Sequence[Any]) -> None:
        """Change settings in all replicas but the one that has changed its own. Raises the first error, after the
        others have undone the change, if it can be undone.
        """
        changed: list[Member] = []
        others = [one for one in self._members() if one.number != origin]
        try:
            for one in others:
                try:
                    await one.link.call("change", [name, arguments])
                except LinkClosed:
                    continue
                changed.append(one)
        except FlowserveError:
            for one in changed if name in _UNDO else ():
                one.link.tell("change", [_UNDO[name], arguments[:1]])
            raise
        self._remember_change(name, arguments)

    def _remember(self, kind: str, name: str, operation: Any, data: bytes) -> None:
        self._last += 1
        self._remembered.pop((kind, name), None)
        self._remembered[kind, name] = self._last, operation, data

    def _remember_change(self, name: str, arguments: Sequence[Any]) -> None:
        if name in _UNDO:
            self._remember(name, arguments[0], {"kind": "change", "name": name, "arguments": arguments}, b"")
        elif name in _UNDO.values():
            kind = next(one for one, undone in _UNDO.items() if undone == name)
            for key in [key for key in self._remembered if key[0] == kind and arguments[0] in ("", key[1])]:
                del self._remembered[key]
        else:  # settings: those not given stay
            key = name, arguments[1] if len(arguments) > 1 else ""
            _, before, _ = self._remembered.get(key, (0, {"arguments": [{}]}, b""))
            merged = [{**before["arguments"][0], **arguments[0]}, *arguments[1:]]
            self._remember(*key, {"kind": "change", "name": name, "arguments": merged}, b"")
