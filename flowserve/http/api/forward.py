"""Inference requests of sequences that are on another server behind the same port: they are sent there.

Decides which headers go with a request, and that connections to other servers are kept for later requests. The other
server treats the request as if it had come from the client. Where a sequence is, and how often a request is sent on, is
decided in runtime/group.py. Caller: `infer`.
"""

from __future__ import annotations

import errno
from collections import defaultdict
from typing import Any, Final
from urllib.parse import quote

import httptools
import trio

from flowserve.errors import Unavailable
from flowserve.http.api.compression import CONTENT_ENCODING, Headers
from flowserve.http.api.request_target import PREFIX, SUFFIX, RequestTarget
from flowserve.http.server.response import HeaderTuple
from flowserve.runtime.group import FORWARDED, LOST, Group, elsewhere, forwards_of
from flowserve.values import BytesLike

_HEADER: Final = FORWARDED.encode()
_OF_CONNECTION: Final = frozenset({b"connection", b"keep-alive", b"content-length", b"transfer-encoding", b"expect"})
_NOT_PASSED_ON: Final = _OF_CONNECTION | {b"server"}  # of a response: this server writes its own
_RECEIVED_BYTES: Final = 1 << 16
_TOGETHER_BYTES_MAX: Final = 1 << 14  # of a body that is sent in one piece with its head

Forwarded = tuple[int, HeaderTuple, list[Any]]  # as the response to the client


class HttpForwarder:
    """Sends requests to the servers of `group`."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._idle: dict[str, list[trio.SocketStream]] = defaultdict(list)

    async def elsewhere(self, target: RequestTarget, sequence_id: int | str, *, begins: bool) -> int | None:
        """The other server that has the sequence; None if there is none."""
        return await elsewhere(self._group, sequence_id, begins=begins, forwards=_forwards(target.headers))

    async def forward(self, server: int, target: RequestTarget, body: BytesLike) -> Forwarded:
        """The response of another server. `body`: not compressed. Raises Unavailable if that server is gone."""
        path = self._group.socket_of(server, "http")
        head = _head(target, len(body))
        while True:
            stream, is_new = await self._connected(path)
            try:
                if len(body) <= _TOGETHER_BYTES_MAX:
                    await stream.send_all(head + bytes(body))
                else:
                    await stream.send_all(head)
                    await stream.send_all(body)
                response = await _received(stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await trio.aclose_forcefully(stream)
                if is_new:
                    raise Unavailable(LOST) from None
                continue  # it was closed while idle
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise
            if response.keeps_alive:
                self._idle[path].append(stream)
            else:
                await trio.aclose_forcefully(stream)
            return response.status, tuple(response.headers), [response.body]

    async def _connected(self, path: str) -> tuple[trio.SocketStream, bool]:
        """A connection, and whether it is a new one."""
        if self._idle[path]:
            return self._idle[path].pop(), False
        try:
            return await trio.open_unix_socket(path), True
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
                raise Unavailable(LOST) from None
            raise Unavailable(f"the worker that has this sequence cannot be reached: {error.strerror}") from None


def _forwards(headers: Headers) -> int:
    return forwards_of(next((value for name, value in headers if name == _HEADER), b"0").decode("latin-1"))


def _head(target: RequestTarget, length: int) -> bytes:
    version = f"/versions/{target.version}" if target.version else ""
    path = f"{PREFIX}{quote(target.name, safe='')}{version}{SUFFIX}"
    lines = [f"POST {path} HTTP/1.1".encode()]
    dropped = {*_OF_CONNECTION, CONTENT_ENCODING, _HEADER}
    lines += [b"%b: %b" % pair for pair in target.headers if pair[0] not in dropped]
    lines += [b"%b: %d" % (_HEADER, _forwards(target.headers) + 1), b"content-length: %d" % length, b"\r\n"]
    return b"\r\n".join(lines)


class _Response:
    """The callbacks of httptools for one response."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.keeps_alive = False
        self.is_complete = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in _NOT_PASSED_ON:
            self.headers.append((name.lower(), value))

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.keeps_alive = self.parser.should_keep_alive()
        self.is_complete = True


async def _received(stream: trio.SocketStream) -> _Response:
    response = _Response()
    while not response.is_complete:
        data = await stream.receive_some(_RECEIVED_BYTES)
        if not data:
            raise trio.BrokenResourceError
        response.parser.feed_data(data)
    return response
