"""Web pages that attack a server on their reader's machine, by raw requests and in a browser; and usual clients."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.http as triton

from flowserve.testing.serve import Served
from tests.support.browser import CHROMIUM, Page, browsing
from tests.support.forked import serving

pytestmark = [pytest.mark.fault("W1"), pytest.mark.server]

EVIL = "evil.example"
# Forms and fetches of any page may send this type without a CORS preflight.
PLAIN = "Content-Type: text/plain"
CONFIG = json.dumps(
    {
        "backend": "python",
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
    }
)
WRITES = """
import pathlib

class TritonPythonModel:
    def initialize(self, args):
        pathlib.Path({path!r}).write_text("this code ran")

    def execute(self, requests):
        return [None for _ in requests]
"""
READS = ("/v2", "/v2/models/echo", "/v2/models/echo/config", "/v2/models/stats", "/v2/logging", "/v2/trace/setting")
PAGES = (
    "/",
    "/metrics",
    "/openapi.json",
    "/live/events",
    "/live/graphs/echo/versions/1",
    "/v2/systemsharedmemory/status",
)


def load(mark: Path) -> str:
    """The body of a load call whose model writes `mark`."""
    code = base64.b64encode(WRITES.format(path=str(mark)).encode()).decode()
    return json.dumps({"parameters": {"config": CONFIG, "file:1/model.py": code}})


@pytest.fixture(scope="module")
def repository(
    tmp_path_factory: pytest.TempPathFactory, add_model: Callable[..., Path], make_python: Callable[..., Any]
) -> Path:
    folder = tmp_path_factory.mktemp("browsers")
    config = 'input { name: "IN" data_type: TYPE_FP32 dims: [1] } output { name: "OUT" data_type: TYPE_FP32 dims: [1] }'
    add_model(folder, "echo", config, make_python('return answer(OUT=given("IN"))'))
    return folder


class Site(BaseHTTPRequestHandler):
    """A site of pages without content, which keeps what a browser sends to it."""

    seen: list[dict[str, str]]

    def do_GET(self) -> None:
        self.seen.append({"method": self.command, "path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()

    do_POST = do_GET

    def log_request(self, *status: Any) -> None:
        """Without a line on standard error."""


@pytest.fixture(scope="module")
def site() -> Iterator[ThreadingHTTPServer]:
    Site.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def served(repository: Path, site: ThreadingHTTPServer) -> Iterator[Served]:
    options = ("--model-control-mode=explicit", "--load-model=echo", "--metrics-port=0", "--allow-client-shm=true")
    with serving(repository, *options, f"--http-cors-origins=http://app.example:{site.server_port}") as served:
        yield served


def ask(port: int, method: str, path: str, host: str, *headers: str, body: str = "") -> tuple[int, str]:
    """The status and the first bytes of the response to one raw request."""
    lines = (
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    )
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall("\r\n".join([*lines, "", body]).encode("latin-1"))
        received = b""
        while b"\r\n\r\n" not in received and (data := connection.recv(65536)):
            received += data
        received += connection.recv(65536)
    return int(received.split(b" ")[1]), received.decode("latin-1")


def infer_body() -> str:
    return json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [3]}]})


def index(served: Served) -> list[str]:
    rows = httpx.post(f"{served.base_url}/v2/repository/index", trust_env=False, verify=False).json()
    return [row["name"] for row in rows if row.get("state") == "READY"]


@pytest.mark.parametrize(
    "page", [("Origin: https://evil.example",), ("Origin: null",), ("Sec-Fetch-Site: cross-site",)]
)
def test_a_foreign_page_changes_and_runs_nothing(served: Served, tmp_path: Path, page: tuple[str, ...]) -> None:
    mark = tmp_path / "ran"
    attacks = [
        ("/v2/repository/models/evil/load", load(mark)),
        ("/v2/repository/models/echo/unload", ""),
        ("/v2/logging", '{"log_verbose_level": 3}'),
        ("/v2/trace/setting", '{"trace_level": ["TIMESTAMPS"]}'),
        ("/v2/systemsharedmemory/region/r/register", '{"key": "/evil", "byte_size": 8}'),
        ("/v2/models/echo/infer", infer_body()),
        ("/v2/models/echo/generate", '{"IN": 3}'),
        ("/v2/models/echo/generate_stream", '{"IN": 3}'),
    ]
    for path, body in attacks:
        for host in (f"127.0.0.1:{served.port}", EVIL):
            status, text = ask(served.port, "POST", path, host, PLAIN, *page, body=body)
            assert (status, "--http-" in text) == (403, True), (path, host, text)
    assert not mark.exists()
    assert index(served) == ["echo"]
    assert httpx.get(f"{served.base_url}/v2/logging", verify=False).json()["log_verbose_level"] == 0
    statistics = httpx.get(f"{served.base_url}/v2/models/echo/stats", verify=False).json()
    assert statistics["model_stats"][0]["inference_count"] == 0


def test_a_rebound_name_reads_nothing(served: Served) -> None:
    (line,) = [line for line in served.lines if line.startswith("metrics on ")]
    metrics = int(line.rpartition(":")[2].removesuffix("/metrics"))
    for host in (EVIL, f"{EVIL}:{served.port}", "router.local", "intranet"):
        for path in (*READS, *PAGES):
            assert ask(served.port, "GET", path, host)[0] == 403, (path, host)
        assert ask(served.port, "POST", "/v2/repository/index", host, f"Origin: http://{host}")[0] == 403
        assert ask(metrics, "GET", "/metrics", host)[0] == 403
    assert ask(metrics, "GET", "/metrics", "127.0.0.1")[0] == 200
    assert served.log.count("are not served; --http-allowed-hosts") == 2  # once for each port


def test_usual_clients_are_served_under_each_name_of_loopback(served: Served) -> None:
    with triton.InferenceServerClient(f"localhost:{served.port}") as client:
        assert client.is_server_ready()
    curl = shutil.which("curl")
    if curl is not None:
        url = f"http://localhost:{served.port}/v2/models/echo/infer"
        done = subprocess.run([curl, "-s", "-4", url, "-d", infer_body()], capture_output=True, check=True, timeout=30)
        assert json.loads(done.stdout)["outputs"][0]["data"] == [3.0]
    scrape = (
        "Accept: text/plain;version=0.0.4",
        "User-Agent: Prometheus/3.0",
        "X-Prometheus-Scrape-Timeout-Seconds: 10",
    )
    for host in ("127.0.0.1", f"LOCALHOST:{served.port}", f"[::1]:{served.port}", "localhost."):
        assert ask(served.port, "GET", "/metrics", host, *scrape)[0] == 200
        own = f"Origin: http://{host.lower()}"
        assert ask(served.port, "POST", "/v2/models/echo/infer", host, own, body=infer_body())[0] == 200


def test_names_and_origins_are_the_operators_choice(tmp_path: Path) -> None:
    repository, path = tmp_path / "empty", tmp_path / "socket"
    repository.mkdir()
    with serving(repository, "--http-address=0.0.0.0") as served:
        for host, status in (("gpu-box", 200), ("a.local", 200), (socket.gethostname(), 200), (EVIL, 403)):
            assert ask(served.port, "GET", "/v2", host)[0] == status
    options = ("--http-address=0.0.0.0", "--http-allowed-hosts=models.example,*.svc", "--http-allowed-hosts=b.example")
    with serving(repository, *options) as served:
        for host, status in (("models.example", 200), ("a.svc", 200), ("b.example:1", 200), ("gpu-box", 403)):
            assert ask(served.port, "GET", "/v2", host)[0] == status
    options = (f"--http-address=unix:{path}", "--model-control-mode=explicit", "--http-cors-origins=a://b,*")
    with serving(repository, *options) as served:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.example") as client:
            assert client.get("/v2").status_code == 200
        assert "can load models and so run code here" in served.log


# ---------------------------------------------------------------------------------------------- a real browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("needs the browser Chromium (apt-get install chromium)")
    rules = f"--host-resolver-rules=MAP *.example 127.0.0.1, MAP {EVIL} 127.0.0.1"
    with browsing(tmp_path_factory.mktemp("browser") / "profile", rules) as page:
        yield page


def fetched(page: Page, url: str, options: str = "{}") -> Any:
    """The status and body of a fetch by the page, or the error's name if the page may not read them."""
    return page.run(f"fetch({json.dumps(url)}, {options}).then(async a => [a.status, await a.text()], e => e.name)")


@pytest.mark.slow
def test_a_page_in_a_browser_loads_no_model_and_reads_nothing(
    served: Served, site: ThreadingHTTPServer, page: Page, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    post = f"{{method: 'POST', mode: 'no-cors', body: {json.dumps(load(mark))}}}"
    for origin in (f"http://{EVIL}:{site.server_port}", f"http://127.0.0.1:{site.server_port}"):
        page.open(f"{origin}/")
        for host in ("127.0.0.1", "localhost"):
            server = f"http://{host}:{served.port}"
            fetched(page, f"{server}/v2/repository/models/evil/load", post)
            assert fetched(page, f"{server}/v2") == "TypeError"
            assert (
                fetched(page, f"{server}/v2/logging", "{method: 'POST', body: '{\"log_verbose_level\": 2}'}")
                == "TypeError"
            )
    assert not mark.exists()
    assert index(served) == ["echo"]
    assert httpx.get(f"{served.base_url}/v2/logging", verify=False).json()["log_verbose_level"] == 0


@pytest.mark.slow
def test_a_rebound_page_in_a_browser_reads_nothing(served: Served, site: ThreadingHTTPServer, page: Page) -> None:
    # Only Host identifies them: such a page's reads have neither Origin nor Sec-Fetch-Site.
    page.open(f"http://{EVIL}:{site.server_port}/")
    assert fetched(page, "/read")[0] == 200
    (seen,) = [one for one in Site.seen if one["path"] == "/read"]
    assert not {"origin", "sec-fetch-site", "sec-fetch-mode"} & set(seen)
    page.open(f"http://{EVIL}:{served.port}/")  # the name now leads to the server
    for path in (*READS, *PAGES):
        status, text = fetched(page, path)
        assert (status, "--http-allowed-hosts" in text) == (403, True), path


@pytest.mark.slow
def test_the_servers_own_page_and_allowed_origins_work_in_a_browser(served: Served, page: Page) -> None:
    for host in ("127.0.0.1", "localhost"):
        server = f"http://{host}:{served.port}"
        page.open(f"{server}/")
        status, text = fetched(page, "/v2/models/echo/infer", f"{{method: 'POST', body: {json.dumps(infer_body())}}}")
        assert (status, json.loads(text)["outputs"][0]["data"]) == (200, [3.0])
        assert fetched(page, "/v2/models/echo")[0] == 200
        page.until("document.querySelector('#link').innerText === 'live'")


@pytest.mark.slow
def test_a_page_of_an_allowed_origin_calls_the_server_in_a_browser(
    served: Served, site: ThreadingHTTPServer, page: Page
) -> None:
    url = f"{served.base_url}/v2/models/echo/infer"
    # The header makes the browser send a preflight.
    options = f"{{method: 'POST', headers: {{'flowserve-timing': '1'}}, body: {json.dumps(infer_body())}}}"
    read = f"fetch({json.dumps(url)}, {options}).then(a => a.headers.get('server-timing'), e => e.name)"
    page.open(f"http://app.example:{site.server_port}/")
    status, text = fetched(page, url, options)
    assert (status, json.loads(text)["outputs"][0]["data"]) == (200, [3.0])
    assert "dur=" in page.run(read)
    page.open(f"http://{EVIL}:{site.server_port}/")
    assert page.run(read) == "TypeError"
