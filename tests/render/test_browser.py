"""The pictures as a browser shows them. Skipped where there is no Chromium."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flowserve.render.html import render_html
from flowserve.render.layout import lay_out
from flowserve.render.svg import render_svg
from tests.support.browser import browsing
from tests.support.pictures import grown_graph

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the browser Chromium (apt-get install chromium)"),
]


def browse(page: Path, home: Path, *actions: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    return subprocess.run(
        [CHROMIUM, *options, f"--user-data-dir={home / 'profile'}", *actions, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_a_browser_draws_the_svg_in_its_size_and_colours(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    graph = grown_graph(6)
    page = tmp_path / "graph.svg"
    page.write_text(render_svg(graph, {}))
    drawing = lay_out(graph, {})
    width, height = round(drawing.width), round(drawing.height + 44)
    browse(page, tmp_path, f"--screenshot={tmp_path / 'shot.png'}", f"--window-size={width + 20},{height + 20}")
    shot = image.open(tmp_path / "shot.png").convert("RGB")
    assert shot.size == (width + 20, height + 20)
    for box in drawing.boxes():
        if box.kind == "node":
            assert shot.getpixel((round(box.left) + 4, round(box.top) + 44 + 8)) == (0xDD, 0xF4, 0xFF)
    edge_pixels = sum(count for count, color in shot.getcolors(1 << 24) if color == (0x57, 0x60, 0x6A))
    assert edge_pixels > 100, "no wires are drawn"


def test_thirty_steps_are_shown_folded_legible_and_with_a_map_of_the_whole(tmp_path: Path) -> None:
    (tmp_path / "graph.html").write_text(render_html(grown_graph(30), {}))
    with browsing(tmp_path / "profile") as page:
        page.look("light", 390, 900)
        page.open((tmp_path / "graph.html").as_uri())
        page.until("document.querySelector('[data-scale]').textContent !== ''")
        visible = "document.querySelector('.picture > svg:not([hidden])')"
        assert page.run(f"{visible}.dataset.open") == ""
        page.run("document.querySelector('.picture').focus()")
        page.press("0", 48)
        assert page.run("document.querySelector('[data-scale]').textContent") == "100 %"
        assert page.run(f"{visible}.querySelector('text.s').getBoundingClientRect().height") > 10
        assert page.run("document.querySelector('.map').hasAttribute('hidden')") is False
        page.run("document.querySelector('.picture').scrollTo(100, 200)")
        page.until("document.querySelector('.map .part').getAttribute('y') === '200'")
        page.press("-", 189)
        assert page.run("document.querySelector('[data-scale]').textContent") == "80 %"
        page.press("f", 70)
        scale = page.run("view.scale")
        assert 0.7 <= scale <= 1, "a fit is legible"
        assert page.said == []


def test_in_a_browser_a_click_on_an_ensemble_unfolds_it(tmp_path: Path) -> None:
    page = tmp_path / "graph.html"
    # The page's own script runs first; this one then clicks as a reader would, and records what is visible.
    clicks = """<script>
      document.querySelector("[data-show='']").click();
      const shown = () => document.querySelector(".picture > svg:not([hidden])").dataset.open || "folded";
      const said = [shown()];
      const press = (scope) => [...document.querySelectorAll(".picture > svg:not([hidden]) [data-scope]")]
        .find(g => g.dataset.scope === scope).dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
      for (const scope of ["part_0", "part_0/part_0_inner", "part_0/part_0_inner", "part_0"]) {
        press(scope); said.push(shown());
      }
      document.title = said.join(" > ");
    </script></body>"""
    page.write_text(render_html(grown_graph(6), {}).replace("</body>", clicks))
    dumped = browse(page, tmp_path, "--dump-dom").stdout
    title = dumped.partition("<title>")[2].partition("</title>")[0]
    assert title == "folded &gt; part_0 &gt; part_0/part_0_inner &gt; part_0 &gt; folded"
