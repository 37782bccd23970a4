import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.conf = float(json.loads(args["model_config"])["parameters"]["conf"]["string_value"])

    def execute(self, requests):
        responses = []
        for request in requests:
            raw = pb_utils.get_input_tensor_by_name(request, "INPUT_0").as_numpy()
            shape = pb_utils.get_input_tensor_by_name(request, "ORIG_SHAPE").as_numpy()
            count = 2
            boxes = np.repeat(raw[:, :4, :1].transpose(0, 2, 1), count, axis=1) * shape.max()
            scores = np.full((len(raw), count), 0.5, np.float32)
            classes = np.argmax(raw[:, 4:, :count], axis=1).astype(np.int32)
            number = np.full((len(raw), 1), count, np.int32)
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("num_detections", number),
                        pb_utils.Tensor("detection_boxes", boxes.astype(np.float32)),
                        pb_utils.Tensor("detection_scores", scores),
                        pb_utils.Tensor("detection_classes", classes),
                    ]
                )
            )
        return responses
