import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        try:
            raise ValueError("bad picture")
        except Exception as e:
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(repr(e))) for _ in requests]
