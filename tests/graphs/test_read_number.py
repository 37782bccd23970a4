"""`read_number`: a decoupled step before an ONNX model, by the held-out digits, in lines of any length."""

from __future__ import annotations

import http.client
import json
from typing import Any

import numpy as np
import pytest

from flowserve.testing.serve import Served

pytestmark = pytest.mark.server


def read(server: Served, line: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    connection = http.client.HTTPConnection(server.address, timeout=60)
    try:
        body = json.dumps({"LINE": line.ravel().tolist()})
        connection.request("POST", "/v2/models/read_number/generate_stream", body)
        events = [line[6:] for line in connection.getresponse() if line.startswith(b"data: ")]
        return [(answer["DIGIT"], answer["COLUMN"]) for answer in map(json.loads, events)]
    finally:
        connection.close()


def test_every_digit_of_a_number_is_recognised_in_order(
    served_graphs: Served, held_out_digits: list[dict[str, Any]]
) -> None:
    digits = held_out_digits * 5
    line = np.hstack([np.array(example["pixels"], np.uint8) for example in digits])
    assert read(served_graphs, line) == [(example["digit"], 8 * n) for n, example in enumerate(digits)]


def test_blanks_are_skipped_and_a_blank_image_has_no_digits(
    served_graphs: Served, held_out_digits: list[dict[str, Any]]
) -> None:
    blank, digit = np.zeros((8, 8), np.uint8), np.array(held_out_digits[0]["pixels"], np.uint8)
    assert read(served_graphs, np.hstack([blank, digit, blank, blank, digit])) == [
        (held_out_digits[0]["digit"], 8),
        (held_out_digits[0]["digit"], 32),
    ]
    assert read(served_graphs, blank) == []
