"""ONNX models on the CPU: runs, failures, loading, completion and session settings."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import onnx.numpy_helper
import pytest

from flowserve.backends import registry
from flowserve.backends.onnx.backend import OnnxModel
from flowserve.backends.onnx.errors import cleaned
from flowserve.config.types import Completion, InstanceGroup, ModelConfig
from flowserve.errors import Invalid, ModelFailed, Problems, Unsupported
from flowserve.values import DType
from tests.support.backends import Opened, Repository, onnx_config, sample, spec, tensors, values
from tests.support.onnx_files import onnx_identity, onnx_model, onnx_node, onnx_value

Open = Callable[..., Opened]
FILE = "1/model.onnx"


def complete(repository: Repository, config: ModelConfig) -> Completion:
    return registry.find("onnxruntime").complete(config, repository.files())


def session_of(opened: Opened) -> Any:
    """The onnxruntime session of a model on the host."""
    assert isinstance(opened.model, OnnxModel)
    assert isinstance(opened.model.execute, MethodType)
    return opened.model.execute.__self__


def load_error(repository: Repository, config: ModelConfig) -> str:
    with pytest.raises(Invalid) as caught:
        registry.find("onnxruntime").load(config, repository.files(), {})
    text = str(caught.value)
    assert str(repository.path) not in text
    return text


# ------------------------------------------------------------------------------------------------------- running


@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_every_data_type_is_served_alone_and_in_a_batch(repository: Repository, opened: Open, dtype: DType) -> None:
    repository.write("m", FILE, onnx_identity(dtype))
    model = opened(onnx_config(inputs=[spec("x", dtype=dtype)], outputs=[spec("y", dtype=dtype)]))
    one, two = sample(dtype), sample(dtype, 2)
    results = model.run({"x": one}, {"x": two})
    assert values(results) == [one.tolist(), two.tolist()]
    assert tensors(results.outputs[0])[0].array.dtype == dtype.numpy
    assert values(model.run({"x": one})) == [one.tolist()]


def test_a_contiguous_batch_is_run_without_a_copy_and_returned_as_one_block(
    repository: Repository, opened: Open
) -> None:
    repository.write("m", FILE, onnx_identity())
    model = opened(onnx_config())
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    results = model.whole(array)
    assert list(results.copied) == [0]
    assert values(results) == [[row] for row in array.tolist()]
    assert len({id(tensor.block) for tensor in tensors(results.outputs[0])}) == 1
    assert results.gathered_ns <= results.computed_ns


def test_scattered_members_are_merged_by_one_copy_that_is_counted(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity())
    results = opened(onnx_config()).run({"x": sample(DType.FP32)}, {"x": sample(DType.FP32, 2)})
    assert list(results.copied) == [48]


@pytest.mark.fault("S5")
def test_tensors_without_elements_are_served(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity(shape=("N", "K")))
    model = opened(onnx_config(inputs=[spec("x", [-1])], outputs=[spec("y", [-1])]))
    assert values(model.run({"x": np.zeros((2, 0), np.float32)})) == [[[], []]]
    assert values(model.run({"x": np.zeros((0, 4), np.float32)})) == [[]]


def test_a_member_without_rows_does_not_shift_other_rows(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity())
    model = opened(onnx_config())
    none, two = np.zeros((0, 4), np.float32), sample(DType.FP32, 2)
    assert values(model.run({"x": none}, {"x": two})) == [[], two.tolist()]


def test_a_model_without_batching_gets_its_whole_tensor(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity(shape=(2, "K")))
    model = opened(onnx_config(0, inputs=[spec("x", [2, -1])], outputs=[spec("y", [2, -1])]))
    array = np.ones((2, 7), np.float32)
    assert values(model.run({"x": array})) == [array.tolist()]


def test_a_scalar_of_the_file_has_dims_of_one(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity(shape=()))
    config = onnx_config(0, inputs=(), outputs=())
    found = complete(repository, config)
    assert found.inputs == (spec("x", [1]),)
    assert found.outputs == (spec("y", [1]),)
    model = opened(replace(config, inputs=found.inputs, outputs=found.outputs))
    assert values(model.run({"x": np.array([3], np.float32)})) == [[3]]


def test_a_rank_one_file_is_served_in_batches_of_single_elements(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity(shape=("N",)))
    found = complete(repository, onnx_config(0, inputs=(), outputs=()))
    assert found.inputs == (spec("x", [1], reshape=()),)
    model = opened(onnx_config(4, inputs=found.inputs, outputs=found.outputs))
    assert values(model.run({"x": np.array([[3], [4]], np.float32)}, {"x": np.array([[5]], np.float32)})) == [
        [[3], [4]],
        [[5]],
    ]


def test_reshape_gives_the_model_another_shape_than_the_client(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity(shape=("N", 2, "K")))
    model = opened(
        onnx_config(inputs=[spec("x", [-1, 2], reshape=(2, -1))], outputs=[spec("y", [2, -1, 1], reshape=(2, -1))])
    )
    array = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    results = model.run({"x": array}, {"x": array})
    assert values(results) == [array.reshape(2, 2, 3, 1).tolist()] * 2


def test_only_the_outputs_that_are_wanted_are_computed(repository: Repository, opened: Open) -> None:
    x, y, z = (onnx_value(name, DType.FP32, ("N", 4)) for name in "xyz")
    repository.write(
        "m", FILE, onnx_model([onnx_node("Neg", ["x"], ["y"]), onnx_node("Abs", ["y"], ["z"])], [x], [y, z])
    )
    model = opened(onnx_config(outputs=[spec("z"), spec("y")]))
    array = sample(DType.FP32)
    results = model.run({"x": array}, {"x": array}, wanted=("y",))
    assert values(results, 0) == [None, None]
    assert values(results, 1) == [(-array).tolist()] * 2


def test_members_that_want_different_outputs_share_a_batch(repository: Repository, opened: Open) -> None:
    x, y, z = (onnx_value(name, DType.FP32, ("N", 4)) for name in "xyz")
    repository.write(
        "m", FILE, onnx_model([onnx_node("Neg", ["x"], ["y"]), onnx_node("Abs", ["x"], ["z"])], [x], [y, z])
    )
    model = opened(onnx_config(outputs=[spec("y"), spec("z")]))
    assert isinstance(model.model, OnnxModel)
    names, indices = model.model.tensors.selected([("y",), ("z",)])
    assert (names, indices) == (["y", "z"], [0, 1])


def test_an_input_with_a_default_is_optional(repository: Repository, opened: Open) -> None:
    x, b, y = (onnx_value(name, DType.FP32, (4,)) for name in "xby")
    default = np.full(4, 10, np.float32)
    file = onnx_model([onnx_node("Add", ["x", "b"], ["y"])], [x, b], [y], [onnx.numpy_helper.from_array(default, "b")])
    repository.write("m", FILE, file)
    model = opened(onnx_config(0, inputs=[spec("b", optional=True), spec("x")]))
    array = np.ones(4, np.float32)
    assert values(model.run({"x": array})) == [[11.0] * 4]
    assert values(model.run({"x": array, "b": array})) == [[2.0] * 4]


def mixed_config(repository: Repository, halves: DType) -> ModelConfig:
    kinds = [DType.BF16, DType.BYTES, halves, DType.BYTES]
    ports = [onnx_value(name, dtype, ("N", 4)) for name, dtype in zip("xsyt", kinds, strict=True)]
    cast = onnx_node("Cast", ["x"], ["y"], to=ports[2].type.tensor_type.elem_type)
    repository.write("m", FILE, onnx_model([cast, onnx_node("Identity", ["s"], ["t"])], ports[:2], ports[2:]))
    specs = [spec(name, dtype=dtype) for name, dtype in zip("xsyt", kinds, strict=True)]
    return onnx_config(inputs=specs[:2], outputs=specs[2:])


def test_bf16_and_strings_go_in_together(repository: Repository, opened: Open) -> None:
    model = opened(mixed_config(repository, DType.FP32))
    results = model.run({"x": sample(DType.BF16), "s": sample(DType.BYTES)})
    assert values(results, 0) == [sample(DType.FP32).tolist()]
    assert values(results, 1) == [sample(DType.BYTES).tolist()]


def test_strings_in_and_bf16_out_are_refused_when_loading(repository: Repository) -> None:
    with pytest.raises(
        Unsupported, match=r"cannot take strings \(input 's'\) where it answers with BF16 \(output 'y'\)"
    ):
        registry.find("onnxruntime").load(mixed_config(repository, DType.BF16), repository.files(), {})


@pytest.mark.fault("B8")
def test_bytes_that_are_not_utf8_are_refused_by_name(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity(DType.BYTES))
    model = opened(onnx_config(inputs=[spec("x", dtype=DType.BYTES)], outputs=[spec("y", dtype=DType.BYTES)]))
    array = np.array([[b"\xff", b"", b"", b""]], object)
    with pytest.raises(Invalid, match="inference input 'x' for model 'm' must hold UTF-8 text"):
        model.run({"x": array})
    assert array[0, 0] == b"\xff"


def test_instances_on_several_threads_share_one_session(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity())
    first = opened(onnx_config())
    instances = [first.model.instance(f"m_{n}", InstanceGroup("m")) for n in range(4)]
    for instance in instances:
        instance.open()
    wrong: list[object] = []

    def work(mark: int) -> None:
        mine = Opened(first.config, first.model, instances[mark])
        array = np.full((1, 4), mark, np.float32)
        wrong.extend(mark for _ in range(50) if values(mine.run({"x": array})) != [array.tolist()])

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ------------------------------------------------------------------------------------------------------ failures


def test_a_failed_run_is_reported_with_the_model_in_one_line(repository: Repository, opened: Open) -> None:
    x, y = onnx_value("x", DType.FP32, ("N", "K")), onnx_value("y", DType.FP32, ("N", 2))
    shape = onnx.numpy_helper.from_array(np.array([-1, 3]), "s")
    repository.write("m", FILE, onnx_model([onnx_node("Reshape", ["x", "s"], ["y"])], [x], [y], [shape]))
    model = opened(onnx_config(inputs=[spec("x", [-1])], outputs=[spec("y", [2])]))
    with pytest.raises(ModelFailed, match=r"^model 'm' failed: onnxruntime: .*cannot be reshaped") as caught:
        model.run({"x": np.zeros((1, 4), np.float32)})
    assert not [part for part in ("\n", "onnxruntime_src", "::", ".h:") if part in str(caught.value)]


@pytest.mark.fault("S10")
def test_an_output_of_another_shape_fails_with_model_and_output(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity(shape=("N", "K")))
    model = opened(onnx_config(inputs=[spec("x", [-1])], outputs=[spec("y", [4])]))
    with pytest.raises(ModelFailed) as caught:
        model.run({"x": np.zeros((1, 5), np.float32)})
    assert (
        str(caught.value) == "model 'm', output 'y': the configuration promises shape [1,4], the model answered [1,5]"
    )


@pytest.mark.fault("S10")
def test_an_output_with_another_row_count_fails_the_batch(repository: Repository, opened: Open) -> None:
    x, y = onnx_value("x", DType.FP32, ("N", 4)), onnx_value("y", DType.FP32, ("M", 4))
    repository.write("m", FILE, onnx_model([onnx_node("Concat", ["x", "x"], ["y"], axis=0)], [x], [y]))
    model = opened(onnx_config())
    with pytest.raises(ModelFailed, match=r"model 'm', output 'y': the batch has 2 rows, the model answered .*\[4,4\]"):
        model.run({"x": sample(DType.FP32)}, {"x": sample(DType.FP32)})


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (
            (
                "[ONNXRuntimeError] : 1 : FAIL : Load model from /a/m.onnx failed:/src/core/graph/model.cc:166 "
                "onnxruntime::Model::Model(onnx::ModelProto&&, const std::function<void(int)>&) It has no graph.\n"
            ),
            "It has no graph.",
        ),
        (
            (
                "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code /a/b.h:55 "
                "virtual onnxruntime::X::Compute(onnxruntime::Y*) const a == b was false.\nStacktrace:\n0x0 0x1"
            ),
            "Non-zero status code a == b was false.",
        ),
        ("plain", "plain"),
    ],
)
def test_messages_of_onnxruntime_lose_source_locations_and_stacks(text: str, clean: str) -> None:
    assert cleaned(text) == clean


# ------------------------------------------------------------------------------------------------------- loading


@pytest.mark.fault("C12")
def test_a_missing_file_is_reported_with_the_files_that_are_there(repository: Repository) -> None:
    repository.write("m", "1/weights.bin", onnx_identity())
    assert load_error(repository, onnx_config()) == (
        "failed to load 'm' version 1: file m/1/model.onnx does not exist; folder m/1 holds weights.bin; "
        "default_model_filename can name another file"
    )


@pytest.mark.parametrize("name", ["other.onnx", "model.onx", "Model.ONNX", "model.onnx.txt"])
def test_a_file_that_was_probably_meant_is_named(repository: Repository, name: str) -> None:
    repository.write("m", "1/weights.bin", b"")
    repository.write("m", f"1/{name}", onnx_identity())
    assert load_error(repository, onnx_config()).endswith(
        f"does not exist; m/1/{name} is not read; did you mean model.onnx? default_model_filename can name another file"
    )


@pytest.mark.fault("C12")
@pytest.mark.parametrize("content", [b"", b"not a model", onnx_identity()[:-20]], ids=["empty", "text", "truncated"])
def test_a_broken_file_is_refused_by_its_relative_path_in_one_line(
    repository: Repository, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    repository.write("m", FILE, content)
    text = load_error(repository, onnx_config())
    assert text.startswith("failed to load 'm' version 1: m/1/model.onnx is not an ONNX model that onnxruntime ")
    assert "::" not in text
    assert "\n" not in text
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"<!DOCTYPE html><html>", "not the whole of one: 21 bytes, which begin with b'<!DOCTYPE html><html'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "Git LFS: `git lfs pull` fetches the file"),
    ],
)
def test_a_file_of_another_kind_is_reported_with_its_first_bytes(
    repository: Repository, content: bytes, what: str
) -> None:
    repository.write("m", FILE, content)
    assert what in load_error(repository, onnx_config())


def test_an_unreadable_file_is_reported(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.write("m", FILE, b"")  # an invalid model, since root may read any file
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert load_error(repository, onnx_config()) == (
        "failed to load 'm' version 1: m/1/model.onnx cannot be read by the user that flowserve runs as"
    )


def test_a_file_of_a_newer_format_is_refused_with_a_hint(repository: Repository) -> None:
    model = onnx.load_from_string(onnx_identity())
    model.ir_version = 999
    repository.write("m", FILE, model.SerializeToString())
    text = load_error(repository, onnx_config())
    newest = text.partition("max supported IR version: ")[2].partition(";")[0]
    assert f"onnx.helper.make_model(..., ir_version={newest}), or install a newer onnxruntime" in text
    model.ir_version = int(newest)
    repository.write("m", FILE, model.SerializeToString())
    assert isinstance(registry.find("onnxruntime").load(onnx_config(), repository.files(), {}), OnnxModel)


def test_a_file_outside_the_versions_folder_is_refused(repository: Repository) -> None:
    repository.write("m", "model.onnx", onnx_identity())
    repository.write("m", FILE, onnx_identity())
    text = load_error(repository, onnx_config(default_model_filename="../model.onnx"))
    assert "default_model_filename '../model.onnx' leads out of the version's folder" in text


def test_another_file_name_and_a_folder_of_files_are_found(repository: Repository, opened: Open) -> None:
    repository.write("m", "1/net.onnx", onnx_identity())
    repository.write("n", "1/model.onnx/model.onnx", onnx_identity())
    for config in (onnx_config(default_model_filename="net.onnx"), onnx_config(name="n")):
        assert values(opened(config).run({"x": sample(DType.FP32)})) == [sample(DType.FP32).tolist()]


@pytest.mark.fault("C12")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"inputs": [spec("z")]},
            "unexpected inference input 'z', allowed inputs are: x",
        ),
        (
            {"inputs": [spec("z")]},
            (
                "unable to load model 'm', configuration expects 1 inputs, model provides 1: m/1/model.onnx needs x, "
                "the configuration lacks x"
            ),
        ),
        (
            {"outputs": [spec("y"), spec("q")]},
            "unexpected inference output 'q', allowed outputs are: y",
        ),
        (
            {"inputs": [spec("x", dtype=DType.INT64)]},
            (
                "model 'm', tensor 'x': the model expects data type TYPE_FP32 (m/1/model.onnx) but the model "
                "configuration specifies TYPE_INT64"
            ),
        ),
        (
            {"inputs": [spec("x", [4, 1])]},
            (
                "model 'm', tensor 'x': the model expects 2 dimensions (shape [-1,4]) but the model configuration "
                "specifies 3 dimensions (an initial batch dimension because max_batch_size > 0 followed by the "
                "explicit tensor shape, making complete shape [-1,4,1])"
            ),
        ),
        (
            {"inputs": [spec("x", [-1, 4])]},
            "(shape as in m/1/model.onnx; dims leave out the batch dimension, since max_batch_size > 0: [4])",
        ),
        (
            {"max_batch_size": 0},
            (
                "(shape as in m/1/model.onnx; with `max_batch_size: 8`, or another number above 0, these dims stand "
                "for one row)"
            ),
        ),
        (
            {"outputs": [spec("y", [5])]},
            (
                "model 'm', tensor 'y': the model expects 2 dimensions (shape [-1,4]) but the model configuration "
                "specifies shape [-1,5]"
            ),
        ),
        (
            {"inputs": [spec("x", optional=True)]},
            "model 'm', tensor 'x': optional inputs require max_batch_size 0 with the onnxruntime backend",
        ),
    ],
)
def test_a_configuration_that_disagrees_with_its_file_is_refused_with_both_sides(
    repository: Repository, change: dict[str, Any], text: str
) -> None:
    repository.write("m", FILE, onnx_identity())
    problems = load_error(repository, onnx_config(**change)).splitlines()
    assert any(text in problem and problem.startswith("m/config.pbtxt: ") for problem in problems)


def test_a_file_with_a_fixed_first_dimension_refuses_batching(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity(shape=(1, 4)))
    assert (
        "for the model to support batching the shape should have at least 1 dimension and the first dimension must be "
        "-1; but shape expected by the model is [1,4]"
    ) in load_error(repository, onnx_config())


@pytest.mark.parametrize("dims", [[1], [-1]])
def test_a_batch_of_single_values_is_refused_with_a_hint(repository: Repository, dims: list[int]) -> None:
    repository.write("m", FILE, onnx_identity(shape=("N",)))
    text = load_error(repository, onnx_config(inputs=[spec("x", dims)], outputs=[spec("y", [1], reshape=())]))
    assert "(shape as in m/1/model.onnx; a batch of single values has `dims: [ 1 ] reshape { shape: [ ] }`)" in text


def test_all_disagreements_are_reported_together(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity())
    config = onnx_config(inputs=[spec("x", dtype=DType.INT8)], outputs=[spec("q"), spec("y", [5])])
    with pytest.raises(Problems) as caught:
        registry.find("onnxruntime").load(config, repository.files(), {})
    assert len(caught.value.problems) == 3


# ---------------------------------------------------------------------------------------------------- completion


def test_a_file_whose_first_dimensions_all_vary_is_batched_by_four(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity(shape=("N", 3, None)))
    found = complete(repository, onnx_config(0, inputs=(), outputs=()))
    assert (found.max_batch_size, found.dynamic_batching) == (4, True)
    assert found.inputs == (spec("x", [3, -1]),)
    assert found.outputs == (spec("y", [3, -1]),)


def test_a_file_with_a_fixed_first_dimension_is_served_without_batching(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity(shape=(1, "K")))
    found = complete(repository, onnx_config(0, inputs=(), outputs=()))
    assert (found.max_batch_size, found.dynamic_batching) == (None, False)
    assert found.inputs == (spec("x", [1, -1]),)


def test_a_configured_batch_size_is_kept(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity())
    found = complete(repository, onnx_config(32, inputs=(), outputs=()))
    assert (found.max_batch_size, found.dynamic_batching) == (None, False)
    assert found.inputs == (spec("x"),)


def test_a_batch_size_for_a_file_without_batch_dimension_is_refused(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity(shape=(1, 4)))
    with pytest.raises(Invalid) as caught:
        complete(repository, onnx_config(8, inputs=(), outputs=()))
    assert (
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified: "
        "'x' has shape [1,4]"
    ) in str(caught.value)


def test_a_configuration_with_inputs_and_outputs_is_not_completed(repository: Repository) -> None:
    found = complete(repository, onnx_config(0))  # no file: it is not read
    assert (found.inputs, found.max_batch_size) == (None, None)


def test_dims_that_include_the_first_dimension_disable_batching(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity())
    found = complete(repository, onnx_config(0, inputs=[spec("x", [-1, 4])], outputs=()))
    assert found.max_batch_size is None
    assert found.outputs == (spec("y", [-1, 4]),)


def test_an_output_that_is_no_tensor_is_refused_with_a_hint(repository: Repository) -> None:
    y = onnx.helper.make_tensor_sequence_value_info("y", 1, None)
    repository.write(
        "m",
        FILE,
        onnx_model([onnx_node("SequenceConstruct", ["x"], ["y"])], [onnx_value("x", DType.FP32, ("N", 4))], [y]),
    )
    with pytest.raises(Unsupported, match=r"tensor 'y' is a seq\(tensor\(float\)\) in m/1/model.onnx"):
        complete(repository, onnx_config(0, inputs=(), outputs=()))


# ------------------------------------------------------------------------------------------------------ settings


def test_parameters_set_the_session_as_on_triton(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity())
    config = onnx_config(
        parameters={
            "intra_op_thread_count": "3",
            "inter_op_thread_count": "2",
            "execution_mode": "1",
            "enable_mem_arena": "0",
            "enable_mem_pattern": "0",
            "something_of_the_users": "x",
        },
        json={"optimization": {"graph": {"level": -1}}},
    )
    session = session_of(opened(config))
    options = session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode.name == "ORT_PARALLEL"
    assert options.graph_optimization_level.name == "ORT_ENABLE_BASIC"
    assert not options.enable_cpu_mem_arena
    assert not options.enable_mem_pattern
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_the_number_of_threads_depends_on_the_runs_at_once(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity())
    session = session_of(opened(onnx_config(), runs_at_once="1000"))
    assert session.get_session_options().intra_op_num_threads == 1


def test_an_invalid_thread_count_is_refused_with_its_position(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity())
    text = load_error(repository, onnx_config(parameters={"intra_op_thread_count": "many"}))
    assert text == "m/config.pbtxt: parameter 'intra_op_thread_count' of model 'm' must be a whole number, found 'many'"
