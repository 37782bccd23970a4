"""A server alone, or as one of the several servers behind a port (`--workers N`).

Decides what is different between the two: who opens the ports and accepts connections, what is printed, and what the
parent is told at each step of a server's life. Does not know that order (`run`), nor how servers agree (`replicas/`).
Caller: `run`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import trio

from flowserve.cli.options import grpc_options
from flowserve.cli.serving.fronts import FrontEnds
from flowserve.cli.serving.ports import OpenPorts, bind_grpc, grpc_server, listen, open_grpc, open_metrics
from flowserve.cli.standard_output import say
from flowserve.errors import Invalid
from flowserve.http.api.app import Exposition
from flowserve.http.api.infer import AppOptions
from flowserve.http.server.server import open_unix_listener
from flowserve.observe.settings import EVERYTHING
from flowserve.replicas.figures import changes_of, reports_of
from flowserve.replicas.replica import Adopt, Replica, ReplicaPlace
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.group import Group
from flowserve.runtime.loading.control import Control

if TYPE_CHECKING:
    from flowserve.grpc.server import GrpcServer


class Role(Protocol):
    """The methods are called in this order, from the start of a server to its end.

    `worker`: the server's number among several, from 1, None if it is alone. `is_first`: it reports what all would.
    """

    worker: int | None
    is_first: bool
    group: Group | None
    connections_changed: Callable[[], None] | None

    def open_ports(self, arguments: argparse.Namespace) -> OpenPorts:
        """All ports, before any model is loaded. Raises Invalid."""

    def own_ports(self, ports: OpenPorts) -> OpenPorts:
        """The ports on which this process accepts connections itself. Closes the others."""

    async def join(
        self, nursery: trio.Nursery, engine: Engine, control: Control, fronts: FrontEnds, options: AppOptions
    ) -> None:
        """The front ends serve; models load next."""

    def report_url(self, where: str) -> None:
        """The models are loaded."""

    async def report_loaded(self) -> None:
        """Requests may arrive from now on."""

    def report_stopping(self) -> None:
        """New requests are refused from now on."""

    async def leave(self, adopt: Mapping[str, Adopt]) -> None:
        """No request is running: the ports close next."""

    def end(self) -> None:
        """Every port is closed."""


class Alone:
    """The only server behind its ports, which has no other to tell."""

    worker: int | None = None
    is_first: bool = True
    group: Group | None = None
    connections_changed: Callable[[], None] | None = None

    def open_ports(self, arguments: argparse.Namespace) -> OpenPorts:
        http = listen(arguments.http_address, arguments.http_port)
        return OpenPorts(http, open_metrics(arguments), open_grpc(arguments, bind_grpc))

    def own_ports(self, ports: OpenPorts) -> OpenPorts:
        return ports

    async def join(
        self, nursery: trio.Nursery, engine: Engine, control: Control, fronts: FrontEnds, options: AppOptions
    ) -> None:
        pass

    def report_url(self, where: str) -> None:
        say(f"listening on {where}")

    async def report_loaded(self) -> None:
        pass

    def report_stopping(self) -> None:
        pass

    async def leave(self, adopt: Mapping[str, Adopt]) -> None:
        pass

    def end(self) -> None:
        pass


class OneOfSeveral:
    """A server whose parent has the ports for HTTP and metrics, and says where the servers listen."""

    def __init__(self, place: ReplicaPlace) -> None:
        self._place = place
        self._replica = Replica(place)
        self.worker: int | None = place.number + 1
        self.is_first: bool = place.number == 0
        self.group: Group | None = self._replica
        self.connections_changed: Callable[[], None] | None = self._replica.connections_changed

    def open_ports(self, arguments: argparse.Namespace) -> OpenPorts:
        http, metrics = self._place.listeners()
        return OpenPorts(http, metrics, self._shared_grpc(arguments))

    def _shared_grpc(self, arguments: argparse.Namespace) -> GrpcServer | None:
        """The gRPC server on the port that the parent chose; None if gRPC is not served. Raises Invalid."""
        address = self._place.grpc
        if address is None:
            return None
        server = grpc_server(grpc_options(arguments))
        host, port = address
        try:
            server.bind_shared(host, port, self._replica.socket_of(self._place.number, "grpc"))
        except OSError as error:
            raise Invalid(f"cannot listen on {host} port {port}: {error}") from error
        return server

    def own_ports(self, ports: OpenPorts) -> OpenPorts:
        """A socket for requests that another server sends on. Only the parent accepts from the rest."""
        for listener in (*ports.http, *ports.metrics):  # whose files, if they have any, are the parent's
            listener.close()
        return OpenPorts([open_unix_listener(self._replica.socket_of(self._place.number, "http"))], [], ports.grpc)

    async def join(
        self, nursery: trio.Nursery, engine: Engine, control: Control, fronts: FrontEnds, options: AppOptions
    ) -> None:
        exposition = Exposition(engine, options.metrics or EVERYTHING, options.budget)
        await nursery.start(
            self._replica.run,
            engine,
            control,
            fronts.adopt,
            lambda: len(fronts.http.connections),
            reports_of(engine, exposition),
            changes_of(engine, options),
        )

    def report_url(self, where: str) -> None:
        pass

    async def report_loaded(self) -> None:
        await self._replica.report_loaded()

    def report_stopping(self) -> None:
        self._replica.report_stopping()

    async def leave(self, adopt: Mapping[str, Adopt]) -> None:
        await self._replica.leave(adopt)

    def end(self) -> None:
        self._replica.end()


def role_of(arguments: argparse.Namespace) -> Role:
    """What this process is, as its parent says with --replica, if it has one."""
    return OneOfSeveral(ReplicaPlace.from_text(arguments.replica)) if arguments.replica else Alone()
