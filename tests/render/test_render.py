"""Pictures of one graph, compared with files in testdata/; and properties of the pictures of any graph."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings, strategies

from flowserve import Graph as PythonGraph
from flowserve import model as python_model
from flowserve.backends.registry import _BUILT_IN
from flowserve.config.types import InstanceGroup
from flowserve.errors import Invalid, Unsupported
from flowserve.graph.compile import compile_ensemble
from flowserve.graph.types import Graph, compile_model
from flowserve.render.formats import DRAWINGS, SUFFIXES, TEXTS, format_of, render
from flowserve.render.html import render_html
from flowserve.render.jsontext import render_json
from flowserve.render.labels import UNKNOWN, Configs
from flowserve.render.layout import (
    DIRECTIONS,
    LABEL,
    LONG,
    NO_SPARE,
    Box,
    Direction,
    Drawing,
    Spare,
    Wire,
    lay_out,
    text_width,
)
from flowserve.render.png import render_png
from flowserve.render.scopes import ensembles_of, scopes_of
from flowserve.render.svg import render_svg
from flowserve.render.text import render_dot, render_mermaid, render_text
from flowserve.render.tints import tints_of
from tests.support.ensembles import Drawn, available, ensembles, model
from tests.support.pictures import READ_TEXT_CONFIGS, grown_graph, people_graph, plain_graph, read_text_graph
from tests.support.spaces_world import MODELS
from tests.support.spaces_world import drawn as drawn_with_spaces

GOLDEN = Path(__file__).parent / "testdata"
RENDERERS = {"txt": render_text, "mmd": render_mermaid, "dot": render_dot, "json": render_json, "svg": render_svg}
GRAPHS = {
    "read_text": (read_text_graph(), READ_TEXT_CONFIGS),
    "plain": (plain_graph(), {}),
    "people": (people_graph(), {}),
}


@pytest.mark.parametrize("suffix", RENDERERS)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_picture_of_a_known_graph_is_the_one_in_testdata(name: str, suffix: str) -> None:
    assert RENDERERS[suffix](*GRAPHS[name]) == (GOLDEN / f"{name}.{suffix}").read_text()


@given(ensembles())
def test_the_text_names_every_node_and_every_tensor(drawn: Drawn) -> None:
    text = render_text(compile_ensemble(drawn.config, 1, drawn.available), {})
    for name, written in drawn.writes.items():
        assert f" {name}: model {name}/1, batches up to 8" in text
        assert all(f" as {tensor}" in text for tensor in written)


@given(ensembles())
def test_the_flowchart_has_one_arrow_per_edge(drawn: Drawn) -> None:
    graph = compile_ensemble(drawn.config, 1, drawn.available)
    assert render_mermaid(graph, {}).count(" --> ") == len(graph.edges)


@pytest.mark.parametrize("name", ['say "hi"', "<script>", "a]b", "x#quot;y", "end`s", "a\nb", "größe"])
def test_names_cannot_break_out_of_a_picture(name: str) -> None:
    graph = compile_model(model(name, {"X": "FP32[1]"}, {"Y": "FP32[1]"}), 1)
    label = re.search(r'n0\["(.*)"\]', render_mermaid(graph, {}))
    assert label is not None
    assert not set(label[1].replace("<br/>", "")) & set('"<>\n`')
    texts = [element.text for element in ElementTree.fromstring(render_svg(graph, {})).iter()]
    assert name in texts


@pytest.mark.parametrize("name", ['say "hi"', "back\\\\slash", "end\\", "a\nb", "\x1b[2J"])
def test_names_cannot_break_out_of_a_dot_string(name: str) -> None:
    graph = compile_model(model(name, {"X": "FP32[1]"}, {"Y": "FP32[1]"}), 1)
    for line in render_dot(graph, {}).splitlines()[1:-1]:
        unquoted = re.sub(r'"(?:[^"\\]|\\.)*"', "", line)
        assert not set(unquoted) & set('"\\\x1b')
        assert unquoted.rstrip().endswith(("];", ";"))


def overlap(a: Box, b: Box) -> bool:
    return (
        a.left < b.left + b.width
        and b.left < a.left + a.width
        and a.top < b.top + b.height
        and b.top < a.top + a.height
    )


def contains(frame: Box, box: Box) -> bool:
    return (
        frame.left <= box.left
        and box.left + box.width <= frame.left + frame.width + 0.1
        and frame.top <= box.top
        and box.top + box.height <= frame.top + frame.height
    )


def in_frame(frame: Box, box: Box) -> bool:
    return frame.inside is not None and box in frame.inside.boxes()


def assert_legible(drawing: Drawing) -> None:
    """Boxes are disjoint or nested, no label is on a box, everything is on the page, no wire crosses a box."""
    boxes = drawing.boxes()
    for a, b in itertools.combinations(boxes, 2):
        inside = in_frame(a, b) or in_frame(b, a)
        assert (contains(a, b) or contains(b, a)) if inside else not overlap(a, b)
    solid = [box for box in boxes if box.kind != "frame"]
    labels = [label_box(wire) for wire in drawing.all_wires() if wire.label]
    for label in labels:
        assert not any(overlap(label, box) for box in solid)
        assert not any(overlap(label, box) and not contains(box, label) for box in boxes if box.kind == "frame")
    assert not any(overlap(a, b) for a, b in itertools.combinations(labels, 2))
    assert all(box.left >= 0 and box.left + box.width <= drawing.width for box in boxes)
    assert all(box.top >= 0 and box.top + box.height <= drawing.height for box in boxes)
    for wire in drawing.all_wires():
        assert not any(crosses(wire, box) for box in solid if box not in (wire.source, wire.target))


def label_box(wire: Wire) -> Box:
    """The area of the two lines of a label."""
    x, y = wire.label_at
    return Box("lane", along=x, across=y - 11, length=text_width(wire.label), breadth=LABEL - 4)


def crosses(wire: Wire, box: Box) -> bool:
    """Whether a wire's straight pieces cross a box. Its bend is between two layers, where no box is."""
    pieces = [(wire.start[0], wire.turn, wire.start[1]), (wire.bent, wire.end[0], wire.end[1])]
    return any(
        box.across < at < box.across + box.breadth and begin < box.along + box.length and box.along < end
        for begin, end, at in pieces
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [1, 6, 30, 60])
@pytest.mark.parametrize("seed", range(3))
def test_drawings_of_one_to_sixty_nodes_are_legible_open_and_folded(
    count: int, seed: int, direction: Direction
) -> None:
    graph = grown_graph(count, seed)
    assert len(graph.nodes) == count
    paths = {*ensembles_of(graph)}
    for folded in (set(), paths, {path for path in paths if "/" in path}):
        for spare in (NO_SPARE, Spare(("figures",) * 3, "  0000 MB/s")):
            assert_legible(lay_out(graph, {}, folded, spare, direction=direction))


@settings(max_examples=40)
@given(ensembles(max_steps=15), strategies.sampled_from(DIRECTIONS))
def test_property_any_drawing_is_legible(drawn: Drawn, direction: Direction) -> None:
    graph = compile_ensemble(drawn.config, 1, drawn.available)
    assert_legible(lay_out(graph, {}, direction=direction))


@settings(max_examples=60)
@given(strategies.integers(0, 2**48), strategies.sampled_from(DIRECTIONS))
def test_property_a_drawing_with_conditions_and_items_is_legible_and_every_edge_ends(
    seed: int, direction: Direction
) -> None:
    config = drawn_with_spaces(Random(seed))
    if config is None:
        return
    graph = compile_ensemble(config, 1, available(*MODELS))
    drawing = lay_out(graph, {}, direction=direction)
    assert_legible(drawing)
    into: dict[int, set[int]] = {}
    for wire in drawing.all_wires():
        for number in wire.edges:
            if wire.has_arrow and wire.target.kind != "merge":
                into.setdefault(number, set()).add(wire.target.node)
    assert into == {number: {edge.consumer} for number, edge in enumerate(graph.edges)}
    for draw in (render_dot, render_mermaid):
        names = re.findall(r"\bm\d+(?= \[shape=diamond|\{)", draw(graph, {}))
        assert len(names) == sum(box.kind == "merge" for box in drawing.boxes())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_conditions_join_in_a_diamond_within_the_frame_of_the_items(direction: Direction) -> None:
    graph = people_graph()
    for folded, spare in itertools.product(((), ensembles_of(graph)), (NO_SPARE, Spare(space=": 00.0 % of rows"))):
        drawing = lay_out(graph, {}, folded, spare, direction=direction)
        for frame in (box for box in drawing.boxes() if box.kind == "frame"):
            left, title = frame.left + frame.text_left, frame.lines[0] + (spare.space if frame.space else "")
            assert left + text_width((title,)) <= frame.left + frame.width
            entered = [frame.left + at for at in frame.inputs] if direction == "TB" else []
            assert not any(left < x < left + text_width((title,)) for x in entered), "a wire crosses the title"
        assert_legible(drawing)
        boxes = drawing.boxes()
        (diamond,) = (box for box in boxes if box.kind == "merge")
        titles = {box.lines[0]: box for box in boxes if box.kind == "frame"}
        assert in_frame(titles["each find.CROPS, find.KIND"], diamond)
        assert not in_frame(titles["when find.KIND = 1"], diamond)
        makers = {title for title, box in titles.items() for wire in diamond.wires_in if wire.source is box}
        assert makers == {"when find.KIND = 0", "when find.KIND = 1"}
        assert ("ensemble turned" in titles) == (not folded)
        for picture in ("svg", "dot", "mermaid", "html"):
            text = render(graph, {}, picture, direction=direction, fold=bool(folded)).decode()
            assert {"svg": 'class="m"', "dot": "shape=diamond", "mermaid": '{" "}', "html": 'class="m"'}[
                picture
            ] in text
            assert all(
                title in text.replace("#61;", "=") for title in ("when find.KIND = 0", "each find.CROPS, find.KIND")
            )


def test_what_a_condition_writes_and_reads_again_has_no_diamond_outside_of_its_frame() -> None:
    @python_model({"X": "FP32[1]"}, {"Y": "FP32[1]"}, max_batch_size=4)
    def double(x: Any) -> Any: ...

    graph = PythonGraph("again", max_batch_size=4)
    x = graph.input("X", "FP32[1]")
    with graph.when(x > 0):
        above = double(x)
    with graph.when(x < 0):
        below = double(x)
    both = graph.merge(above, below, otherwise=0)
    with graph.when(x > 0):
        again = double(both)
    graph.output("Y", graph.merge(again, otherwise=0))
    drawing = lay_out(graph.reading().resolution.graphs["again"][1], {})
    assert_legible(drawing)
    (diamond,) = (box for box in drawing.boxes() if box.kind == "merge")
    assert [wire.target.lines[0] for wire in diamond.wires_out] == ["Y"]


def test_a_long_graph_is_drawn_from_top_to_bottom_and_a_short_one_from_left_to_right() -> None:
    assert lay_out(plain_graph(), {}).direction == "LR"
    long = grown_graph(30)
    drawing = lay_out(long, {})
    assert drawing.direction == "TB"
    assert drawing.width < lay_out(long, {}, direction="LR").width
    assert lay_out(plain_graph(), {}).width < LONG < lay_out(long, {}, direction="LR").width
    assert "rankdir=TB" in render_dot(long, {})
    assert render_mermaid(long, {}).startswith("flowchart TB\n")
    assert "rankdir=LR" in render_dot(long, {}, direction="LR")


def test_each_backend_has_a_tint_and_another_repository_has_the_same() -> None:
    first, second = (
        tints_of(graph, configs)
        for graph, configs in (
            (read_text_graph(), READ_TEXT_CONFIGS),
            (plain_graph(), {"digits": READ_TEXT_CONFIGS["decode"]}),
        )
    )
    by_node = dict(zip([node.name for node in read_text_graph().nodes], first, strict=True))
    assert by_node["decode"] == by_node["turn"] == second[0]
    assert by_node["decode"] != by_node["find_and_read/find"]
    drawn = render_svg(read_text_graph(), READ_TEXT_CONFIGS)
    assert drawn.count(f'class="n {by_node["decode"].name}"') == 2
    assert render_dot(read_text_graph(), READ_TEXT_CONFIGS).count(by_node["decode"].fill) == 2
    assert render_mermaid(read_text_graph(), READ_TEXT_CONFIGS).count(f":::{by_node['decode'].name}") == 2


def test_every_backend_of_flowserve_has_a_tint_that_no_other_has() -> None:
    graph = plain_graph()
    found = [tints_of(graph, {"digits": replace(UNKNOWN, backend=name)})[0] for name in [*_BUILT_IN, "mine"]]
    assert len(set(found)) == len(found)


def test_backends_that_flowserve_does_not_know_have_tints_of_their_own() -> None:
    graph = read_text_graph()
    configs = {"decode": replace(UNKNOWN, backend="mine"), "find": replace(UNKNOWN, backend="yours")}
    tints = dict(zip([node.name for node in graph.nodes], tints_of(graph, configs), strict=True))
    others = {tints[name] for name in ("decode", "find_and_read/find")}
    assert len(others) == 2
    assert tints["turn"] not in others


@pytest.mark.parametrize("draw", [render_dot, render_mermaid])
def test_a_folded_ensemble_is_one_box_in_a_diagram_language(draw: Callable[..., str]) -> None:
    graph = read_text_graph()
    whole, folded = draw(graph, READ_TEXT_CONFIGS), draw(graph, READ_TEXT_CONFIGS, {"find_and_read"})
    assert "glyphs" in whole
    assert "glyphs" not in folded
    assert "2 steps" in folded
    arrow = "->" if draw is render_dot else "--> "
    inside = {("find_and_read/find", "find_and_read/read")}
    assert folded.count(arrow) == len(graph.edges) - len(inside)


def test_a_format_without_a_drawing_has_no_direction() -> None:
    with pytest.raises(Invalid, match="the format json has no direction; dot, mermaid, svg, png, html have"):
        render(plain_graph(), {}, "json", direction="TB")
    with pytest.raises(Invalid, match="the direction LR or TB, not 'UP'"):
        render(plain_graph(), {}, "svg", direction="UP")  # type: ignore[arg-type]


def test_layers_are_connected_only_to_the_next_one() -> None:
    for wire in [wire for each in DIRECTIONS for wire in lay_out(grown_graph(30), {}, direction=each).all_wires()]:
        assert wire.source.layer + 1 == wire.target.layer
        assert wire.start[0] <= wire.turn < wire.bent <= wire.end[0] + 0.1


def test_a_drawing_has_every_edge_of_the_graph_from_its_producer_to_its_reader() -> None:
    graph = grown_graph(30)
    starts: dict[int, set[int]] = {}
    ends: dict[int, set[int]] = {}
    for wire in lay_out(graph, {}).all_wires():
        for number in wire.edges:
            starts.setdefault(number, set()).add(wire.source.node)
            ends.setdefault(number, set()).add(wire.target.node)
    for number, edge in enumerate(graph.edges):
        assert edge.producer in starts[number]
        assert edge.consumer in ends[number]


def test_a_tensor_enters_and_leaves_a_nested_ensemble_once() -> None:
    scope = next(iter(scopes_of(grown_graph(30)).walk()))
    assert scope.name == "part_0"
    assert len(scope.entering) == 1
    assert len(scope.leaving) == 2
    assert [inner.path for inner in scope.inner] == ["part_0/part_0_inner"]


def test_a_tensor_in_a_frame_has_its_name_in_the_ensemble() -> None:
    labels = {wire.label[0] for wire in lay_out(grown_graph(6), {}).all_wires() if wire.label}
    assert {"p", "q", "r"} <= labels
    assert not any("/" in label for label in labels)


@pytest.mark.parametrize("draw", [render_svg, render_html])
def test_a_picture_is_self_contained(draw: Callable[[Graph, Configs], str]) -> None:
    drawn = draw(*GRAPHS["read_text"])
    assert set(re.findall(r"https?://[^\"]*", drawn)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|<link|<img| src=", drawn)


def test_a_page_has_a_picture_for_each_folding_and_is_complete_without_scripts() -> None:
    graph = grown_graph(12)
    page = render_html(graph, {})
    shown = re.findall(r'<svg data-open="([^"]*)"( hidden)? ', page)
    paths = ensembles_of(graph)
    assert shown == [("*", ""), ("", " hidden"), *((path, " hidden") for path in paths)]
    whole = page.split("<svg data-open")[1]
    assert all(f"{node.model}<" in whole for node in graph.nodes)


def test_json_has_the_tensor_and_the_readers_of_an_edge() -> None:
    document = json.loads(render_json(*GRAPHS["read_text"]))
    assert document["schema"] == "flowserve.graph/1"
    (edge,) = [edge for edge in document["edges"] if edge["tensor"] == "upright"]
    assert (edge["dtype"], edge["dims"]) == ("FP32", [1])
    assert edge["to"] == {"node": 4, "tensor": "UPRIGHT"}
    turn = document["nodes"][edge["from"]["node"]]
    assert (turn["model"], turn["is_stateful"], turn["limits"]["resources"]) == ("turn", True, {"R1": 2})


@pytest.mark.parametrize("count", [1, 30])
def test_a_png_has_the_size_of_the_drawing(count: int) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    pytest.importorskip("resvg_py", reason="needs resvg")
    graph = grown_graph(count)
    picture = image.open(io.BytesIO(render_png(graph, {}))).convert("RGB")
    drawing = lay_out(graph, {})
    assert picture.height == 2 * round(drawing.height + 44)
    colors = {color for _, color in picture.getcolors(1 << 24)}
    assert {(255, 255, 255), (221, 244, 255), (87, 96, 106)} <= colors


def test_a_png_has_text_without_any_font_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    resvg = pytest.importorskip("resvg_py", reason="needs resvg")
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    monkeypatch.setattr(resvg, "svg_to_bytes", partial(resvg.svg_to_bytes, skip_system_fonts=True))
    picture = image.open(io.BytesIO(render_png(plain_graph(), {}))).convert("RGB")
    dark = sum(count for count, color in picture.getcolors(1 << 24) if max(color) < 80)
    assert dark > 500, "the title is missing"


def test_without_resvg_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(Unsupported, match=r"pip install 'flowserve\[pictures\]'"):
        render_png(plain_graph(), {})


def test_the_format_follows_from_the_file_suffix() -> None:
    assert {format_of(Path(f"g{suffix}")) for suffix in SUFFIXES} == {*DRAWINGS, *TEXTS}
    with pytest.raises(Invalid, match=r"'g.jpeg' does not say which picture"):
        format_of(Path("g.jpeg"))


def test_edges_of_a_graph_on_a_gpu_show_their_transfer() -> None:
    on_gpu = replace(UNKNOWN, instance_groups=(InstanceGroup("gpu", "KIND_GPU", gpus=(0,)),))
    lines = render_text(plain_graph(), {"digits": on_gpu}).splitlines()
    assert lines[-4].endswith("<- input X (copy host to gpu0, 3136 bytes a row)")
    assert lines[-1].endswith("<- digits.SCORES (copy gpu0 to host, 40 bytes a row)")
    assert "copy" not in render_text(plain_graph(), {})
