"""Server-sent events: responses without a known end.

Decides the format of an event, and that its source is cancelled when the client disconnects, under any ASGI server.
Their source decides the content of the events and when they end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_HEADERS: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

Say = Callable[[bytes], Awaitable[None]]  # one event; returns when the client's socket has taken it


class EventResponse(Response):
    """The events that `tell` sends, until it returns. Each is text of one line, JSON mostly. `source` is entered before
    the response begins.
    """

    def __init__(
        self,
        tell: Callable[[Say], Awaitable[None]],
        source: AbstractAsyncContextManager[object] | None = None,
        status: int = 200,
    ) -> None:
        super().__init__(status_code=status)
        self._tell = tell
        self._source = source or nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def say(text: bytes) -> None:
            await send({"type": "http.response.body", "body": b"data: " + text + b"\n\n", "more_body": True})

        async with self._source:
            await send({"type": "http.response.start", "status": self.status_code, "headers": _HEADERS})
            if scope["method"] != "HEAD":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
                    await self._tell(say)
                    nursery.cancel_scope.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
