"""Responses about all deployments are produced in portions, between which the event loop does other work."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

import pytest
import trio

from flowserve.runtime.engine.engine import Engine
from tests.http.conftest import Running
from tests.support.engine import add_function

pytestmark = pytest.mark.fault("W5")
DEPLOYMENTS: Final = 240
PATHS: Final = [
    ("GET", "/metrics"),
    ("GET", "/v2/models/stats"),
    ("POST", "/v2/repository/index"),
    ("GET", "/live/events"),
]


class Steps(trio.abc.Instrument):
    """The bytecode instructions that all tasks execute, and the most of one task until it returns to the event loop."""

    def __init__(self) -> None:
        self.longest = self.total = self._count = 0

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._count += event == "opcode"
        return self._trace

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._count = 0
        sys.settrace(self._trace)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        sys.settrace(None)
        self.longest = max(self.longest, self._count)
        self.total += self._count


def request(method: str, path: str) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n".encode()


async def steps(api: Running, method: str, path: str) -> Steps:
    """Of the server, until the end of the response or its first event."""
    client = await api.connect()
    found = Steps()
    await client.say(request(method, path))
    before = sys.gettrace()
    trio.lowlevel.add_instrument(found)
    try:
        if path == "/live/events":
            await client._until(b"data: ")
        else:
            assert (await client.answer()).status == 200
    finally:
        trio.lowlevel.remove_instrument(found)
        sys.settrace(before)
    await client.stream.aclose()
    await api.until(lambda: not api.server.connections)
    return found


async def test_a_response_about_all_deployments_leaves_the_event_loop_free(engine: Engine, api: Running) -> None:
    for number in range(DEPLOYMENTS):
        add_function(engine, f"m{number:03}", [lambda array: array])
    shares = {}
    for method, path in PATHS:
        found = await steps(api, method, path)
        shares[path] = found.longest / found.total
    assert {path: share for path, share in shares.items() if share > 0.5} == {}, shares
