import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
            lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
            logits = pb_utils.get_input_tensor_by_name(request, "CONTEXT_LOGITS")
            outputs = []
            for batch_idx, beams in enumerate(tokens):
                for beam_idx, ids in enumerate(beams):
                    outputs.append(f"{ids.tolist()}:{lengths[batch_idx][beam_idx]}".encode("utf8"))
            tensors = [pb_utils.Tensor("OUTPUT", np.array(outputs).astype(np.object_))]
            if logits is not None:
                tensors.append(pb_utils.Tensor("OUT_CONTEXT_LOGITS", logits.as_numpy()))
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
