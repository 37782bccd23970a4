"""The live page as a browser shows it, over a real server. Skipped where there is no Chromium.

The tests share one server and one tab, and go on from where the one before left it: each is a step of a visit.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flowserve.testing.serve import Served, serving
from tests.support.browser import CHROMIUM, Page, browsing
from tests.support.onnx_files import onnx_identity

pytestmark = [
    pytest.mark.slow,
    pytest.mark.server,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the browser Chromium (apt-get install chromium)"),
]

MARKUP = "<img src=x onerror=document.title=1>"
KEY = "--http-restricted-api=statistics:admin-key=secret"
OPTIONS = (
    *(KEY, "--model-control-mode", "explicit", "--load-model", "*", "--exit-on-error", "false"),
    *("--python-execution", "thread"),
)
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", one)]) for one in inputs]
"""
ECHO_CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
PAIR = """
platform: "ensemble" max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling {
  step { model_name: "same" model_version: -1 input_map { key: "x" value: "IN" } output_map { key: "y" value: "T" } }
  step { model_name: "same" model_version: -1 input_map { key: "x" value: "T" } output_map { key: "y" value: "OUT" } }
}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    for name in ("same", MARKUP):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.onnx").write_bytes(onnx_identity())
    for name, config in (("pair", PAIR), ("wrong", PAIR.replace('"same"', f'"no {MARKUP}"')), ("echo", ECHO_CONFIG)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    (folder / "echo" / "1" / "model.py").write_text(ECHO)
    return folder


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def served(repository: Path, stack: ExitStack) -> Served:
    return stack.enter_context(serving(repository, *OPTIONS))


@pytest.fixture(scope="module")
def page(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as page:
        page.look("light", 1280, 900)
        page.open(f"{served.base_url}/")
        yield page


def infer(served: Served, times: int) -> None:
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [2, 4], "data": [1.0] * 8}]
    for _ in range(times):
        urllib.request.urlopen(
            f"{served.base_url}/v2/models/pair/infer", json.dumps({"inputs": inputs}).encode()
        ).close()


def text(page: Page, element: str) -> str:
    return str(page.run(f"document.querySelector({json.dumps(element)}).innerText"))


def choose(page: Page, name: str) -> None:
    """Look at another deployment, as a click on it in the list does."""
    named = f"[...document.querySelectorAll('#list .who')].find(who => who.innerText === {json.dumps(name)})"
    page.until(f"!!{named}")
    page.run(f"{named}.closest('button').click()")
    page.until(f"document.querySelector('#title').innerText === {json.dumps(name)}")


def test_the_page_asks_for_a_missing_key_and_lists_models_with_it(page: Page) -> None:
    page.until("document.querySelector('#keys').open")
    assert "admin-key" in text(page, "#keys-why")
    page.run("document.querySelector('#keys-text').focus()")
    page.ask("Input.insertText", text="admin-key: secret")
    page.run("document.querySelector('#keys-save').focus()")
    page.press("Enter", 13)
    page.until("document.querySelector('#link').innerText === 'live'")
    listed = page.run("[...document.querySelectorAll('#list .who')].map(who => who.innerText)")
    assert sorted(listed) == sorted([MARKUP, "echo", "pair", "same", "wrong"])
    assert listed[:2] == ["pair", "same"]  # a graph, and its model below it
    assert page.run("[...document.querySelectorAll('#list .under .who')].map(who => who.innerText)") == ["same"]
    page.until("document.querySelectorAll('#picture [data-node]').length === 2")
    assert text(page, "#title") == "pair"  # a graph, where there is one
    assert text(page, "#state") == "ready"
    assert page.run("[...document.querySelectorAll('#steps td:first-child')].map(one => one.innerText)") == [
        "same",
        "same#2",
    ]


def test_names_and_errors_are_shown_unchanged_and_no_script_in_them_runs(page: Page) -> None:
    choose(page, MARKUP)
    page.until("document.querySelectorAll('#picture [data-node]').length === 1")
    choose(page, "wrong")
    assert MARKUP in text(page, "#reason")
    assert text(page, "#state") == "unavailable"
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.title") == "wrong · flowserve"
    assert [said for said in page.said if "403" not in said] == [], "its own policy stopped something of the page"


def test_figures_are_updated_in_the_picture_and_in_the_tables(served: Served, page: Page) -> None:
    choose(page, "pair")
    page.until("document.querySelector('#picture .live')?.textContent === 'idle'")
    infer(served, 20)
    page.until("document.querySelector('#picture .works .live')?.textContent.endsWith('batches of 2')")
    assert page.run("document.querySelectorAll('#picture path.flows').length") == 3
    assert "B/s" in page.run("document.querySelector('#picture text[data-edges]').textContent")
    assert page.run("document.querySelectorAll('#steps tr')[1].children[3].innerText") == "2"
    assert page.run("document.querySelector('#cards dd').innerText") != "0 /s"


def test_a_chart_shows_the_values_of_the_server_under_the_pointer(served: Served, page: Page) -> None:
    choose(page, "pair")
    infer(served, 20)
    page.until("history.values.rate && history.values.rate.at(-1) > 0 && history.at.length > 2")
    page.run("document.querySelectorAll('.chart')[0].focus()")
    page.press("ArrowRight", 39)
    page.press("ArrowLeft", 37)
    shown = page.run("document.querySelectorAll('.chart')[0].querySelectorAll('.u-value')[1].innerText")
    right = page.run("count(charts[0].plot.data[1][charts[0].plot.cursor.idx])")
    assert shown == right
    assert shown == page.run(
        "count(history.values.rate[history.at.indexOf(charts[0].plot.data[0][charts[0].plot.cursor.idx])])"
    )
    durations = page.run("history.values.p99.filter(one => one !== null)")
    assert durations
    with urllib.request.urlopen(
        urllib.request.Request(f"{served.base_url}/v2/models/pair/stats", headers={"admin-key": "secret"})
    ) as answer:
        counted = json.load(answer)["model_stats"][0]["inference_stats"]["success"]
    mean_ms = counted["ns"] / counted["count"] / 1e6
    assert 0.3 * mean_ms < max(durations) < 100 * mean_ms
    page.run("document.querySelector('#range').value = '60'")
    page.run("document.querySelector('#range').dispatchEvent(new Event('change'))")
    low, high = page.run("[charts[0].plot.scales.x.min, charts[0].plot.scales.x.max]")
    assert high - low == pytest.approx(60)


def test_the_last_requests_are_listed_with_their_times_and_errors(served: Served, page: Page) -> None:
    choose(page, "echo")
    page.until("document.querySelector('#link').innerText === 'live'")
    choose(page, "pair")
    page.until("!!document.querySelector('#picture svg') && document.querySelector('#link').innerText === 'live'")
    time.sleep(0.5)  # the stream of events about this deployment has begun
    for _ in range(3):
        infer(served, 1)
        time.sleep(0.15)
    page.until("document.querySelectorAll('#recent tr').length >= 3")
    page.run("document.querySelector('#recent button').focus()")
    page.press("Enter", 13)
    page.until("document.querySelectorAll('#recent-shown .lane').length >= 2")
    shown = text(page, "#recent-shown")
    assert "in the server" in shown
    assert "same#2" in shown
    assert page.run("document.querySelector('#recent tr.marked td:last-child').innerText") == "answered"
    assert page.run("recent.every((one) => one.request.ms > 0 && one.request.rows === 2)")


def test_the_picture_is_made_larger_and_smaller_and_fits_again(page: Page) -> None:
    choose(page, "pair")
    width = "document.querySelector('#picture svg').getBoundingClientRect().width"
    page.until("!!document.querySelector('#picture svg')")
    page.run("fit(false)")
    whole = page.run(width)
    assert text(page, "#size") == "100 %"
    page.run("document.querySelector('#larger').focus()")
    page.press("Enter", 13)
    assert page.run(width) == pytest.approx(1.25 * whole, rel=0.01)
    assert text(page, "#size") == "125 %"
    page.run("document.querySelector('#picture').focus()")
    page.press("-", 189)
    page.press("-", 189)
    assert page.run(width) == pytest.approx(0.8 * whole, rel=0.01)
    page.run("document.querySelector('#fit').click()")
    assert page.run(width) == pytest.approx(page.run("document.querySelector('#picture').clientWidth"), abs=2)


def test_on_a_narrow_screen_the_list_is_a_drawer(page: Page) -> None:
    page.look("dark", 390, 844)
    seen = "getComputedStyle(document.querySelector('nav')).visibility"
    try:
        page.until(f"{seen} === 'hidden'")
        assert page.run("document.documentElement.scrollWidth") <= 390
        page.run("document.querySelector('#menu').focus()")
        page.press("Enter", 13)
        page.until(f"{seen} === 'visible'")
        assert page.run("document.activeElement.id") == "filter"
        page.press("Escape", 27)
        page.until(f"{seen} === 'hidden'")
        assert page.run("document.activeElement.id") == "menu"
        page.run("document.querySelector('#menu').click()")
        choose(page, "echo")
        page.until(f"{seen} === 'hidden'")
    finally:
        page.look("light", 1280, 900)
    choose(page, "pair")
    page.until("!!document.querySelector('#input-0')")


def test_a_request_is_sent_with_the_keyboard_and_its_time_is_drawn(page: Page) -> None:
    page.run("document.querySelector('#input-0').value = '[1, 2, 3, 4, 5, 6, 7, 8]'")
    page.run("document.querySelector('#send').focus()")
    page.press("Enter", 13)
    page.until("!document.querySelector('#timeline').hidden")
    assert "OUT FP32 [2,4]" in text(page, "#answer")
    assert "1, 2, 3, 4, 5, 6, 7, 8" in text(page, "#answer")
    assert page.run("[...document.querySelectorAll('.lane .label')].map(one => one.innerText).slice(-2)") == [
        "same",
        "same#2",
    ]
    assert page.run("document.querySelectorAll('#picture [data-node] text.took').length") == 2
    page.run("document.querySelector('#picture [data-node=\"1\"]').focus()")
    page.press("Enter", 13)
    assert page.run("document.querySelectorAll('#steps tr')[1].className") == "marked"
    assert text(page, "#step-said").startswith("same#2 runs same/1 on onnxruntime")
    page.run("document.querySelector('#input-0').value = '[1, 2, 3]'")
    page.run("document.querySelector('#send').focus()")
    page.press("Enter", 13)
    page.until("!!document.querySelector('#answer .failed')")


def test_a_file_is_one_bytes_element_and_an_image_in_the_response_is_shown(page: Page) -> None:
    choose(page, "echo")
    page.until("!!document.querySelector('#input-0-way')")
    page.run(
        """(() => {
          const way = document.querySelector("#input-0-way");
          way.value = "file";
          way.dispatchEvent(new Event("change"));
          const chosen = new DataTransfer();
          const dot = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC";
          chosen.items.add(new File([Uint8Array.from(atob(dot), (c) => c.charCodeAt(0))], "dot.png"));
          document.querySelector("#input-0-file").files = chosen.files;
          document.querySelector("#send").click();
        })()"""
    )
    page.until("document.querySelector('#answer img.shot')?.naturalWidth === 1")


def test_a_model_can_be_unloaded_and_loaded_on_the_page(page: Page) -> None:
    page.run("document.querySelector('#unload').click()")
    page.until("document.querySelector('#state').innerText === 'unavailable'")
    page.until("!document.querySelector('#load').disabled && document.querySelector('#unload').hidden")
    page.run("document.querySelector('#load').click()")
    page.until("document.querySelector('#state').innerText === 'ready'")


def test_the_memory_of_the_page_does_not_grow(page: Page) -> None:
    choose(page, "pair")
    page.until("document.querySelectorAll('#picture [data-node]').length === 2")
    grown = page.run(
        """(() => {
          const times = { p50: 1, p99: 2, queue_p50: 1, queue_p99: 1, compute_p50: 1, compute_p99: 1 };
          const node = { batches: 5, mean_batch: 2, waiting: 1, in_flight: 2, busy: 1, instances: 1, away: 0,
            model: { rate: 9, failing: 0, ...times } };
          const edge = { bytes: 9, copied: 0 };
          const graph = { name: "pair", version: "1", picture: picture.word, nodes: [node, node],
            edges: [edge, edge, null] };
          const server = { is_ready: true, in_flight: 1 };
          const frame = { server, names: null, deployments: [], can_load: true, graph };
          show(frame);
          const before = document.querySelectorAll("*").length;
          for (let i = 0; i < 1100; i++) {
            frame.deployments = [{ ...rows.get(keyOf("pair", "1")), rate: i }];
            show(frame);
          }
          const { ring } = cards.rate;
          return [document.querySelectorAll("*").length - before, ring.size, ring.values.length, rows.size];
        })()"""
    )
    assert grown == [0, 1000, 1000, 5]


def test_the_page_follows_the_preferred_color_scheme(page: Page) -> None:
    shades = {}
    for scheme in ("light", "dark"):
        page.look(scheme, 1280, 900)
        background = page.run("getComputedStyle(document.body).backgroundColor")
        box = page.run("getComputedStyle(document.querySelector('#picture rect.n')).fill")
        shades[scheme] = [sum(map(int, color[4:-1].split(","))) / 3 for color in (background, box)]
        assert page.screenshot().startswith(b"\x89PNG")
    assert min(shades["light"]) > 200
    assert max(shades["dark"]) < 60


def test_the_page_of_the_interface_works_without_a_network(served: Served, page: Page) -> None:
    page.said.clear()
    page.open(f"{served.base_url}/docs")
    page.until("document.querySelectorAll('.opblock').length > 20")
    assert page.run("document.querySelector('#operations-default-get_v2_health_live') !== null")
    page.run("document.querySelector('#operations-default-get_v2_health_live button').click()")
    page.until("!!document.querySelector('.execute')")
    page.run("document.querySelector('.execute').click()")
    status = "document.querySelector('.live-responses-table .response .response-col_status')"
    page.until(f"{status}?.innerText.includes('200')")
    assert page.said == []
    page.open(f"{served.base_url}/")
    page.until("document.querySelector('#link').innerText === 'live' && !!document.querySelector('#picture svg')")


def test_a_server_that_ends_does_not_wait_for_viewers_and_the_page_reconnects(
    served: Served, page: Page, repository: Path, stack: ExitStack
) -> None:
    began = time.monotonic()
    assert served.stop() == 0
    assert time.monotonic() - began < 5
    page.until("document.querySelector('#link').innerText.startsWith('lost')")
    assert "old" in text(page, "#trouble")
    stack.enter_context(serving(repository, KEY, "--model-control-mode", "explicit", "--http-port", str(served.port)))
    page.until("document.querySelector('#link').innerText === 'live'")
    assert page.run("document.querySelector('#trouble').hidden")
