import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        out = []
        for one in requests:
            x = one.inputs()[0].as_numpy()
            tensors = {"LEFT": x[:, :3], "RIGHT": x[:, 3:], "UNUSED": x[:, :1]}
            wanted = one.requested_output_names()
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor(n, a) for n, a in tensors.items() if n in wanted]))
        return out
