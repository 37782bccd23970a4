"""Preprocessing of pictures of any size: equal to Pillow, on numpy and on compatible array libraries."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowserve.backends import registry
from flowserve.backends.python.pb_utils import triton_python_backend_utils as pb_utils
from flowserve.repository.layout import find_models
from flowserve.repository.read import examine
from flowserve.runtime.loading.completion import complete
from flowserve.values import Array
from tests.support.backends import Opened, Repository, open_instance

GRAPHS = Path(__file__).resolve().parents[2] / "graphs"
MEAN = np.array([123.675, 116.28, 103.53], np.float32)
SCALE = np.array([58.395, 57.12, 57.375], np.float32)
# What of numpy a node may use that runs on CuPy too; all of it is in both under these names.
COMMON = {"float32", "moveaxis", "matmul", "ascontiguousarray", "asarray"}


def opened(**parameters: str) -> Opened:
    (folder,) = [one for one in find_models([GRAPHS]).folders if one.name == "image_preprocess"]
    config = examine(folder, registry.default_files(), complete).valid().config
    json: dict[str, Any] = {**config.json, "parameters": {**config.json["parameters"]}}
    json["parameters"] |= {key: {"string_value": value} for key, value in parameters.items()}
    return open_instance(Repository(GRAPHS), replace(config, json=json))


def picture(height: int, width: int, seed: int = 0) -> Array:
    """Smooth blobs of colour."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize(("height", "width"), [(480, 640), (224, 224), (50, 31), (1, 1000)])
def test_pictures_are_resized_as_by_pillow_and_normalised(height: int, width: int) -> None:
    image = picture(height, width)
    (tensor,) = opened().run({"IMAGE": image[None]}).outputs[0]
    assert tensor is not None
    expected = np.asarray(Image.fromarray(image).resize((224, 224), Image.Resampling.BILINEAR), np.float32)
    back = tensor.array[0].transpose(1, 2, 0) * SCALE + MEAN
    assert np.abs(back - expected).max() <= 1.5, "Pillow rounds twice"


def test_a_batch_of_images_equals_its_images_one_by_one() -> None:
    batch = np.stack([picture(40, 60, seed) for seed in range(3)])
    model = opened()
    (together,) = model.run({"IMAGE": batch}).outputs[0]
    apart = model.run(*({"IMAGE": one[None]} for one in batch)).outputs[0]
    assert together is not None
    for row, tensor in zip(together.array, apart, strict=True):
        assert tensor is not None
        assert np.allclose(row, tensor.array[0], atol=1e-5)


def test_parameters_that_do_not_fit_the_output_fail_the_load() -> None:
    with pytest.raises(Exception, match="layout 'NHWC' does not go with PIXELS of dims"):
        opened(layout="NHWC")
    with pytest.raises(Exception, match="'1 2' is not one number for each colour"):
        opened(mean="1 2")


class Library(ModuleType):
    """An array library that has what numpy and CuPy share, and nothing else."""

    def __getattr__(self, name: str) -> Any:
        if name not in COMMON:
            raise AttributeError(f"{name} is not known to be in CuPy")
        return getattr(np, name)


def test_preprocessing_uses_only_functions_that_cupy_has() -> None:
    module: dict[str, Any] = {"__name__": "model", "__file__": "model.py"}
    sys.modules.setdefault("triton_python_backend_utils", pb_utils)
    exec(compile((GRAPHS / "image_preprocess/1/model.py").read_text(), "model.py", "exec"), module)
    images = picture(30, 50)[None]
    for layout in ("NCHW", "NHWC"):
        made = [module["preprocess"](images, (8, 9), MEAN, SCALE, layout, xp, {}) for xp in (np, Library("library"))]
        assert made[0].shape == ((1, 3, 8, 9) if layout == "NCHW" else (1, 8, 9, 3))
        assert made[0].flags.c_contiguous
        assert (made[0] == made[1]).all()
