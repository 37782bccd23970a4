import json
import sys
import traceback
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(__file__).parent))
from lib.decode import call


class TritonPythonModel:
    def initialize(self, args):
        self.params = json.loads(args["model_config"])["parameters"]
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.logger = pb_utils.Logger

    def execute(self, requests):
        responses = []
        for request in requests:
            if self.decoupled:
                response_sender = request.get_response_sender()
            try:
                text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
                tokens = pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy()
                if text.shape[0] != 1:
                    raise Exception("tensorrt_llm_bls takes one prompt at a time")
                first = call("preprocessing", ["INPUT_ID", "REQUEST_INPUT_LEN", "REQUEST_OUTPUT_LEN"],
                             QUERY=text, REQUEST_OUTPUT_LEN=tokens)
                made = call(self.params["tensorrt_llm_model_name"]["string_value"], ["output_ids", "sequence_length"],
                            input_ids=first["INPUT_ID"], input_lengths=first["REQUEST_INPUT_LEN"],
                            request_output_len=first["REQUEST_OUTPUT_LEN"])
                out = call("postprocessing", ["OUTPUT"], TOKENS_BATCH=made["output_ids"],
                           SEQUENCE_LENGTH=made["sequence_length"])
                for _ in range(2):
                    response_sender.send(
                        pb_utils.InferenceResponse([pb_utils.Tensor("text_output", out["OUTPUT"])]))
                response_sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception:
                self.logger.log_error(traceback.format_exc())
                message = traceback.format_exc().strip().splitlines()[-1]
                error = pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message))
                response_sender.send(error)
                response_sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
