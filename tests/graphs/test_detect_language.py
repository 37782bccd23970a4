"""`detect_language`: tokenise, classify, label, by its held-out sentences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from flowserve.backends.registry import default_files
from flowserve.config.load import finish, read_draft
from tests.support.backends import Repository, open_instance

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


def test_the_cascade_asks_the_network_only_for_what_the_words_do_not_tell(
    client: triton.InferenceServerClient, root: Path
) -> None:
    sentences = _held_out(root)
    texts = [text for text, _ in sentences]

    def tokenised() -> int:
        (model,) = client.get_inference_statistics("detect_language_tokenise")["model_stats"]
        return int(model["inference_count"])

    before = tokenised()
    found, sure = [], []
    for start in range(0, len(texts), 40):
        given = _texts(*texts[start : start + 40])
        found += client.infer("detect_language_cascade", given).as_numpy("LANGUAGE")[:, 0].tolist()
        sure += client.infer("detect_language_words", given).as_numpy("SURE")[:, 0].tolist()
    assert [name.decode() for name in found] == [name for _, name in sentences]
    assert tokenised() - before == sure.count(False) == 25


def test_concurrent_sentences_get_their_own_responses(client: triton.InferenceServerClient, root: Path) -> None:
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


def test_a_text_gets_the_same_response_in_any_batch(client: triton.InferenceServerClient, root: Path) -> None:
    texts = [*[text for text, _ in _held_out(root)][::8], "", "je", "der Tag und die Nacht " * 50]
    alone = [client.infer("detect_language", _texts(text)) for text in texts]
    waiting = [client.async_infer("detect_language", _texts(text)) for text in texts]
    in_one = client.infer("detect_language", _texts(*texts))
    for row, (one, other) in enumerate(zip(alone, [each.get_result() for each in waiting], strict=True)):
        for answer, at in ((other, 0), (in_one, row)):
            assert one.as_numpy("LANGUAGE")[0].tolist() == answer.as_numpy("LANGUAGE")[at].tolist()
            np.testing.assert_allclose(one.as_numpy("PROBABILITY")[0], answer.as_numpy("PROBABILITY")[at], rtol=1e-5)


def test_requests_with_lists_of_different_lengths_are_classified_in_one_run(root: Path) -> None:
    graphs = root / "graphs"
    config = finish(read_draft(graphs / "detect_language_classify", graphs, default_files()), None)
    rng = np.random.default_rng(1)
    lists = [rng.integers(1, 4097, shape, np.int32) for shape in ((1, 7), (1, 0), (3, 40), (1, 512))]
    lists[2][0, 5:] = lists[2][1, :] = 0  # texts of five tokens and of none, beside one of forty
    opened = open_instance(Repository(graphs), config)
    together = [tensor for tensor in opened.run(*({"TOKENS": each} for each in lists)).outputs[0] if tensor is not None]
    alone = [opened.run({"TOKENS": row[row > 0][None]}).outputs[0][0] for each in lists for row in each]
    opened.instance.close()
    opened.model.close()
    assert [tensor.shape for tensor in together] == [(1, 10), (1, 10), (3, 10), (1, 10)]
    found = np.concatenate([tensor.array for tensor in together])
    one_by_one = np.concatenate([tensor.array for tensor in alone if tensor is not None])
    np.testing.assert_allclose(found, one_by_one, rtol=1e-5)


def test_bytes_that_are_not_text_fail_alone_with_their_position(client: triton.InferenceServerClient) -> None:
    bad = client.async_infer("detect_language", _texts(b"Stra\xdfe"))
    good = client.async_infer("detect_language", _texts("Guten Morgen, wie geht es dir?"))
    with pytest.raises(InferenceServerException, match=r"TEXT is not UTF-8: .* at byte 4") as raised:
        bad.get_result()
    assert raised.value.status() == "400"
    assert good.get_result().as_numpy("LANGUAGE")[0, 0] == b"de"
