"""The live page as a browser shows it, over a real server. Skipped where there is no Chromium.

The tests share one server and one tab, and each continues from the state that the previous one left.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from flowserve.testing.serve import Served
from tests.support.browser import CHROMIUM, Page, browsing
from tests.support.forked import serving
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
FIRST = ECHO.replace('pb_utils.Tensor("y", one)', 'pb_utils.Tensor("y", one), pb_utils.Tensor("first", one[:, :1])')
FIRST_CONFIG = """
backend: "python" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "first" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
SOME = f"""{PAIR.partition("ensemble_scheduling")[0]}
ensemble_scheduling {{
  step {{ model_name: "first" model_version: -1 input_map {{ key: "x" value: "IN" }}
         output_map {{ key: "y" value: "T" }} output_map {{ key: "first" value: "FIRST" }} }}
  step {{ model_name: "same" model_version: -1 when {{ tensor: "FIRST" above: 0 }}
         input_map {{ key: "x" value: "T" }} output_map {{ key: "y" value: "OUT" }} }}
  fill {{ tensor: "OUT" value: -1 }}
}}
"""


def chain(model: str, count: int, reads: str, writes: str) -> str:
    """The configuration of an ensemble of `count` steps of one model, one after the other."""
    head, _, _ = PAIR.partition("ensemble_scheduling")
    names = ["IN", *(f"t{n}" for n in range(1, count)), "OUT"]
    steps = [
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "{reads}" value: "{one}" }}'
        f' output_map {{ key: "{writes}" value: "{other}" }} }}'
        for one, other in pairwise(names)
    ]
    return f"{head}ensemble_scheduling {{\n{chr(10).join(steps)}\n}}\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    for name in ("same", MARKUP):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.onnx").write_bytes(onnx_identity())
    for name, config in (
        ("pair", PAIR),
        ("wrong", PAIR.replace('"same"', f'"no {MARKUP}"')),
        ("echo", ECHO_CONFIG),
        ("first", FIRST_CONFIG),
        ("some", SOME),
        ("five", chain("same", 5, "x", "y")),
        ("thirty", chain("five", 6, "IN", "OUT")),
    ):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    (folder / "echo" / "1" / "model.py").write_text(ECHO)
    (folder / "first" / "1" / "model.py").write_text(FIRST)
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


def infer(served: Served, times: int, name: str = "pair") -> None:
    """Two rows, of which the first begins with a number above 0."""
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [2, 4], "data": [1.0] * 4 + [0.0] * 4}]
    for _ in range(times):
        urllib.request.urlopen(
            f"{served.base_url}/v2/models/{name}/infer", json.dumps({"inputs": inputs}).encode()
        ).close()


def text(page: Page, element: str) -> str:
    return str(page.run(f"document.querySelector({json.dumps(element)}).innerText"))


def choose(page: Page, name: str) -> None:
    """Select another deployment, as a click on it in the list does."""
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
    # The graph with its model beneath it, the graph of 30 steps with the same model, then deployments without a graph.
    assert listed == [
        *("five", "same", "pair", "same", "some", "first", "same", "thirty", "same"),
        *sorted([MARKUP, "echo", "wrong"]),
    ]
    choose(page, "pair")
    page.until("document.querySelectorAll('#picture [data-node]').length === 2")
    assert text(page, "#state") == "ready"
    assert page.run("[...document.querySelectorAll('#steps td:first-child')].map(one => one.innerText)") == [
        "same",
        "same#2",
    ]


def test_deployments_with_about_the_same_traffic_keep_their_order_and_numbers_count(page: Page) -> None:
    order = """(...rates) => {
      const found = rates.map((rate, i) => ({ name: `step_${[10, 2][i]}`, version: 1, rate, total: 0 }));
      return found.sort(compare).map((one) => one.name);
    }"""
    first, second = "step_2", "step_10"
    shown = page.run(f"[[100, 100], [130, 100], [120, 131], [260, 131], [126, 131]].map((one) => ({order})(...one))")
    assert shown == [[first, second], [first, second], [first, second], [second, first], [first, second]]


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
    page.until("document.querySelector('#list .who').innerText === 'pair'")  # the graph with most traffic is first


def test_a_value_of_a_chart_is_the_one_the_server_sent(served: Served, page: Page) -> None:
    infer(served, 10)
    # The frames as they arrive, with the time at which the server made each.
    page.run("window.frames_seen = []; { const was = show; show = (one) => { frames_seen.push(one); was(one); }; }")
    page.until("frames_seen.filter((one) => one.deployments.some((row) => row.name === 'pair' && row.p50)).length >= 2")
    sent = page.run(
        """(() => {
          const frame = frames_seen.find((one) => one.deployments.some((row) => row.name === "pair" && row.p50));
          return [frame.at_ms, frame.deployments.find((row) => row.name === "pair")];
        })()"""
    )
    at_ms, row = sent
    for title, expected in (("Requests", [row["rate"], row["failing"]]), ("Latency", [row["p50"], row["p99"]])):
        found = page.run(
            f"""(() => {{
              const {{ chart, place }} = charts.find((one) => one.place.ariaLabel.startsWith("{title}"));
              const over = place.querySelector(".u-over");
              const box = over.getBoundingClientRect();
              const left = chart.valToPos({at_ms} / 1000, "x");
              over.dispatchEvent(new MouseEvent("mousemove",
                {{ clientX: box.left + left, clientY: box.top + 20, bubbles: true }}));
              return [...place.querySelectorAll(".u-series:not(:first-child) .u-value")].map((one) => one.textContent);
            }})()"""
        )
        assert [float(value.split()[0]) for value in found] == expected
    page.run("document.querySelector('.chart').focus()")
    page.press("End", 35)
    latest = text(page, ".chart .u-value")
    page.press("ArrowLeft", 37)
    assert text(page, ".chart .u-value") != latest
    page.press("Escape", 27)


def test_the_last_requests_have_timelines_and_errors_that_stay_text(served: Served, page: Page) -> None:
    wrong = {"id": MARKUP, "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 3], "data": [1.0] * 3}]}
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{served.base_url}/v2/models/pair/infer", json.dumps(wrong).encode())
    infer(served, 1)
    page.until("document.querySelectorAll('#requests tr.is-failed').length > 0")
    page.until("document.querySelector('#requests .result').innerText === 'ok'")
    assert MARKUP in text(page, "#requests .is-failed .id")
    assert "unexpected shape for input 'IN'" in text(page, "#requests .is-failed .result")
    page.run("document.querySelector('#requests .toggle:enabled').focus()")
    page.press("Enter", 13)
    lanes = "[...document.querySelectorAll('#requests tr:not([hidden]) .lane .label')].map((one) => one.innerText)"
    assert page.run(lanes)[-2:] == ["same", "same#2"]
    infer(served, 1)
    page.until("document.querySelector('#requests-note').innerText.startsWith('1 newer')")
    assert page.run("document.querySelector('#requests tr button').ariaExpanded") == "true", "it stays in its place"
    page.press("Enter", 13)
    assert page.run(lanes) == []
    page.until("document.querySelector('#requests-note').innerText === ''")
    page.run("document.querySelector('#failures-only').click()")
    shown = "[...document.querySelectorAll('#requests tr')].filter((one) => one.checkVisibility())"
    assert page.run(f"{shown}.every((one) => one.classList.contains('is-failed'))")
    page.run("document.querySelector('#failures-only').click()")
    assert page.run("document.title") == "pair · flowserve"


def test_the_frame_of_a_condition_has_the_share_of_rows_that_it_takes(served: Served, page: Page) -> None:
    choose(page, "some")
    page.until("document.querySelectorAll('#picture path.m').length === 1")
    for direction in ("TB", "LR", ""):
        turn(page, direction)
        infer(served, 2, "some")
        page.until(
            "document.querySelector('#picture [data-space] text').textContent === 'when FIRST > 0: 50 % of rows'"
        )


def turn(page: Page, direction: str) -> None:
    page.run(f"document.querySelector('#direction').value = '{direction}'")
    page.run("void document.querySelector('#direction').dispatchEvent(new Event('change'))")


def test_thirty_steps_are_folded_legible_and_unfold_with_the_keyboard(page: Page) -> None:
    choose(page, "thirty")
    page.until("document.querySelectorAll('#picture [data-scope]').length === 6")
    assert page.run("document.querySelectorAll('#picture [data-node]').length") == 0
    page.run("document.querySelector('#picture [data-scope=\"five#2\"]').focus()")
    page.press("Enter", 13)
    page.until("document.querySelectorAll('#picture [data-node]').length === 5")
    assert page.run("document.activeElement.dataset.scope") == "five#2"
    page.run("document.querySelector('#unfold').click()")
    page.until("document.querySelectorAll('#picture [data-node]').length === 30")
    page.run("document.querySelector('#picture').focus()")
    page.press("0", 48)
    assert text(page, "#scale") == "100 %"
    heights = page.run(
        "[...document.querySelectorAll('#picture text.s')].map((one) => one.getBoundingClientRect().height)"
    )
    assert min(height for height in heights if height) > 10, "letters of 11 px"
    tall = page.run("[picture.graph.nodes.length, view.height > view.width]")
    assert tall == [30, True]
    turn(page, "LR")
    page.until("view.width > view.height")
    assert page.run("document.querySelector('.map').hasAttribute('hidden')") is False
    page.press("f", 70)
    assert 0.7 <= page.run("view.scale") <= 1
    turn(page, "")
    assert "five#6/same#5" in text(page, "#steps")


def test_in_a_narrow_window_the_list_is_a_drawer(page: Page) -> None:
    page.look("dark", 390, 844)
    page.until("document.documentElement.scrollWidth <= 390")  # the charts follow in the next frame
    assert page.run("getComputedStyle(document.querySelector('#nav')).visibility") == "hidden"
    page.run("document.querySelector('#drawer').focus()")
    page.press("Enter", 13)
    page.until("getComputedStyle(document.querySelector('#nav')).visibility === 'visible'")
    assert page.run("document.activeElement.id") == "filter"
    page.press("Escape", 27)
    page.until("getComputedStyle(document.querySelector('#nav')).visibility === 'hidden'")
    assert page.run("document.activeElement.id") == "drawer"
    page.press("Enter", 13)
    choose(page, "pair")
    page.until("getComputedStyle(document.querySelector('#nav')).visibility === 'hidden'")
    page.look("light", 1400, 900)
    page.until("document.documentElement.scrollWidth <= 1400")
    assert page.run("getComputedStyle(document.querySelector('#nav')).visibility") == "visible"


def test_every_control_is_reached_with_the_keyboard(page: Page) -> None:
    """Tab goes through every control that is visible, and leaves none out."""
    page.run(
        """{
          window.controls = () => [...document.querySelectorAll(
              "a[href], button, input, select, textarea, [tabindex='0'], summary")]
            .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.disabled)
            .filter((one) => !one.closest("dialog:not([open])"));
          window.reached = new Set();
          document.activeElement.blur();
        }"""
    )
    missing = "controls().filter((one) => !one.closest('#requests') && !reached.has(one))"
    for _ in range(page.run("controls().length") + 100):  # rows of requests appear meanwhile, at most 50 with a button
        page.press("Tab", 9)
        if not page.run(f"reached.add(document.activeElement) && {missing}.length"):
            break
    assert page.run(f"{missing}.map((one) => one.id || one.outerHTML.slice(0, 80))") == []


def test_the_page_of_the_api_shows_the_calls_and_sends_one_with_the_key(served: Served, page: Page) -> None:
    live = page.run("location.href")
    for scheme, width in (("dark", 390), ("light", 1400)):
        page.look(scheme, width, 900)
        page.open(f"{served.base_url}/docs")
        page.until("document.querySelectorAll('.opblock').length > 30")
        page.until(f"document.documentElement.scrollWidth <= {width}")
        shade = page.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, shade[4:-1].split(","))) / 3 < 60) == (scheme == "dark")
    named = "[...document.querySelectorAll('.opblock-summary-control')]"
    page.run(f"{named}.find((one) => one.innerText.includes('/v2/models/stats')).focus()")
    page.press("Enter", 13)
    page.until("!!document.querySelector('.execute')")
    page.run("document.querySelector('.execute').focus()")
    page.press("Enter", 13)
    page.until("document.querySelector('.live-responses-table tbody .response-col_status')?.innerText === '200'")
    assert [said for said in page.said if "403" not in said] == []
    page.open(live)
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
          const frame = { server, names: null, deployments: [], can_load: true, graph, at_ms: 0 };
          show(frame);
          const before = document.querySelectorAll("*").length;
          for (let i = 0; i < 1100; i++) {
            frame.at_ms = 1000 * i;
            frame.deployments = [{ ...rows.get(keyOf("pair", "1")), rate: i }];
            show(frame);
          }
          const ring = rings.rate;
          return [document.querySelectorAll("*").length - before, ring.size, ring.values.length, rows.size];
        })()"""
    )
    assert grown == [0, 1000, 1000, 9]


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
