import json
from typing import List

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        model_config = json.loads(args["model_config"])
        special = model_config["parameters"].get("add_special_tokens")
        self.special = special["string_value"].lower() in ["true", "1", "yes"]
        input_names = ["END_ID"]
        for name in input_names:
            setattr(self, name.lower() + "_dtype", pb_utils.triton_string_to_numpy(
                pb_utils.get_input_config_by_name(model_config, name)["data_type"]))
        output_names = ["INPUT_ID", "REQUEST_INPUT_LEN", "REQUEST_OUTPUT_LEN", "OUT_END_ID"]
        for name in output_names:
            setattr(self, name.lower() + "_dtype", pb_utils.triton_string_to_numpy(
                pb_utils.get_output_config_by_name(model_config, name)["data_type"]))

    def execute(self, requests: List):
        responses = []
        for request in requests:
            query = pb_utils.get_input_tensor_by_name(request, "QUERY").as_numpy()
            batch_size = query.shape[0]
            output_len = pb_utils.get_input_tensor_by_name(request, "REQUEST_OUTPUT_LEN").as_numpy()
            end_id = pb_utils.get_input_tensor_by_name(request, "END_ID")
            end_id = end_id.as_numpy() if end_id is not None else [[2]] * batch_size
            words = pb_utils.get_input_tensor_by_name(request, "BAD_WORDS_DICT")
            extra = 0 if words is None else words.as_numpy().shape[1]
            ids = [[ord(c) % 97 for c in s[0].decode()[:6]] for s in query]
            longest = max(map(len, ids))
            lengths = np.array([[len(one) + extra] for one in ids], self.request_input_len_dtype)
            padded = np.array([one + [0] * (longest - len(one)) for one in ids], self.input_id_dtype)
            responses.append(pb_utils.InferenceResponse(output_tensors=[
                pb_utils.Tensor("INPUT_ID", padded),
                pb_utils.Tensor("REQUEST_INPUT_LEN", lengths),
                pb_utils.Tensor("REQUEST_OUTPUT_LEN", output_len),
                pb_utils.Tensor("OUT_END_ID", np.array(end_id, dtype=self.out_end_id_dtype)),
            ]))
        return responses

    def finalize(self):
        print("Cleaning up...")
