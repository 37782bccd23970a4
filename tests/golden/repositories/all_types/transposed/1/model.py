import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        out = []
        for one in requests:
            x = one.inputs()[0].as_numpy()
            out.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("Y", x.transpose(0, 2, 1)), pb_utils.Tensor("S", x[:, ::2, 1])]
                )
            )
        return out
