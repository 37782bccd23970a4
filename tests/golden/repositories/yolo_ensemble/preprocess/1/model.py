import struct

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            images, shapes = [], []
            for raw in in_0:
                width, height = struct.unpack(">II", raw[16:24].tobytes())
                shapes.append((height, width))
                images.append(np.resize(raw.astype(np.float32) / 255, (3, 16, 16)))
            responses.append(
                pb_utils.InferenceResponse(
                    output_tensors=[
                        pb_utils.Tensor("OUTPUT", np.stack(images)),
                        pb_utils.Tensor("ORIG_SHAPE", np.array(shapes, np.int32)),
                    ]
                )
            )
        return responses
