"Configurations and ensembles that do not load, with Triton's texts: one repository of mistakes."

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.triton_models import python_config, spec, write_model

pytestmark = pytest.mark.server

ECHO = """
def execute(self, requests):
    return [respond(Y=given(request, "X")) for request in requests]
"""
X, Y = spec("X", "FP32", "2"), spec("Y", "FP32", "2")
BATCHES = "max_batch_size: 4"


def config(*more: str, inputs: tuple[str, ...] = (X,), outputs: tuple[str, ...] = (Y,)) -> str:
    return python_config([*inputs], [*outputs], *more)


def sequence(text: str) -> str:
    return config(BATCHES, f"sequence_batching {{ {text} }}")


def state(text: str) -> str:
    one = 'input_name: "SI" output_name: "SO" data_type: TYPE_FP32 dims: [ 2 ]'
    return sequence(f"state [ {{ {one} initial_state: [ {{ {text} }} ] }} ]")


# Each with a part of Triton's text, in the order of the chapters of its documentation.
MODELS = {
    # 1.2
    "other_name": (
        'name: "elsewhere"\n' + config(),
        ("unexpected directory name 'other_name' for model 'elsewhere', directory name must equal model name"),
    ),
    "negative_batch": (config("max_batch_size: -1"), "'max_batch_size' must be non-negative value for negative_batch"),
    "no_backend": (
        config().replace('backend: "python"', 'platform: "nothing"'),
        "unexpected platform type 'nothing' for no_backend",
    ),
    "not_ensemble": (
        config("ensemble_scheduling { step [ ] }"),
        ("ensemble scheduling cannot be set for model 'not_ensemble' whose platform is not ensemble"),
    ),
    "unknown_field": (config("no_such_field: 1"), "no_such_field"),
    # 1.3
    "no_dims": (
        config(inputs=('{ name: "X" data_type: TYPE_FP32 }',)),
        "model input 'X' must specify 'dims' for no_dims",
    ),
    "no_type": (config(inputs=('{ name: "X" dims: [ 2 ] }',)), "model input 'X' must specify 'data_type' for no_type"),
    "zero_dim": (
        config(inputs=(spec("X", "FP32", "0"),)),
        ("model input 'X' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for zero_dim"),
    ),
    "zero_dim_out": (
        config(outputs=(spec("Y", "FP32", "-2"),)),
        (
            "model output 'Y' dimension must be integer >= 1, or -1 to indicate a variable-size "
            "dimension for zero_dim_out"
        ),
    ),
    "reshape_count": (
        config(inputs=(spec("X", "FP32", "2", "reshape { shape: [ 3 ] }"),)),
        "model input 'X' has different size for dims and reshape for reshape_count",
    ),
    "reshape_empty": (
        config(inputs=(spec("X", "FP32", "1", "reshape { shape: [ ] }"),)),
        ("cannot have empty reshape for non-batching model as scalar tensors are not supported for reshape_empty"),
    ),
    "reshape_variable": (
        config(inputs=(spec("X", "FP32", "-1, 2", "reshape { shape: [ -1, -1 ] }"),)),
        "reshape_variable",
    ),
    "nhwc": (
        config(inputs=(spec("X", "FP32", "2", "format: FORMAT_NHWC"),)),
        "model input NHWC/NCHW require 3 dims for nhwc",
    ),
    # 1.4
    "cpu_with_gpus": (
        config("instance_group [ { kind: KIND_CPU gpus: [ 0 ] } ]"),
        ("instance group cpu_with_gpus_0 of model cpu_with_gpus has kind KIND_CPU but specifies one or more GPUs"),
    ),
    # 1.6
    "no_version": (
        config("version_policy { specific { versions: [ 7 ] } }"),
        "at least one version must be available under the version policy of model 'no_version'",
    ),
    # 1.7
    "preferred_large": (
        config(BATCHES, "dynamic_batching { preferred_batch_size: [ 9 ] }"),
        "dynamic batching preferred size must be <= max batch size for preferred_large",
    ),
    "preferred_zero": (
        config(BATCHES, "dynamic_batching { preferred_batch_size: [ 0 ] }"),
        "dynamic batching preferred size must be positive for preferred_zero",
    ),
    "no_default_level": (
        config(BATCHES, "dynamic_batching { priority_levels: 2 }"),
        "default priority level must be in range [1, 2] for no_default_level",
    ),
    "level_range": (
        config(
            BATCHES,
            (
                "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { "
                "key: 3 value { max_queue_size: 1 } } }"
            ),
        ),
        "priority queue policy must have priority level in range [1, 2] for level_range",
    ),
    "order_levels": (
        config(BATCHES, ("dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }")),
        "Only one priority level is allowed when 'preserve_ordering' is true for order_levels",
    ),
    # 1.8
    "control_name": (
        sequence("control_input [ { control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ]"),
        "sequence batching control tensor must have a name for control_name",
    ),
    "control_twice": (
        sequence(
            'control_input [ { name: "A" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ '
            '0, 1 ] } ] }, { name: "A" control [ { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1'
            " ] } ] } ]"
        ),
        ("sequence batching control tensor 'A' is specified for multiple control kinds for control_twice"),
    ),
    "kind_twice": (
        sequence(
            'control_input [ { name: "A" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ '
            '0, 1 ] } ] }, { name: "B" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0,'
            " 1 ] } ] } ]"
        ),
        "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for kind_twice",
    ),
    "control_values": (
        sequence('control_input [ { name: "A" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0 ] } ] } ]'),
        (
            "sequence batching control 'fp32_false_true' must have exactly 2 entries for "
            "CONTROL_SEQUENCE_START for control_values"
        ),
    ),
    "corrid_type": (
        sequence('control_input [ { name: "A" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } ] } ]'),
        "unexpected data type for control CONTROL_SEQUENCE_CORRID for corrid_type",
    ),
    "oldest_large": (
        sequence("oldest { max_candidate_sequences: 4 preferred_batch_size: [ 9 ] }"),
        "sequence batching preferred batch size must be <= max batch size for oldest_large",
    ),
    "utilization": (
        sequence("direct { minimum_slot_utilization: 2 }"),
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for utilization",
    ),
    "initial_name": (
        state("data_type: TYPE_FP32 dims: [ 2 ] zero_data: true"),
        "Field 'name' must be set when using initial_state for state input 'SI'.",
    ),
    "initial_type": (state('name: "S" data_type: TYPE_INT32 dims: [ 2 ] zero_data: true'), "SI"),
    "initial_none": (state('name: "S" data_type: TYPE_FP32 dims: [ 2 ]'), "SI"),
    "cache_sequence": (
        sequence("") + "response_cache { enable: true }",
        (
            "Response Cache does not currently support model cache_sequence with sequence batching "
            "scheduler. Please disable the response cache."
        ),
    ),
    "cache_decoupled": (
        config("model_transaction_policy { decoupled: true }", "response_cache { enable: true }"),
        ("Response Cache does not currently support model cache_decoupled with 'decoupled' transaction policy"),
    ),
}


def step(model: str, inputs: str, outputs: str, version: int = -1) -> str:
    """`inputs`, `outputs`: "KEY=VALUE ..."."""
    maps = [
        f'{kind}_map {{ key: "{key}" value: "{value}" }}'
        for kind, pairs in (("input", inputs), ("output", outputs))
        for key, _, value in (pair.partition("=") for pair in pairs.split())
    ]
    return f'{{ model_name: "{model}" model_version: {version} {" ".join(maps)} }}'


def ensemble(
    *steps: str,
    inputs: tuple[str, ...] = (spec("A", "FP32", "2"),),
    outputs: tuple[str, ...] = (spec("B", "FP32", "2"),),
    more: str = "",
) -> str:
    lines = ['platform: "ensemble"', f"input [ {', '.join(inputs)} ]", f"output [ {', '.join(outputs)} ]", more]
    return "\n".join([*lines, f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}", ""])


ONE = step("echo", "X=A", "Y=B")
ENSEMBLES = {
    # 2.2
    "e_backend": (
        'backend: "python"\n' + ensemble(ONE),
        "Ensemble model 'e_backend' must have platform type 'ensemble' and empty backend type",
    ),
    "e_group": (
        ensemble(ONE, more="instance_group [ { count: 1 } ]"),
        "instance group should not be specified for ensemble 'e_group'",
    ),
    "e_optimization": (
        ensemble(ONE, more="optimization { }"),
        "optimization should not be specified for ensemble 'e_optimization'",
    ),
    "e_warmup": (
        ensemble(ONE, more='model_warmup [ { name: "w" batch_size: 1 } ]'),
        "model_warmup can not be specified for ensemble 'e_warmup'",
    ),
    "e_empty": (ensemble(), "must specify 'step' for ensemble 'e_empty'"),
    "e_no_model": (
        ensemble('{ input_map { key: "X" value: "A" } output_map { key: "Y" value: "B" } }'),
        "must specify 'model_name' in step 0 of ensemble 'e_no_model'",
    ),
    "e_no_input_map": (
        ensemble(ONE, step("echo", "", "Y=C")),
        "must specify 'input_map' in step 1 of ensemble 'e_no_input_map'",
    ),
    "e_no_output_map": (
        ensemble(ONE, step("echo", "X=A", "")),
        "must specify 'output_map' in step 1 of ensemble 'e_no_output_map'",
    ),
    "e_twice": (
        ensemble(ONE, step("echo", "X=A", "Y=B")),
        "ensemble tensor 'B' can appear in an output map only once for ensemble 'e_twice' step 1",
    ),
    "e_input_unused": (
        ensemble(ONE, inputs=(spec("A", "FP32", "2"), spec("A2", "FP32", "2"))),
        "ensemble input 'A2' for ensemble ",
    ),
    "e_output_unused": (
        ensemble(step("echo", "X=A", "Y=C"), step("echo", "X=C", "Y=D")),
        "ensemble output 'B' for ensemble ",
    ),
    "e_not_written": (
        ensemble(ONE, step("echo", "X=C2", "Y=C"), outputs=(spec("B", "FP32", "2"), spec("C", "FP32", "2"))),
        (
            "output 'C' for ensemble 'e_not_written' is not written: at least one of its depending "
            "tensors, 'C2', is not connected"
        ),
    ),
    "e_cycle": (
        ensemble(step("join", "X=A Z=C", "Y=B"), step("echo", "X=B", "Y=C")),
        "output 'B' for ensemble 'e_cycle' is not written",
    ),
    "e_tensor_unused": (
        ensemble(ONE, step("echo", "X=A", "Y=C")),
        "ensemble tensor 'C' is unused in ensemble 'e_tensor_unused'",
    ),
    # 2.3
    "e_missing": (
        ensemble(step("nowhere", "X=A", "Y=B")),
        "ensemble e_missing contains models that are not available or ambiguous: nowhere",
    ),
    "e_broken": (ensemble(step("raises", "X=A", "Y=B")), "ensemble 'e_broken' depends on 'raises' which "),
    "e_version": (
        ensemble(step("echo", "X=A", "Y=B", 3)),
        "ensemble 'e_version' depends on 'echo' whose required version 3 is not loaded",
    ),
    "e_version_0": (
        ensemble(step("echo", "X=A", "Y=B", 0)),
        "ensemble 'e_version_0' depends on 'echo' whose required version 0 is not loaded",
    ),
    "e_self": (ensemble(step("e_self", "A=A", "B=B")), "circular dependency between ensembles: e_self -> "),
    "e_batch": (
        ensemble(step("small", "X=A", "Y=B"), more="max_batch_size: 8"),
        (
            "ensemble e_batch allows maximum batch size 8, but it contains model small which only "
            "allows maximum batch size to be 4"
        ),
    ),
    "e_no_input": (
        ensemble(step("echo", "X=A Q=A", "Y=B")),
        ("in ensemble e_no_input, ensemble tensor A is mapping to non-existing input Q in model echo"),
    ),
    "e_unmapped": (
        ensemble(step("join", "X=A", "Y=B")),
        "in ensemble e_unmapped, input Z in model join is not mapped to any ensemble tensors",
    ),
    "e_no_output": (
        ensemble(step("echo", "X=A", "Q=B")),
        ("in ensemble e_no_output, ensemble tensor B is mapped from non-existing output Q in model echo"),
    ),
    "e_type": (
        ensemble(ONE, inputs=(spec("A", "INT32", "2"),)),
        "in ensemble e_type, ensemble tensor A: inconsistent data type: ",
    ),
    "e_shape": (
        ensemble(ONE, inputs=(spec("A", "FP32", "3"),)),
        "in ensemble e_shape, ensemble tensor A: inconsistent shape: ",
    ),
    "e_branches": (
        ensemble(step("many", "X=A", "Y=C"), step("join", "X=C Z=A", "Y=B")),
        (
            "in ensemble e_branches, step of model 'e_branches' receives inputs originated from "
            "different decoupled models"
        ),
    ),
}

# Where one of the two has another text; None: it loads the model.
ON_TRITON: dict[str, str | None] = {"unknown_field": "failed to read text proto from "}
ON_FLOWSERVE: dict[str, str | None] = {"e_branches": None}  # it joins decoupled steps with other tensors


@dataclass
class Refusals:
    "`text(name)`: why a model did not load, from the index or from Triton's log. `has(name)`: whether it serves."

    url: str
    log: Path
    rows: dict[str, dict[str, str]]

    def text(self, name: str) -> str:
        reason = self.rows.get(name, {}).get("reason", "")
        if self.log.exists():
            lines = self.log.read_text().splitlines()
            reason += "".join(line for line in lines if name in line)
        return reason


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Refusals:
    repository = tmp_path_factory.mktemp("refused")
    for name, (text, _) in MODELS.items():
        write_model(repository, name, text, ECHO)
    for name, (text, _) in ENSEMBLES.items():
        write_model(repository, name, text)
    write_model(repository, "echo", config(), ECHO)
    write_model(repository, "small", config(BATCHES), ECHO)
    write_model(repository, "join", config(inputs=(X, spec("Z", "FP32", "2"))), ECHO)
    write_model(
        repository, "many", config("model_transaction_policy { decoupled: true }"), "def execute(self, r): pass"
    )
    write_model(repository, "raises", config(), 'def initialize(self, args): raise ValueError("told to")\n' + ECHO)
    url = triton_like(repository, "--exit-on-error=false", "--strict-readiness=false")
    rows = httpx.post(f"{url}/v2/repository/index", verify=False).json()
    return Refusals(url, repository.parent / f"{repository.name}.triton.log", {row["name"]: row for row in rows})


@pytest.mark.parametrize("name", [*MODELS, *ENSEMBLES])
def test_a_mistake_is_refused_with_tritons_text(refusals: Refusals, on_triton: bool, name: str) -> None:
    text = (ON_TRITON if on_triton else ON_FLOWSERVE).get(name, {**MODELS, **ENSEMBLES}[name][1])
    state = refusals.rows.get(name, {}).get("state")
    assert (state == "READY") == (text is None)
    assert text is None or text in refusals.text(name)


def test_models_without_mistakes_serve(refusals: Refusals) -> None:
    ready = {name for name, row in refusals.rows.items() if row.get("state") == "READY"}
    assert {"echo", "small", "join", "many"} <= ready
