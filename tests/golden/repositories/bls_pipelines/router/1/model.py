import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self.targets = {key: value["string_value"] for key, value in parameters.items()}

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            target = pb_utils.get_input_tensor_by_name(request, "TARGET")
            name = self.targets["stable"]
            if target is not None and target.as_numpy().flat[0].decode() in self.targets:
                name = self.targets[target.as_numpy().flat[0].decode()]
            answer = pb_utils.InferenceRequest(
                model_name=name, requested_output_names=["Y"], inputs=[x], request_id=request.request_id()
            ).exec()
            if answer.has_error():
                error = pb_utils.TritonError(f"router -> {name}: {answer.error().message()}")
                responses.append(pb_utils.InferenceResponse(output_tensors=[], error=error))
                continue
            used = np.array([[name.encode()]] * len(x.as_numpy()), object)
            responses.append(
                pb_utils.InferenceResponse(list(answer.output_tensors()) + [pb_utils.Tensor("USED", used)])
            )
        return responses
