"""Restricted APIs: groups of endpoints that require a header with the right value.

Decides which group a path belongs to, and the response without the key. The group follows from all readings of a path,
not from the route it matches: case, doubled and trailing slashes, percent-encoding and the method make no difference.
runtime/protocol.py decides the format of a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from flowserve.errors import Forbidden
from flowserve.http.api.json_bodies import error_response, status_of
from flowserve.http.api.request_target import TIMING
from flowserve.runtime.protocol import Restriction, by_group

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


# Outside /v2, by the first part of the path, or its first two. The live page's data is that of the endpoints of its
# groups; the page itself, /, contains none, and neither does /docs. The last requests have timelines.
_ELSEWHERE: Final[Mapping[str, frozenset[str]]] = {
    "live": frozenset({"metadata", "model-config", "model-repository", "statistics"}),
    "live/requests": frozenset({"trace"}),
    "metrics": frozenset({"statistics"}),
    "flowserve": frozenset({"statistics"}),
    "openapi.json": frozenset({"metadata"}),
}


@lru_cache(maxsize=1024)
def groups_of(path: str) -> frozenset[str]:
    """Every group that a path could belong to, in any spelling; none for a path without an endpoint."""
    for _ in range(_DECODED_TIMES):  # routes decode once, but the path may be encoded several times
        path = unquote(path)
    parts = [part for part in path.lower().split("/") if part not in ("", ".")]
    if not parts or parts[0] != "v2":
        return frozenset().union(*(_ELSEWHERE.get("/".join(parts[:n]), ()) for n in (1, 2)))
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


class Guard:
    """Checks the keys of `restrictions`; each group is named in one of them."""

    def __init__(self, restrictions: Sequence[Restriction]) -> None:
        self._by_group = by_group(restrictions)

    def check(self, scope: Scope) -> None:
        """Raises `Forbidden` if the request lacks a key. The timing header also requires the key of `trace`."""
        headers = scope["headers"]
        groups = groups_of(scope["path"])
        if any(name == TIMING for name, _ in headers):
            groups |= {"trace"}
        for group in groups:
            restriction = self._by_group.get(group)
            if restriction is None:
                continue
            name = restriction.name.encode("ascii")
            if not restriction.is_opened_by(next((value for key, value in headers if key == name), b"")):
                raise Forbidden(f"This API is restricted, expecting header '{restriction.name}'")


def restricted(app: ASGIApp, restrictions: Sequence[Restriction]) -> ASGIApp:
    """`app`, with keys required for the groups of `restrictions`."""
    guard = Guard(restrictions)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                guard.check(scope)
            except Forbidden as error:
                await error_response(str(error), status_of(error))(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded
