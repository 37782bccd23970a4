"""Calls the models of the pipeline."""

import numpy as np
import triton_python_backend_utils as pb_utils


def call(model, outputs, decoupled=False, **inputs):
    request = pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=outputs,
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
    )
    if decoupled:
        return request.exec(decoupled=True)
    response = request.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return {one.name(): one.as_numpy() for one in response.output_tensors()}
