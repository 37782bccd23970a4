import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for n in range(3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy() + n)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
