"""TLS in front of the server: copies data between the client's encrypted stream and a plain socket pair.

Decides which protocols and certificates are accepted (those of Python's ssl module: TLS 1.2 and later), and the
response to plain HTTP. Servers without TLS pay nothing for it. connection.py speaks HTTP on the plain socket, as on any
other, with the same deadlines and detection of disconnects.
"""

from __future__ import annotations

import logging
import socket
import ssl
from pathlib import Path
from typing import Final

import trio

from flowserve.errors import Invalid
from flowserve.http.server.request_parser import Limits
from flowserve.http.server.response import refusal

PLAIN: Final = "this port speaks HTTPS, and the request came in plain HTTP: begin the URL with https://"
_PIECE_BYTES: Final = 65536
_REFUSAL_READ_S: Final = 1.0  # time for a client to read them before the connection is closed

_log = logging.getLogger("flowserve.http")


def tls_context(certificate: Path, key: Path, clients: Path | None) -> ssl.SSLContext:
    """The server's certificate, and (`clients`) the authority of the certificates of clients. Raises `Invalid`."""
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # In Debian's Python a file of OpenSSL's sets the oldest version.
        context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
        context.load_cert_chain(certificate, key)
        if clients is not None:
            context.load_verify_locations(clients)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError among them
        names = ", ".join(str(path) for path in (certificate, key, clients) if path)
        raise Invalid(f"TLS cannot be set up from {names}: {error.strerror or error}") from None
    return context


class Terminator:
    """Replaces encrypted sockets by plain ones."""

    def __init__(self, context: ssl.SSLContext, limits: Limits) -> None:
        self._context = context
        self._limits = limits

    def plain(self, sock: socket.socket, nursery: trio.Nursery) -> socket.socket:
        """The plain end for a connection that was just accepted; the copying between both runs in `nursery`.
        Raises OSError, and then it is closed.
        """
        try:
            near, far = socket.socketpair()
        except OSError:  # out of descriptors
            sock.close()
            raise
        near.setblocking(False)
        nursery.start_soon(self._carry, sock, far, name="http tls")
        return near

    async def _carry(self, sock: socket.socket, far: socket.socket) -> None:
        plain = trio.SocketStream(trio.socket.from_stdlib_socket(far))
        transport = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        stream = trio.SSLStream(transport, self._context, server_side=True, https_compatible=True)
        try:
            with trio.fail_after(self._limits.header_timeout_s):
                # No record of TLS begins with a capital letter, and every request of plain HTTP does.
                if (await transport.socket.recv(1, socket.MSG_PEEK)).isupper():
                    await _refuse_plain(transport)
                    return
                await stream.do_handshake()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._inwards, stream, plain)
                await self._outwards(plain, stream)
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, OSError) as errors:
            _log.debug("TLS connection ended: %s", errors.exceptions[0].__cause__ or errors.exceptions[0])
        finally:
            # Not by aclose(), which is a checkpoint: where this task is cancelled the second would not be reached.
            transport.socket.close()
            plain.socket.close()

    async def _inwards(self, stream: trio.SSLStream[trio.SocketStream], plain: trio.SocketStream) -> None:
        while data := await stream.receive_some(_PIECE_BYTES):
            await plain.send_all(data)
        await plain.send_eof()

    async def _outwards(self, plain: trio.SocketStream, stream: trio.SSLStream[trio.SocketStream]) -> None:
        while data := await plain.receive_some(_PIECE_BYTES):
            with trio.fail_after(self._limits.write_timeout_s):
                await stream.send_all(data)
        with trio.move_on_after(self._limits.write_timeout_s):
            await stream.aclose()


async def _refuse_plain(transport: trio.SocketStream) -> None:
    await transport.send_all(refusal(400, PLAIN))
    await transport.send_eof()
    with trio.move_on_after(_REFUSAL_READ_S):  # unread input would reset the connection when it is closed
        while await transport.receive_some(_PIECE_BYTES):
            pass
