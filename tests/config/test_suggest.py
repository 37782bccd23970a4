"""Suggestions for unknown names, and their limits."""

from __future__ import annotations

import pytest

from flowserve.config.suggest import KNOWN_MAX, NAME_CHARS_MAX, meant


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("normalise", ["digit", "normalize"], " (did you mean 'normalize'?)"),
        ("zebra", ["digit", "normalize"], ""),
        ("input", ["OUTPUT", "INPUT0"], " (did you mean 'INPUT0'?)"),
        ("onnx", ["python", "onnxruntime"], " (did you mean 'onnxruntime'?)"),
        ("on", ["python", "onnxruntime"], ""),
        ("normalise", ["normalize"] * (KNOWN_MAX + 1), ""),
        ("n" * (NAME_CHARS_MAX + 1), ["n" * NAME_CHARS_MAX], ""),
    ],
    ids=["close", "far", "capitals", "beginning", "short", "many", "long"],
)
def test_a_similar_name_is_suggested_unless_the_comparison_is_expensive(name: str, known: list[str], hint: str) -> None:
    assert meant(name, known) == hint
