"""Opens the ports of HTTP and gRPC before any model is loaded, so that a port in use is reported within milliseconds.

Decides the error messages, the printed addresses, and when gRPC is served: a requested port must be available; the
default port is served if possible, and otherwise both the log and the line in place of its address say so. grpcio is
imported only by a server that uses it. Does not know how sockets are created (`http`). Caller: `run`.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from typing import TYPE_CHECKING, Final

from flowserve.cli.options import DEFAULT_GRPC_PORT, GrpcChoice
from flowserve.errors import Invalid
from flowserve.grpc.options import NOT_INSTALLED, is_installed
from flowserve.http.server.listeners import open_listeners, open_unix_listener
from flowserve.http.server.tls import tls_context

if TYPE_CHECKING:
    from flowserve.grpc.server import GrpcServer


UNIX: Final = "unix:"


def listen(
    address: str, port: int, option: str = "--http-port", address_option: str = "--http-address"
) -> list[socket.socket]:
    """Listening sockets for `address`. `port`, the value of `option`, may be 0: then the system picks one. An address
    unix:PATH has no port. Raises Invalid with an alternative.
    """
    if address.startswith(UNIX):
        path = address.removeprefix(UNIX)
        try:
            return [open_unix_listener(path)]
        except (OSError, ValueError) as error:
            reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
            raise Invalid(f"cannot listen on {address}: {reason}; choose another path") from error
    try:
        return open_listeners(address, port)
    except (OSError, UnicodeError) as error:
        raise Invalid(f"cannot listen on {address} port {port}: {_reason(error, option, address_option)}") from error


def url(listener: socket.socket, address: str, scheme: str = "http") -> str:
    """The server's URL for a client on this machine."""
    if address.startswith(UNIX):
        return address
    host = f"[{address}]" if ":" in address else address
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _reason(error: OSError | UnicodeError, option: str, address_option: str) -> str:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return f"no such address; try {address_option} 127.0.0.1"
    text = (error.strerror or str(error)).lower()
    if error.errno == errno.EADDRINUSE:
        return f"{text}; stop the server that has it, or choose another {option} (0 picks a free one)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{text}; ports below 1024 are the administrator's, choose a higher {option}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{text}; this machine does not have it, try {address_option} 127.0.0.1"
    return text


_log = logging.getLogger("flowserve.cli")

_WITHOUT: Final = (
    f"Clients of port {DEFAULT_GRPC_PORT} do not reach this server. With --grpc-port, a port that is not available ends"
    " the start; --allow-grpc false serves HTTP alone"
)


def open_grpc(choice: GrpcChoice) -> GrpcServer | None:
    """The gRPC server with its port open, which is printed; None if gRPC is not served. Raises Invalid if a requested
    port cannot be opened.
    """
    if not choice.is_allowed:
        return None
    try:
        return _bound(choice)
    except Invalid as error:
        if choice.port is not None or choice.address.startswith(UNIX) or choice.options.certificate is not None:
            raise
        if not is_installed():
            _log.info("gRPC is not served: %s", error)
            return None
        _log.warning("gRPC is not served: %s. %s", error, _WITHOUT)
        print(f"gRPC is not served: port {DEFAULT_GRPC_PORT} is not available, the log says why", flush=True)
        return None


def _bound(choice: GrpcChoice) -> GrpcServer:
    if not is_installed():
        raise Invalid(NOT_INSTALLED)
    # Errors reach clients and the log; grpcio would repeat them on standard error.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from flowserve.grpc.server import GrpcServer

    if choice.options.certificate is not None:
        tls_context(*choice.options.certificate)  # raises a specific error for bad files; grpcio would not
    if choice.open_over_http:
        groups = ", ".join(choice.open_over_http)
        _log.warning("restricted over gRPC only, not over HTTP: %s; see --http-restricted-api", groups)
    port = DEFAULT_GRPC_PORT if choice.port is None else choice.port
    server = GrpcServer(choice.options)
    try:
        taken = server.bind(choice.address, port)
    except OSError as error:
        # grpcio does not report the reason; the same attempt without it does.
        for listener in listen(choice.address, port, "--grpc-port", "--grpc-address"):
            listener.close()
        raise Invalid(f"cannot listen on {choice.address} port {port}: {error}") from error
    print(f"gRPC on {choice.address if choice.address.startswith(UNIX) else f'{choice.address}:{taken}'}", flush=True)
    return server
