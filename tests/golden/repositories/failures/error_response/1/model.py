import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for i, request in enumerate(requests):
            error = pb_utils.TritonError("An Error Occurred")
            responses.append(pb_utils.InferenceResponse(output_tensors=[], error=error))
        return responses
