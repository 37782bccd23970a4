"""`detect_language`: tokenise, classify, label, by its held-out sentences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.server

HELD_OUT = 8  # as graphs/detect_language_classify/train.py


def _held_out(root: Path) -> list[tuple[str, str]]:
    """The last sentences of each language, which training does not see: text and language."""
    by_language: dict[str, list[str]] = {}
    language = ""
    for line in (root / "graphs/detect_language_classify/sentences.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            language = line.strip("[]")
        elif line and not line.startswith("#"):
            by_language.setdefault(language, []).append(line)
    return [(text, name) for name, lines in by_language.items() for text in lines[-HELD_OUT:]]


def _texts(*texts: str | bytes, binary: bool = True) -> list[triton.InferInput]:
    given = triton.InferInput("TEXT", [len(texts), 1], "BYTES")
    given.set_data_from_numpy(
        np.array([[text if isinstance(text, bytes) else text.encode()] for text in texts], np.object_),
        binary_data=binary,
    )
    return [given]


@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
def test_the_language_of_every_held_out_sentence_is_found(
    client: triton.InferenceServerClient, root: Path, binary: bool
) -> None:
    sentences = _held_out(root)
    found = []
    for start in range(0, len(sentences), 40):
        answer = client.infer(
            "detect_language", _texts(*(text for text, _ in sentences[start : start + 40]), binary=binary)
        )
        found += [name.decode() for name in answer.as_numpy("LANGUAGE")[:, 0]]
        probabilities = answer.as_numpy("PROBABILITY")
        assert (np.diff(probabilities, axis=1) <= 0).all()
    assert found == [name for _, name in sentences]


def test_sentences_sent_all_at_once_come_back_to_their_senders(
    client: triton.InferenceServerClient, root: Path
) -> None:
    sentences = _held_out(root)
    waiting = [client.async_infer("detect_language", _texts(text)) for text, _ in sentences]
    assert [each.get_result().as_numpy("LANGUAGE")[0, 0].decode() for each in waiting] == [
        name for _, name in sentences
    ]


def test_a_text_without_letters_and_one_of_a_megabyte_are_answered(client: triton.InferenceServerClient) -> None:
    answer = client.infer("detect_language", _texts("", "123 !?", "der Tag und die Nacht " * 50_000))
    names = answer.as_numpy("LANGUAGE")
    assert names.shape == (3, 3)
    assert names[0].tolist() == names[1].tolist()
    assert names[2, 0] == b"de"


def test_bytes_that_are_not_text_fail_alone_and_the_error_says_where(client: triton.InferenceServerClient) -> None:
    bad = client.async_infer("detect_language", _texts(b"Stra\xdfe"))
    good = client.async_infer("detect_language", _texts("Guten Morgen, wie geht es dir?"))
    with pytest.raises(InferenceServerException, match=r"TEXT is not UTF-8: .* at byte 4") as raised:
        bad.get_result()
    assert raised.value.status() == "400"
    assert good.get_result().as_numpy("LANGUAGE")[0, 0] == b"de"
