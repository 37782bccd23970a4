"""The functions and classes of `triton_python_backend_utils`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowserve.backends.python.pb_utils import triton_python_backend_utils as pb_utils
from flowserve.backends.python.requests import ResponseSender, SingleResponseSender
from flowserve.graph.types import reshaped
from flowserve.values import DType, fits, shape_text


@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_data_types_convert_in_both_directions(dtype: DType) -> None:
    assert pb_utils.triton_string_to_numpy(dtype.config_name) is (bool if dtype is DType.BOOL else dtype.numpy.type)
    assert pb_utils.triton_to_numpy_type(dtype.number) is dtype.numpy.type
    assert pb_utils.numpy_to_triton_type(dtype.numpy) == dtype.number
    assert pb_utils.numpy_to_triton_type(dtype.numpy.type) == dtype.number


@pytest.mark.parametrize("text", [np.str_, np.bytes_, np.dtype("S4"), np.dtype("U4")])
def test_every_numpy_string_type_is_type_string(text: object) -> None:
    assert pb_utils.numpy_to_triton_type(text) == DType.BYTES.number


def test_strings_are_serialized_and_other_tensors_are_not() -> None:
    encoded = pb_utils.serialize_byte_tensor(np.array([[b"a\0", "ü"]], object))
    assert encoded is not None
    assert pb_utils.deserialize_bytes_tensor(encoded).tolist() == [b"a\0", "ü".encode()]
    assert pb_utils.serialize_byte_tensor(np.zeros(2)) is None
    assert pb_utils.deserialize_bytes_tensor(b"").tolist() == []


def test_a_tensor_has_name_dtype_and_shape() -> None:
    tensor = pb_utils.Tensor("x", np.zeros((2, 3), np.int8))
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("x", [2, 3], 6, True)
    assert tensor.dtype() == np.int8
    assert pb_utils.Tensor(b"x", np.zeros(1)).name() == "x"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "array", "shown"),
    [
        ("x", [1.0], "'x', [1.0] (np.array(VALUES, DTYPE) makes an array)"),
        ("x", [0] * 10_000, "'x', [0, 0, 0, 0, 0, 0, ...] (np.array(VALUES, DTYPE) makes an array)"),
        (5, np.zeros(1), "5, array([0.])"),
    ],
)
def test_a_tensor_of_other_arguments_is_refused_with_tritons_text(name: Any, array: Any, shown: str) -> None:
    with pytest.raises(TypeError) as refused:
        pb_utils.Tensor(name, array)
    assert str(refused.value) == (
        "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
        f"    1. c_python_backend_utils.Tensor(arg0: str, arg1: numpy.ndarray)\n\nInvoked with: {shown}"
    )


def test_dlpack_exports_and_imports_without_a_copy() -> None:
    array = np.arange(4, dtype=np.float32)
    tensor = pb_utils.Tensor("x", array)
    for offered in (tensor, tensor.to_dlpack(), array):
        taken = pb_utils.Tensor.from_dlpack("y", offered)
        assert taken.name() == "y"
        assert np.shares_memory(taken.as_numpy(), array)


def test_a_response_has_tensors_and_an_error() -> None:
    tensor = pb_utils.Tensor("y", np.zeros(1))
    response = pb_utils.InferenceResponse([tensor])
    assert pb_utils.get_output_tensor_by_name(response, "y") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "z") is None
    assert response.output_tensors() == [tensor]
    assert not response.has_error()
    refused = pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND))
    error = refused.error()
    assert error is not None
    assert (refused.has_error(), error.message(), error.code(), str(error)) == (True, "no", 2, "no")


def test_a_plain_text_is_accepted_as_an_error() -> None:
    error = pb_utils.InferenceResponse([], "went wrong").error()
    assert error is not None
    assert error.message() == "went wrong"


def test_names_that_triton_does_not_have_are_absent() -> None:
    name = "nonsense"
    assert not hasattr(pb_utils, name)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        getattr(pb_utils, name)


def test_a_shape_fits_if_every_size_is_allowed() -> None:
    assert fits((2, 3), (2, 3))
    assert fits((2, 3), (-1, 3))
    assert fits((), ())
    assert not fits((2, 3), (3, 3))
    assert not fits((2, 3), (-1,))
    assert not fits((2,), (-1, -1))


def test_variable_sizes_are_assigned_from_the_left() -> None:
    assert reshaped((5, 2, 7), (-1, 2, -1), (2, -1, 1, -1)) == (2, 5, 1, 7)
    assert reshaped((1,), (1,), ()) == ()
    assert shape_text((-1, 3)) == "[-1,3]"


def names_in(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def test_the_page_lists_every_name_in_pb_utils(root: Path) -> None:
    page = (root / "docs/python-models.md").read_text().partition("## Every name")[2]
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    listed = [name for names, _ in rows for name in names_in(names)]
    assert sorted(listed) == sorted(pb_utils.__all__)
    for names, more in rows:
        for name in names_in(names):
            found = getattr(pb_utils, name)
            if isinstance(found, type) and name not in ("PreferredMemory", "InferenceResponseSender"):
                assert names_in(more) == sorted(one for one in vars(found) if not one.startswith("_")), name
    for sender in (ResponseSender, SingleResponseSender):
        assert issubclass(sender, pb_utils.InferenceResponseSender)
        assert callable(sender.send)
        assert callable(sender.is_cancelled)
    for name in names_in(page.partition("Not there")[2].partition(". ")[0]):
        assert not hasattr(pb_utils, name)


def test_a_request_for_another_model_keeps_its_arguments() -> None:
    trace = pb_utils.InferenceTrace("00-1-2-01")
    request = pb_utils.InferenceRequest(model_name="m", flags=1, trace=trace, parameters=None)
    request.set_flags(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    assert (request.flags(), request.trace(), request.parameters()) == (2, trace, "{}")
    assert request.trace().get_context() == '{"traceparent": "00-1-2-01"}'
    assert pb_utils.InferenceRequest(model_name="m").trace().get_context() is None
