import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(self.config)
        self.logger = pb_utils.Logger

    def _encode(self, mel):
        request = pb_utils.InferenceRequest(
            model_name="encoder", requested_output_names=["hidden"], inputs=[pb_utils.Tensor("mel", mel)]
        )
        response = request.exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.get_output_tensor_by_name(response, "hidden").as_numpy()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            wav = pb_utils.get_input_tensor_by_name(request, "WAV").as_numpy()
            prefix = pb_utils.get_input_tensor_by_name(request, "TEXT_PREFIX")
            prefix = "" if prefix is None else prefix.as_numpy().tolist()[0][0].decode("utf-8")
            self.logger.log_info(f"{len(requests)} requests")
            try:
                hidden = self._encode(np.resize(wav, (wav.shape[0], 80, 4)).astype(np.float16))
                for i in range(3):
                    text = f"{prefix}|{i}|{hidden.shape}|{hidden.dtype}|{float(hidden.sum()):.2f}"
                    sender.send(
                        pb_utils.InferenceResponse(
                            output_tensors=[pb_utils.Tensor("TRANSCRIPTS", np.array([text] * len(wav), dtype=np.object_)[:, None])]
                        )
                    )
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception as e:
                self.logger.log_error(str(e))
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(e))))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    def finalize(self):
        print("Cleaning up...")
