"""One of several servers behind a port: its ends of the connections to the parent and to the others.

Decides how a replica takes the connections that the parent accepted, what it tells the parent and when, how it takes
part in operations on models, and that a replica without its parent ends. Does not know HTTP or gRPC: `cli` connects it
to the front ends. What it means to load a model is decided in runtime/loading/. Caller: `cli`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import trio

from flowserve.errors import FlowserveError, Unavailable
from flowserve.replicas.link import NOTHING, Handler, LinkClosed, ProcessLink, Result
from flowserve.replicas.operations import FOLLOW, LOAD, UNLOAD
from flowserve.replicas.two_phase import ReplicaLoad
from flowserve.repository.override import Override
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.group import Agree
from flowserve.runtime.loading.control import Control

_log = logging.getLogger("flowserve.replicas")

_TOLD_AFTER_S: Final = 0.01  # after a change of the number of connections
_RELEASED_EVERY_S: Final = 1.0  # how often ended sequences are reported
_KIND_BYTES: Final = 16
_ELSEWHERE_MAX: Final = 10_000
_WITHOUT_PARENT: Final = "the parent process of the workers has ended"

Adopt = Callable[[socket.socket], None]
# Kinds of ports.
HTTP: Final = "http"
METRICS_PORT: Final = "metrics"


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Which replica this process is, and what it got from the parent: `link` and `takes` are descriptors of sockets to
    it, `http` and `metrics` those of the listening sockets, which only the parent accepts from. `folder`: with the
    replicas' own sockets. `grpc`: the address and the port of gRPC, None if it is not served.
    """

    number: int
    count: int
    folder: str
    link: int
    takes: int
    http: Sequence[int]
    metrics: Sequence[int]
    grpc: tuple[str, int] | None = None

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ReplicaPlace:
        return cls(**json.loads(text))

    def listeners(self) -> tuple[list[socket.socket], list[socket.socket]]:
        """The listening sockets for requests and for metrics. The caller only reads their addresses and closes them."""
        return [socket.socket(fileno=one) for one in self.http], [socket.socket(fileno=one) for one in self.metrics]


class Replica:
    """A `Group` as this server sees it. Made before the engine; `run` connects the two."""

    def __init__(self, place: ReplicaPlace) -> None:
        self.place = place
        self.leads = False
        self._takes = socket.socket(fileno=place.takes)
        self._takes.setblocking(False)
        self._socket = socket.socket(fileno=place.link)
        self._loads: dict[int, ReplicaLoad] = {}  # which wait for the parent's decision, by number
        self._here: set[int | str] = set()  # sequences that began here
        self._elsewhere: dict[int | str, int] = {}  # the last known servers of other sequences
        self._quiet: set[int | str] = set()  # those that were not live at the last check
        self._changed = trio.Event()
        self._taken = 0
        self._link: ProcessLink
        self._engine: Engine
        self._control: Control
        self._nursery: trio.Nursery

    async def run(
        self,
        engine: Engine,
        control: Control,
        adopt: Mapping[str, Adopt],
        open_connections: Callable[[], int],
        reports: Mapping[str, Callable[[], Awaitable[Any]]],
        changes: Mapping[str, Callable[..., object]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Take part until cancelled. `adopt` takes a connection, by the kind of its port. `reports` and `changes` are
        what other replicas may ask for, by name.
        """
        self._engine, self._control, self._reports, self._changes = engine, control, reports, changes
        self._open_connections = open_connections
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(self._socket))
        handlers: dict[str, Handler] = {
            "check": self._check,
            "report": self._report,
            "change": self._change,
            "prepare": self._prepare,
            "decide": self._decide,
            "unload": self._unload,
            "lead": self._lead,
            "ended": self._ended,
        }
        self._link = ProcessLink(stream, handlers)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._until_the_parent_ends)
            nursery.start_soon(self._take, adopt)
            nursery.start_soon(self._tell_connections)
            nursery.start_soon(self._tell_ended_sequences)
            await self._link.call("serving")
            task_status.started()

    async def report_loaded(self) -> None:
        """The models are loaded: catch up with the operations since the server was started, and then serve."""
        done = 0
        while True:
            try:
                missing, data = await self._link.call("ready", done)
            except LinkClosed:
                return
            if not missing:
                return
            at = 0
            for number, operation, nbytes in missing:
                try:
                    await self._repeat(operation, data[at : at + nbytes])
                except FlowserveError as error:
                    _log.error("an operation that the other workers carried out failed here: %s", error)
                at, done = at + nbytes, number

    def report_stopping(self) -> None:
        """New requests are refused from now on."""
        self._link.tell("stopping")

    async def leave(self, adopt: Mapping[str, Adopt]) -> None:
        """Take no more connections, except those that were handed over already."""
        with suppress(LinkClosed):
            await self._link.call("leaving")
        self._take_waiting(adopt)

    def connections_changed(self) -> None:
        self._changed.set()

    def end(self) -> None:
        """Every request is answered: stop taking part."""
        self._nursery.cancel_scope.cancel()

    # ------------------------------------------------------------------ what this server asks for: a Group

    async def report(self, kind: str) -> Any:
        value, data = await self._ask("report", kind)
        return data if value is None else value

    async def change(self, name: str, arguments: Sequence[Any]) -> None:
        await self._ask("change", [name, arguments])

    async def load(self, name: str, override: Override | None) -> None:
        operation: dict[str, Any] = {"kind": LOAD, "name": name}
        data = b""
        if override is not None:
            operation["config"] = override.config
            operation["files"] = [[path, len(content)] for path, content in override.files.items()]
            data = b"".join(override.files.values())
        await self._ask("operate", operation, data)

    async def unload(self, name: str, *, dependents: bool, waits: bool) -> None:
        await self._ask("operate", {"kind": UNLOAD, "name": name, "dependents": dependents, "waits": waits})

    async def follow(self, changed: Sequence[str], gone: Sequence[str]) -> None:
        await self._ask("operate", {"kind": FOLLOW, "changed": [*changed], "gone": [*gone]})

    async def owner(self, sequence_id: int | str, *, begins: bool) -> int | None:
        if not begins:
            if sequence_id in self._here:
                return None
            if sequence_id in self._elsewhere:  # if it has moved, the server there sends the request on
                return self._elsewhere[sequence_id]
        where, _ = await self._ask("claim", [sequence_id, begins])
        if where != self.place.number:
            if len(self._elsewhere) >= _ELSEWHERE_MAX:
                del self._elsewhere[next(iter(self._elsewhere))]
            self._elsewhere[sequence_id] = int(where)
            return int(where)
        self._elsewhere.pop(sequence_id, None)
        if begins:
            self._here.add(sequence_id)
            self._quiet.discard(sequence_id)
        return None

    def socket_of(self, server: int, protocol: str) -> str:
        return os.path.join(self.place.folder, f"{protocol}-{server}")

    async def _ask(self, name: str, arguments: Any, data: bytes = b"") -> Result:
        try:
            return await self._link.call(name, arguments, data)
        except LinkClosed:
            raise Unavailable(_WITHOUT_PARENT) from None

    # ------------------------------------------------------------------ connections

    async def _take(self, adopt: Mapping[str, Adopt]) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._takes)
            if not self._take_waiting(adopt):
                return

    def _take_waiting(self, adopt: Mapping[str, Adopt]) -> bool:
        """Take the connections that were handed over. False: there will be no more."""
        while True:
            try:
                kind, descriptors, _, _ = socket.recv_fds(self._takes, _KIND_BYTES, 1)
            except BlockingIOError:
                return True
            if not kind:
                return False
            self._taken += 1
            self._changed.set()
            for descriptor in descriptors:  # none if this process has no free descriptor
                sock = socket.socket(fileno=descriptor)
                sock.setblocking(False)
                try:
                    adopt[kind.decode()](sock)
                except OSError as error:
                    _log.warning("a connection cannot be served: %s", error.strerror)

    async def _tell_connections(self) -> None:
        while True:
            await self._changed.wait()
            await trio.sleep(_TOLD_AFTER_S)
            self._tell_connections_now()

    def _tell_connections_now(self) -> None:
        self._changed = trio.Event()
        self._link.tell("connections", [self._open_connections(), self._taken])

    async def _tell_ended_sequences(self) -> None:
        while True:
            await trio.sleep(_RELEASED_EVERY_S)
            batchers = self._engine.scheduler.models.sequences
            over = {one for one in self._here if not any(batcher.is_live(one) for batcher in batchers)}
            # Not live at two checks: the first request of a sequence may not be in its queue yet.
            ended, self._quiet = over & self._quiet, over
            if ended:
                self._here.difference_update(ended)
                self._link.tell("release", [*ended])

    async def _until_the_parent_ends(self) -> None:
        await self._link.run()
        _log.error("%s: stopping", _WITHOUT_PARENT)
        os.kill(os.getpid(), signal.SIGTERM)

    # ------------------------------------------------------------------ calls of the parent

    async def _report(self, kind: str, _: bytes) -> Result:
        report = await self._reports[kind]()
        self._tell_connections_now()  # so that the parent counts as many connections as the report
        return (None, report) if isinstance(report, bytes) else (report, b"")

    def _check(self, _: Any, __: bytes) -> Result:
        """Respond, which shows that the event loop runs."""
        return NOTHING

    def _change(self, change: Sequence[Any], _: bytes) -> Result:
        name, arguments = change
        self._changes[name](*arguments)
        return NOTHING

    def _lead(self, _: Any, __: bytes) -> Result:
        self.leads = True
        return NOTHING

    def _ended(self, number: int, _: bytes) -> Result:
        """Another server has ended, and its sequences with it."""
        self._elsewhere = {key: where for key, where in self._elsewhere.items() if where != number}
        return NOTHING

    async def _prepare(self, arguments: Sequence[Any], data: bytes) -> Result:
        number, operation = arguments
        load = self._loads[number] = ReplicaLoad(partial(self._load, operation, data))
        self._nursery.start_soon(load.run)
        try:
            return await load.prepare(), b""
        except FlowserveError:
            del self._loads[number]
            raise

    async def _decide(self, arguments: Sequence[Any], _: bytes) -> Result:
        number, errors, is_dropped = arguments
        await self._loads.pop(number).decide(errors, is_dropped=is_dropped)
        return NOTHING

    async def _load(self, operation: Mapping[str, Any], data: bytes, agree: Agree) -> None:
        if operation["kind"] == LOAD:
            await self._control.load_here(operation["name"], _override(operation, data), agree=agree)
        else:
            await self._control.follow_here(operation["changed"], operation["gone"], agree)

    async def _unload(self, operation: Mapping[str, Any], _: bytes) -> Result:
        await self._control.unload_here(operation["name"], dependents=operation["dependents"], waits=operation["waits"])
        return NOTHING

    async def _repeat(self, operation: Mapping[str, Any], data: bytes) -> None:
        """Repeat an operation from before this replica was started."""
        kind = operation["kind"]
        if kind == LOAD:
            await self._control.load_here(operation["name"], _override(operation, data))
        elif kind == UNLOAD:
            await self._control.unload_here(operation["name"], dependents=operation["dependents"], waits=False)
        else:
            self._changes[operation["name"]](*operation["arguments"])


def _override(operation: Mapping[str, Any], data: bytes) -> Override | None:
    if "config" not in operation:
        return None
    files, at = {}, 0
    for path, nbytes in operation["files"]:
        files[path] = data[at : at + nbytes]
        at += nbytes
    return Override(operation["config"], files)
