"""Whether this server speaks gRPC, and what is said where it does not.

Decided here: a port that was asked for must be had; the usual one is served where it can be, and where it is not, both
the log and the line in the place of its address say so. grpcio is imported only by a server that uses it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from flowserve.cli.grpc_options import DEFAULT_PORT, GrpcChoice
from flowserve.cli.listen import UNIX, listen
from flowserve.errors import Invalid
from flowserve.grpc.options import NOT_INSTALLED, is_installed
from flowserve.http.tls import tls_context

if TYPE_CHECKING:
    from flowserve.grpc.server import GrpcServer

_log = logging.getLogger("flowserve.cli")

_WITHOUT: Final = (
    f"Whoever asks port {DEFAULT_PORT} does not reach this server. With --grpc-port, a port that cannot be had ends the"
    " start; with --allow-grpc false, HTTP alone is meant"
)


def open_grpc(choice: GrpcChoice) -> GrpcServer | None:
    """The server with its port taken, which is printed; None where there is none. Raises Invalid where it was asked
    for and cannot be.
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
        print(f"gRPC is not served: port {DEFAULT_PORT} cannot be had, the log says why", flush=True)
        return None


def _bound(choice: GrpcChoice) -> GrpcServer:
    if not is_installed():
        raise Invalid(NOT_INSTALLED)
    # What goes wrong reaches clients and our log; grpcio's own lines on standard error say it again, in C++.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from flowserve.grpc.server import GrpcServer

    if choice.options.certificate is not None:
        tls_context(*choice.options.certificate)  # says what is wrong with them; grpcio would not
    if choice.open_over_http:
        groups = ", ".join(choice.open_over_http)
        _log.warning("restricted over gRPC only, HTTP answers everybody: %s; see --http-restricted-api", groups)
    port = DEFAULT_PORT if choice.port is None else choice.port
    server = GrpcServer(choice.options)
    try:
        taken = server.bind(choice.address, port)
    except OSError as error:
        # grpcio does not say why; the same attempt without it does.
        for listener in listen(choice.address, port, "--grpc-port", "--grpc-address"):
            listener.close()
        raise Invalid(f"cannot listen on {choice.address} port {port}: {error}") from error
    print(f"gRPC on {choice.address if choice.address.startswith(UNIX) else f'{choice.address}:{taken}'}", flush=True)
    return server
