import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, x = request.get_response_sender(), request.inputs()[0].as_numpy()
            for n in range(2):
                response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x + n)])
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if n else 0)
        return None
