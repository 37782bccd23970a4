"""Server-sent events: an answer that goes on for as long as there is something to say and somebody who listens.

Decided here: how an event looks, and that whoever tells is cancelled when the client leaves, whichever server carries
it. What is told, and when it ends, its teller knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio
from starlette.types import Receive, Scope, Send

_HEADERS: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

Say = Callable[[bytes], Awaitable[None]]  # one event; comes back when the client's socket has taken it


async def send_events(scope: Scope, receive: Receive, send: Send, tell: Callable[[Say], Awaitable[None]]) -> None:
    """Answer with the events that `tell` says, and end when it returns. Each is text of one line, JSON mostly."""

    async def say(text: bytes) -> None:
        await send({"type": "http.response.body", "body": b"data: " + text + b"\n\n", "more_body": True})

    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    if scope["method"] != "HEAD":
        exchange = scope.get("flowserve.exchange")
        if exchange is not None:  # our own server cancels this task when the client leaves
            exchange.goes_on()
            await tell(say)
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until_gone, receive, nursery.cancel_scope)
                await tell(say)
                nursery.cancel_scope.cancel()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive, scope: trio.CancelScope) -> None:
    """Other servers say so when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
