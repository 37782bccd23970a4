import os
from typing import Dict, List

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: Dict[str, str]) -> None:
        self.path = os.path.join(args["model_repository"], args["model_version"])
        assert os.path.isdir(self.path)

    def execute(self, requests) -> "List[List[pb_utils.Tensor]]":
        responses = []
        for request in requests:
            query = [t.decode("UTF-8") for t in pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().tolist()]
            ids = [[len(word) for word in text.split()] for text in query]
            longest = max(map(len, ids))
            padded = np.array([one + [0] * (longest - len(one)) for one in ids])
            tokens = {"input_ids": padded.astype(np.int32), "attention_mask": (padded > 0).astype(np.int32)}
            outputs = [pb_utils.Tensor(name, array) for name, array in tokens.items()]
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
