"""Operations on models, and changes of settings, in every replica or in none.

Decides the order: one load at a time; each replica first prepares it, beside what it serves; if all succeed, all put it
in force, and if one fails, all drop it. An unload cannot fail, and does not wait for loads, since it ends one that
hangs. Decides also what is remembered for replicas that start later: the last operation on each name, and the settings
as they are. Does not know what a model is. Caller: `parent`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final, Protocol

import trio

from flowserve.errors import FlowserveError
from flowserve.replicas.link import LinkClosed, ProcessLink

_log = logging.getLogger("flowserve.replicas")

LOAD: Final = "load"
UNLOAD: Final = "unload"
FOLLOW: Final = "follow"  # the repository, in mode poll

# Changes and their inverses, which undo a change in the replicas that made it if another one failed.
_UNDO: Final = {"register": "unregister", "register_cuda": "unregister_cuda"}


class Member(Protocol):
    """A replica that takes part."""

    number: int
    link: ProcessLink


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
            await self._everywhere("unload", operation)
            self._remember("model", operation["name"], operation, data)
            return
        async with self._turn:
            await self._together(operation, data)
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

    async def _together(self, operation: dict[str, Any], data: bytes) -> None:
        """Prepare the operation in all replicas, then put it in force, or drop it, in those that prepared it."""
        number = next(self._numbers)
        prepared: list[Member] = []
        errors: dict[str, list[str]] = {}  # by name: the class and the text
        failures: list[FlowserveError] = []

        async def prepare(one: Member) -> None:
            try:
                found, _ = await one.link.call("prepare", [number, operation], data)
            except LinkClosed:
                return
            except FlowserveError as error:
                failures.append(error)
                return
            prepared.append(one)
            for name, told in found.items():
                errors.setdefault(name, told)

        async def decide(one: Member) -> None:
            try:
                await one.link.call("decide", [number, errors, bool(failures)])
            except LinkClosed:
                return
            except FlowserveError as error:
                failures.append(error)

        for step in (prepare, decide):
            members = self._members() if step is prepare else prepared
            async with trio.open_nursery() as nursery:
                for one in members:
                    nursery.start_soon(step, one)
        if failures:
            raise failures[0]

    async def _everywhere(self, call: str, operation: dict[str, Any]) -> None:
        failures: list[FlowserveError] = []

        async def ask(one: Member) -> None:
            try:
                await one.link.call(call, operation)
            except LinkClosed:
                return
            except FlowserveError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            for one in self._members():
                nursery.start_soon(ask, one)
        if failures:
            raise failures[0]

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
