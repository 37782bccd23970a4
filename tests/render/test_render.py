"""The three pictures of one graph: whole, against files in testdata/; and what must hold of any graph's."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from flowserve.graph.compile import compile_ensemble, compile_model
from flowserve.graph.types import Graph
from flowserve.render.mermaid import render_mermaid
from flowserve.render.svg import Box, Wire, lay_out, render_svg
from flowserve.render.text import render_text
from flowserve.testing.ensembles import Drawn, available, ensemble, ensembles, model

GOLDEN = Path(__file__).parent / "testdata"
RENDERERS = {"txt": render_text, "mmd": render_mermaid, "svg": render_svg}


def read_text_graph() -> Graph:
    decode = model("decode", {"BYTES": "BYTES[1]"}, {"PAGE": "UINT8[-1,-1]", "ANGLE": "FP32[1]"})
    find = model("find", {"PAGE": "UINT8[-1,-1]"}, {"GLYPHS": "FP32[16,1,28,28]", "BOXES": "INT32[16,4]"})
    read = model("read", {"X": "FP32[16,1,28,28]"}, {"SCORES": "FP32[16,62]", "FEATURES": "FP32[16,64]"}, 64)
    turn = model("turn", {"PAGE": "UINT8[-1,-1]", "ANGLE": "FP32[1]"}, {"UPRIGHT": "FP32[1]"})
    join = model(
        "join",
        {"SCORES": "FP32[16,62]", "BOXES": "INT32[16,4]", "UPRIGHT": "FP32[1]", "HINT": "BYTES[1]?"},
        {"TEXT": "BYTES[1]", "SURE": "FP32[1]"},
    )
    find_and_read = ensemble(
        "find_and_read",
        {"page": "UINT8[-1,-1]"},
        {"scores": "FP32[16,62]", "boxes": "INT32[16,4]"},
        [
            ("find", {"PAGE": "page"}, {"GLYPHS": "glyphs", "BOXES": "boxes"}),
            ("read", {"X": "glyphs"}, {"SCORES": "scores"}),
        ],
    )
    config = ensemble(
        "read_text",
        {"image": "BYTES[1]"},
        {"text": "BYTES[1]", "sure": "FP32[1]"},
        [
            ("decode", {"BYTES": "image"}, {"PAGE": "page", "ANGLE": "angle"}),
            ("find_and_read", {"page": "page"}, {"scores": "scores", "boxes": "boxes"}),
            ("turn", {"PAGE": "page", "ANGLE": "angle"}, {"UPRIGHT": "upright"}),
            ("join", {"SCORES": "scores", "BOXES": "boxes", "UPRIGHT": "upright"}, {"TEXT": "text", "SURE": "sure"}),
        ],
    )
    return compile_ensemble(config, 1, available(decode, find, read, turn, join, find_and_read))


GRAPHS = {
    "read_text": read_text_graph(),
    "plain": compile_model(model("digits", {"X": "FP32[1,28,28]"}, {"SCORES": "FP32[10]"}, max_batch_size=0), 3),
}


@pytest.mark.parametrize("suffix", RENDERERS)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_picture_of_a_known_graph_is_the_one_in_testdata(name: str, suffix: str) -> None:
    assert RENDERERS[suffix](GRAPHS[name]) == (GOLDEN / f"{name}.{suffix}").read_text()


@given(ensembles())
def test_the_text_names_every_node_and_every_tensor(drawn: Drawn) -> None:
    text = render_text(compile_ensemble(drawn.config, 1, drawn.available))
    for name, written in drawn.writes.items():
        assert f" {name}: model {name}/1, batches up to 8" in text
        assert all(f" as {tensor}" in text for tensor in written)


@given(ensembles())
def test_the_flowchart_has_one_arrow_per_edge(drawn: Drawn) -> None:
    graph = compile_ensemble(drawn.config, 1, drawn.available)
    assert render_mermaid(graph).count(" --> ") == len(graph.edges)


@pytest.mark.parametrize("name", ['say "hi"', "<script>", "a]b", "x#quot;y", "end`s", "a\nb", "größe"])
def test_names_cannot_break_out_of_a_picture(name: str) -> None:
    graph = compile_model(model(name, {"X": "FP32[1]"}, {"Y": "FP32[1]"}), 1)
    label = re.search(r'n0\["(.*)"\]', render_mermaid(graph))
    assert label is not None
    assert not set(label[1].replace("<br/>", "")) & set('"<>\n`')
    texts = [element.text for element in ElementTree.fromstring(render_svg(graph)).iter()]
    assert name in texts


def overlap(a: Box, b: Box) -> bool:
    return (
        a.left < b.left + b.width
        and b.left < a.left + a.width
        and a.top < b.top + b.height
        and b.top < a.top + a.height
    )


def crosses(wire: Wire, box: Box) -> bool:
    """Whether a wire's straight pieces run through a box. Its bend lies between two layers, where no box is."""
    out_y = wire.source.port_y(wire.output, wire.source.outputs)
    in_y = wire.target.port_y(wire.input, wire.target.inputs)
    pieces = [
        (wire.source.left + wire.source.width, wire.target.layer_left, out_y),
        (wire.target.layer_left, wire.target.left, in_y),
    ]
    return any(
        box.top < y < box.top + box.height and left < box.left + box.width and box.left < right
        for left, right, y in pieces
    )


@settings(max_examples=40)
@given(ensembles(max_steps=15))
def test_no_two_boxes_or_lanes_of_a_drawing_overlap_and_no_wire_runs_through_one(drawn: Drawn) -> None:
    drawing = lay_out(compile_ensemble(drawn.config, 1, drawn.available))
    everything = [box for layer in drawing.layers for box in layer]
    assert not any(overlap(a, b) for a, b in itertools.combinations(everything, 2))
    for wire in drawing.wires:
        assert wire.source.layer + 1 == wire.target.layer
        assert not any(crosses(wire, box) for box in everything if box not in (wire.source, wire.target))


@settings(max_examples=40)
@given(ensembles(max_steps=15))
def test_a_drawing_fits_on_its_page_and_labels_end_before_the_next_layer(drawn: Drawn) -> None:
    graph = compile_ensemble(drawn.config, 1, drawn.available)
    drawing = lay_out(graph)
    assert all(box.left >= 0 and box.left + box.width <= drawing.width for box in drawing.boxes)
    assert all(box.top >= 0 and box.top + box.height <= drawing.height for box in drawing.boxes)
    for wire in drawing.wires:
        label_end = wire.source.left + wire.source.width + max((len(line) for line in wire.label), default=0) * 6.7
        assert label_end < wire.target.layer_left
    page = ElementTree.fromstring(render_svg(graph))
    assert float(page.attrib["width"]) >= drawing.width - 1


def test_a_picture_needs_nothing_from_outside() -> None:
    svg = render_svg(GRAPHS["read_text"])
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in svg
