import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0]
            calls = [
                pb_utils.InferenceRequest(model_name="add", requested_output_names=["Y"], inputs=[x]).async_exec()
                for _ in range(4)
            ]
            answers = await asyncio.gather(*calls)
            for one in answers:
                if one.has_error():
                    raise pb_utils.TritonModelException(one.error().message())
            total = sum(pb_utils.get_output_tensor_by_name(one, "Y").as_numpy() for one in answers)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", total)]))
        return responses
