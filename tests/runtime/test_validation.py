"""Validation of requests: which requests fit a graph, and the error texts of those that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowserve.errors import Invalid
from flowserve.graph.types import Graph
from flowserve.runtime.engine.validation import Validator
from flowserve.values import Array, DType, Request, TensorSpec


def validator_of(*specs: TensorSpec, max_batch_size: int = 4) -> Validator:
    return Validator(Graph("idf", 1, specs, (TensorSpec("OUT", DType.FP32, (3,)),), max_batch_size, (), ()))


def floats(name: str, *dims: int, optional: bool = False) -> TensorSpec:
    return TensorSpec(name, DType.FP32, dims, optional=optional)


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def refusal(validator: Validator, request: Request) -> str:
    with pytest.raises(Invalid) as caught:
        validator.validate(request)
    return str(caught.value)


def test_a_fitting_request_becomes_slots_in_the_graphs_order() -> None:
    validator = validator_of(floats("A", 3), floats("B", -1))
    a, b = zeros(2, 3), zeros(2, 7)
    tensors = validator.validate(Request({"B": b, "A": a}))
    assert [tensor and tensor.array is array for tensor, array in zip(tensors, (a, b), strict=True)] == [True, True]
    assert [tensor and (tensor.start, tensor.stop) for tensor in tensors] == [(0, 2), (0, 2)]


def test_an_optional_input_may_be_left_out_and_a_required_one_may_not() -> None:
    validator = validator_of(floats("A", 3), floats("B", 3, optional=True))
    assert validator.validate(Request({"A": zeros(1, 3)}))[1] is None
    assert refusal(validator, Request({"B": zeros(1, 3)})) == (
        "expected 1 required inputs but got 1 inputs for model 'idf'. Got input(s) ['B'], "
        "but missing required input(s) ['A']. Please provide all required input(s)."
    )
    assert refusal(validator, Request({})).startswith("expected number of inputs between 1 and 2 but got 0 inputs")


@pytest.mark.fault("S1")
def test_a_wrong_data_type_names_both() -> None:
    text = refusal(validator_of(floats("INPUT0", 3)), Request({"INPUT0": zeros(1, 3, dtype=np.int32)}))
    assert text == "inference input 'INPUT0' data-type is 'INT32', but model 'idf' expects 'FP32'"


@pytest.mark.fault("S2")
@pytest.mark.parametrize("shape", [(1, 2), (1,), (1, 3, 1), ()])
def test_a_wrong_shape_error_shows_the_expected_shape(shape: tuple[int, ...]) -> None:
    text = refusal(validator_of(floats("INPUT0", 3)), Request({"INPUT0": zeros(*shape)}))
    shown = "[" + ",".join(map(str, shape)) + "]"
    assert text.startswith(f"unexpected shape for input 'INPUT0' for model 'idf'. Expected [-1,3], got {shown}")
    assert "NOTE: Setting a non-zero max_batch_size in the model config" in text


def test_a_wrong_shape_error_without_a_batch_dimension_mentions_none() -> None:
    text = refusal(validator_of(floats("INPUT0", 3, -1), max_batch_size=0), Request({"INPUT0": zeros(2, 9)}))
    assert text == "unexpected shape for input 'INPUT0' for model 'idf'. Expected [3,-1], got [2,9]"


@pytest.mark.fault("S3")
def test_too_large_a_batch_names_the_limit() -> None:
    text = refusal(validator_of(floats("INPUT0", 3)), Request({"INPUT0": zeros(5, 3)}))
    assert text == (
        "inference request batch-size must be <= 4 for 'idf' "
        "(input 'INPUT0' has 5 rows: send several requests, or raise its max_batch_size)"
    )


@pytest.mark.fault("S4")
def test_inputs_of_different_batch_sizes_are_refused() -> None:
    text = refusal(validator_of(floats("A", 3), floats("B", 3)), Request({"A": zeros(1, 3), "B": zeros(2, 3)}))
    assert text == "input 'B' batch size does not match other inputs for 'idf'"


@pytest.mark.fault("S5")
def test_a_tensor_without_elements_is_accepted() -> None:
    assert validator_of(floats("A", -1)).validate(Request({"A": zeros(1, 0)}))[0] is not None
    assert validator_of(floats("A", 3)).validate(Request({"A": zeros(0, 3)}))[0] is not None


@pytest.mark.fault("S9")
def test_unknown_and_missing_names_are_named() -> None:
    validator = validator_of(floats("A", 3), floats("B", 3))
    one, two = zeros(1, 3), zeros(1, 3)
    assert refusal(validator, Request({"A": one})).startswith(
        "expected 2 inputs but got 1 inputs for model 'idf'. Got input(s) ['A'], but missing required input(s) ['B']."
    )
    unexpected = "unexpected inference input 'C' for model 'idf' (its inputs are ['A','B'])"
    assert refusal(validator, Request({"A": one, "C": two})) == unexpected
    too_many = refusal(validator, Request({"A": one, "B": two, "C": one}))
    assert too_many.startswith("expected 2 inputs but got 3 inputs")
    assert too_many.endswith(" It has no input(s) ['C'].")
    assert (
        refusal(validator, Request({"A": one, "B": two}, outputs=("NOPE",)))
        == "unexpected inference output 'NOPE' for model 'idf' (its outputs are ['OUT'])"
    )
    optional = validator_of(floats("A", 3), floats("B", 3, optional=True))
    assert refusal(optional, Request({"A": one, "C": two})) == unexpected


def test_an_error_for_a_misspelled_input_suggests_the_name() -> None:
    validator = validator_of(floats("left", 3), floats("right", 3))
    given = {"left": zeros(1, 3), "rihgt": zeros(1, 3)}
    text = "unexpected inference input 'rihgt' for model 'idf' (did you mean 'right'?)"
    assert refusal(validator, Request(given)) == text
    text = refusal(validator, Request({"left": zeros(1, 3), "lefft": zeros(1, 3)}))
    # The only name near is given already.
    assert text == "unexpected inference input 'lefft' for model 'idf' (its inputs are ['left','right'])"


def test_a_refusal_carries_the_requests_id() -> None:
    with pytest.raises(Invalid, match=r"^\[request id: r7\] unexpected inference output"):
        validator_of(floats("A", 3)).validate(Request({"A": zeros(1, 3)}, outputs=("NOPE",), id="r7"))
