import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def call(self, model, inputs, outputs=("Y",), **more):
        try:
            response = pb_utils.InferenceRequest(
                model_name=model, requested_output_names=list(outputs), inputs=inputs, **more
            ).exec()
            return response.error().message() if response.has_error() else "answered"
        except Exception as e:
            return [type(e).__name__, str(e).split("\n")[0]]

    def execute(self, requests):
        out = []
        for r in requests:
            x = r.inputs()[0].as_numpy()
            two = np.ones((2, 3), np.float32)
            told = {
                "too_many_rows": self.call("add", [pb_utils.Tensor("X", np.ones((5, 3), np.float32))]),
                "other_type": self.call("add", [pb_utils.Tensor("X", two.astype(np.float64))]),
                "other_rank": self.call("add", [pb_utils.Tensor("X", two[0])]),
                "other_name": self.call("add", [pb_utils.Tensor("Z", two)]),
                "other_output": self.call("add", [pb_utils.Tensor("X", two)], ("Q",)),
                "no_version": self.call("add", [pb_utils.Tensor("X", two)], model_version=9),
                "decoupled_once": self.call("many", [pb_utils.Tensor("X", two[0])]),
                "no_inputs": self.call("add", []),
            }
            text = json.dumps(told, sort_keys=True)
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("INFO", np.array([[text]] * len(x), object))]))
        return out
