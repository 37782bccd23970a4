import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("N", np.full((len(r.inputs()[0].as_numpy()) if r.inputs() else 1, 1), len(r.inputs()), np.int32))]
            )
            for r in requests
        ]
