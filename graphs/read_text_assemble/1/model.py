"""Probabilities and layout -> text.

Decided here: the most probable character at each place wins, where words part, and how sure the whole is. The
characters are listed in characters.txt, one a line in the order of the probabilities, written by the script that
trained the recogniser.
"""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

# Gaps wider than this fraction of the line's height are spaces.
SPACE = 0.265
# Most fonts make digits equally wide, which leaves air around the slim one.
AIR_OF_ONE = 0.15


def assemble(probabilities: np.ndarray, layout: np.ndarray, characters: list[str]) -> tuple[str, float]:
    """The text of one picture, and the probability of its least certain character (1.0 where there is none). Another
    picture of the request may have more characters: the first rows of `probabilities` are those of this one.
    """
    layout = layout[layout[:, 0] >= 0]
    probabilities = probabilities[: len(layout)]
    text, last, last_line = "", "", 0.0
    for best, (line, gap) in zip(probabilities.argmax(axis=1).tolist(), layout.tolist(), strict=True):
        now = characters[best]
        if line != last_line:
            text += "\n"
        elif gap > (SPACE + AIR_OF_ONE if last == "1" or now == "1" else SPACE):
            text += " "
        text += now
        last, last_line = now, line
    return text, float(probabilities.max(axis=1).min(initial=1.0))


class TritonPythonModel:
    def initialize(self, args):
        self.characters = Path(__file__).with_name("characters.txt").read_text(encoding="utf-8").splitlines()

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        probabilities = pb_utils.get_input_tensor_by_name(request, "PROBABILITIES").as_numpy()
        layout = pb_utils.get_input_tensor_by_name(request, "LAYOUT").as_numpy()
        read = [assemble(*each, self.characters) for each in zip(probabilities, layout, strict=True)]
        texts = np.array([[text.encode()] for text, _ in read], np.object_)
        confidence = np.array([[sure] for _, sure in read], np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", texts), pb_utils.Tensor("CONFIDENCE", confidence)])
