"""The example of docs/cluster.md is checked and served as the page says."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as tritonclient

from flowserve.cli.check import check
from flowserve.cli.main import _parsers
from flowserve.elsewhere.placement import parse_placement
from flowserve.testing.serve import Served
from tests.support.clusters import write_chain

KINDS = ["circle", "square", "triangle", "cross"]
BLOCK = re.compile(r'```pbtxt title="cluster\.pbtxt"\n(.*?)```', re.DOTALL)


@pytest.fixture(scope="module")
def files(root: Path) -> list[str]:
    """The placement files of the page."""
    return BLOCK.findall((root / "docs/cluster.md").read_text())


def test_every_file_of_the_page_is_valid(files: list[str]) -> None:
    local, segment, ray = (parse_placement(text, "cluster.pbtxt") for text in files)
    assert [*local.places] == ["shapes_segment", "shapes_classify"]
    assert {place.segment for place in segment.places.values()} == {"text"}
    assert ray.address == "10.0.0.1:6379"
    assert ray.places["detect"].resources == {"GPU": 1}


def test_the_segment_fits_a_chain_of_its_models(files: list[str], tmp_path: Path) -> None:
    write_chain(tmp_path / "graphs", names=("crop", "recognise", "join"))
    placement = tmp_path / "cluster.pbtxt"
    placement.write_text(files[1])
    out, err = io.StringIO(), io.StringIO()
    assert check([tmp_path / "graphs"], out, err, color=False, placement=placement) == 0, err.getvalue()


def test_the_proposed_file_is_valid_and_its_page_has_every_option(root: Path) -> None:
    page = (root / "docs/cluster.md").read_text()
    shown = re.search(r'```pbtxt title="proposed\.pbtxt"\n(.*?)```', page, re.DOTALL)
    assert shown is not None
    assert parse_placement(shown[1], "proposed.pbtxt").places["heavy"].count == 3
    section = page.partition("## Let flowserve propose the file\n")[2].partition("\n## ")[0]
    told = {
        name for row in re.findall(r"^\| (`-.*?`) \|", section, re.MULTILINE) for name in re.findall(r"--[\w-]+", row)
    }
    options = [word for action in _parsers()[1]["place"]._actions for word in action.option_strings]
    assert told == {word for word in options if word.startswith("--")} - {"--help", "--quiet"}


@pytest.mark.server
def test_the_example_is_checked_and_answers(
    root: Path, files: list[str], tmp_path: Path, serve: Callable[..., Served]
) -> None:
    placement = tmp_path / "cluster.pbtxt"
    placement.write_text(files[0])
    out, err = io.StringIO(), io.StringIO()
    assert check([root / "graphs"], out, err, color=False, placement=placement) == 0, err.getvalue()
    options = ("--cluster", "local:2", "--placement", str(placement))
    names = ("shapes", "shapes_preprocess", "shapes_segment", "shapes_classify")
    chosen = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in names)]
    served = serve(root / "graphs", *options, *chosen)
    examples = json.loads((root / "graphs/shapes/held_out.json").read_text())
    with tritonclient.InferenceServerClient(served.address) as client:
        assert all(map(client.is_model_ready, names))
        for example in examples[:5]:
            pixels = np.array([example["image"]], np.uint8)
            given = tritonclient.InferInput("IMAGE", list(pixels.shape), "UINT8")
            given.set_data_from_numpy(pixels)
            answer = client.infer("shapes", [given])
            assert KINDS[answer.as_numpy("CLASSIFICATION").argmax()] == example["kind"]
