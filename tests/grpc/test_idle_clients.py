"""Idle connections: they are closed after the handshake timeout, and a drain does not wait for them."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from flowserve.grpc import server
from flowserve.grpc.options import GrpcOptions
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.settings import LogSettings

DRAIN_S = 15.0


def until_closed(idle: socket.socket) -> None:
    while idle.recv(4096):  # the server's own greeting comes first
        pass


async def test_a_drain_does_not_wait_for_an_unresponsive_client_without_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "IDLE_CLIENT_S", 0.1)
    grpc_server = server.GrpcServer(GrpcOptions())
    port = grpc_server.bind("127.0.0.1", 0)
    engine: Any = SimpleNamespace(group=None)  # no call is made
    with trio.fail_after(DRAIN_S / 2):
        async with trio.open_nursery() as nursery:
            await nursery.start(grpc_server.serve, engine, None, ClientMemory(), LogSettings())
            stopped = socket.create_connection(("127.0.0.1", port))
            settings, acknowledged = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])
            stopped.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
            received = b""
            while acknowledged not in received:
                received += await trio.to_thread.run_sync(stopped.recv, 4096)
            grpc_server.drain(DRAIN_S)
    stopped.close()


async def test_a_connection_without_a_handshake_is_closed_and_a_drain_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_MS_MAX", 200)
    grpc_server = server.GrpcServer(GrpcOptions())
    port = grpc_server.bind("127.0.0.1", 0)
    engine: Any = SimpleNamespace(group=None)  # no call is made
    with trio.fail_after(DRAIN_S / 2):
        async with trio.open_nursery() as nursery:
            await nursery.start(grpc_server.serve, engine, None, ClientMemory(), LogSettings())
            with socket.create_connection(("127.0.0.1", port)) as before:
                await trio.to_thread.run_sync(until_closed, before, abandon_on_cancel=True)
            idle = socket.create_connection(("127.0.0.1", port))
            await trio.sleep(0.05)  # it is accepted
            grpc_server.drain(DRAIN_S)
    idle.close()
