"""Restricted APIs: the group of a path in any spelling, and the responses without the key."""

from __future__ import annotations

import hmac
import json
from typing import Any

import pytest

from flowserve.errors import Invalid
from flowserve.http.api.infer import AppOptions
from flowserve.http.api.restricted import groups_of
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.protocol import GROUPS, hides_names, parse_restriction

PATHS = {
    "health": ["/v2/health/live", "/v2/health/ready", "/v2/models/double/ready", "/v2/models/double/versions/1/ready"],
    "metadata": ["/v2", "/v2/models/double", "/v2/models/double/versions/1", "/openapi.json", "/live/events"],
    "inference": [
        "/v2/models/double/infer",
        "/v2/models/double/versions/1/infer",
        "/v2/models/double/generate",
        "/v2/models/double/generate_stream",
    ],
    "shared-memory": [
        "/v2/systemsharedmemory/status",
        "/v2/systemsharedmemory/region/r/register",
        "/v2/cudasharedmemory/unregister",
    ],
    "model-config": ["/v2/models/double/config", "/v2/models/double/versions/1/config"],
    "model-repository": ["/v2/repository/index", "/v2/repository/x/index", "/v2/repository/models/double/load"],
    "statistics": [
        "/v2/models/stats",
        "/v2/models/double/stats",
        "/flowserve/stats",
        "/flowserve/models/double/stats",
        "/metrics",
        "/live/graphs/double/versions/1",
    ],
    "trace": [
        "/v2/trace/setting",
        "/v2/trace/timeline",
        "/v2/models/double/trace/setting",
        "/live/requests/double/versions/1",
    ],
    "logging": ["/v2/logging"],
}
EACH = [(group, path) for group, paths in PATHS.items() for path in paths]


def aliases(path: str) -> list[str]:
    """Other spellings of `path`, some of which a router may normalise to it."""
    head, _, tail = path.rpartition("/")
    made = [
        f"{path}/",
        f"{path}//",
        path.upper(),
        path.replace("/", "//"),
        f"{head}%2f{tail}",
        f"{head}%2F{tail}",
        f"{head}%252f{tail}",
        f"{head}/%{ord(tail[0]):02x}{tail[1:]}",
        f"{head}/./{tail}",
        f"{path}?a=b",
    ]
    return [one for one in made if one.startswith("/")]


def test_every_group_is_tried() -> None:
    assert tuple(PATHS) == GROUPS


@pytest.mark.fault("Z6")
@pytest.mark.parametrize(("group", "path"), EACH)
def test_a_path_belongs_to_its_group_in_any_spelling(group: str, path: str) -> None:
    for spelled in [path, *aliases(path)]:
        assert group in groups_of(spelled.partition("?")[0]), spelled


def test_unknown_paths_have_no_group_and_model_names_are_no_endpoints() -> None:
    for path in ("/", "", "/docs", "/v3/health/live", "/v2/nothing"):
        assert not groups_of(path)
    assert groups_of("/v2/models/infer") == {"metadata"}
    assert groups_of("/v2/models/config/infer") == {"inference"}


@pytest.fixture
async def guarded(engine: Engine, start: Any) -> Any:
    rules = tuple(parse_restriction(f"{group}:Admin-Key=s3:cr=t") for group in GROUPS)
    return await start(engine, AppOptions(restrictions=rules))


@pytest.mark.fault("W1")
@pytest.mark.fault("Z6")
@pytest.mark.parametrize(("group", "path"), EACH)
async def test_a_restricted_path_needs_its_key_in_any_spelling_and_for_any_method(
    guarded: Any, group: str, path: str
) -> None:
    client = await guarded.connect()
    for spelled in [path, *aliases(path)]:
        for method in ("GET", "POST", "HEAD", "PUT"):
            for header in ("", "admin-key: wrong\r\n", "admin-key: \r\n", "admin-key: s3:cr=\r\n", "x: s3:cr=t\r\n"):
                await client.say(
                    f"{method} {spelled} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n{header}\r\n".encode()
                )
                answer = await client.answer(has_body=method != "HEAD")
                assert answer.status == 403, (method, spelled, header)
    assert json.loads(answer.body or b"{}").get("error", "This API is restricted, expecting header 'admin-key'") == (
        "This API is restricted, expecting header 'admin-key'"
    )


async def test_restricted_endpoints_respond_with_their_key_and_others_without(guarded: Any) -> None:
    client = await guarded.connect()
    for path in (
        "/v2/health/live",
        "/v2/models/double",
        "/v2/models/stats",
        "/v2/logging",
        "/metrics",
        "/openapi.json",
    ):
        answer = await client.ask(f"GET {path} HTTP/1.1\r\nHost: h\r\nADMIN-KEY: s3:cr=t\r\n\r\n".encode())
        assert answer.status == 200
    assert (await client.ask(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")).status == 200


async def test_other_groups_stay_open(engine: Engine, start: Any) -> None:
    rules = (parse_restriction("model-repository,logging:k=v"),)
    running = await start(engine, AppOptions(restrictions=rules))
    client = await running.connect()
    for path, status in [("/v2", 200), ("/v2/models/double/ready", 200), ("/v2/logging", 403)]:
        assert (await client.ask(f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())).status == status


@pytest.mark.fault("Z7")
async def test_keys_are_compared_in_constant_time(guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []
    honest = hmac.compare_digest

    def recording(left: Any, right: Any) -> bool:
        compared.append((left, right))
        return honest(left, right)

    monkeypatch.setattr(hmac, "compare_digest", recording)
    client = await guarded.connect()
    assert (await client.ask(b"GET /v2 HTTP/1.1\r\nHost: h\r\nAdmin-Key: s3\r\n\r\n")).status == 403
    assert compared == [(b"s3", b"s3:cr=t")]


@pytest.mark.parametrize(
    "text", ["", "health", "health:key", "health:key=", "health:=v", ":k=v", "nope:k=v", "health,:k=v"]
)
def test_an_invalid_restriction_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_restriction(text)


@pytest.mark.fault("Z6")
def test_model_names_are_hidden_without_access_to_the_index() -> None:
    assert hides_names([parse_restriction("health:a=b"), parse_restriction("logging,model-repository:k=v")])
    assert not hides_names([parse_restriction("health,metadata:k=v")])


@pytest.mark.fault("Z6")
async def test_timing_is_refused_without_access_to_traces(engine: Engine, start: Any) -> None:
    rule = parse_restriction("trace:key=s3cret")
    running = await start(engine, AppOptions(restrictions=(rule,)))
    body = b'{"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
    for headers, status in (
        ("", 200),
        ("Flowserve-Timing: 1\r\n", 403),
        ("Flowserve-Timing: 1\r\nkey: s3cret\r\n", 200),
    ):
        client = await running.connect()
        head = f"POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        answer = await client.ask(head.encode() + body)
        assert answer.status == status
        assert ("server-timing" in answer.headers) == ("key" in headers)
