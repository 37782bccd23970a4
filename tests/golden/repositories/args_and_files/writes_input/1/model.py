import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        out = []
        for one in requests:
            x = one.inputs()[0].as_numpy()
            x += 1
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
        return out
