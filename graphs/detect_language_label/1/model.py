"""Probabilities -> names of the likeliest languages, likeliest first.

The languages are listed in languages.txt, one a line in the order of the probabilities, written by the script that
trained the classifier.
"""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

SHOWN = 3


class TritonPythonModel:
    def initialize(self, args):
        names = Path(__file__).with_name("languages.txt").read_text(encoding="utf-8").splitlines()
        self.languages = np.array([name.encode() for name in names], np.object_)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        probabilities = pb_utils.get_input_tensor_by_name(request, "PROBABILITIES").as_numpy()
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, :SHOWN]
        chosen = np.take_along_axis(probabilities, best, axis=1)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("LANGUAGE", self.languages[best]), pb_utils.Tensor("PROBABILITY", chosen)]
        )
