"""A seeded source of mutated valid requests, and a client that requires a response to each.

Mutations: JSON by its structure, bodies by their bytes, the binary part and its announced length, URLs, headers.
Framing stays valid, so that every request is complete and requires a response. The test serves the models of the
corpus: "same" and "text" (identities of FP32 and BYTES) and "twice" (an ensemble of two steps of "same").
"""

from __future__ import annotations

import gzip
import json
import random
import socket
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.client import HTTPResponse
from typing import Any, Final

ANSWER_S_MAX: Final = 30.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. Its Content-Length is always that of its body."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[str, ...] = ()

    def wire(self) -> bytes:
        lines = [
            f"{self.method} {self.path} HTTP/1.1",
            "Host: localhost",
            f"Content-Length: {len(self.body)}",
            *self.headers,
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


def _infer(model: str, datatype: str, data: list[Any], **fields: Any) -> Asked:
    one = {"name": "x", "datatype": datatype, "shape": [1, len(data)], "data": data}
    body = {"id": "7", "inputs": [one], "parameters": {"priority": 1, "timeout": 10_000_000, "mine": "x"}, **fields}
    return Asked("POST", f"/v2/models/{model}/infer", json.dumps(body).encode())


def _binary() -> Asked:
    one = {"name": "x", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}}
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    text = json.dumps({"inputs": [one], "outputs": outputs}).encode()
    length = f"Inference-Header-Content-Length: {len(text)}"
    return Asked("POST", "/v2/models/same/versions/1/infer", text + bytes(range(16)), (length,))


def _call(path: str, asked: Any = None) -> Asked:
    return Asked("GET", path) if asked is None else Asked("POST", path, json.dumps(asked).encode())


CORPUS: Final = (
    _infer("same", "FP32", [1.5, -2, 3e30]),
    _infer("same", "FP32", [1, 2], outputs=[{"name": "y", "parameters": {"classification": 1}}]),
    _infer("text", "BYTES", ["é", "b"], outputs=[{"name": "y", "parameters": {"binary_data": True}}]),
    _infer("twice", "FP32", [1, 2, 3], parameters={"sequence_id": 5, "sequence_start": True}),
    _binary(),
    Asked("POST", "/v2/models/same/infer", bytes(range(8)), ("Inference-Header-Content-Length: 0",)),
    _call("/v2/models/same/generate", {"x": [1, 2], "mine": 1, "parameters": {"other": True}}),
    _call("/v2/models/twice/generate_stream", {"x": [1, 2]}),
    _call("/v2"),
    _call("/v2/models/same"),
    _call("/v2/models/same/versions/1/config"),
    _call("/v2/models/twice/stats"),
    _call("/v2/health/ready"),
    _call("/openapi.json"),
    _call("/v2/repository/index", {"ready": True}),
    _call("/v2/repository/models/same/load", {"parameters": {"config": "{}", "file:1/model.onnx": "AAAA"}}),
    _call("/v2/systemsharedmemory/region/r/register", {"key": "/none", "offset": 0, "byte_size": 8}),
    _call("/v2/systemsharedmemory/unregister", {}),
    _call("/v2/systemsharedmemory/status"),
    _call("/v2/logging", {"log_verbose_level": 0, "log_info": True}),
    _call("/v2/trace/setting", {"trace_level": ["OFF"], "trace_rate": "1000"}),
)

NASTY: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "y",
    "FP32",
    "BYTES",
    "é" * 50,
    "\0",
    "\ud800",
    "../../etc/passwd",
    "%s%n",
    "a\nb",
    "x" * 5000,
    [],
    {},
    [[]],
    [[[[1]]]],
    {"a": {}},
    "shared_memory_region",
    10**40,
)
KEYS: Final = (
    "name",
    "shape",
    "datatype",
    "data",
    "inputs",
    "outputs",
    "parameters",
    "id",
    "binary_data_size",
    "binary_data",
    "classification",
    "shared_memory_region",
    "shared_memory_byte_size",
    "shared_memory_offset",
    "sequence_id",
    "timeout",
    "priority",
    "triton_x",
    "",
    "ready",
    "config",
    "key",
    "byte_size",
    "log_file",
    "trace_file",
)
SEGMENTS: Final = (
    "v2",
    "models",
    "same",
    "text",
    "twice",
    "versions",
    "1",
    "0",
    "99999999999999999999",
    "infer",
    "generate",
    "stats",
    "config",
    "ready",
    "..",
    ".",
    "",
    "%2e%2e",
    "%2f",
    "%00",
    "%ff",
    "%",
    "%zz",
    "a%0ab",
    "~" * 300,
    "region",
    "r",
    "repository",
    "é".encode().decode("latin-1"),
)
HEADERS: Final = (
    "Content-Encoding: gzip",
    "Content-Encoding: deflate",
    "Content-Encoding: zebra",
    "Content-Encoding: ",
    "Accept-Encoding: gzip",
    "Accept-Encoding: deflate;q=0.5, gzip;q=0",
    "Accept-Encoding: ;;;,,",
    "Inference-Header-Content-Length: 0",
    "Inference-Header-Content-Length: -1",
    "Inference-Header-Content-Length: 1e3",
    "Inference-Header-Content-Length: 99999999999999999999",
    "Content-Type: text/plain",
    "X-A: \xff\xfe",
    "Accept: nothing",
    "Connection: keep-alive",
    "Expect: 100-continue",
)


def mutated(source: random.Random) -> Asked:
    """A request of the corpus with one to three mutations."""
    asked = source.choice(CORPUS)
    for _ in range(source.randint(1, 3)):
        asked = source.choice(_MUTATIONS)(source, asked)
    return asked


def _json(source: random.Random, asked: Asked) -> Asked:
    """Replace, remove or duplicate one member or element."""
    try:
        document = json.loads(asked.body)
    except ValueError:
        return _bytes(source, asked)
    places = list(_places(document))
    if not places:
        return replace(asked, body=json.dumps(source.choice(NASTY)).encode())
    inside, key = source.choice(places)
    match source.randrange(4):
        case 0:
            inside[key] = source.choice(NASTY)
        case 1:
            del inside[key]
        case 2 if isinstance(inside, dict):
            inside[source.choice(KEYS)] = source.choice((*NASTY, inside[key]))
        case _ if isinstance(inside, list):
            inside.extend(inside * source.choice((1, 3, 40)))
        case _:
            inside[key] = [inside[key]] * source.choice((1, 2, 200))
    return replace(asked, body=json.dumps(document).encode())


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    pairs = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in pairs:
        yield document, key
        yield from _places(value)


def _bytes(source: random.Random, asked: Asked) -> Asked:
    """Remove, duplicate or overwrite pieces of the body."""
    data = bytearray(asked.body)
    for _ in range(source.randint(1, 4)):
        start = source.randint(0, len(data))
        stop = min(len(data), start + source.randint(0, 8))
        data[start:stop] = source.choice(
            (
                source.randbytes(source.randint(0, 6)),
                bytes(data[start:stop]) * 3,
                b"[" * 200,
                b'"',
                b"\0",
                b"1e999",
                b"\\ud800",
            )
        )
    return replace(asked, body=bytes(data))


def _length(source: random.Random, asked: Asked) -> Asked:
    """Change the announced length of the JSON, or the length of the binary part."""
    name = "Inference-Header-Content-Length"
    others = tuple(header for header in asked.headers if not header.startswith(name))
    length = source.choice((len(asked.body), len(asked.body) + 1, source.randint(0, len(asked.body) + 3)))
    body = source.choice((asked.body, asked.body[:-3], asked.body + bytes(source.randint(1, 9))))
    return replace(asked, body=body, headers=(*others, f"{name}: {length}"))


def _url(source: random.Random, asked: Asked) -> Asked:
    path, _, query = asked.path.partition("?")
    parts = path.split("/")[1:]
    where = source.randrange(len(parts))
    match source.randrange(4):
        case 0:
            parts[where] = source.choice(SEGMENTS)
        case 1:
            parts.insert(where, source.choice(SEGMENTS))
        case 2 if len(parts) > 1:
            del parts[where]
        case _:
            parts[where] = source.choice((parts[where].upper(), parts[where] + "/", f"{parts[where]}?a={'b' * 50}"))
    return replace(asked, path="/" + "/".join(parts) + (f"?{query}" if query else ""))


def _header(source: random.Random, asked: Asked) -> Asked:
    return replace(asked, headers=(*asked.headers, source.choice(HEADERS)))


def _packed(source: random.Random, asked: Asked) -> Asked:
    body = source.choice((gzip.compress, zlib.compress))(asked.body)
    if source.random() < 0.3:
        body = body[: source.randint(0, len(body))]
    return replace(asked, body=body, headers=(*asked.headers, "Content-Encoding: gzip"))


def _method(source: random.Random, asked: Asked) -> Asked:
    return replace(asked, method=source.choice(("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH")))


_Mutation = Callable[[random.Random, Asked], Asked]
_MUTATIONS: Final[tuple[_Mutation, ...]] = (_json, _json, _json, _bytes, _length, _url, _url, _header, _packed, _method)


class Insistent:
    """A client that uses one connection until the server closes it. Every request must be answered in time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def ask(self, asked: Asked) -> tuple[int, bytes]:
        """Status and body of the response. Raises OSError if there is none."""
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=ANSWER_S_MAX)
        self._socket.sendall(asked.wire())
        response = HTTPResponse(self._socket, method=asked.method)
        response.begin()
        body = response.read()
        if response.will_close:
            self.close()
        response.close()
        return response.status, body

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
