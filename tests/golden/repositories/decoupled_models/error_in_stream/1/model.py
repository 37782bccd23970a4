import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, x = request.get_response_sender(), request.inputs()[0].as_numpy()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x)]))
            sender.send(
                pb_utils.InferenceResponse(error=pb_utils.TritonError("out of memory")),
                flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
        return None
