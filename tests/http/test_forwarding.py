"""Headers that reach models as request parameters."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import pytest

from flowserve.http.api.options import AppOptions
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.protocol.request_parameters import Forwarding
from flowserve.values import Request


def forwarding(pattern: str) -> AppOptions:
    return AppOptions(forwarding=Forwarding(re.compile(pattern, re.IGNORECASE), "--option"))


@pytest.fixture
async def seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Every request that entered the engine."""
    entered: list[Request] = []
    submit = engine.submit
    monkeypatch.setattr(
        engine, "submit", lambda to, request, *how: entered.append(request) or submit(to, request, *how)
    )
    return entered


async def post(running: Any, *headers: str, packed: bool = False, **fields: Any) -> tuple[int, Any]:
    one = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    body = json.dumps({"inputs": [one], **fields}).encode()
    body = gzip.compress(body) if packed else body
    lines = ["POST /v2/models/double/infer HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    client = await running.connect()
    answer = await client.ask("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    return answer.status, json.loads(answer.body)


@pytest.mark.parametrize("packed", [False, True])
async def test_headers_whose_names_fit_are_parameters(
    engine: Engine, start: Any, seen: list[Request], packed: bool
) -> None:
    running = await start(engine, forwarding("x-(tenant|user)"))
    headers = ["X-Tenant: a b", "x-user: \xe9", "x-user-agent: no", "tenant: no"]
    if packed:
        headers.append("Content-Encoding: gzip")
    status, _ = await post(running, *headers, packed=packed, parameters={"mine": 1, "x-user": "body"})
    assert status == 200
    assert seen[0].parameters == {"x-tenant": "a b", "x-user": "body", "mine": 1}
    assert (await post(running))[0] == 200
    assert seen[1].parameters == {}


async def test_they_reach_the_generate_endpoints_too(
    engine: Engine, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Request] = []
    stream = engine.stream
    monkeypatch.setattr(
        engine, "stream", lambda to, request, *how: entered.append(request) or stream(to, request, *how)
    )
    running = await start(engine, forwarding("x-.*"))
    client = await running.connect()
    body = json.dumps({"IN": [1, 2, 3, 4], "mine": 1}).encode()
    head = f"POST /v2/models/double/generate HTTP/1.1\r\nHost: h\r\nX-A: b\r\nContent-Length: {len(body)}\r\n\r\n"
    assert (await client.ask(head.encode() + body)).status == 200
    assert entered[0].parameters == {"x-a": "b", "mine": 1}


@pytest.mark.parametrize("name", ["priority", "timeout", "sequence_id", "triton_anything"])
async def test_reserved_names_are_refused(engine: Engine, start: Any, name: str) -> None:
    running = await start(engine, forwarding(".*"))
    assert (await post(running, "anything: 1"))[0] == 200
    status, answer = await post(running, f"{name}: 1")
    assert status == 400
    assert f"the header '{name}' cannot be forwarded" in answer["error"]


async def test_nothing_is_forwarded_unless_asked(api: Any, seen: list[Request]) -> None:
    assert (await post(api, "X-Tenant: a"))[0] == 200
    assert seen[0].parameters == {}
