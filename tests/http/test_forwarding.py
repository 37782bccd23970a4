"""Headers that reach models as request parameters."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import pytest

from flowserve.http.api.infer import AppOptions
from flowserve.runtime.engine.deployments import Deployment
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.protocol import Forwarding
from flowserve.scheduling.frames.frame import Frame
from flowserve.values import Request


def forwarding(pattern: str) -> AppOptions:
    return AppOptions(forwarding=Forwarding(re.compile(pattern, re.IGNORECASE), "--option"))


@pytest.fixture
async def seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Every request that entered the engine."""
    entered: list[Request] = []
    submit = engine.submit

    def record(deployment: Deployment, request: Request, *options: Any, **named: Any) -> Frame:
        entered.append(request)
        return submit(deployment, request, *options, **named)

    monkeypatch.setattr(engine, "submit", record)
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
async def test_headers_that_match_the_pattern_are_parameters(
    engine: Engine, start: Any, seen: list[Request], packed: bool
) -> None:
    running = await start(engine, forwarding("x-(tenant|user)$"))
    headers = ["X-Tenant: a b", "x-user: \xe9", "x-user-agent: no", "tenant: no", "My-X-User: yes"]
    if packed:
        headers.append("Content-Encoding: gzip")
    status, _ = await post(running, *headers, packed=packed, parameters={"mine": 1, "x-user": "body"})
    assert status == 200
    assert seen[0].parameters == {"X-Tenant": "a b", "x-user": "body", "My-X-User": "yes", "mine": 1}
    assert (await post(running))[0] == 200
    assert seen[1].parameters == {}


async def test_headers_are_forwarded_to_the_generate_endpoints_too(
    engine: Engine, start: Any, seen: list[Request]
) -> None:
    running = await start(engine, forwarding("x-.*"))
    client = await running.connect()
    body = json.dumps({"IN": [1, 2, 3, 4], "mine": 1}).encode()
    head = f"POST /v2/models/double/generate HTTP/1.1\r\nHost: h\r\nX-A: b\r\nContent-Length: {len(body)}\r\n\r\n"
    assert (await client.ask(head.encode() + body)).status == 200
    assert seen[0].parameters == {"X-A": "b", "mine": 1}


@pytest.mark.parametrize("name", ["priority", "Priority", "timeout", "sequence_id", "triton_anything"])
async def test_headers_with_reserved_names_are_refused(engine: Engine, start: Any, name: str) -> None:
    running = await start(engine, forwarding(".*"))
    assert (await post(running, "anything: 1"))[0] == 200
    status, answer = await post(running, f"{name}: 1")
    assert status == 400
    assert f"the header '{name}' cannot be forwarded" in answer["error"]


async def test_no_header_is_forwarded_by_default(api: Any, seen: list[Request]) -> None:
    assert (await post(api, "X-Tenant: a"))[0] == 200
    assert seen[0].parameters == {}
