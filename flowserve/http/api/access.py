"""Requests from browsers: the Host values that are served, and the origins whose pages may send requests.

A web page can make its reader's browser send requests to any server that the browser reaches, one on the reader's own
machine included. Two checks refuse such requests, for every route and method; programs other than browsers pass them.

* **Host.** The owner of a name can let it resolve to this server's address after a page was loaded from it (DNS
  rebinding). For the browser the server is then the origin of that page, which may read every response; such requests
  have neither Origin nor Sec-Fetch-Site. Only Host tells them apart: it has the owner's name. The server therefore
  accepts addresses, localhost, names that the operator lists and, if it listens beyond loopback, names that cannot be
  registered.
* **Origin and Sec-Fetch-Site.** A page of another origin is refused, unless the operator allows its origin; then CORS
  headers let it read the responses. A browser that follows a link to this server is served.

Decides these checks, the syntax of the operator's lists, and that only the first refusal of each kind is logged.
Starlette's middleware writes the CORS headers. Does not know routes, keys (restricted.py) or sockets. Called by the app
and by the inference route; the command line makes the rules (decision 0036).
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from flowserve.errors import Forbidden, Invalid
from flowserve.http.api.encode import HEADER_LENGTH
from flowserve.http.api.json_bodies import error_response, status_of

ANY: Final = "*"
ADMITTED: Final = "flowserve.admitted"  # in the scope of a request that passed
_CACHED_HOSTS: Final = 256
_HOST_BYTES_MAX: Final = 300  # a name has at most 253
_SHOWN_MAX: Final = 100
_HOST_HINT: Final = "--http-allowed-hosts lists the names of this server"
_ORIGIN_HINT: Final = "--http-cors-origins lists the origins that are"
_HOST: Final = re.compile(r"(?:\[([0-9a-z:.%_~-]+)\]|([a-z0-9_.-]+?)\.?)(?::[0-9]{0,5})?")
_NAME: Final = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?", re.ASCII)
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::[0-9]{1,5})?", re.ASCII)
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}
# Reserved for use in local networks: no registry delegates names below them (RFC 6761, 6762, 8375; .internal by
# ICANN), or no top-level domain at all (Kubernetes' `SERVICE.NAMESPACE.svc`).
_UNREGISTRABLE: Final = (".localhost", ".local", ".home.arpa", ".internal", ".svc")

_log = logging.getLogger("flowserve.http")


@dataclass(frozen=True, slots=True)
class AccessRules:
    """`hosts`: the names served besides `localhost` and addresses: exact ones, `*.` and a suffix, or `*` for any.
    `has_local_names`: names that cannot be registered are served too, those without a dot among them. `origins`: pages
    of these origins may send requests and read responses; `*` for any.
    """

    hosts: tuple[str, ...] = ()
    has_local_names: bool = False
    origins: tuple[str, ...] = ()


class Access:
    """Checks requests by `rules`."""

    def __init__(self, rules: AccessRules) -> None:
        self.origins = rules.origins
        self._names = frozenset({"localhost", *rules.hosts})
        self._suffixes = tuple(one.removeprefix(ANY) for one in rules.hosts if one.startswith("*."))
        self._has_local_names = rules.has_local_names
        # Clients send few distinct hosts.
        self._serves = lru_cache(_CACHED_HOSTS)(self._find)

    def admits(self, scope: Scope) -> bool:
        """Whether a request is served and its response needs no CORS headers. If so, this is noted in the scope, which
        flowserve's own server shares between requests with the same head.
        """
        if self.refusal(scope) or (self.origins and any(name == b"origin" for name, _ in scope["headers"])):
            return False
        scope[ADMITTED] = True
        return True

    def refusal(self, scope: Scope) -> str:
        """Why a request is refused, "" if it is not."""
        headers = dict(scope["headers"])  # browsers send each of these once
        host = headers.get(b"host", b"")  # every browser sends it; some health checks over HTTP/1.0 do not
        if len(host) > _HOST_BYTES_MAX or not self._serves(host):
            return f"requests for host {_shown(_text(host))} are not served; {_HOST_HINT}"
        origin, site = _text(headers.get(b"origin", b"")), headers.get(b"sec-fetch-site", b"none")
        if site == b"same-origin":
            return ""  # only browsers send it, and it is right behind a proxy that changes Host
        if site == b"none" and (not origin or _is_origin_of(origin, _text(host))):
            return ""
        if ANY in self.origins or origin in self.origins or _is_link(scope["method"], headers):
            return ""
        page = f"pages of origin {_shown(origin)}" if origin else "pages of other origins"
        return f"requests from {page} are not served; {_ORIGIN_HINT}"

    def _find(self, host: bytes) -> bool:
        """Whether a value of Host is served, b"" for none."""
        if not host or ANY in self._names:
            return True
        found = _HOST.fullmatch(_text(host))
        if found is None:
            return False
        name = found[1] or found[2]
        try:
            ip_address(name)
        except ValueError:
            if found[1]:
                return False
        else:
            return True
        if name in self._names or name.endswith(self._suffixes):
            return True
        return self._has_local_names and ("." not in name or name.endswith(_UNREGISTRABLE))


def _text(value: bytes) -> str:
    return value.decode("latin-1").lower()


def _is_origin_of(origin: str, host: str) -> bool:
    """Whether a page of `origin` was loaded from `host`. The scheme is not compared: a proxy may have ended TLS."""
    scheme, _, authority = origin.partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    return port is not None and authority.removesuffix(port) == host.removesuffix(port) != ""


def _is_link(method: str, headers: dict[bytes, bytes]) -> bool:
    """Whether the browser opens the response as a page of its own, which the page with the link cannot read."""
    mode, destination = headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
    return method == "GET" and mode == b"navigate" and destination == b"document"


def _shown(text: str) -> str:
    return repr(text[:_SHOWN_MAX])


def checked(app: ASGIApp, rules: AccessRules) -> ASGIApp:
    """`app`, for the requests that `rules` allow."""
    access = Access(rules)
    logged: set[str] = set()
    inner = app
    if rules.origins:
        inner = CORSMiddleware(
            app,
            allow_origins=rules.origins,
            allow_methods=("GET", "POST"),
            allow_headers=(ANY,),
            allow_private_network=True,
            expose_headers=(HEADER_LENGTH.decode("ascii"), "server-timing"),
        )

    async def checking(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if text := access.refusal(scope):
                hint = text.rpartition("; ")[2]
                if hint not in logged:
                    logged.add(hint)
                    _log.warning("%s (further refusals are not logged)", text)
                await error_response(text, status_of(Forbidden(text)))(scope, receive, send)
                return
            scope[ADMITTED] = True
        await inner(scope, receive, send)

    return checking


# ---------------------------------------------------------------------------------------------- the operator's lists


def parse_hosts(text: str) -> tuple[str, ...]:
    """`HOST[,HOST...]`. Raises `Invalid` for a value that no Host could match, such as a URL."""
    hosts = [one.strip().lower() for one in text.split(",")]
    for host in hosts:
        if host != ANY and not _NAME.fullmatch(host) and not _is_address(host):
            raise Invalid("expected HOST[,HOST...]: names without scheme and port, *.NAME, or *")
    return tuple(host.removesuffix(".") for host in hosts)


def parse_origins(text: str) -> tuple[str, ...]:
    """`ORIGIN[,ORIGIN...]`. Raises `Invalid` for other forms."""
    origins = []
    for one in text.split(","):
        origin = one.strip().lower()
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise Invalid("expected ORIGIN[,ORIGIN...]: SCHEME://HOST[:PORT] without a path, or *")
        port = _DEFAULT_PORTS.get(origin.partition("://")[0])
        origins.append(origin.removesuffix(port) if port else origin)
    return tuple(origins)


def _is_address(text: str) -> bool:
    try:
        ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
