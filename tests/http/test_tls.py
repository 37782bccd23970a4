"""HTTPS: the same responses over TLS, and refused connections."""

from __future__ import annotations

import errno
import json
import socket
import ssl
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from flowserve.errors import Invalid
from flowserve.http.api.app import make_app
from flowserve.http.server.request_parser import Limits
from flowserve.http.server.server import Server, open_listeners
from flowserve.http.server.tls import tls_context
from flowserve.runtime.budget import Budget
from flowserve.runtime.engine.engine import Engine
from tests.support.engine import add_function


def client_context(papers: Path, *, shows: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(papers / "server.pem"))
    if shows:
        context.load_cert_chain(papers / "client.pem", papers / "client.key")
    return context


async def secure(server_task: Any, engine: Engine, context: ssl.SSLContext, budget: Budget | None = None) -> int:
    listeners = open_listeners("127.0.0.1", 0)
    port: int = listeners[0].getsockname()[1]
    await server_task.start(Server(make_app(engine), tls=context, budget=budget).serve, listeners)
    return port


async def ask(port: int, context: ssl.SSLContext, request: bytes) -> bytes:
    """All bytes that the server sends until it closes."""
    tcp = await trio.open_tcp_stream("127.0.0.1", port)
    stream = trio.SSLStream(tcp, context, server_hostname="localhost", https_compatible=True)
    try:
        await stream.send_all(request)
        received = b""
        while data := await stream.receive_some(65536):
            received += data
        return received
    finally:
        await trio.aclose_forcefully(stream)


def post(model: str, width: int) -> bytes:
    one = {"name": "IN", "datatype": "FP32", "shape": [1, width], "data": [0.5] * width}
    body = json.dumps({"inputs": [one]}).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


@pytest.mark.parametrize("width", [4, 300_000])
async def test_requests_of_any_size_are_answered_over_tls(
    engine: Engine, nursery: trio.Nursery, papers: Path, width: int
) -> None:
    add_function(engine, "wide", [lambda array: array + array], dims=(width,))
    port = await secure(nursery, engine, tls_context(papers / "server.pem", papers / "server.key", None))
    received = await ask(port, client_context(papers), post("wide", width))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(body)["outputs"][0]["data"] == [1.0] * width


@pytest.mark.fault("Z9")
async def test_old_versions_and_clients_without_a_certificate_are_refused(
    engine: Engine, nursery: trio.Nursery, papers: Path
) -> None:
    context = tls_context(papers / "server.pem", papers / "server.key", papers / "client.pem")
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    port = await secure(nursery, engine, context)
    request = b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    old = client_context(papers, shows=True)
    old.set_ciphers("DEFAULT@SECLEVEL=0")  # or the client itself would refuse
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the old version is intended
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    for context in (client_context(papers), old):
        said = b""
        with suppress(trio.BrokenResourceError):  # reset or closed, depending on the kernel
            said = await ask(port, context, request)
        assert said == b""
    assert (await ask(port, client_context(papers, shows=True), request)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("width", [4, 300_000])
async def test_a_plain_http_request_to_a_tls_port_gets_an_error_and_is_not_run(
    engine: Engine, nursery: trio.Nursery, papers: Path, width: int
) -> None:
    port = await secure(nursery, engine, tls_context(papers / "server.pem", papers / "server.key", None))
    plain = await trio.open_tcp_stream("127.0.0.1", port)
    said = b""
    async with plain:
        with suppress(trio.BrokenResourceError):  # the rest of a long request is not read
            await plain.send_all(post("wide", width))
        while data := await plain.receive_some(1000):
            said += data
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body) == {
        "error": "this port speaks HTTPS, and the request came in plain HTTP: begin the URL with https://"
    }


async def test_a_closed_or_silent_tls_connection_leaves_no_state(
    engine: Engine, nursery: trio.Nursery, papers: Path
) -> None:
    listeners = open_listeners("127.0.0.1", 0)
    context = tls_context(papers / "server.pem", papers / "server.key", None)
    server = Server(make_app(engine), Limits(header_timeout_s=0.2), tls=context)
    await nursery.start(server.serve, listeners)
    port = listeners[0].getsockname()[1]
    silent = await trio.open_tcp_stream("127.0.0.1", port)
    tcp = await trio.open_tcp_stream("127.0.0.1", port)
    stream = trio.SSLStream(tcp, client_context(papers), server_hostname="localhost")
    await stream.send_all(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 200")
    await trio.aclose_forcefully(stream)
    with trio.fail_after(30):
        assert await silent.receive_some(1) == b""  # no handshake in time
        while server.connections:  # noqa: ASYNC110
            await trio.sleep(0.01)
    await silent.aclose()


async def test_a_connection_without_a_free_descriptor_is_closed_and_the_next_one_served(
    engine: Engine,
    nursery: trio.Nursery,
    papers: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = await secure(nursery, engine, tls_context(papers / "server.pem", papers / "server.key", None))

    def none_left() -> None:
        monkeypatch.undo()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", none_left)
    with trio.fail_after(5):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            assert await stream.receive_some() == b""
        request = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert (await ask(port, client_context(papers), request)).startswith(b"HTTP/1.1 200")
    assert "connections are refused: no file descriptors left" in caplog.text


async def test_a_connection_beyond_the_limit_is_closed(engine: Engine, nursery: trio.Nursery, papers: Path) -> None:
    context = tls_context(papers / "server.pem", papers / "server.key", None)
    budget = Budget(max_connections=1)
    port = await secure(nursery, engine, context, budget)
    with trio.fail_after(20):
        async with await trio.open_tcp_stream("127.0.0.1", port):
            while not budget.connections:  # noqa: ASYNC110 - nothing tells of it
                await trio.sleep(0.002)
            async with await trio.open_tcp_stream("127.0.0.1", port) as refused:
                assert await refused.receive_some() == b""
        while budget.connections:  # noqa: ASYNC110 - nothing tells of it
            await trio.sleep(0.002)
        request = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert (await ask(port, client_context(papers), request)).startswith(b"HTTP/1.1 200")


def test_an_invalid_or_missing_certificate_or_key_is_refused(papers: Path, tmp_path: Path) -> None:
    for certificate, key in [("server.pem", "client.key"), ("nothing.pem", "server.key"), ("server.key", "server.key")]:
        with pytest.raises(Invalid, match="TLS cannot be set up from"):
            tls_context(papers / certificate, papers / key, None)
    with pytest.raises(Invalid, match="TLS cannot be set up from"):
        tls_context(papers / "server.pem", papers / "server.key", tmp_path / "none")
