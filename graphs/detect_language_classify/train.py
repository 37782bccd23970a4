"""Trains this model and writes its model.onnx, and languages.txt beside the step that needs it.

    python graphs/detect_language_classify/train.py

Decided here: how sentences.txt and words.txt become training text (whole sentences, pieces of them, so that short texts
work too, and frequent words in any order), the network (the mean of the tokens' vectors, then two dense layers), and
how the ONNX file finds each text's tokens in the list of a whole batch. Seeded; under a minute. Needs numpy and onnx.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np

GRAPHS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(GRAPHS)]

from training import Dense, Floats, Network, TensorProto, Writer, train  # noqa: E402

SEED = 20263
HELD_OUT = 8
PIECES = 12
WORD_SALADS = 800
EPOCHS = 12
VECTOR = 24


def tokeniser() -> types.ModuleType:
    """The tokenising step itself, so that training sees what serving sees."""
    sys.modules.setdefault("triton_python_backend_utils", types.ModuleType("triton_python_backend_utils"))
    spec = importlib.util.spec_from_file_location("tokenise", GRAPHS / "detect_language_tokenise" / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOKENISE = tokeniser()


def sentences() -> dict[str, list[str]]:
    """The sentences of each language, in the order of the file."""
    found: dict[str, list[str]] = {}
    for line in (Path(__file__).parent / "sentences.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            language = line.strip("[]")
            found[language] = []
        elif line and not line.startswith("#"):
            found[language].append(line)
    return found


def words() -> dict[str, list[str]]:
    """Frequent words of each language."""
    lines = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").splitlines()
    return {line[1:3]: line[4:].split() for line in lines if line.startswith("[")}


def frequencies(texts: list[str]) -> Floats:
    """How often each token is in each text, as a fraction: [texts, 1 + BUCKETS]."""
    table = np.zeros((len(texts), 1 + TOKENISE.BUCKETS), np.float32)
    for row, text in zip(table, texts, strict=True):
        tokens = TOKENISE.tokens_of(text)
        np.add.at(row, tokens, np.float32(1 / max(1, len(tokens))))
    return table


def pieces(rng: np.random.Generator, lines: list[str], frequent: list[str]) -> list[str]:
    """Sentences, two in a row, a few words out of one, and frequent words in any order."""
    made = list(lines)
    made += [" ".join(rng.choice(frequent, rng.integers(1, 6))) for _ in range(WORD_SALADS)]
    for line in lines:
        words = line.split()
        for _ in range(PIECES):
            length = int(rng.integers(2, len(words) + 1))
            start = int(rng.integers(0, len(words) - length + 1))
            made.append(" ".join(words[start : start + length]))
        made.append(f"{line} {rng.choice(lines)}")
    return made


def bags(out: Writer) -> str:
    """How often each token is in each text, [texts, 1 + BUCKETS], of the one list TOKENS in which text after text has
    LENGTHS places. Token 0 fills a request's shorter texts up and counts for nothing.
    """
    zero, one = out.constant(np.array(0, np.int64)), out.constant(np.array(1, np.int64))
    tokens = out.node("Cast", "TOKENS", to=TensorProto.INT64)
    places, texts = out.node("Shape", "TOKENS"), out.node("Shape", "LENGTHS")
    # A 1 where a text begins (2 where an empty one begins there, too): the running total is the number of the text.
    # The last text may be empty and begin behind the last token, so that there is a place more.
    starts = out.node("CumSum", out.node("Cast", "LENGTHS", to=TensorProto.INT64), zero, exclusive=1)
    marks = out.node("Expand", zero, out.node("Add", places, one))
    marks = out.node("ScatterElements", marks, starts, out.node("Expand", one, texts), axis=0, reduction="add")
    number = out.node("Slice", out.node("CumSum", marks, zero), out.ints(0), places, out.ints(0))
    text = out.node("Sub", number, one)
    # One sum for each (text, token). Each has its own elements only: an answer does not depend on its neighbours.
    width = out.ints(1 + TOKENISE.BUCKETS)
    where = out.node("Add", out.node("Mul", text, width), tokens)
    used = out.node("Cast", out.node("Greater", tokens, zero), to=TensorProto.FLOAT)
    nothing = out.node("Expand", out.constant(np.array(0, np.float32)), out.node("Mul", texts, width))
    counts = out.node("ScatterElements", nothing, where, used, axis=0, reduction="add")
    return out.node("Reshape", counts, out.node("Concat", texts, width, axis=0))


def export(network: Network, languages: list[str]) -> None:
    out = Writer()
    counts = bags(out)
    total = out.node("ReduceSum", counts, out.ints(1), keepdims=1)
    shares = out.node("Div", counts, out.node("Max", total, out.constant(np.array(1, np.float32))))
    out.node("Softmax", out.network(network, shares), axis=1, output="PROBABILITIES")
    out.save(
        GRAPHS / "detect_language_classify" / "1" / "model.onnx",
        "detect_language_classify",
        {"TOKENS": (TensorProto.INT32, ["tokens"]), "LENGTHS": (TensorProto.INT32, ["texts"])},
        {"PROBABILITIES": (TensorProto.FLOAT, ["texts", len(languages)])},
    )
    names = GRAPHS / "detect_language_label" / "1" / "languages.txt"
    names.write_text("\n".join(languages) + "\n", encoding="utf-8")


def main() -> None:
    rng = np.random.default_rng(SEED)
    lines = sentences()
    languages, frequent = list(lines), words()
    seen = [
        (text, i) for i, name in enumerate(languages) for text in pieces(rng, lines[name][:-HELD_OUT], frequent[name])
    ]
    unseen = [(text, i) for i, name in enumerate(languages) for text in lines[name][-HELD_OUT:]]
    network = Network(
        [],
        [Dense(rng, 1 + TOKENISE.BUCKETS, VECTOR), Dense(rng, VECTOR, 24), Dense(rng, 24, len(languages), relu=False)],
    )
    texts, labels = zip(*seen, strict=True)
    train(network, frequencies(list(texts)), np.array(labels), rng, epochs=EPOCHS, rate=1e-2)
    answers = np.array([i for _, i in unseen])
    for most, name in ((1000, "whole sentences"), (3, "first three words")):
        right = network.predict(frequencies([" ".join(text.split()[:most]) for text, _ in unseen])) == answers
        print(f"held-out accuracy, {name}: {right.mean():.4f} ({int(right.sum())} of {len(right)})")
    export(network, languages)


if __name__ == "__main__":
    main()
