import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.model_config = json.loads(args["model_config"])
        encoder_config = pb_utils.get_input_config_by_name(self.model_config, "encoder_out")
        self.data_type = pb_utils.triton_string_to_numpy(encoder_config["data_type"])
        self.feature_size = encoder_config["dims"][-1]
        probs = pb_utils.get_input_config_by_name(self.model_config, "beam_log_probs")
        self.beam_size = probs["dims"][-1]
        output0 = pb_utils.get_output_config_by_name(self.model_config, "OUTPUT0")
        self.out0_dtype = pb_utils.triton_string_to_numpy(output0["data_type"])
        for key, value in self.model_config["parameters"].items():
            if key == "vocabulary":
                path = os.path.join(args["model_repository"], value["string_value"])
                with open(path, encoding="utf-8") as lines:
                    self.vocabulary = [line.split()[0] for line in lines]

    def execute(self, requests):
        batch_out, batch_lens, counts = [], [], []
        for request in requests:
            out = pb_utils.get_input_tensor_by_name(request, "encoder_out").as_numpy()
            lens = pb_utils.get_input_tensor_by_name(request, "encoder_out_lens").as_numpy()
            batch_out.append(out)
            batch_lens.append(lens)
            counts.append(lens.shape[0])
        total, longest = sum(counts), max(one.shape[1] for one in batch_out)
        encoder_out = np.zeros((total, longest, self.feature_size), dtype=self.data_type)
        encoder_lens = np.zeros((total, 1), dtype=np.int32)
        start = 0
        for out, lens in zip(batch_out, batch_lens):
            encoder_out[start : start + len(out), : out.shape[1]] = out
            encoder_lens[start : start + len(out), 0] = lens
            start += len(out)
        hyps = np.ones((total, self.beam_size, 5), dtype=np.int64)
        score = np.zeros((total, self.beam_size), dtype=self.data_type)
        inference_request = pb_utils.InferenceRequest(
            model_name="decoder",
            requested_output_names=["best_index"],
            inputs=[
                pb_utils.Tensor("encoder_out", encoder_out),
                pb_utils.Tensor("encoder_out_lens", encoder_lens),
                pb_utils.Tensor("hyps_pad_sos_eos", hyps),
                pb_utils.Tensor("ctc_score", score),
            ],
        )
        inference_response = inference_request.exec()
        if inference_response.has_error():
            raise pb_utils.TritonModelException(inference_response.error().message())
        best = pb_utils.get_output_tensor_by_name(inference_response, "best_index")
        best = best.as_numpy() if best.is_cpu() else None
        texts = ["".join(self.vocabulary[1 + (i + int(best[i][0])) % 3] for _ in range(3)) for i in range(total)]
        responses, start = [], 0
        for count in counts:
            sents = np.array(texts[start : start + count])
            out0 = pb_utils.Tensor("OUTPUT0", sents.astype(self.out0_dtype))
            responses.append(pb_utils.InferenceResponse(output_tensors=[out0]))
            start += count
        return responses

    def finalize(self):
        print("Cleaning up...")
