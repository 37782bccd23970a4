"""The `model.py` of a stand-in, which runs in both servers and needs numpy only, or onnxruntime for an ONNX file.

Decides the values of a stand-in's outputs: each row is filled with a number computed of the same row of all inputs, so
that mixed-up rows and inputs are seen. A dimension of -1 is the same dimension of the first input that has it, else 1.
"""

from __future__ import annotations

STAND_IN = '''\
"""Stands in for a model whose file or library is missing."""

import json
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.batches = config["max_batch_size"] > 0
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self.outputs = []
        for one in config["output"]:
            dims = one["reshape"]["shape"] if one.get("reshape") else one["dims"]
            self.outputs.append((one["name"], one["data_type"], [int(n) for n in dims]))

    def execute(self, requests):
        responses = [self.answer(request) for request in requests]
        if not self.decoupled:
            return responses
        for request, response in zip(requests, responses):
            sender = request.get_response_sender()
            sender.send(response)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    def answer(self, request):
        given = sorted(request.inputs(), key=lambda tensor: tensor.name())
        arrays = [tensor.as_numpy() for tensor in given]
        rows = arrays[0].shape[0] if self.batches and arrays else None
        tensors = []
        for name, data_type, dims in self.outputs:
            shape = [self.dimension(n, i, arrays) for i, n in enumerate(dims)]
            if rows is None:
                array = self.filled(data_type, shape, self.number(arrays))
            else:
                numbers = [self.number([a[i] for a in arrays if len(a) == rows]) for i in range(rows)]
                array = np.stack([self.filled(data_type, shape, number) for number in numbers])
            tensors.append(pb_utils.Tensor(name, array))
        return pb_utils.InferenceResponse(tensors)

    def dimension(self, fixed, index, arrays):
        if fixed >= 0:
            return fixed
        index += self.batches
        return next((a.shape[index] for a in arrays if a.ndim > index and a.shape[index] > 0), 1)

    def number(self, arrays):
        """A small number that depends on every byte."""
        total = 0
        for array in arrays:
            data = repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes()
            total = zlib.crc32(data, total)
        return total % 5

    def filled(self, data_type, shape, number):
        dtype = pb_utils.triton_string_to_numpy(data_type)
        if dtype is object or dtype == np.object_:
            return np.full(shape, str(number).encode(), object)
        return np.full(shape, number, np.float32).astype(dtype)
'''

ONNX_RUNNER = '''\
"""Runs the model's ONNX file for a server without a backend for it."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        here = Path(__file__).resolve().parent
        self.session = onnxruntime.InferenceSession(str(here / @FILE@), providers=["CPUExecutionProvider"])
        self.types = {one["name"]: pb_utils.triton_string_to_numpy(one["data_type"]) for one in config["output"]}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        feeds = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        for name, array in feeds.items():
            if array.dtype == object:
                feeds[name] = np.array([text.decode() for text in array.ravel()], object).reshape(array.shape)
        wanted = [one.name for one in self.session.get_outputs() if one.name in request.requested_output_names()]
        made = dict(zip(wanted, self.session.run(wanted, feeds)))
        tensors = []
        for name, array in made.items():
            if self.types[name] in (object, np.object_):
                array = np.array([text.encode() for text in array.ravel()], object).reshape(array.shape)
            tensors.append(pb_utils.Tensor(name, np.ascontiguousarray(array)))
        return pb_utils.InferenceResponse(tensors)
'''


def onnx_runner(file: str) -> str:
    return ONNX_RUNNER.replace("@FILE@", repr(file))
