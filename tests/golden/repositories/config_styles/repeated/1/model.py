import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.k = int(json.loads(args["model_config"])["parameters"]["k"]["string_value"])

    def execute(self, requests):
        out = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in "AB")
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", a + b + self.k)]))
        return out
