import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def letterbox(image):
        return np.resize(image.transpose(2, 0, 1), (1, 3, 16, 16)).astype(np.float32) / 255.0

    def execute(self, requests):
        responses = []
        for request in requests:
            image = pb_utils.get_input_tensor_by_name(request, "raw").as_numpy()
            tensor = pb_utils.Tensor("images", self.letterbox(image))
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses
