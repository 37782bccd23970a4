"""The live page: its headers and its events. tests/http/test_live_browser.py tests the page in a browser."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from flowserve.errors import ModelFailed
from flowserve.http.api.infer import AppOptions
from flowserve.http.page.routes import SPARE, VIEWERS_MAX
from flowserve.http.page.sampler import WINDOW_S, Sampler
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.protocol import parse_restriction
from flowserve.runtime.tracing.recent import KEPT_MAX, TRACED_PER_S
from flowserve.values import Request
from tests.support.engine import add_chain, add_function

Array = np.ndarray[Any, Any]


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: h", *headers, "", ""]).encode()


class Events:
    """The events of one viewer, one at a time."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def begin(self, path: str = "/live/events", *headers: str) -> str:
        """The head of the response."""
        await self._client.say(get(path, *headers))
        head: bytes = await self._client._until(b"\r\n\r\n")
        return head.decode()

    async def next(self) -> Any:
        await self._client._until(b"data: ")
        return json.loads(await self._client._until(b"\n\n"))


async def infer(engine: Engine, name: str, rows: int = 1) -> None:
    await engine.infer(engine.deployments.find(name), Request({"IN": np.ones((rows, 4), np.float32)}))


async def test_the_page_is_served_complete_with_a_content_security_policy(api: Any) -> None:
    client = await api.connect()
    answer = await client.ask(get("/"))
    page = answer.body.decode()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert f"{tag}-src 'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'" in policy
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page))  # none of them is fetched
    assert addresses == {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
    assert not re.findall(r"(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\()", page)
    assert not re.findall(r"\son\w+=|\sstyle=", page.partition("<script>")[0])


async def test_a_head_request_is_answered_without_the_page_and_without_events(api: Any) -> None:
    client = await api.connect()
    whole = await client.ask(get("/"))
    await client.say(get("/", method="HEAD"))
    head = await client.answer(has_body=False)
    assert (head.status, head.headers["content-length"]) == (200, str(len(whole.body)))
    await client.say(get("/live/events", method="HEAD"))
    assert (await client.answer(has_body=False)).headers["content-type"].startswith("text/event-stream")
    assert (await client.ask(get("/v2/health/live"))).status == 200


async def test_a_viewer_gets_a_snapshot_followed_by_changes(engine: Engine, api: Any, patient_clock: MockClock) -> None:
    events = Events(await api.connect())
    assert "text/event-stream" in await events.begin("/live/events?name=double&version=1")
    first = await events.next()
    assert first["names"] == [["double", "1"]]
    (row,) = first["deployments"]
    assert (row["name"], row["version"], row["state"], row["reason"], row["error"]) == ("double", "1", "READY", "", "")
    assert first["can_load"] is False
    assert first["graph"]["nodes"][0]["waiting"] == 0
    quiet = await events.next()
    assert (quiet["names"], quiet["deployments"]) == (None, [])
    for _ in range(6):
        await infer(engine, "double", rows=3)
    busy = await events.next()
    (row,) = busy["deployments"]
    assert row["rate"] > 0
    assert row["p99"] is not None
    (node,) = busy["graph"]["nodes"]
    assert (node["mean_batch"], node["instances"], node["busy"], node["in_flight"]) == (3.0, 1, 0, 0)
    assert busy["graph"]["edges"][0]["bytes"] == pytest.approx(row["rate"] * 3 * 16, rel=0.01)
    assert busy["graph"]["edges"][1] is None  # outputs are sent without a copy
    engine.deployments.withdraw_name("double", "unloaded")
    gone = await events.next()
    assert gone["graph"] is None
    assert gone["names"] == [["double", ""]]
    assert gone["deployments"][0]["state"] == "UNAVAILABLE"


async def test_the_error_of_a_request_is_shown_at_its_deployment_and_model(engine: Engine, api: Any) -> None:
    def fail(array: Array) -> Array:
        raise ModelFailed("<img src=x onerror=alert(1)> is no number")

    add_function(engine, "broken", [fail])
    add_chain(engine, "pair", ["double", "broken"])
    with pytest.raises(ModelFailed):
        await infer(engine, "pair")
    events = Events(await api.connect())
    await events.begin()
    rows = {row["name"]: row for row in (await events.next())["deployments"]}
    assert "is no number" in rows["broken"]["error"]
    assert "in ensemble 'pair'" in rows["pair"]["error"]
    assert rows["pair"]["error_ms"] > 0
    assert rows["double"]["error"] == ""


async def test_the_graph_has_space_for_figures_and_escapes_names(engine: Engine, api: Any) -> None:
    name = "<script>alert(1)<"
    add_function(engine, name, [lambda array: array])
    client = await api.connect()
    answer = await client.ask(get(f"/live/graphs/{name.replace('<', '%3C').replace('>', '%3E')}/versions/1"))
    drawn = json.loads(answer.body)
    assert answer.headers["content-type"] == "application/json"
    assert drawn["graph"]["name"] == name
    assert "<script" not in drawn["svg"]
    assert drawn["svg"].count(SPARE.lines[0]) == 1
    assert 'data-edges="0"' in drawn["svg"]
    again = await Events(await api.connect()).begin("/live/events?name=nobody&version=1")
    assert " 200 " in again
    assert (await client.ask(get("/live/graphs/nobody/versions/1"))).status == 404


async def test_viewers_are_bounded_and_a_closed_one_frees_its_place(api: Any) -> None:
    viewers = [await api.connect() for _ in range(VIEWERS_MAX)]
    for viewer in viewers:
        await Events(viewer).begin()
    client = await api.connect()
    refused = await client.ask(get("/live/events"))
    assert refused.status == 503
    assert "try again later" in json.loads(refused.body)["error"]
    viewers[0].stream.socket.close()
    with trio.fail_after(30):
        while (head := await Events(client).begin()).startswith("HTTP/1.1 503"):
            size = int(re.findall(r"content-length: (\d+)", head)[0])
            await client._exactly(size)
            await trio.sleep(0.01)
    assert head.startswith("HTTP/1.1 200")


async def test_events_end_with_the_server(engine: Engine, api: Any) -> None:
    client = await api.connect()
    events = Events(client)
    await events.begin()
    await events.next()
    with trio.fail_after(0.9):  # sooner than the next event would come
        api.server.drain(30)
        await engine.drain(trio.current_time() + 30)
        assert await events.next() == {"end": True}
        assert await client.rest() == b"0\r\n\r\n" or True


async def test_the_page_of_the_api_is_one_document_that_runs_only_its_own_script(api: Any) -> None:
    client = await api.connect()
    plain = await client.ask(get("/docs"))
    packed = await client.ask(get("/docs", "Accept-Encoding: br, gzip"))
    assert (plain.status, packed.headers["content-encoding"]) == (200, "gzip")
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < 600_000
    policy = plain.headers["content-security-policy"]
    assert "unsafe" not in policy
    page = plain.body.decode()
    assert not re.findall(r'(?:src|href)="(?!data:,|openapi.json|\./)', page.partition("<style>")[0])
    for tag in ("script", "style"):
        inside = page.split(f"<{tag}>", 1)[1].rsplit(f"</{tag}>", 1)[0]
        assert f"{tag}-src 'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'" in policy


async def test_the_picture_has_the_asked_direction_and_foldings(engine: Engine, api: Any) -> None:
    client = await api.connect()

    async def drawn(query: str) -> Any:
        return await client.ask(get(f"/live/graphs/double/versions/1{query}"))

    def size(answer: Any) -> tuple[int, int]:
        found = re.search(r'width="(\d+)" height="(\d+)"', json.loads(answer.body)["svg"])
        assert found is not None
        return int(found[1]), int(found[2])

    wide, high = size(await drawn("?direction=LR&fold=nothing&fold=*")), size(await drawn("?direction=TB"))
    assert wide[0] > high[0]
    assert wide[1] < high[1]
    refused = await drawn("?direction=%3Cscript%3E")
    assert (refused.status, json.loads(refused.body)["error"]) == (400, "'direction' is LR or TB, got '<script>'")


async def last_requests(client: Any, name: str = "double", after: str = "0") -> Any:
    answer = await client.ask(get(f"/live/requests/{name}/versions/1?after={after}"))
    assert answer.status == 200, answer.body
    return json.loads(answer.body)["requests"]


def infer_body(rows: int, values: int = 4) -> bytes:
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [rows, values], "data": [1.0] * rows * values}]
    body = json.dumps({"id": f"of {rows}", "inputs": inputs}).encode()
    head = f"POST /v2/models/double/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_requests_are_recorded_with_their_timelines_while_a_page_asks_for_them(
    engine: Engine, api: Any, patient_clock: MockClock
) -> None:
    client = await api.connect()
    await client.ask(infer_body(1))
    assert (engine.observers, engine.traces.is_on) == ([], False)
    assert await last_requests(client) == []  # nothing was recorded without a viewer
    await client.ask(infer_body(2))
    wrong = await client.ask(infer_body(1, values=3))
    assert wrong.status == 400
    good, bad = await last_requests(client)
    assert (good["id"], good["rows"], good["error"]) == ("of 2", 2, "")
    assert "double.infer;dur=" in good["timing"]
    assert f"total;dur={good['ms']:.3f}" in good["timing"]
    assert bad["error"] == json.loads(wrong.body)["error"]
    assert (bad["ms"], bad["timing"]) == (None, "")
    assert await last_requests(client, after=str(good["number"])) == [bad]
    await trio.sleep(10)  # no poll
    await client.ask(infer_body(3))
    assert (engine.observers, engine.traces.is_on) == ([], False)
    assert await last_requests(client) == []
    refused = await client.ask(get("/live/requests/double/versions/1?after=x"))
    assert refused.status == 400


async def test_so_many_requests_a_second_are_traced_and_every_failure_is_kept(
    engine: Engine, api: Any, patient_clock: MockClock
) -> None:
    def fail(array: Array) -> Array:
        raise ModelFailed("<b>no</b>")

    add_function(engine, "broken", [fail])
    client = await api.connect()
    await last_requests(client)
    for rows in (*[1] * TRACED_PER_S, 2, 3):
        await client.ask(infer_body(rows))
    assert {one["rows"] for one in await last_requests(client)} == {1}, "those beyond the limit are not traced"
    failing = infer_body(1).replace(b"/double/", b"/broken/")
    for _ in range(2):
        assert (await client.ask(failing)).status != 200
    kept = await last_requests(client, "broken")
    assert [(one["error"], one["timing"]) for one in kept] == [("<b>no</b>", "")] * 2
    await trio.sleep(1.5)
    await client.ask(failing)
    one = (await last_requests(client, "broken"))[-1]
    assert "<b>no</b>" in one["error"]
    assert "failed" in one["timing"]
    for _ in range(KEPT_MAX):
        await client.ask(failing)
    assert len(await last_requests(client, "broken")) == KEPT_MAX


async def test_live_figures_need_the_keys_of_their_groups_and_the_page_needs_none(engine: Engine, start: Any) -> None:
    for group in ("metadata", "model-config", "model-repository", "statistics"):
        guarded = await start(engine, AppOptions(restrictions=(parse_restriction(f"{group}:admin-key=secret"),)))
        client = await guarded.connect()
        assert (await client.ask(get("/"))).status == 200
        for path in ("/live/events", "/LIVE//events", "/%6Cive/graphs/double/versions/1"):
            assert (await client.ask(get(path))).status == 403, (group, path)
        assert (await client.ask(get("/live/graphs/double/versions/1", "admin-key: secret"))).status == 200
        assert " 200 " in await Events(client).begin("/live/events", "admin-key: secret")
    guarded = await start(engine, AppOptions(restrictions=(parse_restriction("trace:admin-key=secret"),)))
    client = await guarded.connect()
    assert (await client.ask(get("/live//requests/double/versions/1"))).status == 403
    assert (await client.ask(get("/live/requests/double/versions/1", "admin-key: secret"))).status == 200
    assert (await client.ask(get("/live/graphs/double/versions/1"))).status == 200


async def test_one_sample_serves_all_viewers_and_is_kept_for_a_few_seconds(
    engine: Engine, patient_clock: MockClock
) -> None:
    sampler = Sampler(engine)
    for _ in range(3):
        await sampler.look()
    assert sampler.number == 1
    for _ in range(20):
        await trio.sleep(1)
        await sampler.look()
    assert sampler.number == 21
    assert len(sampler._readings) == WINDOW_S + 1
    await trio.sleep(WINDOW_S + 1)  # no viewer
    await sampler.look()
    assert len(sampler._readings) == 1
    first, later = sampler.frame(None, 0), sampler.frame(None, sampler.number)
    assert (len(first["deployments"]), first["names"]) == (1, [("double", "1")])
    assert (later["deployments"], later["names"]) == ([], None)


async def test_a_changed_graph_is_drawn_again(engine: Engine) -> None:
    sampler = Sampler(engine)
    add_function(engine, "more", [lambda array: array])
    add_chain(engine, "pair", ["double", "more"])
    before = sampler.picture(engine.deployments.find("pair"))
    add_chain(engine, "pair", ["double", "more"])
    assert sampler.picture(engine.deployments.find("pair")) == before
    add_chain(engine, "pair", ["more", "double"])
    assert sampler.picture(engine.deployments.find("pair")) != before
