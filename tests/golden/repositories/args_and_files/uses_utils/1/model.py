import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        kinds = ["TYPE_BOOL", "TYPE_UINT8", "TYPE_INT64", "TYPE_FP16", "TYPE_FP64", "TYPE_STRING"]
        self.info = {
            "types": {kind: str(pb_utils.triton_string_to_numpy(kind)) for kind in kinds},
            "input": pb_utils.get_input_config_by_name(config, "X"),
            "none": pb_utils.get_output_config_by_name(config, "nothing"),
            "decoupled": pb_utils.using_decoupled_model_transaction_policy(config),
            "serialized": str(type(pb_utils.serialize_byte_tensor(np.array([b"ab", b"c"], object))).__name__),
            "read": [s.decode() for s in pb_utils.deserialize_bytes_tensor(bytes.fromhex("020000006162"))],
            "final": pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            "flags": [pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END],
            "memory": [str(pb_utils.TRITONSERVER_MEMORY_CPU), str(pb_utils.TRITONSERVER_MEMORY_GPU)],
            "tensor": repr(pb_utils.Tensor("a", np.zeros(1, np.float32)).is_cpu()),
        }

    def execute(self, requests):
        text = json.dumps(self.info, sort_keys=True, default=str)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("INFO", np.array([text], object))]) for r in requests]
