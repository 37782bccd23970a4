"""Pictures of any size -> pixels as networks for images take them: resized, normalised, in planes or not.

Decided here: how pictures are resized (each output pixel is the mean of the pixels it covers, weighted by a triangle,
as Pillow's bilinear filter does). Everything is written against `xp`, which is numpy on a CPU instance and CuPy on a
GPU one; both give the same numbers up to rounding.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

DEFAULTS = {"mean": "0 0 0", "scale": "1 1 1"}


def weights(size, target):
    """How much each of `size` pixels counts in each of `target` ones: [target, size], rows that add up to 1."""
    ratio = size / target
    reach = max(ratio, 1.0)
    centres = (np.arange(target) + 0.5) * ratio
    distances = np.abs(np.arange(size) + 0.5 - centres[:, None]) / reach
    triangle = np.maximum(1 - distances, 0)
    return (triangle / triangle.sum(axis=1, keepdims=True)).astype(np.float32)


def preprocess(images, size, mean, scale, layout, xp, matrices):
    """[n, height, width, 3] of UINT8 -> FP32 [n, 3, *size], or [n, *size, 3] where `layout` is NHWC. `matrices` keeps
    the weights of sizes that were met.
    """
    planes = xp.moveaxis(images, 3, 1).astype(xp.float32)
    rows, columns = (_matrix(planes.shape[2 + axis], size[axis], xp, matrices) for axis in (0, 1))
    planes = xp.matmul(xp.matmul(rows, planes), columns.T)
    planes = (planes - mean[:, None, None]) / scale[:, None, None]
    return xp.ascontiguousarray(xp.moveaxis(planes, 1, 3) if layout == "NHWC" else planes)


def _matrix(size, target, xp, matrices):
    if (size, target) not in matrices:
        if len(matrices) >= 256:  # clients choose the sizes
            matrices.clear()
        matrices[size, target] = xp.asarray(weights(size, target))
    return matrices[size, target]


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self.layout = parameters.get("layout", "NCHW")
        dims = [int(dim) for dim in pb_utils.get_output_config_by_name(config, "PIXELS")["dims"]]
        self.size = tuple(dims[:2] if self.layout == "NHWC" else dims[1:])
        colours = dims[2] if self.layout == "NHWC" else dims[0]
        if self.layout not in ("NCHW", "NHWC") or colours != 3:
            raise ValueError(f"layout {self.layout!r} does not go with PIXELS of dims {dims}")
        self.is_on_gpu = args["model_instance_kind"] == "GPU"
        if self.is_on_gpu:
            import cupy

            self.device = cupy.cuda.Device(int(args["model_instance_device_id"]))
            self.device.use()
            self.xp = cupy
        else:
            self.xp = np
        self.mean, self.scale = (self._per_colour(parameters.get(key, default)) for key, default in DEFAULTS.items())
        self.matrices = {}

    def execute(self, requests):
        if self.is_on_gpu:
            self.device.use()  # the current device belongs to the thread
        return [pb_utils.InferenceResponse([self.answer(request)]) for request in requests]

    def answer(self, request):
        given = pb_utils.get_input_tensor_by_name(request, "IMAGE")
        images = self.xp.asarray(given.as_numpy()) if given.is_cpu() else self.xp.from_dlpack(given)
        pixels = preprocess(images, self.size, self.mean, self.scale, self.layout, self.xp, self.matrices)
        return pb_utils.Tensor.from_dlpack("PIXELS", pixels)

    def _per_colour(self, text):
        numbers = [float(word) for word in text.split()]
        if len(numbers) != 3:
            raise ValueError(f"{text!r} is not one number for each colour")
        return self.xp.asarray(numbers, dtype=self.xp.float32)
