import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.get_input_tensor_by_name(requests[0], "NOT_THERE").as_numpy()]
