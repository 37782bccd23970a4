"""Completion of the user's configuration from the model's own file, and contradictions between them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowserve.config.load import Draft, finish
from flowserve.config.types import Completion, ModelConfig
from flowserve.errors import Problems
from flowserve.values import DType, TensorSpec

Read = Callable[..., Draft]

X = TensorSpec("X", DType.FP32, (4,))
Y = TensorSpec("Y", DType.INT64, (-1,))
ONNX = Completion((X,), (Y,), max_batch_size=4, dynamic_batching=True)


@pytest.fixture
def complete(draft: Read) -> Callable[..., ModelConfig]:
    def completed(text: str | None, completion: Completion, file: str = "1/model.onnx") -> ModelConfig:
        return finish(draft(text, file), completion)

    return completed


Complete = Callable[..., ModelConfig]


def refusals(complete: Complete, text: str, completion: Completion, file: str = "1/model.onnx") -> list[str]:
    with pytest.raises(Problems) as caught:
        complete(text, completion, file)
    assert {problem.rule for problem in caught.value.problems} == {"M90"}
    return [str(problem).removesuffix(" [M90]").replace("m/config.pbtxt:", "") for problem in caught.value.problems]


def test_a_model_without_configuration_is_completed_from_its_file(complete: Complete) -> None:
    config = complete(None, ONNX)
    assert (config.name, config.backend, config.platform) == ("m", "onnxruntime", "onnxruntime_onnx")
    assert (config.inputs, config.outputs, config.max_batch_size) == ((X,), (Y,), 4)
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.preferred_batch_sizes == (4,)
    assert config.json["input"][0]["dims"] == [4]


def test_missing_fields_of_a_tensor_are_filled_in(complete: Complete) -> None:
    config = complete('input { name: "X" } output { name: "Y" data_type: TYPE_INT64 dims: [ 7 ] }', ONNX)
    assert config.max_batch_size == 4
    assert config.inputs == (X,)
    assert config.outputs == (TensorSpec("Y", DType.INT64, (7,)),)


def test_complete_inputs_and_outputs_leave_the_batch_size_at_zero(complete: Complete) -> None:
    text = """input { name: "X" data_type: TYPE_FP32 dims: [ -1, 4 ] }
    output { name: "Y" data_type: TYPE_INT64 dims: [ -1, -1 ] }"""
    config = complete(text, ONNX)
    assert (config.max_batch_size, config.dynamic_batching) == (0, None)


def test_an_explicit_batch_size_of_zero_is_kept(complete: Complete) -> None:
    config = complete("max_batch_size: 0", ONNX)
    assert config.max_batch_size == 0
    assert config.inputs == (TensorSpec("X", DType.FP32, (-1, 4)),)


def test_an_explicit_batch_size_is_kept_and_enables_the_batcher(complete: Complete) -> None:
    config = complete("max_batch_size: 16", ONNX)
    assert config.max_batch_size == 16
    assert config.dynamic_batching is not None
    assert complete("max_batch_size: 1", ONNX).dynamic_batching is None


def test_omitted_outputs_are_not_added(complete: Complete) -> None:
    extra = Completion((X,), (Y, TensorSpec("Z", DType.FP32, (2,))), max_batch_size=4)
    config = complete('output { name: "Y" data_type: TYPE_INT64 dims: [ -1 ] }', extra)
    assert [spec.name for spec in config.outputs] == ["Y"]


def test_optional_inputs_may_be_omitted_and_are_omitted_by_default(complete: Complete) -> None:
    extra = Completion((X, TensorSpec("O", DType.FP32, (2,), optional=True)), (Y,), max_batch_size=4)
    config = complete('input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }', extra)
    assert [spec.name for spec in config.inputs] == ["X"]
    assert [spec.name for spec in complete(None, extra).inputs] == ["X"]


def test_a_scalar_without_batching_has_dims_one(complete: Complete) -> None:
    config = complete(None, Completion((X,), (TensorSpec("S", DType.FP32, ()),), max_batch_size=0))
    assert config.outputs == (TensorSpec("S", DType.FP32, (1,)),)
    written = 'output { name: "S" data_type: TYPE_FP32 dims: [ 1 ] }'
    assert complete(written, Completion((X,), (TensorSpec("S", DType.FP32, ()),), max_batch_size=0)).outputs[
        0
    ].dims == (1,)


def test_a_batched_scalar_has_dims_one_for_clients_and_is_reshaped_for_the_model(complete: Complete) -> None:
    (made,) = complete(None, Completion((X,), (TensorSpec("S", DType.FP32, ()),), max_batch_size=4)).outputs
    assert (made.dims, made.reshape) == ((1,), ())


@pytest.mark.fault("C12")
def test_a_file_without_batching_refuses_a_batch_size_as_the_only_problem(complete: Complete) -> None:
    text = 'max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }'
    (told,) = refusals(complete, text, Completion((X,), (Y,), max_batch_size=0))
    assert told.startswith(
        "1:1: autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified"
    )


@pytest.mark.fault("C12")
def test_names_on_one_side_only_are_reported_with_both_sides(complete: Complete) -> None:
    text = (
        'input { name: "XX" data_type: TYPE_FP32 dims: [ 4 ] }\noutput { name: "Q" data_type: TYPE_FP32 dims: [ 4 ] }'
    )
    two = Completion((X, TensorSpec("W", DType.FP32, (1,))), (Y,), max_batch_size=4)
    missing = "(missing in the configuration: X, W)"
    assert refusals(complete, "max_batch_size: 4\n" + text, two) == [
        f"2:1: unable to load model 'm', configuration expects 1 inputs, model provides 2 {missing}",
        "2:9: unexpected inference input 'XX', allowed inputs are: X, W (did you mean \"X\"?)",
        "3:10: unexpected inference output 'Q', allowed outputs are: Y (those are what the file of model 'm' has)",
    ]


@pytest.mark.fault("C12")
def test_contradicting_types_and_shapes_are_reported_with_both_sides(complete: Complete) -> None:
    text = (
        'max_batch_size: 4 input { name: "X" data_type: TYPE_INT32 dims: [ 4, 4 ] } output { name: "Y" dims: [ 1, 1 ] }'
    )
    types = "unable to load model 'm', input 'X' is TYPE_INT32 in the configuration, but the model provides TYPE_FP32"
    because = "(an initial batch dimension is counted because max_batch_size > 0)"
    expects = "model 'm', tensor '{name}': the model expects 2 dimensions"
    but = "but the model configuration specifies 3 dimensions"
    assert refusals(complete, text, ONNX) == [
        f"1:37: {types}",
        f"1:59: {expects} (shape [-1,4]) {but} (shape [-1,4,4]) {because}".format(name="X"),
        f"1:95: {expects} (shape [-1,-1]) {but} (shape [-1,1,1]) {because}".format(name="Y"),
    ]


@pytest.mark.fault("C12")
def test_a_fixed_dim_of_the_file_cannot_be_changed(complete: Complete) -> None:
    text = 'max_batch_size: 0 input { name: "X" data_type: TYPE_FP32 dims: [ -1, -1 ] }'
    (told,) = refusals(complete, text, ONNX)
    assert "(shape [-1,4])" in told
    assert "(shape [-1,-1])" in told


# A model.py declares its own configuration


def test_a_python_model_may_add_tensors(complete: Complete) -> None:
    text = 'input { name: "A" data_type: TYPE_STRING dims: [ 1 ] }'
    config = complete(text, Completion((X,), (Y,), max_batch_size=8), "1/model.py")
    assert [spec.name for spec in config.inputs] == ["A", "X"]
    assert config.backend == "python"
    assert config.max_batch_size == 8


def test_a_python_model_without_declarations_changes_nothing(complete: Complete) -> None:
    text = 'max_batch_size: 2 output { name: "Y" data_type: TYPE_INT64 dims: [ -1 ] }'
    config = complete(text, Completion(), "1/model.py")
    assert (config.max_batch_size, config.outputs) == (2, (Y,))


@pytest.mark.fault("C12")
def test_a_python_model_may_not_lower_the_batch_size(complete: Complete) -> None:
    assert refusals(complete, "max_batch_size: 8", Completion((X,), (Y,), max_batch_size=4), "1/model.py") == [
        (
            "1:1: configuration specified max_batch_size 8, but in auto-complete-config function for model m specified"
            " max_batch_size 4"
        )
    ]


def test_a_python_model_may_declare_itself_decoupled(complete: Complete) -> None:
    config = complete(None, Completion((X,), (Y,), decoupled=True), "1/model.py")
    assert config.json["model_transaction_policy"] == {"decoupled": True}
