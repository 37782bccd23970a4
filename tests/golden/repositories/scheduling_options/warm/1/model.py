import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.seen = []

    def execute(self, requests):
        out = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "X").as_numpy()
            t = pb_utils.get_input_tensor_by_name(r, "T").as_numpy()
            if len(self.seen) < 8:
                self.seen.append((x.shape, t.ravel().tolist()))
            n = len([one for one in self.seen if one[0][1] != 4])
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("N", np.full((len(x), 1), n, np.int32))]))
        return out
