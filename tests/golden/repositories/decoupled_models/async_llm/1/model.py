import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.logger = pb_utils.Logger
        self.kind = args["model_instance_kind"]

    async def execute(self, requests):
        await asyncio.gather(*(self.generate(one) for one in requests))
        return None

    async def generate(self, request):
        sender = request.get_response_sender()
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0]
        prompt = prompt.decode("utf-8") if isinstance(prompt, bytes) else prompt
        for i in range(3):
            if sender.is_cancelled():
                break
            await asyncio.sleep(0.001)
            out = np.asarray([f"{prompt[:4]}{i}{self.kind}"], dtype=np.object_)
            sender.send(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", out)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
