"""Trains language_of_text and writes its model.savedmodel.

    python graphs/.tensorflow/language_of_text/train.py

Decided here: the text of a request goes through TensorFlow's own operations (lower case, characters, runs of one to
three of them, hashes), a mean of vectors and a dense layer, all in one file. It is trained on the same sentences as
detect_language. Seeded; under a minute. Needs tensorflow-cpu.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

GRAPHS = Path(__file__).resolve().parents[2]
SEED = 20264
BUCKETS = 2048
VECTOR = 24
EPOCHS = 15
ROWS = 64
LONGEST = 2000  # characters of a text that count


def neighbour() -> types.ModuleType:
    """The training script of detect_language_classify, whose sentences and pieces of sentences are used."""
    spec = importlib.util.spec_from_file_location("classify", GRAPHS / "detect_language_classify" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["classify"] = module
    spec.loader.exec_module(module)
    return module


class LanguageOfText(tf.Module):
    def __init__(self, languages: list[str]) -> None:
        super().__init__()
        generator = tf.random.Generator.from_seed(SEED)
        self.vectors = tf.Variable(generator.normal((BUCKETS, VECTOR), stddev=0.1))
        self.weights = tf.Variable(generator.normal((VECTOR, len(languages)), stddev=0.3))
        self.biases = tf.Variable(tf.zeros(len(languages)))
        self.languages = tf.constant(languages)

    def logits(self, texts: tf.Tensor) -> tf.Tensor:
        """[texts] of UTF-8, invalid characters left out -> [texts, languages]."""
        letters = tf.strings.regex_replace(tf.strings.lower(texts, encoding="utf-8"), r"[\PL]+", " ")
        letters = tf.strings.substr(" " + letters + " ", 0, LONGEST, unit="UTF8_CHAR")
        characters = tf.strings.unicode_split(letters, "UTF-8", errors="ignore")
        runs = tf.strings.ngrams(characters, [1, 2, 3], separator="")
        buckets = tf.strings.to_hash_bucket_fast(runs, BUCKETS)
        means = tf.reduce_mean(tf.gather(self.vectors, buckets), axis=1)
        return means @ self.weights + self.biases

    @tf.function(input_signature=[tf.TensorSpec([None, 1], tf.string, name="TEXT")])
    def serve(self, TEXT: tf.Tensor) -> dict[str, tf.Tensor]:
        shares = tf.nn.softmax(self.logits(TEXT[:, 0]))
        best = tf.argmax(shares, axis=1)
        return {
            "LANGUAGE": tf.gather(self.languages, best)[:, None],
            "PROBABILITY": tf.reduce_max(shares, axis=1, keepdims=True),
        }


def main() -> None:
    tf.config.experimental.enable_op_determinism()
    tf.random.set_seed(SEED)
    data = neighbour()
    rng = np.random.default_rng(SEED)
    lines, frequent = data.sentences(), data.words()
    languages = list(lines)
    seen = [
        (text, i)
        for i, name in enumerate(languages)
        for text in data.pieces(rng, lines[name][: -data.HELD_OUT], frequent[name])
    ]
    unseen = [(text, i) for i, name in enumerate(languages) for text in lines[name][-data.HELD_OUT :]]
    model = LanguageOfText(languages)
    optimiser = tf.keras.optimizers.Adam(1e-2)
    variables = [model.vectors, model.weights, model.biases]
    optimiser.build(variables)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string), tf.TensorSpec([None], tf.int64)])
    def step(texts: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=model.logits(texts))
            )
        gradients = [tf.convert_to_tensor(one) for one in tape.gradient(loss, variables)]
        optimiser.apply_gradients(zip(gradients, variables, strict=True))

    texts, labels = np.array([text for text, _ in seen], object), np.array([i for _, i in seen], np.int64)
    for _ in range(EPOCHS):
        order = rng.permutation(len(texts))
        for start in range(0, len(order), ROWS):
            rows = order[start : start + ROWS]
            step(tf.constant(texts[rows]), tf.constant(labels[rows]))
    answers = tf.argmax(model.logits(tf.constant([text for text, _ in unseen])), axis=1).numpy()
    accuracy = (answers == np.array([i for _, i in unseen])).mean()
    print(f"accuracy on {len(unseen)} unseen sentences: {accuracy:.3f}")
    folder = Path(__file__).parent / "1" / "model.savedmodel"
    tf.saved_model.save(model, str(folder), signatures={"serving_default": model.serve})
    (folder / "fingerprint.pb").unlink(missing_ok=True)  # differs from run to run, and nothing reads it


if __name__ == "__main__":
    main()
