"""grpcio's server beside the engine: its ports, its calls, how it begins and ends.

Decided here: that it is grpcio's asyncio server, in a loop that is a guest of the engine's (docs/decisions/0021), when
ports are bound, who may call what, what becomes of errors, and that ending lets what is under way finish. What the
calls answer, service.py knows.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
import trio
from google.protobuf.message import DecodeError, Message

from flowserve.errors import FlowserveError, Invalid
from flowserve.grpc import health, service
from flowserve.grpc.calls import Calls, broken
from flowserve.grpc.forwarding import ForwardingService
from flowserve.grpc.guest import Guest
from flowserve.grpc.health_pb2 import HealthCheckRequest
from flowserve.grpc.options import GrpcOptions
from flowserve.grpc.reader import Reader
from flowserve.grpc.restricted import guarded
from flowserve.grpc.status import details_of, status_of
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.log_settings import LogSettings
from flowserve.runtime.control import Control
from flowserve.runtime.engine import Engine
from flowserve.runtime.request_parameters import Forwarding
from flowserve.runtime.restriction import by_group

UNIX: Final = "unix:"
CLOSE_S_MAX: Final = 5.0
HANDSHAKE_MS_MAX: Final = 10_000
QUIET_S: Final = 2.0  # so long a client has, when nothing of its own is under way any more, to hear that all is over


class GrpcServer:
    """`bind`, then `serve`, which ends some time after `drain`. Everything is called on the engine's thread."""

    def __init__(self, options: GrpcOptions) -> None:
        self._options = options
        self._guest = Guest()
        self._ended = trio.Event()
        self._server: grpc.aio.Server | None = None

    def bind(self, address: str, port: int) -> int:
        """Take the port on every address of that name; 0 lets the system pick one. Returns it. An address unix:PATH has
        none. Clients may connect from now on, and wait until `serve`. Raises OSError where it cannot be had.
        """
        hosts = _hosts(address)
        try:
            return self._guest.at_once(lambda: self._bind(hosts, port))
        except Exception as error:
            raise OSError(str(error)) from None

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
        assert self._server is not None  # bind comes first
        server = self._server
        try:
            async with trio.open_nursery() as nursery:
                calls = Calls(engine, memory, self._guest, nursery)
                served = self._service(engine, control, memory, log, calls)
                server.add_generic_rpc_handlers(self._handlers(served))
                nursery.start_soon(self._guest.run, name="grpc")
                await self._start(server)
                task_status.started()
                await self._ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.close()

    async def _start(self, server: grpc.aio.Server) -> None:
        started = trio.Event()
        failures: list[Exception] = []

        async def start() -> None:
            try:
                await server.start()
            except Exception as error:
                failures.append(error)
            started.set()

        self._guest.begin(start())
        await started.wait()
        if failures:
            raise failures[0]

    def drain(self, within_s: float) -> None:
        """Begin to end. Calls under way have `within_s` seconds; new ones are refused, and streams end when what they
        asked is answered.
        """
        assert self._server is not None  # bind comes first
        server = self._server

        async def stop() -> None:
            self._stopping.set()
            ending = asyncio.create_task(server.stop(within_s))
            while not (await asyncio.wait([ending], timeout=QUIET_S))[0]:
                if not _is_any_call_under_way(besides=ending):  # who still is connected does not answer
                    await server.stop(None)
            self._ended.set()

        self._guest.begin(stop())

    def close(self) -> None:
        """End at once, also where it never served."""
        server, self._server = self._server, None
        if server is not None:
            self._guest.finish(server.stop(None), CLOSE_S_MAX)

    # ------------------------------------------------------------------ in grpcio's loop

    def _bind(self, hosts: list[str], port: int) -> int:
        self._stopping = asyncio.Event()
        server = self._server = grpc.aio.server(options=_channel_options(self._options))
        credentials = _credentials(self._options)
        for host in hosts:
            where = host if host.startswith(UNIX) else f"{host}:{port}"
            # The first may pick the port, for the others too.
            if credentials is None:
                port = server.add_insecure_port(where)
            else:
                port = server.add_secure_port(where, credentials)
        return port

    def _service(self, *given: Any) -> service.Service:
        pattern = self._options.forward_pattern
        if pattern is None:
            return service.Service(*given)
        return ForwardingService(Forwarding(pattern, "--grpc-header-forward-pattern"), *given)

    def _handlers(self, served: service.Service) -> tuple[Any, ...]:
        restrictions = by_group(self._options.restrictions)
        reader = Reader()

        def answering(name: str, method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
            return _answering(guarded(name, method, restrictions))

        calls = {
            name: grpc.unary_unary_rpc_method_handler(
                answering(name, _alone(partial(method, served))), _reader(kind), _written
            )
            for name, (kind, method) in service.CALLS.items()
        }
        # What these two answer is bytes already.
        calls[service.INFER_CALL] = grpc.unary_unary_rpc_method_handler(
            answering(service.INFER_CALL, served.infer), reader
        )
        calls[service.STREAM_CALL] = grpc.stream_stream_rpc_method_handler(
            answering(service.STREAM_CALL, lambda _, context: served.stream(context, self._stopping)),
            reader,
        )
        healthy = health.Health(served.is_ready, (service.SERVICE,))
        probes = {
            "Check": grpc.unary_unary_rpc_method_handler(
                answering("Check", _alone(healthy.check)), _reader(HealthCheckRequest), _written
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                answering("Watch", lambda request, context: healthy.watch(request, context, self._stopping)),
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


def _answering(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """A handler that ends with a status whatever `method` raises. What has many answers writes them itself."""

    async def answer(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, FlowserveError):
                raise request
            return await method(request, context)
        except FlowserveError as error:
            failure = error.with_traceback(None)  # or this frame would hold it, and it this frame and the request
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


def _is_any_call_under_way(besides: asyncio.Task[None]) -> bool:
    """Each call is a task of grpcio's, until its answer is written. What else there is of tasks is told by its name;
    one that is not known counts as a call, which only means to wait.
    """
    known = {besides, asyncio.current_task()}
    others = [task.get_coro() for task in asyncio.all_tasks() if task not in known]
    return not all(getattr(one, "__qualname__", "").startswith("AioServer.") for one in others)


def _written(message: Message) -> bytes:
    return message.SerializeToString()


def _credentials(options: GrpcOptions) -> grpc.ServerCredentials | None:
    """grpcio's TLS 1.2 and later; None is plain. Raises OSError where a file cannot be read."""
    if options.certificate is None:
        return None
    certificate, key, clients = options.certificate
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())],
        root_certificates=clients.read_bytes() if clients else None,
        require_client_auth=clients is not None,
    )


def _channel_options(options: GrpcOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # two servers on one port would each get half of the clients
        # Who connects and says nothing has left by then: a drain would wait for it.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
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
