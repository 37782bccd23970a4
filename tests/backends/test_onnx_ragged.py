"""ONNX models with ragged inputs, batch inputs and batch outputs: runs, and errors at load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flowserve.backends import registry
from flowserve.backends.base import Work
from flowserve.config.types import BatchInput, BatchOutput, ModelConfig
from flowserve.errors import Invalid, ModelFailed
from flowserve.memory.column import Column
from flowserve.values import Array, DType, Request
from tests.support.backends import Opened, Repository, config_of, spec, tensors, values
from tests.support.onnx_files import onnx_model, onnx_node, onnx_value

Open = Callable[..., Opened]
FILE = "1/model.onnx"
X = spec("X", (-1,), ragged=True)


def show_file(dtype: DType, made: Sequence[int | str | None], data: DType = DType.FP32) -> bytes:
    """SHOWN is the batch input I as the model got it; FLAT is the ragged input X as the model got it."""
    nodes = [onnx_node("Identity", ["I"], ["SHOWN"]), onnx_node("Identity", ["X"], ["FLAT"])]
    return onnx_model(
        nodes,
        [onnx_value("X", data, ["N"]), onnx_value("I", dtype, made)],
        [onnx_value("SHOWN", dtype, made), onnx_value("FLAT", data, ["N"])],
    )


def show_config(kind: str, dtype: DType = DType.INT32, **fields: Any) -> ModelConfig:
    fields.setdefault("inputs", [X])
    fields.setdefault("outputs", [spec("SHOWN", (-1,), dtype), spec("FLAT", (-1,))])
    fields.setdefault("max_batch_size", 8)
    return config_of(
        "onnxruntime",
        batch_inputs=(BatchInput(kind, ("I",), dtype, "X"),),
        batch_outputs=(BatchOutput(("FLAT",), "X"),),
        **fields,
    )


def lists(*lengths: int) -> list[dict[str, Array]]:
    """One request for each length; all elements are different."""
    stop, made = 0, []
    for length in lengths:
        made.append({"X": np.arange(stop, stop + length, dtype=np.float32).reshape(1, length)})
        stop += length
    return made


def load_error(repository: Repository, config: ModelConfig) -> str:
    with pytest.raises(Invalid) as caught:
        registry.find("onnxruntime").load(config, repository.files(), {})
    return str(caught.value)


@pytest.mark.parametrize("dtype", [DType.INT32, DType.FP32], ids=str)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [2, 4, 1, 3]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [2, 6, 7, 10]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [2, 4, 1, 3]),
    ],
)
def test_a_batch_input_has_a_row_per_request_and_a_flat_output_is_split(
    repository: Repository, opened: Open, kind: str, expected: list[int], dtype: DType
) -> None:
    repository.write("m", FILE, show_file(dtype, ["R"]))
    config = show_config(kind, dtype, outputs=[spec("SHOWN", (1,), dtype, reshape=()), spec("FLAT", (-1,))])
    results = opened(config).run(*lists(2, 4, 1, 3))
    assert values(results) == [[[count]] for count in expected]
    assert tensors(results.outputs[0])[0].array.dtype == dtype.numpy
    assert values(results, 1) == [[[0, 1]], [[2, 3, 4, 5]], [[6]], [[7, 8, 9]]]


@pytest.mark.fault("D13")
def test_an_empty_ragged_member_has_empty_outputs(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, show_file(DType.INT32, ["R"]))
    outputs = [spec("SHOWN", (1,), DType.INT32, reshape=()), spec("FLAT", (-1,))]
    model = opened(show_config("BATCH_ACCUMULATED_ELEMENT_COUNT", outputs=outputs))
    results = model.run(*lists(2, 0, 3))
    assert values(results) == [[[2]], [[2]], [[5]]]
    assert values(results, 1) == [[[0, 1]], [[]], [[2, 3, 4]]]
    assert values(model.run(*lists(0)), 1) == [[[]]]


@pytest.mark.fault("D13")
def test_a_request_without_rows_has_outputs_without_rows(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, show_file(DType.INT32, ["R"]))
    outputs = [spec("SHOWN", (1,), DType.INT32, reshape=()), spec("FLAT", (-1,))]
    model = opened(show_config("BATCH_ELEMENT_COUNT", outputs=outputs))
    blank = {"X": np.empty((0, 7), np.float32)}
    two, three = lists(2, 3)
    results = model.run(blank, two, blank, three)
    assert values(results) == [[], [[2]], [], [[3]]]
    assert values(results, 1) == [[], [[0, 1]], [], [[2, 3, 4]]]
    alone = [tensors(column)[0].array for column in model.run(blank).outputs]
    assert [array.shape for array in alone] == [(0, 1), (0, 7)]
    assert [array.dtype for array in alone] == [np.int32, np.float32]


def test_item_shapes_have_one_row_per_row_and_are_split_by_request(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, show_file(DType.FP32, ["R", 2]))
    config = show_config(
        "BATCH_ITEM_SHAPE",
        DType.FP32,
        inputs=[replace(X, dims=(-1, -1))],
        outputs=[spec("SHOWN", (2,)), spec("FLAT", (-1, -1))],
    )
    shapes = [(2, 1, 2), (1, 1, 2), (1, 2, 2)]
    results = opened(config).run(*({"X": np.ones(shape, np.float32)} for shape in shapes))
    assert values(results) == [[[1, 2], [1, 2]], [[1, 2]], [[2, 2]]]
    assert [tensor.shape for tensor in tensors(results.outputs[1])] == shapes


def test_the_largest_element_count_is_the_shape_of_a_batch_input(repository: Repository, opened: Open) -> None:
    nodes = [
        onnx_node("Shape", ["I"], ["size"]),
        onnx_node("Identity", ["X"], ["FLAT"]),
        onnx_node("Expand", ["size", "counts_shape"], ["SHOWN"]),
        onnx_node("Shape", ["COUNTS"], ["counts_shape"]),
    ]
    order = [nodes[0], nodes[1], nodes[3], nodes[2]]
    inputs = [onnx_value("X", DType.FP32, ["N"]), onnx_value("I", DType.INT32, ["M"])]
    inputs.append(onnx_value("COUNTS", DType.INT32, ["R"]))
    outputs = [onnx_value("SHOWN", DType.INT64, ["R"]), onnx_value("FLAT", DType.FP32, ["N"])]
    repository.write("m", FILE, onnx_model(order, inputs, outputs))
    config = show_config(
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", outputs=[spec("SHOWN", (1,), DType.INT64, reshape=()), spec("FLAT", (-1,))]
    )
    counts = BatchInput("BATCH_ELEMENT_COUNT", ("COUNTS",), DType.INT32, "X")
    results = opened(replace(config, batch_inputs=(*config.batch_inputs, counts))).run(*lists(2, 4, 1, 3))
    assert values(results) == [[[4]]] * 4


def test_two_targets_get_the_same_tensor_and_other_inputs_are_unchanged(repository: Repository, opened: Open) -> None:
    nodes = [onnx_node("Add", ["I", "J"], ["IJ"]), onnx_node("Mul", ["IJ", "F"], ["Y"])]
    inputs = [onnx_value("X", DType.FP32, ["N"]), onnx_value("F", DType.FP32, ["R", 2])]
    inputs += [onnx_value(name, DType.FP32, ["R", 1]) for name in ("I", "J")]
    nodes = [onnx_node("Identity", ["X"], ["Z"]), *nodes]
    outputs = [onnx_value("Y", DType.FP32, ["R", 2]), onnx_value("Z", DType.FP32, ["N"])]
    repository.write("m", FILE, onnx_model(nodes, inputs, outputs))
    config = config_of(
        "onnxruntime",
        inputs=[X, spec("F", (2,))],
        outputs=[spec("Y", (2,))],
        max_batch_size=8,
        batch_inputs=(BatchInput("BATCH_ITEM_SHAPE", ("I", "J"), DType.FP32, "X"),),
    )
    factor = np.array([[1, 10]], np.float32)
    requests = [{**each, "F": factor} for each in lists(3, 5)]
    assert values(opened(config).run(*requests)) == [[[6, 60]], [[10, 100]]]


@pytest.mark.parametrize("dtype", [DType.BYTES, DType.BF16, DType.UINT8], ids=str)
def test_other_data_types_are_concatenated_too(repository: Repository, opened: Open, dtype: DType) -> None:
    repository.write("m", FILE, show_file(DType.INT32, ["R"], data=dtype))
    inputs = [replace(X, dtype=dtype)]
    config = show_config("BATCH_ELEMENT_COUNT", inputs=inputs, outputs=[spec("FLAT", (-1,), dtype)])
    one, two = np.array([[b"a", b"", b"\xc3\xbc"]], object), np.array([[b"b"]], object)
    if dtype is not DType.BYTES:
        one, two = np.array([[1, 2, 3]]).astype(dtype.numpy), np.array([[4]]).astype(dtype.numpy)
    assert values(opened(config).run({"X": one}, {"X": two})) == [one.tolist(), two.tolist()]


def test_a_model_without_batching_gets_the_elements_of_its_one_request(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, show_file(DType.INT32, ["R"]))
    config = show_config("BATCH_ELEMENT_COUNT", inputs=[replace(X, dims=(-1, 2))], max_batch_size=0)
    config = replace(config, outputs=(spec("SHOWN", (1,), DType.INT32), spec("FLAT", (-1, 2))))
    results = opened(config).run({"X": np.arange(6, dtype=np.float32).reshape(3, 2)})
    assert values(results) == [[6]]
    assert values(results, 1) == [[[0, 1], [2, 3], [4, 5]]]


def test_the_flat_output_of_one_step_is_the_ragged_input_of_the_next_without_a_copy(
    repository: Repository, opened: Open
) -> None:
    repository.write("m", FILE, show_file(DType.INT32, ["R"]))
    model = opened(show_config("BATCH_ELEMENT_COUNT", outputs=[spec("FLAT", (-1,))]))
    first = model.run(*lists(2, 4, 1, 3))
    assert sum(first.copied) == 10 * 4
    work = Work([Column.of([*first.outputs[0]], [1] * 4)], [1] * 4, [Request({})] * 4, [("FLAT",)] * 4)
    second = model.instance.run(work, time.perf_counter_ns)
    assert values(second) == values(first) == [[[0, 1]], [[2, 3, 4, 5]], [[6]], [[7, 8, 9]]]
    assert sum(second.copied) == 0


def test_an_output_that_is_not_requested_is_not_split(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, show_file(DType.INT32, ["R"]))
    outputs = [spec("SHOWN", (1,), DType.INT32, reshape=()), spec("FLAT", (-1,))]
    results = opened(show_config("BATCH_ELEMENT_COUNT", outputs=outputs)).run(*lists(2, 3), wanted=("SHOWN",))
    assert values(results) == [[[2]], [[3]]]
    assert values(results, 1) == [None, None]


@pytest.mark.fault("S10")
def test_a_flat_output_of_a_wrong_size_fails_the_batch(repository: Repository, opened: Open) -> None:
    nodes = [onnx_node("Concat", ["X", "I"], ["FLAT"], axis=0)]
    inputs = [onnx_value("X", DType.FP32, ["N"]), onnx_value("I", DType.FP32, ["R"])]
    repository.write("m", FILE, onnx_model(nodes, inputs, [onnx_value("FLAT", DType.FP32, ["M"])]))
    model = opened(show_config("BATCH_ELEMENT_COUNT", DType.FP32, outputs=[spec("FLAT", (-1,))]))
    with pytest.raises(ModelFailed) as caught:
        model.run(*lists(2, 4))
    assert str(caught.value) == (
        "model 'm', output 'FLAT': by the shapes of input 'X' it has 6 elements in this batch, the model answered 8"
    )


def test_an_output_per_request_fails_for_two_rows_and_names_batch_item_shape(
    repository: Repository, opened: Open
) -> None:
    repository.write("m", FILE, show_file(DType.INT32, ["R"]))
    config = show_config("BATCH_ELEMENT_COUNT", outputs=[spec("SHOWN", (1,), DType.INT32, reshape=())])
    model = opened(replace(config, batch_outputs=()))
    with pytest.raises(ModelFailed) as caught:
        model.run({"X": np.ones((2, 3), np.float32)}, *lists(4))
    assert str(caught.value) == (
        "model 'm', output 'SHOWN': the batch has 3 rows, the model answered shape [2]; its outputs need one row for "
        "each row of the batch: element counts are one for each request, and only BATCH_ITEM_SHAPE tells the rows of a "
        "request apart"
    )


# ------------------------------------------------------------------------------------------------------- loading

SHOW = show_config("BATCH_ELEMENT_COUNT")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            replace(SHOW, batch_inputs=()),
            (
                "unable to load model 'm', configuration expects 1 inputs, model provides 2: m/1/model.onnx needs X, "
                "I, the configuration lacks I"
            ),
        ),
        (
            replace(SHOW, batch_inputs=(BatchInput("BATCH_ELEMENT_COUNT", ("I", "K"), DType.INT32, "X"),)),
            "model 'm', batch input 'K': the model has no input of this name (the inputs of m/1/model.onnx are: X, I)",
        ),
        (
            replace(SHOW, batch_inputs=(BatchInput("BATCH_ELEMENT_COUNT", ("I",), DType.FP32, "X"),)),
            (
                "model 'm', batch input 'I': the model expects data type TYPE_INT32 (m/1/model.onnx) but the model "
                "configuration specifies TYPE_FP32"
            ),
        ),
        (
            replace(SHOW, batch_inputs=(BatchInput("BATCH_ITEM_SHAPE", ("I",), DType.INT32, "X"),)),
            (
                "model 'm', batch input 'I': BATCH_ITEM_SHAPE has shape [-1,1], the shape expected by the model is "
                "[-1] (shape as in m/1/model.onnx)"
            ),
        ),
        (
            replace(SHOW, max_batch_size=0, inputs=(replace(X, optional=True),)),
            "model 'm', tensor 'X': it is ragged and may not be optional",
        ),
    ],
)
def test_a_ragged_configuration_that_disagrees_with_its_file_is_refused(
    repository: Repository, config: ModelConfig, message: str
) -> None:
    repository.write("m", FILE, show_file(DType.INT32, ["R"]))
    assert f"m/config.pbtxt: {message}" in load_error(repository, config)


@pytest.mark.parametrize("shape", [["N", 4], ["N", "M"], [12], []], ids=str)
def test_a_ragged_input_that_the_file_does_not_declare_as_a_list_is_refused(
    repository: Repository, shape: list[int | str]
) -> None:
    x = onnx_value("X", DType.FP32, shape)
    repository.write(
        "m", FILE, onnx_model([onnx_node("Identity", ["X"], ["Y"])], [x], [onnx_value("Y", DType.FP32, shape)])
    )
    text = load_error(repository, config_of("onnxruntime", inputs=[X], outputs=[spec("Y", (-1,))], max_batch_size=8))
    shown = "[" + ",".join(str(size) if isinstance(size, int) else "-1" for size in shape) + "]"
    assert (
        "model 'm', tensor 'X': a ragged input is handed over as one list of elements, so that the model must declare "
        f"it with shape [-1]; the shape expected by the model is {shown} (shape as in m/1/model.onnx)"
    ) in text


def test_the_file_completes_all_but_ragged_inputs_and_batch_inputs(repository: Repository) -> None:
    nodes = [onnx_node("ReduceSum", ["X"], ["s"], keepdims=0), onnx_node("Add", ["s", "I"], ["Y"])]
    inputs = [onnx_value("X", DType.FP32, ["N"]), onnx_value("I", DType.FP32, ["R", 1])]
    repository.write("m", FILE, onnx_model(nodes, inputs, [onnx_value("Y", DType.FP32, ["R", 1])]))
    made = (BatchInput("BATCH_ITEM_SHAPE", ("I",), DType.FP32, "X"),)
    written = config_of("onnxruntime", inputs=[X], max_batch_size=8, batch_inputs=made)
    found = registry.find("onnxruntime").complete(written, repository.files())
    assert found.inputs == (X,)
    assert found.outputs == (spec("Y", (1,)),)
