"""grpcio's server beside the engine: its thread, its ports, how it begins and ends.

Decided here: that it is grpcio's asyncio server, on a thread and a loop of its own (docs/decisions/0021), when ports
are bound, what becomes of errors, and that ending lets what is under way finish. What the calls answer, service.py
knows.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
import trio
from google.protobuf.message import DecodeError, Message

from flowserve.errors import FlowserveError, Invalid
from flowserve.grpc import health, service
from flowserve.grpc.crossing import Crossing, broken
from flowserve.grpc.health_pb2 import HealthCheckRequest
from flowserve.grpc.options import GrpcOptions
from flowserve.grpc.service_pb2 import ModelInferRequest
from flowserve.grpc.status import details_of, status_of
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.log_settings import LogSettings
from flowserve.runtime.control import Control
from flowserve.runtime.engine import Engine

UNIX: Final = "unix:"
_JOIN_S_MAX: Final = 5.0


class GrpcServer:
    """`bind`, then `serve`, which ends some time after `drain`. Everything is called on the engine's thread."""

    def __init__(self, options: GrpcOptions) -> None:
        self._options = options
        self._is_bound = threading.Event()
        self._error: BaseException | None = None
        self._port = 0
        self._grace_s = 0.0
        self._token: trio.lowlevel.TrioToken | None = None
        self._started, self._ended = trio.Event(), trio.Event()
        # A daemon: a process that is told to end does, whatever hangs.
        self._thread = threading.Thread(target=self._run, name="flowserve grpc", daemon=True)

    def bind(self, address: str, port: int) -> int:
        """Take the port on every address of that name; 0 lets the system pick one. Returns it. An address unix:PATH has
        none. Clients may connect from now on, and wait until `serve`. Raises OSError where it cannot be had.
        """
        self._hosts = _hosts(address)
        self._port = port
        self._thread.start()
        self._is_bound.wait()
        if self._error is not None:
            raise OSError(str(self._error))
        return self._port

    async def serve(
        self,
        engine: Engine,
        control: Control | None,
        memory: ClientMemory,
        log: LogSettings,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answer until drained. Cancelling it ends every call."""
        try:
            async with trio.open_nursery() as nursery:
                self._token = trio.lowlevel.current_trio_token()
                crossing = Crossing(self._loop, nursery)
                make = partial(service.Service, engine, control, memory, log, crossing)
                self._loop.call_soon_threadsafe(self._given.set_result, make)
                await self._started.wait()
                task_status.started()
                await self._ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.close()
        if self._error is not None:
            raise self._error

    def drain(self, within_s: float) -> None:
        """Begin to end. Calls under way have `within_s` seconds; new ones are refused, and streams end when what they
        asked is answered.
        """
        self._grace_s = within_s
        self._ask(self._stopping)

    def close(self) -> None:
        """End at once, also where it never served. Harmless after the end."""
        if self._thread.is_alive():
            self.drain(0)
            self._ask(self._closing)
            self._thread.join(_JOIN_S_MAX)

    def _ask(self, event: asyncio.Event) -> None:
        with suppress(RuntimeError):  # the loop ended by itself
            self._loop.call_soon_threadsafe(event.set)

    # ------------------------------------------------------------------ on grpcio's thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._is_bound.set()
            for event in (self._started, self._ended):
                self._tell(event)

    def _tell(self, event: trio.Event) -> None:
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(event.set)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping, self._closing = asyncio.Event(), asyncio.Event()
        self._given: asyncio.Future[Callable[[], service.Service]] = self._loop.create_future()
        server = grpc.aio.server(options=_channel_options(self._options))
        for host in self._hosts:
            where = host if host.startswith(UNIX) else f"{host}:{self._port}"
            self._port = server.add_insecure_port(where)  # the first may pick it, for the others too
        self._is_bound.set()
        given = await _first(self._given, self._stopping)
        if given is not None:
            server.add_generic_rpc_handlers(self._handlers(given()))
            await server.start()
            self._tell(self._started)
            await self._stopping.wait()
        ending = asyncio.create_task(server.stop(self._grace_s))
        await _first(ending, self._closing)
        if not ending.done():
            await server.stop(None)

    def _handlers(self, served: service.Service) -> tuple[Any, ...]:
        calls = {
            name: grpc.unary_unary_rpc_method_handler(
                _answering(served.infer if name == service.INFER_CALL else _alone(partial(method, served))),
                _reader(kind),
                _written,
            )
            for name, (kind, method) in service.CALLS.items()
        }
        calls[service.STREAM_CALL] = grpc.stream_stream_rpc_method_handler(
            _answering(lambda _, context: served.stream(context, self._stopping)),
            _reader(ModelInferRequest),
            _written,
        )
        healthy = health.Health(served.is_ready, (service.SERVICE,))
        probes = {
            "Check": grpc.unary_unary_rpc_method_handler(
                _answering(_alone(healthy.check)), _reader(HealthCheckRequest), _written
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                _answering(lambda request, context: healthy.watch(request, context, self._stopping)),
                _reader(HealthCheckRequest),
                _written,
            ),
        }
        return (
            grpc.method_handlers_generic_handler(service.SERVICE, calls),
            grpc.method_handlers_generic_handler(health.SERVICE, probes),
        )


def _alone(method: Callable[[Any], Awaitable[Message]]) -> Callable[[Any, Any], Awaitable[Message]]:
    """A method that needs nothing but the request, as a handler is called."""
    return lambda request, _: method(request)


def _answering(method: Callable[[Any, Any], Awaitable[Message | None]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """A handler that ends with a status whatever `method` raises. What has many answers writes them itself."""

    async def answer(request: Any, context: Any) -> Message | None:
        try:
            if isinstance(request, FlowserveError):
                raise request
            return await method(request, context)
        except FlowserveError as error:
            failure = error
        except Exception as error:
            failure = broken(error)
        raise await _refused(context, failure)

    return answer


async def _refused(context: Any, error: FlowserveError) -> Exception:
    """Raises what ends a call with the error's status."""
    await context.abort(status_of(error), details_of(error))
    return error  # for the type checker: abort raises


def _reader(kind: type[Message]) -> Callable[[bytes], Message | FlowserveError]:
    """Reads messages. What is none becomes the error that its sender reads: grpcio would call it the server's fault."""

    def read(data: bytes) -> Message | FlowserveError:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Invalid(f"the request is not a {kind.DESCRIPTOR.full_name} message")

    return read


def _written(message: Message) -> bytes:
    return message.SerializeToString()


async def _first(awaited: asyncio.Future[Any], event: asyncio.Event) -> Any:
    """What `awaited` came to, None where `event` is set before."""
    told = asyncio.ensure_future(event.wait())
    await asyncio.wait((awaited, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    return awaited.result() if awaited.done() else None


def _channel_options(options: GrpcOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # two servers on one port would each get half of the clients
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        *options.channel,
    ]


def _hosts(address: str) -> list[str]:
    """Everything that the name stands for, as grpcio spells it. Raises OSError for one that nobody knows."""
    if address.startswith(UNIX):
        return [address]
    found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    hosts = dict.fromkeys((family, place[0]) for family, _, _, _, place in found)
    return [f"[{host}]" if family == socket.AF_INET6 else str(host) for family, host in hosts]
