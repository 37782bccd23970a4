"""Cuts a line of digits, each 8 columns wide, into pictures of one digit, and leaves out the blanks between them.

Every digit is sent as soon as it is cut out: whoever reads digits begins before the line is at its end. `send` waits
while those who read are behind, so that a line may be as long as it likes.
"""

import numpy as np
import triton_python_backend_utils as pb_utils

SIZE = 8


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            line = pb_utils.get_input_tensor_by_name(request, "LINE").as_numpy()[0]
            for column in range(0, line.shape[1] - SIZE + 1, SIZE):
                if sender.is_cancelled():
                    break
                pixels = line[:, column : column + SIZE]
                if pixels.any():
                    sender.send(
                        pb_utils.InferenceResponse(
                            [
                                pb_utils.Tensor("PIXELS", pixels[np.newaxis].copy()),
                                pb_utils.Tensor("COLUMN", np.array([[column]], np.int64)),
                            ]
                        )
                    )
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
