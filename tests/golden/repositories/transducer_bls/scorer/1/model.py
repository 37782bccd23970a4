import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.model_config = model_config = json.loads(args["model_config"])
        self.max_batch_size = max(model_config["max_batch_size"], 1)
        parameters = model_config["parameters"]
        self.context_size = int(parameters["context_size"]["string_value"])
        here = os.path.dirname(os.path.abspath(__file__))
        with open(os.path.join(here, parameters["tokens_file"]["string_value"])) as lines:
            self.tokens = lines.read().split()

    def forward_decoder(self, hyps):
        y = np.array([one[-self.context_size :] for one in hyps], dtype=np.int64)
        request = pb_utils.InferenceRequest(
            model_name="decoder",
            requested_output_names=["decoder_out"],
            inputs=[pb_utils.Tensor("y", y)],
        )
        response = request.exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.get_output_tensor_by_name(response, "decoder_out").as_numpy()

    def forward_joiner(self, encoder_out, decoder_out):
        request = pb_utils.InferenceRequest(
            model_name="joiner",
            requested_output_names=["logit"],
            inputs=[pb_utils.Tensor("encoder_out", encoder_out), pb_utils.Tensor("decoder_out", decoder_out)],
        )
        response = request.exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.get_output_tensor_by_name(response, "logit").as_numpy()

    def greedy(self, encoder_out, lens):
        hyps = [[0] * self.context_size for _ in range(len(encoder_out))]
        for t in range(int(lens.max())):
            decoder_out = self.forward_decoder(hyps)
            logits = self.forward_joiner(np.ascontiguousarray(encoder_out[:, t % encoder_out.shape[1]]), decoder_out)
            for i, choice in enumerate(np.round(logits.sum(axis=1)).astype(int) % len(self.tokens)):
                if choice:
                    hyps[i].append(int(choice))
        return ["".join(self.tokens[j] for j in one[self.context_size :]) for one in hyps]

    def execute(self, requests):
        responses = []
        for request in requests:
            out = pb_utils.get_input_tensor_by_name(request, "encoder_out").as_numpy()
            lens = pb_utils.get_input_tensor_by_name(request, "encoder_out_lens").as_numpy()
            sentences = np.array(self.greedy(out, lens + 2))
            responses.append(
                pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUTPUT0", sentences.astype(np.object_))])
            )
        return responses
