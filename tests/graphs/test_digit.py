"""`digit`: a plain ONNX model, by its held-out examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

pytestmark = pytest.mark.server


def _input(pixels: np.ndarray[Any, Any], *, binary: bool) -> triton.InferInput:
    given = triton.InferInput("PIXELS", list(pixels.shape), "UINT8")
    given.set_data_from_numpy(pixels, binary_data=binary)
    return given


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
def test_every_held_out_digit_is_recognised(
    client: triton.InferenceServerClient, held_out_digits: list[dict[str, Any]], binary: bool
) -> None:
    told = []
    for start in range(0, len(held_out_digits), 50):
        pixels = np.array([example["pixels"] for example in held_out_digits[start : start + 50]], np.uint8)
        answer = client.infer("digit", [_input(pixels, binary=binary)])
        told += answer.as_numpy("DIGIT")[:, 0].tolist()
        np.testing.assert_allclose(answer.as_numpy("PROBABILITIES").sum(axis=1), 1, atol=1e-5)
    assert told == [example["digit"] for example in held_out_digits]


def test_digits_sent_sequentially_or_concurrently_get_their_own_responses(
    client: triton.InferenceServerClient, held_out_digits: list[dict[str, Any]]
) -> None:
    pixels = [np.array([example["pixels"]], np.uint8) for example in held_out_digits]
    waiting = [client.async_infer("digit", [_input(each, binary=True)]) for each in pixels]
    assert [int(each.get_result().as_numpy("DIGIT")[0, 0]) for each in waiting] == [
        example["digit"] for example in held_out_digits
    ]
