"""Restricted APIs: groups of endpoints that only answer to a header with the right value.

Decided here: which group a path belongs to, and what is said without the key. A path is judged by what it could be
taken for, not by the route it matches: case, doubled and trailing slashes and percent-encoding make no other path of
it, and the method does not count. What a key is, runtime/restriction.py decides. A server without the option has none
of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from flowserve.errors import Forbidden
from flowserve.http.asked import TIMING
from flowserve.http.errors import error_body, status_of
from flowserve.runtime.restriction import Restriction, by_group

_DECODED_TIMES: Final = 3
_TOP: Final[Mapping[str, str]] = {
    "health": "health",
    "repository": "model-repository",
    "systemsharedmemory": "shared-memory",
    "cudasharedmemory": "shared-memory",
    "trace": "trace",
    "logging": "logging",
}
_OF_A_MODEL: Final[Mapping[str, str]] = {
    "ready": "health",
    "infer": "inference",
    "generate": "inference",
    "generate_stream": "inference",
    "config": "model-config",
    "stats": "statistics",
    "trace": "trace",
}


# The live page tells what the endpoints of these groups tell, and its page itself nothing.
_LIVE: Final = frozenset({"metadata", "model-config", "model-repository", "statistics"})


@lru_cache(maxsize=1024)
def groups_of(path: str) -> frozenset[str]:
    """Every group that a path could belong to, however it is spelled; none for a path that is no endpoint's."""
    parts = [part for part in _decoded(path).lower().split("/") if part not in ("", ".")]
    if not parts or parts[0] != "v2":
        return _LIVE if parts[:1] == ["live"] else frozenset()
    if len(parts) == 1:
        return frozenset({"metadata"})
    if parts[1] != "models":
        group = _TOP.get(parts[1])
        return frozenset({group} if group else ())
    rest = parts[2:]
    found = {_OF_A_MODEL[part] for part in rest[1:] if part in _OF_A_MODEL}
    if rest == ["stats"]:
        found.add("statistics")
    if not found or (len(rest) == 3 and rest[1] == "versions"):
        found.add("metadata")
    return frozenset(found)


def _decoded(path: str) -> str:
    """`path` without percent-encoding, and without what encodes that again. Routes decode once."""
    for _ in range(_DECODED_TIMES):
        path = unquote(path)
    return path


def restricted(app: ASGIApp, restrictions: Sequence[Restriction]) -> ASGIApp:
    """`app`, where the groups of `restrictions`, each named in one of them, need their keys."""
    found = by_group(restrictions)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        for group in _asked(scope) if scope["type"] == "http" else ():
            restriction = found.get(group)
            if restriction is not None and not _has_key(scope["headers"], restriction):
                await _refuse(send, Forbidden(f"This API is restricted, expecting header '{restriction.name}'"))
                return
        await app(scope, receive, send)

    return guarded


def _asked(scope: Scope) -> frozenset[str]:
    """The groups of what is asked for. Who wants to be told where its time went asks for a trace, too."""
    groups = groups_of(scope["path"])
    return groups | {"trace"} if any(name == TIMING for name, _ in scope["headers"]) else groups


def _has_key(headers: Sequence[tuple[bytes, bytes]], restriction: Restriction) -> bool:
    name = restriction.name.encode("ascii")
    given = next((value for key, value in headers if key == name), b"")
    return restriction.is_opened_by(given)


async def _refuse(send: Send, error: Forbidden) -> None:
    body = error_body(str(error))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status_of(error), "headers": headers})
    await send({"type": "http.response.body", "body": body})
