"""The ports of a server: how they are opened, and the errors of opening them.

Decides that all ports are opened before any model is loaded, so that a port in use is reported within milliseconds;
that a requested port must be available, and that the default port of gRPC is served if possible; which Hosts and
origins belong to an address; and the URL that is printed. grpcio is imported only by a server that uses it. Does not
know how sockets are created (`http`). Callers: `run`, `role`, `fronts`, `workers`.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeVar

from flowserve.cli.options import DEFAULT_GRPC_PORT, grpc_options, metrics_port, open_over_http
from flowserve.cli.standard_output import say
from flowserve.errors import Invalid
from flowserve.grpc.options import NOT_INSTALLED, GrpcOptions, is_installed
from flowserve.http.api.access import ANY, AccessRules
from flowserve.http.server.server import open_listeners, open_unix_listener
from flowserve.http.server.tls import tls_context

if TYPE_CHECKING:
    from flowserve.grpc.server import GrpcServer

_log = logging.getLogger("flowserve.cli")

T = TypeVar("T")
UNIX: Final = "unix:"
DESCRIPTORS_WANTED: Final = 65536
_WITHOUT: Final = (
    f"Clients of port {DEFAULT_GRPC_PORT} do not reach this server. With --grpc-port, a port that is not available ends"
    " the start; --allow-grpc false serves HTTP alone"
)


@dataclass(frozen=True, slots=True)
class OpenPorts:
    """The listening sockets for HTTP and for metrics, and the gRPC server with its port; without metrics and gRPC: none
    and None.
    """

    http: list[socket.socket]
    metrics: list[socket.socket]
    grpc: GrpcServer | None


def open_metrics(arguments: argparse.Namespace) -> list[socket.socket]:
    port = metrics_port(arguments)
    if port is None:
        return []
    beside = "127.0.0.1" if arguments.http_address.startswith(UNIX) else arguments.http_address
    address = arguments.metrics_address or beside
    listeners = listen(address, port, "--metrics-port", "--metrics-address")
    say(f"metrics on {url(listeners[0], address)}/metrics")
    return listeners


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


def access_rules(arguments: argparse.Namespace, address: str, listeners: Sequence[socket.socket]) -> AccessRules:
    """The values of Host and Origin that are served on the listeners of `address`, the option's value. Browsers cannot
    connect to a socket in the file system. An attacker in the local network can own a name that is valid only there,
    but can also connect directly to a server that listens beyond this machine; so only a loopback address excludes
    such names.
    """
    origins = tuple(chain(*arguments.http_cors_origins))
    if any(one.family == socket.AF_UNIX for one in listeners):
        return AccessRules((ANY,), origins=origins)
    own = address.lower().removesuffix(".")  # an address in it does no harm
    if arguments.http_allowed_hosts:
        return AccessRules((own, *chain(*arguments.http_allowed_hosts)), origins=origins)
    if all(ip_address(one.getsockname()[0]).is_loopback for one in listeners):
        return AccessRules((own,), origins=origins)
    return AccessRules((own, socket.gethostname().lower()), has_local_names=True, origins=origins)


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


def open_grpc(arguments: argparse.Namespace, bind: Callable[[str, int, GrpcOptions], T]) -> T | None:
    """The result of `bind`, which opens the port of gRPC, or raises OSError; None if gRPC is not served. Raises Invalid
    if a requested port cannot be opened.
    """
    if not arguments.allow_grpc:
        return None
    options = grpc_options(arguments)
    try:
        return _bound(arguments, options, bind)
    except Invalid as error:
        if arguments.grpc_port is not None or arguments.grpc_address.startswith(UNIX) or options.certificate:
            raise
        if not is_installed():
            _log.info("gRPC is not served: %s", error)
            return None
        _log.warning("gRPC is not served: %s. %s", error, _WITHOUT)
        say(f"gRPC is not served: port {DEFAULT_GRPC_PORT} is not available, the log says why")
        return None


def _bound(arguments: argparse.Namespace, options: GrpcOptions, bind: Callable[[str, int, GrpcOptions], T]) -> T:
    if not is_installed():
        raise Invalid(NOT_INSTALLED)
    if options.certificate is not None:
        tls_context(*options.certificate)  # raises a specific error for bad files; grpcio would not
    if groups := open_over_http(arguments):
        _log.warning("restricted over gRPC only, not over HTTP: %s; see --http-restricted-api", ", ".join(groups))
    address, port = arguments.grpc_address, DEFAULT_GRPC_PORT if arguments.grpc_port is None else arguments.grpc_port
    try:
        return bind(address, port, options)
    except OSError as error:
        # grpcio does not report the reason; the same attempt without it does.
        for listener in listen(address, port, "--grpc-port", "--grpc-address"):
            listener.close()
        raise Invalid(f"cannot listen on {address} port {port}: {error}") from error


def bind_grpc(address: str, port: int, options: GrpcOptions) -> GrpcServer:
    """The gRPC server with its port open, which is printed. Raises OSError."""
    server = grpc_server(options)
    taken = server.bind(address, port)
    say(f"gRPC on {address if address.startswith(UNIX) else f'{address}:{taken}'}")
    return server


def grpc_server(options: GrpcOptions) -> GrpcServer:
    """Imports grpcio. Errors reach clients and the log; grpcio would repeat them on standard error."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from flowserve.grpc.server import GrpcServer

    return GrpcServer(options)


def allow_many_descriptors() -> None:
    """Raise the soft limit of open files. A connection needs one descriptor and a model in its own process about five;
    1024, the usual soft limit, is little. The hard limit stays as it is.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(DESCRIPTORS_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
