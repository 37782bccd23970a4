"""`Server-Timing`: on every response whose request asks for it, errors included, and on no other."""

from __future__ import annotations

import gzip
import json
from typing import Any

from flowserve.runtime.engine.engine import Engine
from tests.support.engine import add_function

BODY = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


async def ask(running: Any, body: bytes, *headers: str, model: str = "double") -> Any:
    client = await running.connect()
    lines = "".join(f"{header}\r\n" for header in headers)
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    return await client.ask(head.encode() + body)


def names(answer: Any) -> list[str]:
    return [entry.split(";")[0] for entry in answer.headers.get("server-timing", "").split(", ") if entry]


PARTS = ["double.queue", "double.input", "double.infer", "double.output"]


async def test_a_response_has_the_requested_timing(api: Any, engine: Engine) -> None:
    body = json.dumps(BODY).encode()
    timed = await ask(api, body, "Flowserve-Timing: 1")
    plain = await ask(api, body)
    assert timed.body == plain.body
    assert [name for name in names(timed) if name != "request.queue"] in (["total", *PARTS], ["total", *PARTS[1:]])
    assert "batch 1 of 1 row on double_0" in timed.headers["server-timing"]
    for header in ((), ("Flowserve-Timing: 0",)):
        assert names(await ask(api, body, *header)) == []
    assert not engine.tracing.is_live


async def test_compressed_bodies_are_timed_too(api: Any) -> None:
    packed = gzip.compress(json.dumps(BODY).encode())
    timed = await ask(api, packed, "Flowserve-Timing: 1", "Content-Encoding: gzip", "Accept-Encoding: gzip")
    assert timed.status == 200
    assert "double.infer" in names(timed)


async def test_a_model_that_fails_is_timed(api: Any, engine: Engine) -> None:
    def broken(array: Any) -> Any:
        raise ValueError("broken")

    add_function(engine, "broken", [broken])
    answer = await ask(api, json.dumps(BODY).encode(), "Flowserve-Timing: 1", model="broken")
    assert answer.status == 500
    assert "total;dur=" in answer.headers["server-timing"]
    assert "failed: " in answer.headers["server-timing"]


async def test_a_request_refused_before_validation_has_no_timing(api: Any) -> None:
    answer = await ask(api, b"{}", "Flowserve-Timing: 1")
    assert answer.status == 400
    assert names(answer) == []
