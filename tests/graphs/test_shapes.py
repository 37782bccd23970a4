"""`shapes`: one picture, two parallel models, by its held-out examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

KINDS = ["circle", "square", "triangle", "cross"]

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def held_out(root: Path) -> list[dict[str, Any]]:
    examples: list[dict[str, Any]] = json.loads((root / "graphs/shapes/held_out.json").read_text())
    return examples


def image(example: dict[str, Any]) -> triton.InferInput:
    pixels = np.array([example["image"]], np.uint8)
    given = triton.InferInput("IMAGE", list(pixels.shape), "UINT8")
    given.set_data_from_numpy(pixels)
    return given


def test_every_held_out_shape_is_classified_and_located(
    client: triton.InferenceServerClient, held_out: list[dict[str, Any]]
) -> None:
    for example in held_out:
        answer = client.infer("shapes", [image(example)])
        assert KINDS[answer.as_numpy("CLASSIFICATION").argmax()] == example["kind"]
        assert int(answer.as_numpy("SEGMENTATION").sum()) == pytest.approx(example["pixels"], rel=0.2)


def test_an_unrequested_branch_is_not_run(client: triton.InferenceServerClient, held_out: list[dict[str, Any]]) -> None:
    def runs(model: str) -> int:
        (row,) = client.get_inference_statistics(model)["model_stats"]
        count: int = row["inference_count"]
        return count

    before = runs("shapes_classify"), runs("shapes_segment")
    answer = client.infer("shapes", [image(held_out[0])], outputs=[triton.InferRequestedOutput("SEGMENTATION")])
    assert answer.as_numpy("CLASSIFICATION") is None
    assert (runs("shapes_classify"), runs("shapes_segment")) == (before[0], before[1] + 1)
