"""Unsupported features of valid configurations are refused by name, with their place; other features are accepted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flowserve.config.backends import OTHER_BACKENDS
from flowserve.config.load import Draft, finish
from flowserve.config.types import OFF
from flowserve.errors import Problems

Read = Callable[..., Draft]

MODEL = """backend: "python" max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] %s }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PIPE = """platform: "ensemble"
input { name: "A" data_type: TYPE_FP32 dims: [ 4 ] %s }
output { name: "B" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling { %s
step { model_name: "a" model_version: -1 input_map { key: "X" value: "A" } output_map { key: "Y" value: "B" } %s } }
"""


@pytest.fixture
def refused(draft: Read) -> Callable[..., list[str]]:
    """`refused(text)`: all problems raised by `finish`, places shortened to line:column."""

    def problems(text: str | None, *files: str) -> list[str]:
        try:
            finish(draft(text, *files), None)
        except Problems as error:
            return [str(problem).replace("m/config.pbtxt:", "") for problem in error.problems]
        return []

    return problems


Refused = Callable[..., list[str]]


def test_every_refusal_has_a_test_and_every_test_a_refusal(root: Path) -> None:
    tested = re.findall(r"^def test_refusal_(N\d+)_", Path(__file__).read_text(encoding="utf-8"), re.MULTILINE)
    refusals = (root / "flowserve/config/unsupported.py").read_text(encoding="utf-8")
    assert set(tested) == set(re.findall(r'"(N\d+)"', refusals))


def test_a_plain_model_and_a_plain_ensemble_are_served(refused: Refused) -> None:
    assert refused(MODEL % "") == []
    assert refused(PIPE % ("", "", "")) == []


def test_optional_inputs_of_a_model_are_served(refused: Refused) -> None:
    assert refused(MODEL % "optional: true") == []


@pytest.mark.parametrize(
    "text",
    [
        'instance_group { count: 2 rate_limiter { resources { name: "R" count: 4 } priority: 2 } }',
        'input { name: "I" data_type: TYPE_UINT8 dims: [ 3, -1, -1 ] format: FORMAT_NCHW }',
        "dynamic_batching { default_queue_policy { timeout_action: DELAY } }",
        "dynamic_batching { preserve_ordering: true }",
        "dynamic_batching { priority_levels: 3 default_priority_level: 2 priority_queue_policy { key: 1 value { } } }",
        "dynamic_batching { default_queue_policy { default_timeout_microseconds: 1 max_queue_size: 1 } }",
        "response_cache { enable: false } model_transaction_policy { decoupled: false }",
        "sequence_batching { iterative_sequence: true } model_transaction_policy { decoupled: true }",
        'model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { buckets: 1 } } }',
        'parameters { key: "execution" value { string_value: "inline" } }',
        'parameters { key: "execution" value { string_value: "process" } }',
    ],
)
def test_fields_that_change_no_result_are_accepted(refused: Refused, text: str) -> None:
    assert refused(MODEL % "" + text) == []


def test_refusal_N2_decoupled_onnx_models(refused: Refused) -> None:
    text = (MODEL % "").replace('backend: "python"', 'backend: "onnxruntime"')
    (told,) = refused(text + "model_transaction_policy { decoupled: true }", "1/model.onnx")
    assert "model 'm': a decoupled model_transaction_policy of an ONNX model is not supported yet" in told
    assert refused(MODEL % "" + "model_transaction_policy { decoupled: true }") == []
    assert refused(PIPE % ("", "", "") + "model_transaction_policy { decoupled: true }") == []


def test_refusal_N13_shape_tensors(refused: Refused) -> None:
    text = (MODEL % "is_shape_tensor: true").replace('backend: "python"', 'platform: "tensorrt_plan"')
    assert any(problem.endswith("is_shape_tensor of input 'X' is not supported yet [N13]") for problem in refused(text))


def test_refusal_N14_non_linear_formats(refused: Refused) -> None:
    text = MODEL % "is_non_linear_format_io: true"
    assert any(problem.endswith("format_io of input 'X' is not supported yet [N14]") for problem in refused(text))


@pytest.mark.fault("C11")
def test_with_gpus_off_groups_that_request_one_run_on_the_cpu_with_a_warning(
    draft: Read, caplog: pytest.LogCaptureFixture
) -> None:
    text = MODEL % "" + "instance_group [ { kind: KIND_GPU gpus: [ 0, 1 ] count: 3 }, { kind: KIND_MODEL } ]"
    config = finish(draft(text), None, OFF)
    assert [(group.kind, group.count, group.gpus) for group in config.instance_groups] == [
        ("KIND_CPU", 3, ()),
        ("KIND_MODEL", 1, ()),
    ]
    assert caplog.messages == ["m/config.pbtxt: instance group m_0 runs on the CPU instead of a GPU (--gpu=off)"]


def test_refusal_N17_namespaces(refused: Refused) -> None:
    (text,) = refused(PIPE % ("", "", 'model_namespace: "ns"'))
    assert text.endswith("model 'm': model_namespace of step 0 is not supported yet [N17]")


def test_refusal_N18_custom_operators(refused: Refused) -> None:
    assert refused(MODEL % "" + 'model_operations { op_library_filename: "ops.so" }') == [
        "4:1: model 'm': model_operations (custom operators) is not supported yet [N18]"
    ]


def test_refusal_N19_repository_agents(refused: Refused) -> None:
    assert refused(MODEL % "" + 'model_repository_agents { agents { name: "checksum" } }') == [
        "4:1: model 'm': model_repository_agents is not supported yet [N19]"
    ]


def test_refusal_N21_places_that_do_not_exist_yet(refused: Refused) -> None:
    text = 'parameters { key: "execution" value { string_value: "ray" } }'
    (told,) = refused(MODEL % "" + text)
    assert told.startswith(
        "4:14: model 'm': execution \"ray\" is not supported yet (name the model in a placement file"
    )


@pytest.mark.parametrize(
    ("said", "files", "where", "advice"),
    [
        ('backend: "libtorch"', (), "1:1", 'libtorch is not supported yet (write backend: "pytorch")'),
        ('backend: "dali"', (), "1:1", "dali is not supported yet (run the DALI pipeline"),
        ('backend: "identity"', (), "1:1", "identity is not supported yet (write a model.py"),
        ('backend: "tensorrtllm"', (), "1:1", "tensorrtllm is not supported yet (its engines are no TensorRT plans:"),
        ('backend: "tensorrt_llm"', (), "1:1", "tensorrt_llm is not supported yet (its engines are no TensorRT plans:"),
    ],
)
def test_refusal_N22_backends_that_are_not_installed(
    refused: Refused, said: str, files: tuple[str, ...], where: str, advice: str
) -> None:
    text = (MODEL % "").replace('backend: "python"', said)
    (told,) = refused(text, *files)
    assert told.startswith(f"{where}: model 'm': {advice}" if where else f" model 'm': {advice}")


def test_an_unsupported_backend_given_as_platform_gets_the_alternative_as_hint(
    refused: Refused,
) -> None:
    (told,) = refused((MODEL % "").replace('backend: "python"', 'platform: "dali"'))
    assert told == f"1:1: unexpected platform type 'dali' for m ({OTHER_BACKENDS['dali']}) [M3]"


def test_each_unsupported_backend_is_on_the_page_from_triton() -> None:
    page = (Path(__file__).parents[2] / "docs" / "from-triton.md").read_text()
    told = page[page.index("### Other backends") : page.index("## 2.")]
    assert [name for name in OTHER_BACKENDS if f"`{name}`" not in told] == []


def test_an_unknown_backend_is_left_to_the_registry(refused: Refused) -> None:
    assert refused((MODEL % "").replace("python", "mine")) == []
