"""One connection to a server on which a request is sent again and again, whose answer is read as it comes.

Decided here: as little of HTTP as a load generator needs, in a few plain calls per request, so that it measures the
server and not itself. What the answer means is the caller's.
"""

from __future__ import annotations

import ssl
from typing import Final, Self

import trio

from flowserve.cli.client import Address, Headers, no_answer
from flowserve.errors import Unavailable

HEAD_BYTES_MAX: Final = 64 * 1024
_GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError)


class Wire:
    """An async context manager: connected inside. Everything raises Unavailable where the server goes, or speaks
    something else than HTTP.
    """

    def __init__(self, address: Address, path: str, body: bytes, headers: Headers) -> None:
        self._address = address
        self._path = path
        self.prepare(body, headers)
        self._held = bytearray()
        self._left: int | None = 0  # bytes of the answer's body that have not been taken; None: it comes in chunks

    def prepare(self, body: bytes, headers: Headers) -> None:
        """What the next requests are."""
        lines = {"Host": self._address.netloc, "Content-Length": str(len(body)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._request = f"POST {self._path} HTTP/1.1\r\n{head}\r\n".encode() + body

    async def __aenter__(self) -> Self:
        self._stream = await _connect(self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.aclose_forcefully(self._stream)

    async def begin(self) -> int:
        """Send the request. Returns the status of its answer, whose body `more` reads to its end."""
        try:
            await self._stream.send_all(self._request)
        except _GONE:
            raise _gone() from None
        held = self._held
        while (end := held.find(b"\r\n\r\n")) < 0:
            if len(held) > HEAD_BYTES_MAX:
                raise _strange()
            held += await self._some()
        status, self._left = _head(bytes(held[:end]))
        del held[: end + 4]
        return status

    async def more(self) -> bytes:
        """The next piece of the body, as soon as there is one; b"" at its end."""
        if self._left is None:
            return await self._chunks()
        if not self._left:
            return b""
        held = self._held or await self._some()
        self._held = bytearray()
        self._left -= len(held)
        return bytes(held)

    async def rest(self) -> bytes:
        """The body to its end."""
        pieces = []
        while piece := await self.more():
            pieces.append(piece)
        return b"".join(pieces)

    async def _chunks(self) -> bytes:
        """All that are there already, or the next ones to come."""
        held, pieces = self._held, []
        while True:
            while (end := held.find(b"\r\n")) >= 0:
                size = _size(bytes(held[:end]))
                if len(held) < end + 4 + size:
                    break
                pieces.append(bytes(held[end + 2 : end + 2 + size]))
                del held[: end + 4 + size]
                if not size:
                    self._left = 0
                    break
            if pieces:
                return b"".join(pieces)
            held += await self._some()

    async def _some(self) -> bytes | bytearray:
        try:
            received = await self._stream.receive_some()
        except _GONE:
            raise _gone() from None
        if not received:
            raise _gone()
        return received


async def _connect(address: Address) -> trio.abc.Stream:
    try:
        if address.is_tls:
            secure = await trio.open_ssl_over_tcp_stream(
                address.host, address.port, ssl_context=ssl.create_default_context()
            )
            await secure.do_handshake()
            return secure
        return await trio.open_tcp_stream(address.host, address.port)
    except trio.BrokenResourceError as error:  # which has what TLS said in it
        raise no_answer(address, error.__cause__ if isinstance(error.__cause__, OSError) else error) from None
    except OSError as error:
        raise no_answer(address, error) from None


def _head(head: bytes) -> tuple[int, int | None]:
    """Status and length of the body, None where it comes in chunks."""
    first, *lines = head.split(b"\r\n")
    try:
        status = int(first.split(b" ", 2)[1])
        for line in lines:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                return status, int(value)
            if name.lower() == b"transfer-encoding":
                return status, None
    except (IndexError, ValueError):
        raise _strange() from None
    raise Unavailable("the server's answer does not say how long it is")


def _size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise _strange() from None


def _gone() -> Unavailable:
    return Unavailable("the server closed the connection")


def _strange() -> Unavailable:
    return Unavailable("the server's answer is not HTTP")
