"""Requests from web pages: which hosts and origins are served, on every route; and CORS for the origins allowed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import hypercorn.trio
import pytest
import trio
from hypercorn.config import Config

from flowserve.errors import Invalid
from flowserve.http.api.access import Access, AccessRules, parse_hosts, parse_origins
from flowserve.http.api.app import make_app, make_metrics_app, make_routes
from flowserve.http.api.infer import AppOptions
from flowserve.http.server.server import open_listeners
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.protocol import parse_restriction

pytestmark = pytest.mark.fault("W1")

LOOPBACK = AccessRules(("localhost",))  # the rules of a server on 127.0.0.1
EVERYWHERE = AccessRules(("box.example",), has_local_names=True)  # of one on 0.0.0.0, on the machine box.example
LISTED = AccessRules(("models.example", "*.svc"))
FOREIGN = "https://evil.example"
INFER = "/v2/models/double/infer"
BODY = b'{"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'


def refusal(rules: AccessRules, host: str | None, method: str = "POST", **headers: str) -> str:
    """The refusal of a request with these headers, `_` in a name for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    pairs = {**({} if host is None else {"host": host}), **named}
    return Access(rules).refusal(
        {
            "type": "http",
            "method": method,
            "headers": [(name.encode(), value.encode()) for name, value in pairs.items()],
        }
    )


def request(method: str, path: str, host: str = "localhost", *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@pytest.fixture
async def local(engine: Engine, start: Any) -> Any:
    return await start(engine, AppOptions(access=LOOPBACK))


@pytest.fixture
async def open_to_app(engine: Engine, start: Any) -> Any:
    return await start(engine, AppOptions(access=AccessRules(("localhost",), origins=("https://app.example",))))


def calls(engine: Engine) -> Iterator[tuple[str, str]]:
    """Each method and path of the app's routes."""
    for route in make_routes(engine, AppOptions(), None):
        path = re.sub(r"\{(\w+)\}", lambda name: "1" if name[1] == "version" else "double", route.path)
        for method in sorted(route.methods or ()):
            yield method, path


# ---------------------------------------------------------------------------------------------- every route


async def test_no_route_answers_a_request_for_another_host(engine: Engine, local: Any) -> None:
    client = await local.connect()
    count = 0
    for method, path in (*calls(engine), ("GET", "/nope"), ("OPTIONS", "/v2"), ("DELETE", "/v2")):
        for host in ("evil.example", f"evil.example:{local.port}", "localhost.evil.example"):
            await client.say(request(method, path, host))
            answer = await client.answer(has_body=method != "HEAD")
            assert answer.status == 403, (method, path, host)
            assert method == "HEAD" or b"--http-allowed-hosts" in answer.body
            count += 1
    assert count > 90


async def test_no_route_answers_a_page_of_another_origin(engine: Engine, local: Any) -> None:
    client = await local.connect()
    for method, path in (*calls(engine), ("OPTIONS", INFER)):
        for header in (f"Origin: {FOREIGN}", "Origin: null", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site"):
            await client.say(request(method, path, "localhost", header, "Content-Type: text/plain"))
            answer = await client.answer(has_body=method != "HEAD")
            assert answer.status == 403, (method, path, header)
            assert method == "HEAD" or b"--http-cors-origins" in answer.body
            assert "access-control-allow-origin" not in answer.headers


async def test_every_route_answers_usual_clients(engine: Engine, local: Any) -> None:
    own = f"Origin: http://localhost:{local.port}"
    for method, path in calls(engine):
        if path in ("/live/events", "/v2/trace/timeline"):  # their responses take long
            continue
        for headers in ((), (own,), (own, "Sec-Fetch-Site: same-origin")):
            client = await local.connect()
            await client.say(request(method, path, f"localhost:{local.port}", *headers))
            assert (await client.answer(has_body=method != "HEAD")).status != 403, (method, path, headers)


async def test_a_refused_inference_runs_nothing_and_reveals_no_name(local: Any) -> None:
    client = await local.connect()
    texts = set()
    for model in ("double", "missing"):
        path = f"/v2/models/{model}/infer"
        for headers in ((f"Origin: {FOREIGN}",), (f"Origin: {FOREIGN}",)):  # the second head is in the cache
            answer = await client.ask(request("POST", path, "localhost", *headers, body=BODY))
            assert answer.status == 403
            texts.add(answer.body)
    assert len(texts) == 1
    statistics = await client.ask(request("GET", "/v2/models/double/stats"))
    assert b'"inference_count":0' in statistics.body


async def test_the_metrics_port_checks_the_host_too(engine: Engine, start: Any) -> None:
    client = await (await start(make_metrics_app(engine))).connect()
    assert (await client.ask(request("GET", "/metrics", "127.0.0.1:8002"))).status == 200
    assert (await client.ask(request("GET", "/metrics", "evil.example:8002"))).status == 403


async def test_the_checks_hold_on_another_asgi_server(engine: Engine) -> None:
    (listener,) = open_listeners("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    over = trio.Event()
    app = make_app(engine, AppOptions(access=AccessRules(origins=("https://app.example",))))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: hypercorn.trio.serve(app, config, shutdown_trigger=over.wait, mode="asgi"))  # type: ignore[arg-type]
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            for path in ("/v2", "/metrics", "/openapi.json", "/"):
                assert (await client.get(path)).status_code == 200
                assert (await client.get(path, headers={"Host": "evil.example"})).status_code == 403
            for headers, status in (
                ({}, 200),
                ({"Origin": url}, 200),
                ({"Origin": "https://app.example"}, 200),
                ({"Origin": FOREIGN}, 403),
                ({"Host": "evil.example"}, 403),
            ):
                answer = await client.post(INFER, content=BODY, headers=headers)
                assert answer.status_code == status, headers
                allowed = answer.headers.get("access-control-allow-origin")
                assert allowed == ("https://app.example" if "app" in headers.get("Origin", "") else None)
        over.set()


# ---------------------------------------------------------------------------------------------- hosts

ADDRESSES = ["127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000", "192.0.2.7:80", "[2001:db8::7]:8000", "0.0.0.0:8000"]
OWN = ["localhost", "localhost:8000", "LOCALHOST:8000", "localhost.", "localhost.:8000", "localhost:"]
LOCAL = [
    "gpu-box",
    "gpu-box:8000",
    "triton_server:8000",
    "flowserve.default.svc.cluster.local",
    "Box.Local.",
    "a.internal",
]
ABSURD = [
    *("evil.example", "evil.example:8000", "localhost.evil.example", "evil.example.", "127.0.0.1.evil.example"),
    *(
        "localhost@evil.example",
        "evil.example/localhost",
        "localhost:80:80",
        "localhost evil.example",
        "localhost,evil",
    ),
    *("[::1", "::1", "[localhost]", "[::1].evil.example", "localhost:evil", ".", "..", ":8000", "*", "xlocalhost.x"),
    *(
        "127.0.0.1%00",
        "l\u00f6calhost",
        "localhost\u00a0",
        "a" * 400 + ".local",
        "evil.example.com#.local",
        "internal.com",
    ),
]


@pytest.mark.parametrize("host", [*ADDRESSES, *OWN])
def test_addresses_and_localhost_are_always_served(host: str) -> None:
    for rules in (LOOPBACK, EVERYWHERE, LISTED, AccessRules()):
        assert refusal(rules, host) == refusal(rules, host, "GET") == ""


@pytest.mark.parametrize("host", LOCAL)
def test_names_that_cannot_be_registered_are_served_beyond_this_machine_only(host: str) -> None:
    assert refusal(EVERYWHERE, host) == ""
    assert "--http-allowed-hosts" in refusal(LOOPBACK, host)
    assert "--http-allowed-hosts" in refusal(LISTED, host)


@pytest.mark.parametrize("host", ABSURD)
def test_other_hosts_are_refused(host: str) -> None:
    for rules in (LOOPBACK, EVERYWHERE, LISTED, AccessRules()):
        assert "--http-allowed-hosts" in refusal(rules, host, "GET")
    assert (refusal(AccessRules(("*",)), host) == "") == (len(host) < 300)


def test_listed_names_are_served() -> None:
    for host in ("models.example", "MODELS.example:443", "models.example.", "a.svc:8000", "a.b.svc"):
        assert refusal(LISTED, host) == ""
    for host in ("svc", "x.models.example", "models.example.org", "asvc"):
        assert refusal(LISTED, host)


def test_a_request_without_host_is_no_browsers() -> None:
    assert refusal(LOOPBACK, None) == refusal(LOOPBACK, "") == ""
    assert refusal(LOOPBACK, None, origin="http://")
    assert refusal(LOOPBACK, "", origin="http://:80")


# ---------------------------------------------------------------------------------------------- origins


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("LocalHost:8000", "HTTP://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("127.0.0.1", "http://127.0.0.1"),
        ("127.0.0.1:80", "http://127.0.0.1"),
        ("localhost", "https://localhost:443"),  # a proxy ended TLS
    ],
)
def test_pages_of_this_server_are_served(host: str, origin: str) -> None:
    assert refusal(LOOPBACK, host, origin=origin) == ""
    for site in ("same-origin", "none"):
        assert refusal(LOOPBACK, host, origin=origin, sec_fetch_site=site) == ""
    for site in ("cross-site", "same-site", "Same-Origin", ""):
        assert "--http-cors-origins" in refusal(LOOPBACK, host, origin=origin, sec_fetch_site=site)


@pytest.mark.parametrize(
    "origin",
    [
        *(FOREIGN, "null", "http://localhost:3000", "http://localhost", "http://127.0.0.1:8000", "localhost:8000"),
        *("http://localhost:8000.evil.example", "http://localhost:80000", "file://", "http://", "https://[::1]:8000"),
        *("chrome-extension://localhost:8000", "http://localhost:8000 http://evil.example", "http://a@localhost:8000"),
    ],
)
def test_pages_of_other_origins_are_refused(origin: str) -> None:
    for more in ({}, {"sec_fetch_site": "none"}, {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}):
        for method in ("GET", "POST"):
            text = refusal(LOOPBACK, "localhost:8000", method, origin=origin, **more)
            assert (origin.lower() in text, "--http-cors-origins" in text) == (True, True)


def test_without_an_origin_the_browser_says_where_a_request_comes_from() -> None:
    for site in ("none", "same-origin"):
        assert refusal(LOOPBACK, "localhost", sec_fetch_site=site) == ""
    for site in ("cross-site", "same-site", "anything"):
        for method in ("GET", "HEAD", "POST"):
            assert refusal(LOOPBACK, "localhost", method, sec_fetch_site=site)


def test_a_proxy_may_change_the_host_as_the_browser_knows_the_origin() -> None:
    assert refusal(LOOPBACK, "127.0.0.1:8000", origin="https://models.example", sec_fetch_site="same-origin") == ""


def test_links_are_followed_but_frames_and_forms_of_other_sites_are_not() -> None:
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert refusal(LOOPBACK, "localhost", "GET", **link, sec_fetch_dest="document") == ""
    assert refusal(LOOPBACK, "localhost", "GET", **link, sec_fetch_dest="iframe")
    assert refusal(LOOPBACK, "localhost", "POST", **link, sec_fetch_dest="document", origin=FOREIGN)
    assert refusal(LOOPBACK, "localhost", "GET", sec_fetch_site="cross-site", sec_fetch_dest="document")
    assert refusal(LOOPBACK, "evil.example", "GET", **link, sec_fetch_dest="document")


def test_an_error_shows_the_clients_text_escaped_and_cut() -> None:
    text = refusal(LOOPBACK, "localhost", origin="\n\u00ff" + "x" * 5000)
    assert len(text) < 300
    assert "\n" not in text


# ---------------------------------------------------------------------------------------------- CORS


async def test_a_page_of_an_allowed_origin_reads_responses(open_to_app: Any) -> None:
    client = await open_to_app.connect()
    page = ("Origin: https://app.example", "Sec-Fetch-Site: cross-site")
    infer = await client.ask(request("POST", INFER, "localhost", *page, body=BODY))
    assert (infer.status, b"[2.0,4.0,6.0,8.0]" in infer.body) == (200, True)
    metadata = await client.ask(request("GET", "/v2/models/double", "localhost", *page))
    missing = await client.ask(request("GET", "/v2/models/missing", "localhost", *page))
    assert (metadata.status, missing.status) == (200, 404)
    for answer in (infer, metadata, missing):
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.headers["vary"] == "Origin"
        assert "inference-header-content-length" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers


async def test_other_origins_are_still_refused_and_other_clients_get_no_cors_headers(open_to_app: Any) -> None:
    client = await open_to_app.connect()
    for origin in (FOREIGN, "https://app.example:8443", "http://app.example", "https://x.app.example", "null"):
        assert (await client.ask(request("POST", INFER, "localhost", f"Origin: {origin}", body=BODY))).status == 403
    answer = await client.ask(request("POST", INFER, body=BODY))
    assert (answer.status, "access-control-allow-origin" in answer.headers) == (200, False)
    assert (await client.ask(request("GET", "/v2", "evil.example", "Origin: https://app.example"))).status == 403


@pytest.mark.parametrize("keys", [(), ("inference:key=secret",)])
async def test_preflights_are_answered_without_keys(engine: Engine, start: Any, keys: tuple[str, ...]) -> None:
    options = AppOptions(
        access=AccessRules(("localhost",), origins=("https://app.example",)),
        restrictions=tuple(map(parse_restriction, keys)),
    )
    client = await (await start(engine, options)).connect()
    asked = (
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: key,inference-header-content-length",
    )
    answer = await client.ask(request("OPTIONS", INFER, "localhost", "Origin: https://app.example", *asked))
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert answer.headers["access-control-allow-methods"] == "GET, POST"
    assert "inference-header-content-length" in answer.headers["access-control-allow-headers"]
    assert "Origin" in answer.headers["vary"]
    refused = await client.ask(request("OPTIONS", INFER, "localhost", f"Origin: {FOREIGN}", *asked))
    assert (refused.status, "access-control-allow-origin" in refused.headers) == (403, False)
    page = await client.ask(request("POST", INFER, "localhost", "Origin: https://app.example", body=BODY))
    assert page.status == (403 if keys else 200)
    assert page.headers["access-control-allow-origin"] == "https://app.example"  # the page may read the error


async def test_any_origin_may_be_allowed(engine: Engine, start: Any) -> None:
    client = await (await start(engine, AppOptions(access=AccessRules(("localhost",), origins=("*",))))).connect()
    for origin in (FOREIGN, "null"):
        answer = await client.ask(request("POST", INFER, "localhost", f"Origin: {origin}", body=BODY))
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
    assert (await client.ask(request("GET", "/v2", "evil.example", f"Origin: {FOREIGN}"))).status == 403


# ---------------------------------------------------------------------------------------------- the operator


async def test_the_first_refusal_of_each_kind_is_logged(local: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = await local.connect()
    with caplog.at_level(logging.WARNING, "flowserve.http"):
        for number in range(3):
            await client.ask(request("GET", "/metrics", f"scraped{number}; --x.example"))
            await client.ask(request("GET", "/metrics", "localhost", f"Origin: http://a{number}.example; --y"))
    lines = [record.getMessage() for record in caplog.records]
    assert [("scraped0" in line, "a0.example" in line) for line in lines] == [(True, False), (False, True)]


def test_lists_of_hosts_and_origins_are_normalised_and_checked() -> None:
    assert parse_hosts("Models.example., *.svc,10.0.0.1,[::1],::1,*") == (
        *("models.example", "*.svc", "10.0.0.1", "[::1]", "::1", "*"),
    )
    assert parse_origins("HTTPS://App.example:443,http://localhost:3000,http://[::1]:80,chrome-extension://abc,*") == (
        *("https://app.example", "http://localhost:3000", "http://[::1]", "chrome-extension://abc", "*"),
    )
    for text in ("", "a,,b", "http://a", "a:8000", "a b", "*x", "*.", "a/b", "a.*", "l\u00f6we.example", "\u0661"):
        with pytest.raises(Invalid, match="expected HOST"):
            parse_hosts(text)
    for text in (
        "",
        "null",
        "app.example",
        "https://a/",
        "https://a/b",
        "https://*.a",
        "https://a:x",
        "https://",
        "a, ",
    ):
        with pytest.raises(Invalid, match="expected ORIGIN"):
            parse_origins(text)
