"""grpcio's server beside the engine: ports, call handlers, start and drain.

Decides: it is grpcio's asyncio server, whose loop is a guest of the engine's (docs/decisions/0021); when ports are
bound; that a restricted call requires its group's key; that no web page can send a call; that every exception becomes
a status; and that a drain lets calls in progress finish. The calls are in `service`. Caller: `cli`.
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

from flowserve.errors import FlowserveError, Forbidden
from flowserve.grpc import service_pb2 as pb
from flowserve.grpc.bounds import FIELDS_MAX, MessageBounds
from flowserve.grpc.decode import MessageReader, unreadable
from flowserve.grpc.encode import STATUS, details_of
from flowserve.grpc.forward import keeping
from flowserve.grpc.guest import GuestLoop
from flowserve.grpc.health_pb2 import HealthCheckRequest
from flowserve.grpc.inference import EngineAccess, internal_error, trace_context
from flowserve.grpc.options import GrpcOptions
from flowserve.grpc.service import CALLS, GROUP, HEALTH_SERVICE, INFER_CALL, SERVICE, STREAM_CALL, Service
from flowserve.memory.client_memory import ClientMemory
from flowserve.memory.raw import BYTES_ELEMENTS_MAX
from flowserve.observe.settings import LogSettings
from flowserve.runtime.budget import COUNTED_BYTES_MIN, Budget, Reservation
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.loading.control import Control
from flowserve.runtime.protocol import ITEMS_MAX, Forwarding, Restriction, by_group

UNIX: Final = "unix:"
CLOSE_S_MAX: Final = 5.0
HANDSHAKE_MS_MAX: Final = 10_000
IDLE_CLIENT_S: Final = 2.0  # in a drain, how long clients without calls may take to close their connections

Handler = Callable[[Any, Any], Awaitable[Any]]


class GrpcServer:
    """`bind`, then `serve`, which ends some time after `drain`. All methods are called on the engine's thread."""

    def __init__(self, options: GrpcOptions) -> None:
        self._options = options
        self._guest = GuestLoop()
        self._ended = trio.Event()
        self._server: grpc.aio.Server | None = None
        self.port = 0  # after `bind`

    def bind(self, address: str, port: int) -> int:
        """Bind the port on every address of that name, 0 for any free port. Returns the port, which an address
        unix:PATH does not have. Clients may connect now, and wait until `serve`. Raises OSError on failure.
        """
        return self._bind_all(_hosts(address), port, is_shared=False)

    def bind_shared(self, address: str, port: int, private: str) -> None:
        """As `bind`, for one of several servers on a port; the system spreads connections over them. `private`: the
        path of a socket for requests from the other servers.
        """
        self._bind_all([*_hosts(address), f"{UNIX}{private}"], port, is_shared=True)

    def _bind_all(self, hosts: list[str], port: int, *, is_shared: bool) -> int:
        try:
            return self._guest.run_sync(lambda: self._bind(hosts, port, is_shared=is_shared))
        except Exception as error:
            raise OSError(str(error)) from None

    async def serve(
        self,
        engine: Engine,
        control: Control | None,
        memory: ClientMemory,
        log: LogSettings,
        budget: Budget | None = None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until drained. Cancellation ends every call. `budget`: of all requests in the server."""
        assert self._server is not None  # bind comes first
        server = self._server
        try:
            async with trio.open_nursery() as nursery:
                access = EngineAccess(engine, memory, self._guest, nursery)
                pattern = self._options.forward_pattern
                forwarding = Forwarding(pattern, "--grpc-header-forward-pattern") if pattern else None
                service = Service(access, control, log, forwarding)
                is_one_of_several = engine.group is not None
                handlers = self._handlers(service, budget or Budget(), is_one_of_several=is_one_of_several)
                server.add_generic_rpc_handlers(handlers)
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

        self._guest.start_task(start())
        await started.wait()
        if failures:
            raise failures[0]

    def drain(self, within_s: float) -> None:
        """Begin to end. Calls in progress have `within_s` seconds; new calls are refused, and streams end when the
        requests read so far are answered.
        """
        assert self._server is not None  # bind comes first
        server = self._server

        async def stop() -> None:
            self._stopping.set()
            ending = asyncio.create_task(server.stop(within_s))
            while not (await asyncio.wait([ending], timeout=IDLE_CLIENT_S))[0]:
                if not _has_calls(besides=ending):
                    await server.stop(None)  # the remaining clients do not respond
            self._ended.set()

        self._guest.start_task(stop())

    def close(self) -> None:
        """End at once, even without a `serve`."""
        server, self._server = self._server, None
        if server is not None:
            self._guest.finish(server.stop(None), CLOSE_S_MAX)

    # ------------------------------------------------------------------ in grpcio's loop

    def _bind(self, hosts: list[str], port: int, *, is_shared: bool) -> int:
        self._stopping = asyncio.Event()
        # Two unrelated servers on one port would each get half of the clients.
        options = [("grpc.so_reuseport", int(is_shared)), *_channel_options(self._options)]
        server = self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=self._options.max_calls)
        credentials = _credentials(self._options)
        for host in hosts:
            where = host if host.startswith(UNIX) else f"{host}:{port}"
            # The first host may select the port for all. Only the other servers reach the private socket.
            if credentials is None or (is_shared and host.startswith(UNIX)):
                port = server.add_insecure_port(where)
            else:
                port = server.add_secure_port(where, credentials)
            self.port = self.port or port
        return self.port

    def _handlers(self, service: Service, budget: Budget, *, is_one_of_several: bool) -> tuple[Any, ...]:
        restrictions = by_group(self._options.restrictions)
        reader: Callable[[bytes], Any] = MessageReader(self._options.bytes_elements or BYTES_ELEMENTS_MAX, budget)
        if is_one_of_several:
            reader = keeping(reader)

        def handler(name: str, method: Handler) -> Handler:
            restriction = restrictions.get(GROUP[name])
            if restriction is not None:
                method = _with_key(method, restriction)
            # Browsers speak HTTP/2 over TLS only.
            return _with_status(method if self._options.certificate is None else _from_no_page(method))

        def unary(name: str, kind: type[Message], method: Callable[[Any], Awaitable[Message]]) -> Any:
            call = handler(name, lambda request, _: method(request[0]))
            return grpc.unary_unary_rpc_method_handler(call, _reader(kind, budget), _serialized)

        calls = {name: unary(name, getattr(pb, f"{name}Request"), partial(service.respond, name)) for name in CALLS}
        # The responses of these two are bytes already.
        calls[INFER_CALL] = grpc.unary_unary_rpc_method_handler(handler(INFER_CALL, service.infer), reader)
        calls[STREAM_CALL] = grpc.stream_stream_rpc_method_handler(
            handler(STREAM_CALL, lambda _, context: service.stream(context, self._stopping)), reader
        )
        probes = {
            "Check": unary("Check", HealthCheckRequest, service.check),
            "Watch": grpc.unary_stream_rpc_method_handler(
                handler("Watch", lambda request, context: service.watch(request[0], context, self._stopping)),
                _reader(HealthCheckRequest, budget),
                _serialized,
            ),
        }
        return (
            grpc.method_handlers_generic_handler(SERVICE, calls),
            grpc.method_handlers_generic_handler(HEALTH_SERVICE, probes),
        )


def _with_key(method: Handler, restriction: Restriction) -> Handler:
    """The method, refused without the key of its API group."""

    async def check(request: Any, context: Any) -> Any:
        given = next((value for name, value in context.invocation_metadata() or () if name == restriction.name), b"")
        if not restriction.is_opened_by(given if isinstance(given, bytes) else given.encode()):
            raise Forbidden(f"This protocol is restricted, expecting header '{restriction.name}'")
        return await method(request, context)

    return check


def _from_no_page(method: Handler) -> Handler:
    """The method, refused for a web page that sends a message without a CORS preflight. grpcio requires no content
    type, so a page could send one as text/plain. grpcio refuses preflights; a proxy for gRPC-Web may answer them.
    """

    async def check(request: Any, context: Any) -> Any:
        if dict(context.invocation_metadata() or ()).get("sec-fetch-mode", "cors") != "cors":
            raise Forbidden("requests from web pages are not served without CORS, which a proxy for gRPC-Web answers")
        return await method(request, context)

    return check


def _with_status(method: Handler) -> Handler:
    """The method, with its exceptions and errors of the reader as statuses. Streaming methods write responses
    themselves.
    """

    async def respond(request: Any, context: Any) -> Any:
        try:
            if isinstance(request, FlowserveError):
                raise request
            return await method(request, context)
        except FlowserveError as error:
            failure = error.with_traceback(None)  # avoids a reference cycle of the error, this frame and the request
        except grpc.aio.InternalError:  # a response cannot be written, because the client left
            raise asyncio.CancelledError from None
        except Exception as error:
            failure = internal_error(error, trace_context(context))
        return await context.abort(STATUS[failure.kind], details_of(failure))  # raises

    return respond


def _reader(
    kind: type[Message], budget: Budget
) -> Callable[[bytes], tuple[Message, Reservation | None] | FlowserveError]:
    """Parses messages; a large one has a part of the budget until it is dropped. Invalid bytes become a client error;
    grpcio itself would report an error of the server.
    """
    # The parameters of a load call are files, whose number the call itself limits.
    bounds = MessageBounds(
        kind.DESCRIPTOR, items_max=FIELDS_MAX if kind is pb.RepositoryModelLoadRequest else ITEMS_MAX
    )

    def read(data: bytes) -> tuple[Message, Reservation | None] | FlowserveError:
        reservation = None
        try:
            if len(data) > COUNTED_BYTES_MIN:
                reservation = Reservation(budget)
                reservation.grow(len(data))
            bounds.check(data)
            return kind.FromString(data), reservation
        except DecodeError:
            return unreadable(kind)
        except FlowserveError as error:
            return error.with_traceback(None)

    return read


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def _has_calls(besides: asyncio.Task[None]) -> bool:
    """Whether a call is in progress: each is a task of grpcio's until its response is written. grpcio's other tasks are
    recognised by name; an unknown task counts as a call, which only prolongs the drain.
    """
    known = {besides, asyncio.current_task()}
    others = [task.get_coro() for task in asyncio.all_tasks() if task not in known]
    return not all(getattr(one, "__qualname__", "").startswith("AioServer.") for one in others)


def _credentials(options: GrpcOptions) -> grpc.ServerCredentials | None:
    """grpcio's TLS, 1.2 and later; None for no TLS. Raises OSError if a file cannot be read."""
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
        # A connection without a handshake is closed by then; a drain would wait for it.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS_MAX),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        *options.channel,
    ]


def _hosts(address: str) -> list[str]:
    """All addresses of a host name in grpcio's spelling. Raises OSError for an unknown name."""
    if address.startswith(UNIX):
        return [address]
    found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    hosts = dict.fromkeys((family, place[0]) for family, _, _, _, place in found)
    return [f"[{host}]" if family == socket.AF_INET6 else str(host) for family, host in hosts]
