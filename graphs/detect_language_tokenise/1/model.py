"""Text -> tokens: hashed runs of one to four characters, as many as the text has.

Decided here: what of a text counts (letters, in lower case; words stand apart), how n-grams become numbers, and that
the texts of one request are filled up to the longest of them: a tensor has no rows of different lengths. The hash is
CRC-32, which is the same on every machine and in every process.
"""

import re
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils

MOST_TOKENS = 512
BUCKETS = 4096
LONGEST = 4
NO_LETTERS = re.compile(r"[\W\d_]+")


def tokens_of(text: str) -> np.ndarray:
    """The tokens of one text: INT32, 1 to BUCKETS, at most MOST_TOKENS; longer texts are cut off."""
    # Twice as many letters as tokens are more than can be used; a megabyte of text costs no more than a page.
    letters = NO_LETTERS.sub(" ", f" {text[: 2 * MOST_TOKENS]} ".lower())
    grams = [
        letters[start : start + length]
        for start in range(len(letters))
        for length in range(1, LONGEST + 1)
        if start + length <= len(letters) and letters[start : start + length] != " "
    ]
    return np.array([1 + zlib.crc32(gram.encode()) % BUCKETS for gram in grams[:MOST_TOKENS]], np.int32)


def padded(lists: list) -> np.ndarray:
    """TOKENS of a request: [texts, longest], 0 where a text has no more."""
    tokens = np.zeros((len(lists), max(map(len, lists), default=0)), np.int32)
    for row, one in zip(tokens, lists, strict=True):
        row[: len(one)] = one
    return tokens


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        try:
            tokens = padded([tokens_of(text.decode()) for text in texts.ravel()])
        except UnicodeDecodeError as error:
            text = f"TEXT is not UTF-8: {error.reason} at byte {error.start}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOKENS", tokens)])
