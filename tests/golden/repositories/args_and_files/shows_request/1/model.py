import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        out = []
        for one in requests:
            x = pb_utils.get_input_tensor_by_name(one, "X")
            info = {
                "id": one.request_id(),
                "corrid": one.correlation_id(),
                "flags": one.flags(),
                "timeout": one.timeout(),
                "outputs": sorted(one.requested_output_names()),
                "parameters": json.loads(one.parameters()),
                "cancelled": one.is_cancelled(),
                "inputs": [tensor.name() for tensor in one.inputs()],
                "dtype": str(x.triton_dtype()),
                "missing": pb_utils.get_input_tensor_by_name(one, "NONE") is None,
                "writeable": x.as_numpy().flags.writeable,
            }
            rows = len(x.as_numpy())
            text = json.dumps(info, sort_keys=True)
            out.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("INFO", np.array([[text]] * rows, object)), pb_utils.Tensor("OTHER", x.as_numpy())],
                    parameters={"s": "text", "i": 3, "b": True},
                )
            )
        return out
