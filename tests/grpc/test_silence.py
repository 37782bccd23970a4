"""Clients that connect and say nothing: they leave before long, and then nothing keeps a server that ends."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import trio

from flowserve.grpc import server
from flowserve.grpc.options import GrpcOptions
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.log_settings import LogSettings

DRAIN_S = 15.0


def until_closed(silent: socket.socket) -> None:
    while silent.recv(4096):  # the server's own greeting comes first
        pass


async def test_a_drain_does_not_wait_for_a_client_that_stopped_while_nothing_was_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "QUIET_S", 0.1)
    front = server.GrpcServer(GrpcOptions())
    port = front.bind("127.0.0.1", 0)
    nobody: Any = None  # no call is made
    with trio.fail_after(DRAIN_S / 2):
        async with trio.open_nursery() as nursery:
            await nursery.start(front.serve, nobody, None, ClientMemory(), LogSettings())
            stopped = socket.create_connection(("127.0.0.1", port))
            settings, taken = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])
            stopped.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
            said = b""
            while taken not in said:
                said += await trio.to_thread.run_sync(stopped.recv, 4096)
            front.drain(DRAIN_S)
    stopped.close()


async def test_who_says_nothing_is_closed_and_the_drain_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_MS_MAX", 200)
    front = server.GrpcServer(GrpcOptions())
    port = front.bind("127.0.0.1", 0)
    nobody: Any = None  # no call is made
    with trio.fail_after(DRAIN_S / 2):
        async with trio.open_nursery() as nursery:
            await nursery.start(front.serve, nobody, None, ClientMemory(), LogSettings())
            with socket.create_connection(("127.0.0.1", port)) as before:
                await trio.to_thread.run_sync(until_closed, before, abandon_on_cancel=True)
            silent = socket.create_connection(("127.0.0.1", port))
            await trio.sleep(0.05)  # it is accepted
            front.drain(DRAIN_S)
    silent.close()
