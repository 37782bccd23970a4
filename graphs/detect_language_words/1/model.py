"""Text -> its language, from frequent words that only one language has, and whether that is certain.

Decided here: a text is certain if it has at least two such words of one language and none of another. words.txt has
them, one language a line: its ISO 639-1 code, then its words.
"""

import re
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

SHOWN = 3
ENOUGH = 2
WORD = re.compile(r"[^\W\d_]+")


class TritonPythonModel:
    def initialize(self, args):
        lines = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines()
        self.languages = np.array([line.split()[0].encode() for line in lines], np.object_)
        self.language_of = {word: number for number, line in enumerate(lines) for word in line.split()[1:]}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        try:
            counts = np.array([self.counts(text.decode()) for text in texts.ravel()])
        except UnicodeDecodeError as error:
            text = f"TEXT is not UTF-8: {error.reason} at byte {error.start}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))
        counts = counts.reshape(len(texts), len(self.languages))
        best = np.argsort(-counts, axis=1, kind="stable")[:, :SHOWN]
        found = np.take_along_axis(counts, best, axis=1)
        shares = ((found + 1e-3) / (counts.sum(axis=1, keepdims=True) + 1e-3 * len(self.languages))).astype(np.float32)
        sure = (found[:, :1] >= ENOUGH) & (found[:, 1:2] == 0)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("LANGUAGE", self.languages[best]),
                pb_utils.Tensor("PROBABILITY", shares),
                pb_utils.Tensor("SURE", sure),
            ]
        )

    def counts(self, text):
        """How many words of each language alone a text has. Its first two thousand characters count."""
        found = [0] * len(self.languages)
        for word in WORD.findall(text[:2000].lower()):
            if word in self.language_of:
                found[self.language_of[word]] += 1
        return found
