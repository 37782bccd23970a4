import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        out = []
        for one in requests:
            a = pb_utils.get_input_tensor_by_name(one, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(one, "B").as_numpy()
            out.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", a - 2 * b)]))
        return out
