import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceRequest(model_name="add", requested_output_names=["Y"], inputs=r.inputs()).exec()
            for r in requests
        ]
