"""The front ends of a server: HTTP, the port for metrics, gRPC.

Decides what each is made of, and the order in which they start and end. Does not know when a server starts or ends
(`run`), nor what is different in one of several servers (`role`). Caller: `run`.
"""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import trio

from flowserve.cli.options import MEBIBYTE
from flowserve.cli.serving.ports import OpenPorts, access_rules
from flowserve.http.api.app import make_app, make_metrics_app
from flowserve.http.api.infer import AppOptions, InferRoute
from flowserve.http.server.request_parser import Limits
from flowserve.http.server.server import Server
from flowserve.memory.pool import HOST
from flowserve.replicas.replica import HTTP, METRICS_PORT, Adopt
from flowserve.runtime.budget import Budget
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.loading.control import Control

if TYPE_CHECKING:
    from flowserve.grpc.server import GrpcServer

SCRAPERS_MAX: Final = 256  # connections to the metrics port


class FrontEnds:
    """The front ends of one engine. `http` always exists, the one for metrics and gRPC where their ports are open."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        ports: OpenPorts,
        tls: ssl.SSLContext | None,
        engine: Engine,
        control: Control,
        options: AppOptions,
        connections_changed: Callable[[], None] | None,
    ) -> None:
        self._engine, self._control, self._options = engine, control, options
        app, infer = make_app(engine, options, control), InferRoute(engine, options)
        limits = Limits(max_body_bytes=options.max_body_bytes)
        self.http = Server(app, limits, HOST, tls, infer, options.budget, connections_changed)
        self._metrics: Server | None = None
        if ports.metrics:
            access = access_rules(arguments, arguments.metrics_address or arguments.http_address, ports.metrics)
            metrics = make_metrics_app(engine, options.metrics, access, options.budget)
            self._metrics = Server(metrics, budget=Budget(MEBIBYTE, SCRAPERS_MAX))
        self._grpc: GrpcServer | None = ports.grpc

    @property
    def adopt(self) -> Mapping[str, Adopt]:
        """How each front end takes a connection that another process accepted, by the kind of its port."""
        found: dict[str, Adopt] = {HTTP: self.http.adopt}
        if self._metrics is not None:
            found[METRICS_PORT] = self._metrics.adopt
        return found

    async def start(self, nursery: trio.Nursery, ports: OpenPorts) -> None:
        """Serve on these ports; returns once all do."""
        await nursery.start(self.http.serve, ports.http)
        if self._metrics is not None:
            await nursery.start(self._metrics.serve, ports.metrics)
        if self._grpc is not None:
            options = self._options
            await nursery.start(
                self._grpc.serve, self._engine, self._control, options.client_memory, options.log, options.budget
            )

    def drain(self, left_s: float) -> None:
        """Close the ports; open connections get `left_s` to end, those for metrics none."""
        self.http.drain(left_s)
        if self._grpc is not None:
            self._grpc.drain(left_s)
        if self._metrics is not None:
            self._metrics.drain(0)
