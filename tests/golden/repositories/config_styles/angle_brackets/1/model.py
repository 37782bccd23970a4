import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        assert json.loads(args["model_config"])["parameters"]["long"]["string_value"] == "abc"

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy() + 1)]) for request in requests
        ]
