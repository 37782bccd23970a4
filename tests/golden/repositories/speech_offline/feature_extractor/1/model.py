import json

import numpy as np
import triton_python_backend_utils as pb_utils


class Fbank:
    """Mean energies of fixed-size frames."""

    def __init__(self, bins, shift):
        self.bins, self.shift = bins, shift

    def __call__(self, wav):
        frames = max(1, len(wav) // self.shift)
        padded = np.resize(wav, frames * self.bins)
        return np.abs(padded).reshape(frames, self.bins).astype(np.float32)


class TritonPythonModel:
    def initialize(self, args):
        self.model_config = model_config = json.loads(args["model_config"])
        self.max_batch_size = max(model_config["max_batch_size"], 1)
        output0_config = pb_utils.get_output_config_by_name(model_config, "speech")
        self.output0_dtype = pb_utils.triton_string_to_numpy(output0_config["data_type"])
        self.feature_size = output0_config["dims"][-1]
        output1_config = pb_utils.get_output_config_by_name(model_config, "speech_lengths")
        self.output1_dtype = pb_utils.triton_string_to_numpy(output1_config["data_type"])
        params = self.model_config["parameters"]
        shift = 1
        for li in params.items():
            key, value = li
            value = value["string_value"]
            if key == "frame_shift_in_ms":
                shift = int(value) // 5
        self.fbank = Fbank(self.feature_size, shift)

    def execute(self, requests):
        total_waves, batch_count, responses = [], [], []
        for request in requests:
            wav = pb_utils.get_input_tensor_by_name(request, "wav").as_numpy()
            lens = pb_utils.get_input_tensor_by_name(request, "wav_lens").as_numpy()
            batch_count.append(wav.shape[0])
            for one, length in zip(wav, lens):
                total_waves.append(one[: max(int(length[0]), 1)])
        features = [self.fbank(one) for one in total_waves]
        start = 0
        for count in batch_count:
            chunk = features[start : start + count]
            start += count
            longest = max(len(one) for one in chunk)
            speech = np.zeros((count, longest, self.feature_size), dtype=self.output0_dtype)
            lengths = np.zeros((count, 1), dtype=self.output1_dtype)
            for i, one in enumerate(chunk):
                speech[i, : len(one)] = one
                lengths[i, 0] = len(one)
            out0 = pb_utils.Tensor("speech", speech)
            out1 = pb_utils.Tensor("speech_lengths", lengths)
            responses.append(pb_utils.InferenceResponse(output_tensors=[out0, out1]))
        return responses

    def finalize(self):
        print("Cleaning up...")
