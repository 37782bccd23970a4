import json

import numpy as np
import triton_python_backend_utils as pb_utils


def tensor_of(array, name="X"):
    return pb_utils.Tensor(name, array)


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]

    def call(self, model, inputs, outputs=("Y",), decoupled=False, **more):
        try:
            request = pb_utils.InferenceRequest(
                model_name=model, requested_output_names=list(outputs), inputs=inputs, **more
            )
            response = request.exec(decoupled=True) if decoupled else request.exec()
            if decoupled:
                return [self.shown(one) for one in response]
            return self.shown(response)
        except Exception as e:
            return [type(e).__name__, str(e).split("\n")[0]]

    @staticmethod
    def shown(response):
        if response.has_error():
            return {"error": response.error().message()}
        return {
            "outputs": {
                t.name(): [t.as_numpy().dtype.name, list(t.as_numpy().shape), t.as_numpy().ravel()[:4].tolist()]
                for t in response.output_tensors()
            },
        }

    def execute(self, requests):
        out = []
        for r in requests:
            x = r.inputs()[0].as_numpy()
            two = np.ones((2, 3), np.float32)
            told = {
                "plain": self.call("add", [tensor_of(x)]),
                "reused": self.call("add", [pb_utils.Tensor.from_dlpack("X", r.inputs()[0].to_dlpack())]),
                "input_itself": self.call("add", [r.inputs()[0]]),
                "two_rows": self.call("add", [tensor_of(two)]),
                "no_outputs": self.call("add", [tensor_of(two)], ()),
                "version": self.call("add", [tensor_of(two)], model_version=1),
                "id": self.call("add", [tensor_of(two)], request_id="abc", correlation_id=3),
                "timeout": self.call("add", [tensor_of(two)], timeout=1000000),
                "preferred": self.call(
                    "add", [tensor_of(two)], preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)
                ),
                    "empty": self.call("add", [tensor_of(np.zeros((1, 0), np.float32))]),
                "fails": self.call("fails", [tensor_of(two)]),
                "many": self.call("many", [tensor_of(two[0])], decoupled=True),
                "one_by_decoupled": self.call("add", [tensor_of(two)], decoupled=True),
            }
            text = json.dumps(told, sort_keys=True)
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("INFO", np.array([[text]] * len(x), object))]))
        return out
