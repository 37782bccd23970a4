import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            image = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()
            pixels = np.resize(image.astype(np.float32), (image.shape[0], 3, 8, 8))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("pixels", pixels)]))
        return responses
