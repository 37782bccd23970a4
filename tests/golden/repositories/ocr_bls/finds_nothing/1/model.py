import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("boxes", np.zeros((0, 4), np.float32)), pb_utils.Tensor("texts", np.array([], dtype=object))]
            )
            for _ in requests
        ]
