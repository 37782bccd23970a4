import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.texts = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            probs = pb_utils.get_input_tensor_by_name(request, "log_probs").as_numpy()
            lens = pb_utils.get_input_tensor_by_name(request, "chunk_out_lens").as_numpy()
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()
            corrid = pb_utils.get_input_tensor_by_name(request, "CORRID").as_numpy()
            end = pb_utils.get_input_tensor_by_name(request, "END").as_numpy()
            key = int(corrid.ravel()[0])
            if start.ravel()[0]:
                self.texts[key] = ""
            self.texts[key] += f"{probs.shape}{lens.shape}{start.dtype}{start.shape}{end.dtype}{end.shape}{corrid.dtype}"
            sents = np.array([self.texts[key]])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", sents.astype(np.object_))]))
        return responses
