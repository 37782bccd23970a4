"""`read_number`: a decoupled step before an ONNX model, by the held-out digits, in lines of any length."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowserve.testing.serve import Served

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def held_out(root: Path) -> list[dict[str, Any]]:
    examples: list[dict[str, Any]] = json.loads((root / "graphs/digit/held_out.json").read_text())
    return examples


def read(server: Served, line: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    connection = http.client.HTTPConnection(server.address, timeout=60)
    try:
        body = json.dumps({"LINE": line.ravel().tolist()})
        connection.request("POST", "/v2/models/read_number/generate_stream", body)
        events = [line[6:] for line in connection.getresponse() if line.startswith(b"data: ")]
        return [(answer["DIGIT"], answer["COLUMN"]) for answer in map(json.loads, events)]
    finally:
        connection.close()


def test_every_digit_of_a_number_is_read_in_its_place(served_graphs: Served, held_out: list[dict[str, Any]]) -> None:
    digits = held_out * 5
    line = np.hstack([np.array(example["pixels"], np.uint8) for example in digits])
    assert read(served_graphs, line) == [(example["digit"], 8 * n) for n, example in enumerate(digits)]


def test_blanks_are_skipped_and_a_blank_image_has_no_digits(
    served_graphs: Served, held_out: list[dict[str, Any]]
) -> None:
    blank, digit = np.zeros((8, 8), np.uint8), np.array(held_out[0]["pixels"], np.uint8)
    assert read(served_graphs, np.hstack([blank, digit, blank, blank, digit])) == [
        (held_out[0]["digit"], 8),
        (held_out[0]["digit"], 32),
    ]
    assert read(served_graphs, blank) == []
