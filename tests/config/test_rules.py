"""Every numbered rule of config/rules: the refused case, Triton's message, the place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowserve.config.types import ASSUMED, Gpus
from flowserve.errors import Problem

Judge = Callable[..., list[Problem]]

GOOD = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
PIPE = """
platform: "ensemble"
input [ { name: "A" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
STEP = 'step { model_name: "m" model_version: -1 input_map { key: "X" value: "A" } output_map { key: "Y" value: "B" } }'


@pytest.fixture
def said(judge: Judge) -> Callable[..., list[str]]:
    """`said("M8", text)`: that rule's problems without their number, places shortened to line:column."""

    def problems(rule: str, text: str | None, *files: str, name: str = "m", **machine: Any) -> list[str]:
        found = [problem for problem in judge(text, *files, name=name, **machine) if problem.rule == rule]
        return [
            str(problem).removesuffix(f" [{rule}]").replace(f"{name}/config.pbtxt:", "").strip() for problem in found
        ]

    return problems


Said = Callable[..., list[str]]


def test_every_rule_has_a_test_and_every_test_a_rule(root: Path) -> None:
    tested = re.findall(r"^def test_rule_(M\d+)_", Path(__file__).read_text(encoding="utf-8"), re.MULTILINE)
    rules = (root / "flowserve/config/rules.py").read_text(encoding="utf-8")
    assert set(tested) == set(re.findall(r'"(M\d+)"', rules))


def test_a_valid_model_and_a_valid_ensemble_break_no_rule(judge: Judge) -> None:
    assert judge(GOOD) == []
    assert judge(f"{PIPE} ensemble_scheduling {{ {STEP} }}") == []


def test_all_rules_report_at_once(judge: Judge) -> None:
    text = 'name: "other" backend: "python" max_batch_size: -1 input { name: "X" } output { dims: 0 }'
    assert {problem.rule for problem in judge(text)} == {"M2", "M8", "M20", "M21", "M22", "M23"}


# The model


@pytest.mark.parametrize("name", ["  ", "a\nb", "a\x7f", "b\\c"])
def test_rule_M1_a_name_is_one_visible_word_of_a_path(said: Said, name: str) -> None:
    (text,) = said("M1", None, name=name)
    assert f": Invalid model name: {name!r}" in text


def test_rule_M1_counts_bytes(said: Said) -> None:
    assert said("M1", None, name="é" * 127) == []


@pytest.mark.fault("C3")
def test_rule_M2_the_name_is_the_folders(said: Said) -> None:
    assert said("M2", 'name: "n"') == [
        (
            "1:1: unexpected directory name 'm' for model 'n', directory name must equal model name (rename the folder,"
            " or leave `name` out)"
        )
    ]


def test_rule_M3_a_model_has_a_backend(said: Said) -> None:
    assert said("M3", 'platform: "onnxruntime"') == [
        "1:1: unexpected platform type 'onnxruntime' for m (did you mean \"onnxruntime_onnx\"?)"
    ]
    assert said("M3", 'platform: "vino"')[0].endswith('(write `backend: "vino"`?)')
    assert said("M3", 'default_model_filename: "model.bin"') == [
        "1:1: unexpected platform type '' for m (write `backend` beside 'model.bin')"
    ]
    (text,) = said("M3", "", "1/weights.bin")
    assert text.startswith("Invalid model name: Could not determine backend for model 'm' with no")
    assert "put a model.onnx or model.py into a version folder (1/)" in text


@pytest.mark.parametrize(
    ("file", "meant"), [("modle.py", "model.py"), ("model.onx", "model.onnx"), ("digit.onnx", "model.onnx")]
)
def test_rule_M3_names_a_file_that_was_probably_meant(said: Said, file: str, meant: str) -> None:
    (text,) = said("M3", "", f"1/{file}")
    assert text.endswith(f"(m/1/{file} is not read; did you mean {meant}?)")


def test_rule_M4_an_ensemble_has_no_backend(said: Said) -> None:
    assert said("M4", 'platform: "ensemble" backend: "python"') == [
        "1:22: Ensemble model 'm' must have platform type 'ensemble' and empty backend type (leave `backend` out)"
    ]


def test_rule_M5_platform_and_backend_fit(said: Said) -> None:
    assert said("M5", 'platform: "tensorrt_plan" backend: "onnxruntime"') == [
        (
            "1:1: unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxruntime (platform of this backend:"
            ' "onnxruntime_onnx")'
        )
    ]
    assert said("M5", 'platform: "anything" backend: "python"') == []


def test_rule_M6_only_ensembles_have_steps(said: Said) -> None:
    assert said("M6", f"ensemble_scheduling {{ {STEP} }}") == [
        (
            "1:1: ensemble scheduling cannot be set for model 'm' whose platform is not ensemble (write `platform:"
            ' "ensemble"`)'
        )
    ]


def test_rule_M7_ensembles_have_steps(said: Said) -> None:
    assert said("M7", 'platform: "ensemble"') == [
        (
            "1:1: ensemble scheduling must be set for ensemble m whose platform is ensemble (add ensemble_scheduling {"
            " step [ ... ] })"
        )
    ]


@pytest.mark.fault("C4")
def test_rule_M8_the_batch_size_is_not_negative(said: Said) -> None:
    assert said("M8", "max_batch_size: -1") == [
        "1:1: 'max_batch_size' must be non-negative value for m (found -1; 0 means no batch dimension)"
    ]


def test_rule_M9_a_version_policy_names_versions(said: Said) -> None:
    none = "at least one version must be available under the version policy of model 'm'"
    assert said("M9", "version_policy { latest { } }") == [f"1:18: {none} (write latest {{ num_versions: 1 }})"]
    assert said("M9", "version_policy { specific { } }") == [f"1:18: {none} (write specific {{ versions: [ 1 ] }})"]
    assert said("M9", "version_policy { specific { versions: [ 1, 0 ] } }") == [
        "1:44: version 0 of model 'm' is not a version (they start at 1)"
    ]
    assert said("M9", "version_policy { all { } }") == []


@pytest.mark.fault("C11")
def test_rule_M10_instances_are_counted_up_to_a_limit(said: Said) -> None:
    assert said("M10", "instance_group [ { count: 0 }, { count: 1024 } ]") == []
    assert said("M10", "instance_group [ { count: 10000 } ]") == [
        "1:20: instance group m_0 of model m asks for 10000 instances (at most 1024 are allowed)"
    ]


@pytest.mark.fault("C11")
def test_rule_M11_only_groups_on_gpus_list_them(said: Said) -> None:
    assert said("M11", 'instance_group [ { name: "g" kind: KIND_CPU gpus: [ 0 ] } ]') == [
        "1:45: instance group g of model m has kind KIND_CPU but specifies one or more GPUs"
    ]
    assert said("M11", "instance_group { gpus: -1 }") == [
        "1:18: instance group m_0 of model m specifies invalid or unsupported gpu id -1"
    ]


def test_rule_M44_no_gpu_is_listed_twice(said: Said) -> None:
    assert said("M44", "instance_group { gpus: [ 1, 0, 1 ] }") == [
        "1:18: instance group m_0 of model m lists gpu id 1 twice (for several instances on each GPU, write `count`)"
    ]


@pytest.mark.fault("C11")
def test_rule_M45_requested_gpus_exist(said: Said) -> None:
    text = 'backend: "python"\ninstance_group [ { }, { kind: KIND_GPU } ]'
    assert said("M45", text, gpus=Gpus(absence="this machine has no NVIDIA driver")) == [
        (
            "2:23: instance group m_1 of model m has kind KIND_GPU but no GPUs are available: this machine has no"
            " NVIDIA driver (write kind: KIND_CPU or leave `kind` out, or start with --gpu=off, which runs such models"
            " on the CPU)"
        )
    ]
    two = Gpus((0, 1))
    assert said("M45", text, gpus=two) == []
    assert said("M45", "instance_group { kind: KIND_GPU gpus: [ 1, 2 ] }", gpus=two) == [
        (
            "1:33: instance group m_0 of model m specifies invalid or unsupported gpu id 2. GPUs that can be used are:"
            " 0, 1"
        )
    ]
    assert said("M45", "instance_group { gpus: [ 1, 2 ] }", gpus=two) == [], "then it is on the CPU"
    assert said("M45", "instance_group { kind: KIND_GPU gpus: [ 7 ] }", gpus=ASSUMED) == []


def test_rule_M46_groups_on_gpus_are_for_backends_that_use_gpus(said: Said) -> None:
    text = 'backend: "callable" instance_group { kind: KIND_GPU }'
    assert said("M46", text, gpus=Gpus((0,)), uses_gpus=False) == [
        (
            "1:21: instance group m_0 of model m has kind KIND_GPU but backend 'callable' computes on the CPU only"
            " (write kind: KIND_CPU, or leave `kind` out)"
        )
    ]


def test_rule_M47_the_cpu_only_parameter_is_yes_or_no(said: Said) -> None:
    text = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "%s" } }'
    assert said("M47", text % "no") == []
    (told,) = said("M47", text % "maybe")
    assert "Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: 'maybe' of model 'm'" in told


def test_rule_M12_profiles_are_numbers_and_tensorrts(said: Said) -> None:
    (text,) = said("M12", 'backend: "python" instance_group { profile: "0" }')
    assert "specifies profile field which is only supported for TensorRT models" in text
    assert said("M12", 'platform: "tensorrt_plan" instance_group { profile: [ "0", "x" ] }') == [
        (
            "1:60: instance group m_0 of model m and platform tensorrt_plan specifies invalid profile x. The field"
            " should contain the string representation of a non-negative integer."
        )
    ]


def test_rule_M13_execution_is_a_place_that_exists(said: Said) -> None:
    assert said("M13", 'parameters { key: "execution" value { string_value: "thred" } }') == [
        "1:14: parameter 'execution' of model 'm' is \"thred\" (did you mean \"thread\"?)"
    ]
    assert said("M13", 'parameters { key: "execution" value { string_value: "inline" } }') == []


@pytest.mark.fault("C10")
@pytest.mark.parametrize("file", ["../2/model.onnx", "/etc/passwd", "a/../../b", "a\\000b"])
def test_rule_M14_model_files_lie_in_the_versions_folder(said: Said, file: str) -> None:
    (text,) = said("M14", f'default_model_filename: "{file}"')
    assert text.startswith("1:1: file '")
    assert "leads out of the version's folder" in text
    assert said("M14", f'cc_model_filenames {{ key: "8.0" value: "{file}" }}')[0].startswith("1:22: ")
    assert said("M14", f'model_operations {{ op_library_filename: "{file}" }}')[0].startswith("1:20: ")


def test_rule_M15_metrics_are_whole(said: Said) -> None:
    text = "model_metrics { metric_control [ {}, { metric_identifier { } histogram_options { } } ] }"
    assert said("M15", text) == [
        "1:34: metric control must specify 'metric_identifier'",
        "1:34: metric control must specify 'histogram_options'",
        "1:40: metric identifier must specify non-empty 'family'",
        "1:62: histogram options must specify non-empty 'buckets'",
    ]


def test_rule_M16_a_cached_model_has_one_response(said: Said) -> None:
    text = "response_cache { enable: true } sequence_batching { } model_transaction_policy { decoupled: true }"
    assert said("M16", text) == [
        (
            "1:1: Response Cache does not currently support model m with sequence batching scheduler. Please disable"
            " the response cache."
        ),
        (
            "1:1: Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable"
            " the response cache."
        ),
    ]


def test_rule_M17_some_instance_serves(said: Said) -> None:
    assert said("M17", "instance_group [ { passive: true }, { count: 2 } ]") == []
    assert said("M17", "instance_group [ { passive: true }, { passive: true } ]") == [
        (
            "1:20: model 'm' has passive instance groups only, so that nothing would ever serve a request"
            " (leave `passive` out of one of them)"
        ),
    ]


@pytest.mark.parametrize("value", ["", "soon", "0", "0.0", "-1", "1e3", "nan", "1000001", "5s"])
def test_rule_M18_execution_timeout_is_a_number_of_seconds(said: Said, value: str) -> None:
    hint = 'write seconds, more than 0 and at most 1000000, such as "2.5"'
    assert said("M18", f'parameters {{ key: "execution_timeout" value {{ string_value: "{value}" }} }}') == [
        f"1:14: parameter 'execution_timeout' of model 'm' is \"{value}\" ({hint})"
    ]


@pytest.mark.parametrize("value", ["1", "0.5", "1000000"])
def test_rule_M18_valid_times_are_accepted(said: Said, value: str) -> None:
    assert said("M18", f'parameters {{ key: "execution_timeout" value {{ string_value: "{value}" }} }}') == []


def test_rule_M49_only_backends_that_can_run_in_processes_do(said: Said) -> None:
    process = 'parameters { key: "execution" value { string_value: "process" } }'
    assert said("M49", f'{process} backend: "python"') == said("M49", f'{process} backend: "of_a_plug_in"') == []
    (problem,) = said("M49", f'{process} backend: "onnxruntime"')
    assert problem.startswith("1:14: model 'm': its backend 'onnxruntime' does not run in processes")


def test_rule_M48_a_decoupled_model_does_not_run_inline(said: Said) -> None:
    decoupled = "model_transaction_policy { decoupled: true }"
    inline = 'parameters { key: "execution" value { string_value: "inline" } }'
    assert said("M48", decoupled) == said("M48", inline) == []
    (problem,) = said("M48", f"{inline} {decoupled}")
    assert problem.startswith("1:14: model 'm': a decoupled model cannot run inline, where its responses")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("max_requests", "0", "expected a whole number, 1 or more"),
        ("max_request_bytes", "1k", "expected a whole number, 1 or more"),
        ("deadline_ms", "2.5", "expected a whole number, 1 or more"),
        ("when_full", "drop", "expected reject or wait"),
        ("answer_at_timeout", "yes", "expected true or false"),
    ],
)
def test_rule_M19_limits_of_a_deployment_are_numbers(said: Said, key: str, value: str, wanted: str) -> None:
    text = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}'
    assert said("M19", text.format(key, value)) == [f"1:14: model 'm': {key} is '{value}'; {wanted}"]
    valid = {"when_full": "wait", "answer_at_timeout": "true"}.get(key, "7")
    assert said("M19", text.format(key, valid)) == []


# Tensors


def test_rule_M20_tensors_have_names(said: Said) -> None:
    assert said("M20", "input { } output { }") == [
        "1:1: model input must specify 'name' for m",
        "1:11: model output must specify 'name' for m",
    ]


def test_rule_M21_tensors_have_data_types(said: Said) -> None:
    assert said("M21", 'input { name: "X" }') == ["1:1: model input 'X' must specify 'data_type' for m"]
    assert said("M21", 'output { name: "Y" data_type: TYPE_INVALID }') == [
        "1:1: model output 'Y' must specify 'data_type' for m"
    ]


@pytest.mark.fault("C5")
def test_rule_M22_tensors_have_dims(said: Said) -> None:
    assert said("M22", 'input { name: "X" }') == ["1:1: model input 'X' must specify 'dims' for m"]
    assert said("M22", 'max_batch_size: 1 input { name: "X" dims: [] }') == [
        "1:19: model input 'X' must specify 'dims' for m (a batch of single values has dims: [ 1 ])"
    ]


@pytest.mark.fault("C5")
def test_rule_M23_a_dim_is_a_size_or_varies(said: Said) -> None:
    assert said("M23", 'input { name: "X" dims: [ -1, 0, 3, -2 ] }') == [
        f"1:{column}: model input 'X' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m"
        f" (found {dim})"
        for column, dim in ((31, 0), (37, -2))
    ]


@pytest.mark.fault("C5")
def test_rule_M24_a_reshape_dim_is_a_size_or_varies(said: Said) -> None:
    assert said("M24", 'output { name: "Y" dims: 4 reshape { shape: [ 0 ] } }') == [
        (
            "1:47: model output 'Y' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size"
            " dimension for m (found 0)"
        )
    ]


@pytest.mark.fault("C5")
def test_rule_M25_no_empty_reshape_without_batching(said: Said) -> None:
    tensor = 'input { name: "X" dims: 1 reshape { } }'
    assert said("M25", tensor) == [
        (
            "1:27: model input 'X' cannot have empty reshape for non-batching model as scalar tensors are not supported"
            " for m"
        )
    ]
    assert said("M25", f"max_batch_size: 4 {tensor}") == []


@pytest.mark.fault("C5")
@pytest.mark.parametrize(
    ("dims", "shape", "fits"),
    [
        ("4, 4", "2, 2, 4", True),
        ("1", "", True),
        ("4", "3", False),
        ("2", "", False),
        ("-1", "4", False),
        ("4", "-1", False),
    ],
)
def test_rule_M26_a_reshape_keeps_the_element_count(said: Said, dims: str, shape: str, fits: bool) -> None:
    text = f'max_batch_size: 1 input {{ name: "X" dims: [ {dims} ] reshape {{ shape: [ {shape} ] }} }}'
    assert len(said("M26", text)) == (not fits)
    assert all(
        "model input 'X' has different size for dims and reshape for m" in problem for problem in said("M26", text)
    )


@pytest.mark.fault("C5")
@pytest.mark.parametrize(
    ("dims", "shape", "text"),
    [
        ("2, 4, -1, 6", "8, -1, 1, 6", ""),
        ("-1, -1", "-1", "has different number of variable-size dimensions for dims and reshape"),
        ("2, -1, 3", "3, -1, 2", "has different size for dims and reshape"),
    ],
)
def test_rule_M27_a_reshape_keeps_what_lies_between_varying_dims(said: Said, dims: str, shape: str, text: str) -> None:
    found = said("M27", f'input {{ name: "X" dims: [ {dims} ] reshape {{ shape: [ {shape} ] }} }}')
    assert [f"model input 'X' {text} for m" in problem for problem in found] == [True] * bool(text)


def test_rule_M28_an_image_has_three_dims(said: Said) -> None:
    assert said("M28", 'input { name: "X" format: FORMAT_NHWC dims: [ 4, 4 ] }') == [
        "1:19: model input NHWC/NCHW require 3 dims for m ('X' has 2)"
    ]
    assert said("M28", "input { format: FORMAT_NCHW dims: [ 3, -1, -1 ] }") == []


def test_rule_M29_shape_tensors_are_for_tensorrt(said: Said) -> None:
    tensor = 'input { name: "X" is_shape_tensor: true }'
    assert said("M29", f'backend: "python" {tensor}') == [
        "1:37: shape tensors are only supported for TensorRT platform for m (model input 'X')"
    ]
    assert said("M29", f'platform: "tensorrt_plan" {tensor}') == []


def test_rule_M30_non_linear_formats_are_for_tensorrt(said: Said) -> None:
    tensor = 'output { name: "Y" dims: [ 1, 1 ] is_non_linear_format_io: true }'
    assert said("M30", f'backend: "python" {tensor}') == [
        "1:53: Non-linear IO format is only supported for the TensorRT platform for m (model output 'Y')"
    ]
    assert said("M30", f'platform: "tensorrt_plan" {tensor}') == [
        "1:61: Non-linear IO format output requires 3 dims for m (model output 'Y')"
    ]


@pytest.mark.fault("C6")
def test_rule_M31_no_input_name_twice(said: Said) -> None:
    assert said("M31", 'input { name: "X" }\ninput { name: "X" }') == [
        "2:9: input 'X' is specified more than once for m (the first is at 1:1)"
    ]


@pytest.mark.fault("C6")
def test_rule_M32_an_output_has_one_label_file(said: Said) -> None:
    text = 'output [ { name: "Y" label_filename: "a" }, { name: "Y" %s } ]'
    assert said("M32", text % 'label_filename: "a"') == ["1:57: multiple label files for 'Y' (the first is at 1:22)"]
    assert said("M32", text % "") == []


@pytest.mark.fault("C6")
def test_rule_M33_a_model_has_outputs_unless_it_is_python(said: Said) -> None:
    assert said("M33", 'backend: "python"') == []
    (text,) = said("M33", 'backend: "onnxruntime"')
    assert text.startswith(
        "model 'm' must specify at least one 'output' (list them in config.pbtxt, or let the model's"
    )
    (text,) = said("M33", 'backend: "onnxruntime"', is_strict=True)  # its file completes nothing
    assert text.endswith("(list them in config.pbtxt)")


@pytest.mark.fault("C10")
@pytest.mark.parametrize("file", ["../../etc/passwd", "/etc/passwd", "../m2/labels.txt"])
def test_rule_M34_label_files_stay_inside(said: Said, file: str) -> None:
    assert said("M34", f'output {{ name: "Y" label_filename: "{file}" }}') == [
        f"1:20: label file '{file}' of output 'Y' leads out of the model's folder for m"
    ]


@pytest.mark.fault("C10")
def test_rule_M34_a_link_that_leads_out_and_a_loop_of_links_are_refused(said: Said, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "out.txt").symlink_to("/etc/passwd")
    (tmp_path / "m" / "loop.txt").symlink_to("loop.txt")
    assert "leads out of the model's folder" in said("M34", 'output { name: "Y" label_filename: "out.txt" }')[0]
    assert "is a loop of links" in said("M34", 'output { name: "Y" label_filename: "loop.txt" }')[0]


def test_rule_M34_a_label_file_exists(said: Said) -> None:
    text = 'output { name: "Y" label_filename: "labels.txt" }'
    assert "label file 'labels.txt' of output 'Y' does not exist for m" in said("M34", text)[0]
    assert said("M34", text, "labels.txt") == []


def test_rule_M35_a_batch_input_has_one_source(said: Said) -> None:
    assert said("M35", 'batch_input { kind: BATCH_ITEM_SHAPE source_input: [ "a", "b" ] }') == [
        "1:1: batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 2 for m"
    ]


def test_rule_M36_a_batch_input_is_a_number(said: Said) -> None:
    assert said("M36", "batch_input { data_type: TYPE_INT64 }") == [
        "1:15: batch input data type must be TYPE_INT32 or TYPE_FP32 for m"
    ]


@pytest.mark.fault("C9")
def test_rule_M37_a_batch_source_exists(said: Said) -> None:
    text = 'input { name: "INPUT0" } batch_input { source_input: "INPUT" } batch_output { source_input: "Z" }'
    assert said("M37", text) == [
        "1:40: unknown source input name 'INPUT' for m (did you mean \"INPUT0\"?)",
        "1:79: unknown source input name 'Z' for m",
    ]


def test_rule_M38_a_batch_input_has_a_target(said: Said) -> None:
    assert said("M38", "batch_input { }") == ["1:1: batch input must specify 'target_name' for m"]


def test_rule_M39_a_batch_output_has_one_source(said: Said) -> None:
    assert said("M39", "batch_output { }") == [
        "1:1: batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for m"
    ]


def test_rule_M40_a_batch_output_has_a_target_of_its_own(said: Said) -> None:
    text = 'output { name: "Y" } batch_output { target_name: [ "Y", "Z", "Y" ] }'
    assert said("M40", text) == [
        "1:57: unknown target output name 'Z' for m",
        "1:62: target output name 'Y' can only be specified once for m",
    ]


def test_rule_M41_computed_inputs_are_not_listed_as_inputs_and_not_computed_twice(said: Said) -> None:
    text = 'input { name: "X" } batch_input { target_name: [ "X", "I" ] } batch_input { target_name: "I" }'
    assert said("M41", text) == [
        (
            "1:50: target input name 'X' is an input that clients send, too, for m "
            "(leave it out of `input`: a batch input is made by the server)"
        ),
        "1:77: target input name 'I' can only be specified once for m",
    ]


def test_rule_M42_the_shape_of_a_batch_output_is_known(said: Said) -> None:
    text = """
input { name: "X" dims: [ -1 ] }
output [ { name: "Y" dims: [ -1, 3 ] }, { name: "Z" dims: [ 3, -1 ] } ]
batch_output { target_name: [ "Y", "Z" ] source_input: "X" }
"""
    assert said("M42", text) == [
        (
            "4:36: target output name 'Z' varies where input 'X' has no dimension for m "
            "(dims [3,-1] take their -1s from [-1])"
        )
    ]


def test_rule_M42_a_batch_output_has_no_second_shape(said: Said) -> None:
    text = """
input { name: "X" dims: [ -1 ] }
output { name: "Y" dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
batch_output { target_name: "Y" source_input: "X" }
"""
    assert said("M42", text) == [
        "4:16: target output name 'Y' has a reshape for m (write the shape that clients get as its dims)"
    ]


# Batching


@pytest.mark.fault("C7")
def test_rule_M50_preferred_sizes_fit(said: Said) -> None:
    assert said("M50", "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 0, 4, 5 ] }") == [
        "1:62: dynamic batching preferred size must be positive for m (found 0)",
        "1:68: dynamic batching preferred size must be <= max batch size for m (5 is more than 4)",
    ]


@pytest.mark.fault("C7")
def test_rule_M51_the_default_priority_exists(said: Said) -> None:
    assert said("M51", "dynamic_batching { priority_levels: 2 default_priority_level: 3 }") == [
        "1:39: default priority level must be in range [1, 2] for m"
    ]
    assert said("M51", "dynamic_batching { priority_levels: 2 }") == [
        "1:20: default priority level must be in range [1, 2] for m"
    ]


@pytest.mark.fault("C7")
def test_rule_M52_a_policy_has_a_priority_that_exists(said: Said) -> None:
    text = "dynamic_batching { priority_levels: 2 priority_queue_policy [ { key: 1 }, { key: 3 value { } } ] }"
    assert said("M52", text) == ["1:77: priority queue policy must have priority level in range [1, 2] for m (found 3)"]


def test_rule_M53_keeping_order_takes_one_priority(said: Said) -> None:
    assert said("M53", "dynamic_batching { preserve_ordering: true priority_levels: 2 }") == [
        "1:44: Only one priority level is allowed when 'preserve_ordering' is true for m"
    ]


def test_rule_M54_keeping_order_forbids_delaying(said: Said) -> None:
    assert (
        said("M54", "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }") == []
    )
    own = "{ timeout_action: DELAY allow_timeout_override: true }"
    assert said("M54", f"dynamic_batching {{ preserve_ordering: true default_queue_policy {own} }}") == []
    policy = "{ timeout_action: DELAY default_timeout_microseconds: 1 }"
    text = (
        f"dynamic_batching {{ preserve_ordering: true default_queue_policy {policy}\n"
        f" priority_queue_policy {{ key: 1 value {policy} }} }}"
    )
    end = "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m"
    assert said("M54", text) == [f"1:44: {end}", f"2:26: {end}"]


def test_rule_M55_a_warmup_sample_is_whole(said: Said) -> None:
    text = 'model_warmup { inputs { key: "X" value { dims: [ -1 ] } } }'
    assert said("M55", text) == [
        "1:42: warmup setting expects all variable-size dimensions are specified for input 'X' for m",
        (
            "1:25: warmup setting expects input 'X' to have input_data_type set for m (write zero_data: true,"
            " random_data: true or input_data_file)"
        ),
    ]


@pytest.mark.fault("C10")
def test_rule_M56_a_warmup_file_exists_and_stays_inside(said: Said) -> None:
    text = 'model_warmup { inputs { key: "X" value { input_data_file: "../../x" } } }'
    assert said("M56", text) == ["1:42: warmup file '../../x' of input 'X' leads out of the model's folder for m"]
    assert said("M56", text.replace("../../x", "x")) == [
        "1:42: warmup file 'x' of input 'X' does not exist for m (put it into m/warmup/)"
    ]


WARMED_UP = """max_batch_size: 4 input { name: "X" data_type: TYPE_FP32 dims: [ -1, 3 ] }
model_warmup { name: "s" batch_size: 4 inputs { key: "%s" value { data_type: %s dims: [ %s ] zero_data: true } } }
"""


def test_rule_M57_a_warmup_input_is_one_of_the_models(said: Said) -> None:
    assert said("M57", WARMED_UP % ("X", "TYPE_FP32", "7, 3")) == []
    assert said("M57", WARMED_UP % ("x", "TYPE_FP32", "7, 3")) == [
        "2:49: warmup input 'x' is not an input of model m (did you mean \"X\"?)"
    ]
    assert said("M57", WARMED_UP % ("X", "TYPE_INT8", "7, 4")) == [
        "2:66: warmup input 'X' of model m has data_type TYPE_INT8 (the input is TYPE_FP32)",
        "2:87: warmup input 'X' of model m has dims [7, 4] (the input's are [-1, 3], without the batch dimension)",
    ]
    sequences = (
        WARMED_UP
        + """sequence_batching {
control_input [ { name: "C" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
                { name: "I" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } ]
state { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ -1 ] } }"""
    )
    for right in (("C", "TYPE_INT32", "1"), ("I", "TYPE_UINT64", "1"), ("S", "TYPE_FP32", "5")):
        assert said("M57", sequences % right) == []
    assert said("M57", sequences % ("C", "TYPE_FP32", "1")) == [
        "2:66: warmup input 'C' of model m has data_type TYPE_FP32 (the input is TYPE_INT32)"
    ]
    assert said("M57", sequences % ("T", "TYPE_FP32", "1")) == [
        "2:49: warmup input 'T' is not an input of model m (it has X, C, I, S)"
    ]


def test_rule_M58_a_warmup_batch_fits_the_model(said: Said) -> None:
    text = WARMED_UP % ("X", "TYPE_FP32", "7, 3")
    assert said("M58", text) == []
    assert said("M58", text.replace("batch_size: 4 inputs", "batch_size: 5 inputs")) == [
        "2:26: warmup sample 's' of model m has batch_size 5 (at most 4 requests run at once)"
    ]
    text = 'max_batch_size: 0 model_warmup { name: "s" batch_size: %d }'
    assert said("M58", text % 1) == []
    assert len(said("M58", text % 2)) == 1


# Sequences


def sequence(inside: str) -> str:
    return f"max_batch_size: 2\nsequence_batching {{\n{inside}\n}}"


def control(inside: str, name: str = "C") -> str:
    return sequence(f'control_input {{ name: "{name}" control {{ {inside} }} }}')


def test_rule_M60_a_control_tensor_has_a_name(said: Said) -> None:
    assert said("M60", sequence("control_input { }")) == [
        "3:1: sequence batching control tensor must have a name for m"
    ]


def test_rule_M61_no_control_tensor_twice(said: Said) -> None:
    assert said("M61", sequence('control_input [ { name: "C" }, { name: "C" } ]')) == [
        "3:34: sequence batching control tensor 'C' is specified for multiple control kinds for m"
    ]


@pytest.mark.fault("C8")
def test_rule_M62_no_control_kind_twice(said: Said) -> None:
    inside = 'control_input [ { name: "A" control { } }, { name: "B" control { kind: CONTROL_SEQUENCE_START } } ]'
    assert said("M62", sequence(inside)) == [
        "3:56: sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m"
    ]


@pytest.mark.fault("C8")
@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        (
            "",
            (
                "27: sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
                " for CONTROL_SEQUENCE_START for m"
            ),
        ),
        (
            "int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ]",
            (
                "27: sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and"
                " 'bool_false_true' for CONTROL_SEQUENCE_START for m"
            ),
        ),
        (
            "bool_false_true: [ true ]",
            (
                "37: sequence batching control 'bool_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START"
                " for m"
            ),
        ),
    ],
)
def test_rule_M63_a_boolean_control_has_one_pair(said: Said, inside: str, expected: str) -> None:
    assert said("M63", control(inside)) == [f"3:{expected}"]
    assert said("M63", control("fp32_false_true: [ 0, 1 ]")) == []


@pytest.mark.fault("C8")
def test_rule_M64_a_correlation_control_is_an_id(said: Said) -> None:
    inside = "kind: CONTROL_SEQUENCE_CORRID fp32_false_true: [ 0, 1 ] data_type: TYPE_FP32"
    assert said("M64", control(inside)) == [
        (
            "3:27: sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
            " for CONTROL_SEQUENCE_CORRID for m"
        ),
        (
            "3:27: unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64,"
            " TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        ),
    ]
    assert said("M64", control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING")) == []


def test_rule_M65_oldest_sizes_fit(said: Said) -> None:
    assert said("M65", sequence("oldest { preferred_batch_size: [ -1, 3 ] }")) == [
        "3:34: sequence batching preferred batch size must be positive for m (found -1)",
        "3:38: sequence batching preferred batch size must be <= max batch size for m (3 is more than 2)",
    ]


def test_rule_M66_slot_utilization_is_a_share(said: Said) -> None:
    assert said("M66", sequence("direct { minimum_slot_utilization: 1.5 }")) == [
        "3:10: sequence batching minimum slot utilization must be in range (0.0, 1.0] for m (found 1.5)"
    ]
    assert len(said("M66", sequence("direct { minimum_slot_utilization: nan }"))) == 1


def state(initial: str, dims: str = "-1") -> str:
    return sequence(f'state {{ input_name: "S" data_type: TYPE_INT32 dims: [ {dims} ]\n{initial} }}')


@pytest.mark.fault("C8")
def test_rule_M67_a_state_begins_once(said: Said) -> None:
    assert said("M67", state("initial_state [ {}, {} ]")) == [
        "4:21: initial_state field for state input 'S' must contain exactly one or zero element. Found '2' elements."
    ]


def test_rule_M68_the_initial_type_is_the_states(said: Said) -> None:
    assert said("M68", state("initial_state { data_type: TYPE_FP32 }")) == [
        "4:1: The data type used for 'initial_state' field of state 'S' does not match the state data type."
    ]


def test_rule_M69_an_initial_state_has_a_name(said: Said) -> None:
    assert said("M69", state("initial_state { }")) == [
        "4:1: Field 'name' must be set when using initial_state for state input 'S'."
    ]


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ("1, 2", []),
        (
            "1",
            [
                (
                    "17: Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state"
                    " input 'S'. 1 != 2"
                )
            ],
        ),
        ("-1, 2", ["25: 'initial_state' field for state input name 'S' contains variable dimensions."]),
        ("1, 3", ["28: 'initial_state' dim for input name 'S' doesn't match 'state' dim description. 3 != 2"]),
    ],
)
def test_rule_M70_initial_dims_fit_the_states(said: Said, dims: str, expected: list[str]) -> None:
    assert said("M70", state(f"initial_state {{ dims: [ {dims} ] }}", "-1, 2")) == [f"4:{text}" for text in expected]


def test_rule_M71_an_initial_state_has_data(said: Said) -> None:
    assert said("M71", state("initial_state { }"))[0].startswith(
        "4:1: initial_state setting expects state'S' to have state_data set"
    )
    assert said("M71", state("initial_state { zero_data: false }")) == []


@pytest.mark.fault("C10")
def test_rule_M72_an_initial_file_stays_inside(said: Said) -> None:
    assert said("M72", state('initial_state { data_file: "../../secret" }')) == [
        "4:17: initial_state file '../../secret' of state input 'S' leads out of the model's folder"
    ]
    assert said("M72", state('initial_state { data_file: "zeros" }')) == []


def test_rule_M73_growing_memory_is_one_buffer(said: Said) -> None:
    assert said("M73", state("use_growable_memory: true")) == [
        (
            "4:1: In order to 'use_growable_memory', you must also enable 'use_same_buffer_for_input_output' for state"
            " input 'S'"
        )
    ]


def test_rule_M74_controls_and_states_are_no_inputs(said: Said) -> None:
    inside = 'control_input { name: "X" }\nstate { input_name: "Y" }' + 2 * '\nstate { input_name: "Z" }'
    assert said("M74", sequence(inside) + '\ninput [ { name: "X" }, { name: "Y" } ]') == [
        "3:17: sequence batching control input 'X' must not be listed as input for m",
        "4:9: sequence batching state input 'Y' must not be listed as input for m",
        "6:9: sequence batching state input 'Z' is specified twice for m",
    ]


def test_rule_M75_states_are_whole(said: Said) -> None:
    assert said("M75", sequence('state { input_name: "S" data_type: TYPE_FP32 }')) == [
        "3:1: sequence batching state must have output_name for m",
        "3:1: sequence batching state must have dims for m",
    ]
    assert said("M75", sequence('state { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 1 ] }')) == []


# Ensembles


def test_rule_M80_an_ensemble_has_no_instances(said: Said) -> None:
    assert said("M80", 'platform: "ensemble" instance_group { }') == [
        "1:22: instance group should not be specified for ensemble 'm' (give the models of its steps instances instead)"
    ]


def test_rule_M81_an_ensemble_has_no_optimization(said: Said) -> None:
    assert said("M81", 'platform: "ensemble" optimization { }') == [
        "1:22: optimization should not be specified for ensemble 'm' (it belongs into the models of its steps)"
    ]


def test_rule_M82_an_ensemble_has_no_warmup(said: Said) -> None:
    assert said("M82", 'platform: "ensemble" model_warmup { }') == [
        "1:22: model_warmup can not be specified for ensemble 'm' (warm up the models of its steps instead)"
    ]


def test_rule_M83_an_ensemble_has_steps(said: Said) -> None:
    assert said("M83", "ensemble_scheduling { }") == ["1:1: must specify 'step' for ensemble 'm'"]


def test_rule_M84_every_step_is_whole(said: Said) -> None:
    assert said("M84", 'ensemble_scheduling { step [ { model_name: "a" }, { } ] }') == [
        "1:30: must specify 'input_map' in step 0 of ensemble 'm'",
        "1:30: must specify 'output_map' in step 0 of ensemble 'm'",
        "1:51: must specify 'model_name' in step 1 of ensemble 'm'",
        "1:51: must specify 'input_map' in step 1 of ensemble 'm'",
        "1:51: must specify 'output_map' in step 1 of ensemble 'm'",
    ]


def test_rule_M85_every_mapping_has_two_names(said: Said) -> None:
    text = 'ensemble_scheduling { step { input_map { key: "X" } output_map { value: "B" } } }'
    hint = "(key is the model's tensor, value the ensemble's)"
    assert said("M85", text) == [
        f"1:42: input_map entry without 'value' in step 0 of ensemble 'm' {hint}",
        f"1:53: output_map entry without 'key' in step 0 of ensemble 'm' {hint}",
    ]


def test_rule_M86_a_test_says_one_thing(said: Said) -> None:
    steps = [
        "when { }",
        'when { tensor: "K" equals: 1 otherwise: true }',
        'when { tensor: "K" above: 1 equals: 1 }',
        'when { tensor: "K" not: true otherwise: true }',
        'when { tensor: "K" above: nan }',
        'when { tensor: "K" above: 1 below: 2 } when { tensor: "L" }',
    ]
    text = " ".join(STEP.replace("step {", f"step {{ {when}") for when in steps)
    texts = [
        one.partition(" (a test is")[0].partition(": ")[2] for one in said("M86", f"ensemble_scheduling {{ {text} }}")
    ]
    assert texts == [
        "when: must specify 'tensor' in step 0 of ensemble 'm'",
        "when: the test of 'K' must be one of a comparison, 'equals' and 'otherwise' in step 1 of ensemble 'm'",
        "when: the test of 'K' must be one of a comparison, 'equals' and 'otherwise' in step 2 of ensemble 'm'",
        "when: the test of 'K' cannot be both 'not' and 'otherwise' in step 3 of ensemble 'm'",
        "when: the test of 'K' compares with NaN, which no number passes in step 4 of ensemble 'm'",
    ]


def test_rule_M87_each_names_tensors(said: Said) -> None:
    text = f"ensemble_scheduling {{ {STEP.replace('step {', 'step { each { at_most: 3 }')} }}"
    (problem,) = said("M87", text)
    assert "each: must specify 'tensor' in step 0 of ensemble 'm'" in problem


def test_rule_M88_a_tensor_is_filled_once(said: Said) -> None:
    fills = 'fill { } fill { tensor: "B" } fill { tensor: "B" value: 1 }'
    problems = said("M88", f"ensemble_scheduling {{ {STEP} {fills} }}")
    assert [problem.partition(": ")[2] for problem in problems] == [
        "fill: must specify 'tensor' in ensemble 'm'",
        "tensor 'B' of ensemble 'm' is filled twice",
    ]


def test_rule_M88_what_is_present_has_a_name_of_its_own(said: Said) -> None:
    fills = (
        'fill { tensor: "B" present: "B" } fill { tensor: "C" present: "p" } fill { tensor: "D" present: "p" } '
        'fill { } fill { tensor: "E" }'
    )
    problems = said("M88", f"ensemble_scheduling {{ {STEP} {fills} }}")
    hint = "(a name of its own: of a BOOL tensor that no step writes)"
    assert [problem.partition(": ")[2] for problem in problems[:2]] == [
        f"fill: 'present' of 'B' names 'B', which is filled itself, in ensemble 'm' {hint}",
        f"fill: 'present' of 'D' names 'p', which is named by another fill, in ensemble 'm' {hint}",
    ]
    assert len(problems) == 3


@pytest.mark.parametrize("name", ["m#2", "inner/m", r"a\nb", "  "])
def test_rule_M89_the_name_of_a_step_is_one_that_no_other_step_can_get(said: Said, name: str) -> None:
    named = STEP.replace("step {", f'step {{ name: "{name}"')
    (problem,) = said("M89", f"ensemble_scheduling {{ {named} }}")
    assert "in step 0 of ensemble 'm' is no name of a step" in problem
