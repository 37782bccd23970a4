import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.seqs = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            wav = pb_utils.get_input_tensor_by_name(request, "wav").as_numpy()[0]
            in_start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()
            in_ready = pb_utils.get_input_tensor_by_name(request, "READY").as_numpy()
            in_corrid = pb_utils.get_input_tensor_by_name(request, "CORRID").as_numpy()
            in_end = pb_utils.get_input_tensor_by_name(request, "END").as_numpy()
            start, ready, corrid, end = in_start[0][0], in_ready[0][0], in_corrid[0][0], in_end[0][0]
            if start:
                self.seqs[corrid] = []
            if ready:
                self.seqs[corrid].extend(wav.tolist())
            speech = np.resize(np.array(self.seqs[corrid], np.float32), (1, 4, 2))
            lengths = np.array([[len(self.seqs[corrid])]], np.int32)
            if end:
                del self.seqs[corrid]
            responses.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("speech", speech), pb_utils.Tensor("speech_lengths", lengths)]
                )
            )
        return responses
