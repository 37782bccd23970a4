"""gRPC's own health service: whether this server is ready, for probes and load balancers.

Decided here: which names are known (none, and the inference service's), and how soon a watcher hears of a change.
What ready means is the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from flowserve.errors import NotFound
from flowserve.grpc.health_pb2 import HealthCheckRequest, HealthCheckResponse

SERVICE: Final = "grpc.health.v1.Health"
WATCH_S: Final = 0.25

_Status = HealthCheckResponse.ServingStatus


class Health:
    """`is_ready` asks the engine. `names` are the services that are known beside the server itself."""

    def __init__(self, is_ready: Callable[[], Awaitable[bool]], names: tuple[str, ...]) -> None:
        self._is_ready = is_ready
        self._names = ("", *names)

    async def check(self, request: HealthCheckRequest) -> HealthCheckResponse:
        if request.service not in self._names:
            raise NotFound(f"unknown service '{request.service}'")
        return HealthCheckResponse(status=await self._status())

    async def watch(self, request: HealthCheckRequest, context: Any, stopping: asyncio.Event) -> None:
        """Until the client leaves or the server is `stopping`, of which it hears."""
        told: _Status | None = None
        while True:
            is_known = request.service in self._names
            status = await self._status() if is_known else HealthCheckResponse.SERVICE_UNKNOWN
            if stopping.is_set() and is_known:
                status = HealthCheckResponse.NOT_SERVING
            if status != told:
                await context.write(HealthCheckResponse(status=status))
                told = status
            if stopping.is_set():
                return
            try:
                async with asyncio.timeout(WATCH_S):
                    await stopping.wait()
            except TimeoutError:
                pass

    async def _status(self) -> _Status:
        return HealthCheckResponse.SERVING if await self._is_ready() else HealthCheckResponse.NOT_SERVING
