import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        floats = np.array([np.pi, 1e-30, 3.4e38, -0.0, 16777217], np.float32)
        doubles = np.array([np.pi, 1e-300, 1.7e308, 0.1 + 0.2], np.float64)
        texts = np.array(["ü", 'a"b\\c\n\t', "", "\u20ac" * 3, "\x01"], object)
        numbers = np.array([2**63 - 1, -(2**63), 0], np.int64)
        tensors = [("F", floats), ("D", doubles), ("T", texts), ("L", numbers), ("E", np.empty((0,), np.float32))]
        return [pb_utils.InferenceResponse([pb_utils.Tensor(n, a) for n, a in tensors]) for _ in requests]
