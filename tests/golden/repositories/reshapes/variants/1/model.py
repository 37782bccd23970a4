import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        out = []
        for r in requests:
            arrays = {n: pb_utils.get_input_tensor_by_name(r, n).as_numpy() for n in ("S", "F", "V", "T")}
            shapes = str({n: a.shape for n, a in arrays.items()})
            tensors = [pb_utils.Tensor("O" + n, a) for n, a in arrays.items()]
            tensors.append(pb_utils.Tensor("SHAPES", np.array([[shapes]] * len(arrays["F"]), object)))
            out.append(pb_utils.InferenceResponse(tensors))
        return out
