"""Taking the port before anything is loaded, so that a port in use is known in milliseconds and not after minutes.

Decided here: what is said when it cannot be had, and the address that is printed. How sockets are made is
http/server.py's.
"""

from __future__ import annotations

import errno
import socket
from typing import Final

from flowserve.errors import Invalid
from flowserve.http.server import open_listeners, open_unix_listener

UNIX: Final = "unix:"


def listen(
    address: str, port: int, option: str = "--http-port", address_option: str = "--http-address"
) -> list[socket.socket]:
    """Listening sockets for `address`; `port`, which came with `option`, may be 0: then the system picks one. An
    address unix:PATH has no port. Raises Invalid with what to do instead.
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
    """Where a client on this machine finds the server."""
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
