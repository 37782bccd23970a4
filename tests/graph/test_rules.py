"""Every rule for ensembles, by number: the refused case, the message, the place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from flowserve.config.types import ModelConfig
from flowserve.errors import Place, Problem, Problems
from flowserve.graph.compile import compile_ensemble
from flowserve.graph.rules import RULES
from flowserve.graph.types import Conversion
from tests.support.ensembles import available, ensemble, model, tensors

DECODE = model("decode", {"BYTES": "BYTES[1]"}, {"IMAGE": "FP32[3,8,8]"})
CLASSIFY = model("classify", {"X": "FP32[3,8,8]"}, {"SCORES": "FP32[10]", "EMBEDDING": "FP32[64]"})
GOOD = ensemble(
    "pipe",
    {"picture": "BYTES[1]"},
    {"scores": "FP32[10]"},
    [
        ("decode", {"BYTES": "picture"}, {"IMAGE": "pixels"}),
        ("classify", {"X": "pixels"}, {"SCORES": "scores"}),
    ],
)


def refusals(config: ModelConfig, *models: ModelConfig, failed: Mapping[str, str] | None = None) -> tuple[Problem, ...]:
    with pytest.raises(Problems) as caught:
        compile_ensemble(config, 1, available(*(models or (DECODE, CLASSIFY))), failed)
    return caught.value.problems


def with_steps(*steps: tuple[str, Mapping[str, str], Mapping[str, str]], **changes: Any) -> ModelConfig:
    inputs = changes.pop("inputs", {"picture": "BYTES[1]"})
    outputs = changes.pop("outputs", {"scores": "FP32[10]"})
    return ensemble("pipe", inputs, outputs, steps, **changes)


def place_of(config: ModelConfig, path: str) -> object:
    return config.source.places[path]


def test_the_example_itself_compiles() -> None:
    assert len(compile_ensemble(GOOD, 1, available(DECODE, CLASSIFY)).nodes) == 2


@pytest.mark.fault("E4")
def test_rule_G1_an_ensemble_cannot_contain_itself() -> None:
    selfish = with_steps(("pipe", {"picture": "picture"}, {"scores": "scores"}))
    (problem,) = refusals(selfish, selfish)
    assert problem.rule == "G1"
    assert problem.message == "circular dependency between ensembles: pipe -> pipe"


@pytest.mark.fault("E4")
def test_rule_G1_a_cycle_of_ensembles_is_named_from_the_loaded_one() -> None:
    a = ensemble("a", {"x": "FP32[1]"}, {"y": "FP32[1]"}, [("b", {"x": "x"}, {"y": "y"})])
    b = ensemble("b", {"x": "FP32[1]"}, {"y": "FP32[1]"}, [("c", {"x": "x"}, {"y": "y"})])
    c = ensemble("c", {"x": "FP32[1]"}, {"y": "FP32[1]"}, [("a", {"x": "x"}, {"y": "y"})])
    (problem,) = refusals(b, a, b, c)
    assert problem.message == "circular dependency between ensembles: b -> c -> a -> b"
    assert problem.place == place_of(b, "ensemble_scheduling.step[0]")


@pytest.mark.fault("E4")
def test_rule_G3_an_ensemble_above_a_cycle_names_the_cycle() -> None:
    top = ensemble("top", {"x": "FP32[1]"}, {"y": "FP32[1]"}, [("a", {"x": "x"}, {"y": "y"})])
    a = ensemble("a", {"x": "FP32[1]"}, {"y": "FP32[1]"}, [("b", {"x": "x"}, {"y": "y"})])
    b = ensemble("b", {"x": "FP32[1]"}, {"y": "FP32[1]"}, [("a", {"x": "x"}, {"y": "y"})])
    (problem,) = refusals(top, top, a, b)
    assert problem.rule == "G3"
    assert problem.message == (
        "ensemble 'top' depends on 'a' which is not valid. Model 'a' failed with error: "
        "circular dependency between ensembles: a -> b -> a"
    )


@pytest.mark.fault("E6")
def test_rule_G2_a_missing_model_is_named_with_the_closest_one_there_is() -> None:
    (problem,) = refusals(with_steps(("decoed", {"BYTES": "picture"}, {"IMAGE": "scores"})))
    assert problem.rule == "G2"
    assert problem.message == "ensemble pipe contains models that are not available or ambiguous: decoed"
    assert problem.hint == 'did you mean "decode"?'
    assert problem.place is not None
    assert problem.place.line > 0
    itself = with_steps(("pip", {"BYTES": "picture"}, {"IMAGE": "scores"}))
    (problem,) = refusals(itself, itself)
    assert problem.hint == "", "the ensemble itself is not meant"


def test_rule_G2_a_missing_model_is_reported_once_for_all_steps() -> None:
    config = with_steps(
        ("gone", {"A": "picture"}, {"B": "middle"}),
        ("gone", {"A": "middle"}, {"B": "scores"}),
    )
    assert [problem.rule for problem in refusals(config)] == ["G2"]


def test_rule_G3_a_failed_model_is_named_with_its_reason() -> None:
    (problem,) = refusals(GOOD, CLASSIFY, failed={"decode": "no such file: model.onnx"})
    assert problem.rule == "G3"
    assert problem.message == (
        "ensemble 'pipe' depends on 'decode' which is not valid. Model 'decode' failed with error: no such"
        " file: model.onnx"
    )


def test_rule_G3_a_nested_ensemble_that_breaks_a_rule_is_named_with_it() -> None:
    outer = with_steps(("inner", {"picture": "picture"}, {"scores": "scores"}), outputs={"scores": "FP32[11]"})
    inner = replace(GOOD, name="inner", outputs=tensors({"scores": "FP32[11]"}))
    (problem,) = refusals(outer, inner, DECODE, CLASSIFY)
    assert problem.rule == "G3"
    assert "depends on 'inner' which is not valid" in problem.message
    assert "inconsistent shape" in problem.message


def test_rule_G3_a_model_that_failed_inside_a_nested_ensemble_is_named_through_it() -> None:
    outer = with_steps(("inner", {"picture": "picture"}, {"scores": "scores"}))
    inner = replace(GOOD, name="inner")
    (problem,) = refusals(outer, inner, CLASSIFY, failed={"decode": "no such file: model.onnx"})
    assert problem.rule == "G3"
    assert problem.message.startswith("ensemble 'pipe' depends on 'inner' which is not valid.")
    assert "Model 'decode' failed with error: no such file: model.onnx" in problem.message


def test_rule_G4_version_0_is_explained() -> None:
    config = ensemble(
        "pipe",
        {"picture": "BYTES[1]"},
        {"image": "FP32[3,8,8]"},
        [
            ("decode", {"BYTES": "picture"}, {"IMAGE": "image"}),
        ],
        versions={0: 0},
    )
    (problem,) = refusals(config)
    assert problem.rule == "G4"
    assert problem.message == "ensemble 'pipe' depends on 'decode' whose required version 0 is not loaded."
    assert "model_version: -1" in problem.hint


def test_rule_G4_a_missing_version_is_reported_with_the_available_ones() -> None:
    config = ensemble(
        "pipe",
        {"picture": "BYTES[1]"},
        {"image": "FP32[3,8,8]"},
        [
            ("decode", {"BYTES": "picture"}, {"IMAGE": "image"}),
        ],
        versions={0: 3},
    )
    with pytest.raises(Problems) as caught:
        compile_ensemble(config, 1, {"decode": {1: DECODE, 2: DECODE}})
    (problem,) = caught.value.problems
    assert problem.message.endswith("whose required version 3 is not loaded.")
    assert problem.hint == (
        "'decode' has versions 1, 2; if decode/3 is there, `version_policy { all { } }` in its configuration serves it "
        "too"
    )


def test_rule_G4_a_model_without_any_version_is_reported() -> None:
    with pytest.raises(Problems, match="depends on 'decode' which has no loaded version"):
        compile_ensemble(GOOD, 1, {"decode": {}, "classify": {1: CLASSIFY}})


@pytest.mark.fault("E2")
def test_rule_G5_an_input_the_model_does_not_have_is_refused_beside_the_one_it_misses() -> None:
    config = with_steps(
        ("decode", {"BYTE": "picture"}, {"IMAGE": "pixels"}),
        ("classify", {"X": "pixels"}, {"SCORES": "scores"}),
    )
    missing, unknown = sorted(refusals(config), key=lambda problem: problem.rule, reverse=True)
    assert (missing.rule, unknown.rule) == ("G7", "G5")
    assert unknown.message == (
        "in ensemble pipe, ensemble tensor picture is mapping to non-existing input BYTE in model decode"
    )
    assert unknown.hint == 'did you mean "BYTES"?'
    assert unknown.place == place_of(config, "ensemble_scheduling.step[0].input_map[BYTE]")
    assert missing.hint == "is 'BYTE' meant to be it?"


@pytest.mark.fault("E2")
def test_rule_G6_an_output_the_model_does_not_have_is_refused() -> None:
    config = with_steps(
        ("decode", {"BYTES": "picture"}, {"PICTURE": "pixels"}),
        ("classify", {"X": "pixels"}, {"SCORES": "scores"}),
    )
    (problem,) = refusals(config)
    assert problem.rule == "G6"
    assert problem.message == (
        "in ensemble pipe, ensemble tensor pixels is mapped from non-existing output PICTURE in model decode"
    )
    assert problem.hint == "its outputs are 'IMAGE'"


@pytest.mark.fault("E2")
def test_rules_G5_and_G6_a_swapped_key_and_value_are_recognised() -> None:
    config = with_steps(
        ("decode", {"picture": "BYTES"}, {"pixels": "IMAGE"}),
        ("classify", {"X": "pixels"}, {"SCORES": "scores"}),
    )
    hints = {problem.rule: problem.hint for problem in refusals(config)}
    assert hints["G5"] == 'the key is what the model calls it: key: "BYTES" value: "picture"'
    assert hints["G6"] == 'the key is what the model calls it: key: "IMAGE" value: "pixels"'


@pytest.mark.fault("E2")
def test_rule_G5_a_tensor_with_the_models_name_is_not_reported_as_swapped() -> None:
    config = with_steps(
        ("decode", {"BYTES": "picture"}, {"IMAGE": "X"}),
        ("classify", {"pixels": "X"}, {"SCORES": "scores"}),
    )
    hints = {problem.rule: problem.hint for problem in refusals(config)}
    assert hints["G5"] == "its inputs are 'X'"


@pytest.mark.fault("E2")
def test_rule_G7_a_required_input_must_be_mapped() -> None:
    two = model("two", {"A": "BYTES[1]", "B": "BYTES[1]"}, {"OUT": "FP32[10]"})
    (problem,) = refusals(with_steps(("two", {"A": "picture"}, {"OUT": "scores"})), two)
    assert problem.rule == "G7"
    assert problem.message == "in ensemble pipe, input B in model two is not mapped to any ensemble tensors"


def test_rule_G7_an_optional_input_may_be_left_out() -> None:
    two = model("two", {"A": "BYTES[1]", "B": "BYTES[1]?"}, {"OUT": "FP32[10]"})
    config = with_steps(("two", {"A": "picture"}, {"OUT": "scores"}))
    assert len(compile_ensemble(config, 1, available(two)).edges) == 2


def test_rule_G7_an_optional_input_of_a_nested_ensemble_may_not_be_left_out_when_a_step_inside_needs_it() -> None:
    two = model("two", {"A": "BYTES[1]", "B": "BYTES[1]"}, {"OUT": "FP32[10]"})
    inner = ensemble(
        "inner",
        {"a": "BYTES[1]", "b": "BYTES[1]?"},
        {"out": "FP32[10]"},
        [
            ("two", {"A": "a", "B": "b"}, {"OUT": "out"}),
        ],
    )
    (problem,) = refusals(with_steps(("inner", {"a": "picture"}, {"out": "scores"})), inner, two)
    assert problem.rule == "G7"
    assert "a step inside that ensemble needs it" in problem.hint


@pytest.mark.fault("E3")
def test_rule_G8_a_tensor_has_one_writer() -> None:
    config = with_steps(
        ("decode", {"BYTES": "picture"}, {"IMAGE": "pixels"}),
        ("classify", {"X": "pixels"}, {"SCORES": "scores"}),
        ("classify", {"X": "pixels"}, {"SCORES": "scores"}),
    )
    (problem,) = refusals(config)
    assert problem.rule == "G8"
    assert problem.message.startswith(
        "ensemble tensor 'scores' can appear in an output map only once for ensemble 'pipe' step 2"
    )
    assert problem.place == place_of(config, "ensemble_scheduling.step[2].output_map[SCORES]")


def test_rule_G8_a_step_may_not_write_an_input_of_the_ensemble() -> None:
    config = with_steps(
        ("decode", {"BYTES": "picture"}, {"IMAGE": "pixels"}),
        ("classify", {"X": "pixels"}, {"SCORES": "scores"}),
        ("label", {"X": "pixels"}, {"NAME": "picture"}),
    )
    label = model("label", {"X": "FP32[3,8,8]"}, {"NAME": "BYTES[1]"})
    assert "G8" in {problem.rule for problem in refusals(config, DECODE, CLASSIFY, label)}


def test_rule_G9_an_input_of_the_ensemble_must_be_read() -> None:
    config = with_steps(
        ("decode", {"BYTES": "picture"}, {"IMAGE": "pixels"}),
        ("classify", {"X": "pixels"}, {"SCORES": "scores"}),
        inputs={"picture": "BYTES[1]", "spare": "BYTES[1]"},
    )
    (problem,) = refusals(config)
    assert problem.rule == "G9"
    # The unbalanced quote is Triton's, and clients match on it.
    assert problem.message == "ensemble input 'spare' for ensemble 'pipe' is not used"
    assert problem.place == place_of(config, "input[1]")


@pytest.mark.fault("E3")
def test_rule_G10_a_tensor_without_a_writer_names_the_dependent_output() -> None:
    config = with_steps(
        ("decode", {"BYTES": "picture"}, {"IMAGE": "pixels"}),
        ("classify", {"X": "pixel"}, {"SCORES": "scores"}),
    )
    problem = next(problem for problem in refusals(config) if problem.rule == "G10")
    assert problem.message == (
        "output 'scores' for ensemble 'pipe' is not written: at least one of its depending tensors, 'pixel',"
        " is not connected: "
        "no step writes 'pixel', which step 1 (model 'classify') reads as 'X'"
    )
    assert problem.hint == 'did you mean "pixels"?'
    assert problem.place == place_of(config, "ensemble_scheduling.step[1].input_map[X]")


@pytest.mark.fault("E3")
def test_rule_G10_a_declared_output_without_a_writer_is_refused() -> None:
    config = replace(GOOD, outputs=tensors({"scores": "FP32[10]", "label": "BYTES[1]"}))
    (problem,) = refusals(config)
    assert problem.rule == "G10"
    assert problem.message.startswith("ensemble output 'label' for ensemble 'pipe' is not used")


@pytest.mark.fault("E3")
def test_rule_G10_a_declared_output_that_is_read_but_never_written_is_refused() -> None:
    config = with_steps(
        ("decode", {"BYTES": "picture"}, {"IMAGE": "pixels"}),
        ("join", {"X": "pixels", "Y": "extra"}, {"SCORES": "scores"}),
        outputs={"scores": "FP32[10]", "extra": "FP32[10]"},
    )
    join = model("join", {"X": "FP32[3,8,8]", "Y": "FP32[10]"}, {"SCORES": "FP32[10]"})
    (problem,) = refusals(config, DECODE, join)
    assert problem.message.startswith("output 'extra' for ensemble 'pipe' is not written")


@pytest.mark.fault("E4")
def test_rule_G11_a_cycle_is_named_with_its_path_after_tritons_text() -> None:
    config = with_steps(
        ("mix", {"A": "picture", "B": "back"}, {"OUT": "forth"}),
        ("turn", {"IN": "forth"}, {"OUT": "back", "ALSO": "scores"}),
    )
    mix = model("mix", {"A": "BYTES[1]", "B": "FP32[4]"}, {"OUT": "FP32[4]"})
    turn = model("turn", {"IN": "FP32[4]"}, {"OUT": "FP32[4]", "ALSO": "FP32[10]"})
    (problem,) = refusals(config, mix, turn)
    assert problem.rule == "G11"
    assert problem.message == (
        "output 'scores' for ensemble 'pipe' is not written: at least one of its depending tensors, 'back',"
        " is not connected: "
        "cycle: step 0 (model 'mix') writes 'forth', step 1 (model 'turn') writes 'back', which step 0"
        " (model 'mix') reads"
    )
    assert problem.place == place_of(config, "ensemble_scheduling.step[0].input_map[B]")


@pytest.mark.fault("E4")
def test_rule_G11_a_step_that_reads_what_it_writes_is_a_cycle() -> None:
    config = with_steps(("mix", {"A": "picture", "B": "scores"}, {"OUT": "scores"}))
    mix = model("mix", {"A": "BYTES[1]", "B": "FP32[10]"}, {"OUT": "FP32[10]"})
    (problem,) = refusals(config, mix)
    assert problem.rule == "G11"


def test_rule_G12_a_tensor_without_a_reader_is_refused() -> None:
    config = with_steps(
        ("decode", {"BYTES": "picture"}, {"IMAGE": "pixels"}),
        ("classify", {"X": "pixels"}, {"SCORES": "scores", "EMBEDDING": "embedding"}),
    )
    (problem,) = refusals(config)
    assert problem.rule == "G12"
    assert problem.message == "ensemble tensor 'embedding' is unused in ensemble 'pipe'"
    assert "leave it out" in problem.hint
    assert problem.place == place_of(config, "ensemble_scheduling.step[1].output_map[EMBEDDING]")


def test_rule_G13_every_step_on_a_dead_branch_is_named() -> None:
    config = with_steps(
        ("decode", {"BYTES": "picture"}, {"IMAGE": "pixels"}),
        ("classify", {"X": "pixels"}, {"SCORES": "scores"}),
        ("blur", {"X": "pixels"}, {"Y": "blurred"}),
        ("classify", {"X": "blurred"}, {"SCORES": "more"}),
    )
    blur = model("blur", {"X": "FP32[3,8,8]"}, {"Y": "FP32[3,8,8]"})
    first, second = refusals(config, DECODE, CLASSIFY, blur)
    assert first.rule == second.rule == "G13"
    assert first.message == (
        "ensemble tensor 'blurred' is unused in ensemble 'pipe': step 2 (model 'blur') leads to no output of"
        " the ensemble"
    )
    assert second.message.startswith("ensemble tensor 'more' is unused in ensemble 'pipe': step 3 (model 'classify')")


@pytest.mark.fault("E1")
def test_rule_G14_data_types_must_agree() -> None:
    bytes_in = model("classify", {"X": "UINT8[3,8,8]"}, {"SCORES": "FP32[10]"})
    (problem,) = refusals(GOOD, DECODE, bytes_in)
    assert problem.rule == "G14"
    assert problem.message == (
        "in ensemble pipe, ensemble tensor pixels: inconsistent data type: TYPE_FP32 is inferred from model decode "
        "while TYPE_UINT8 is inferred from model classify"
    )
    assert problem.place == place_of(GOOD, "ensemble_scheduling.step[1].input_map[X]")


@pytest.mark.fault("E1")
def test_rule_G14_the_ensemble_itself_counts_as_an_end() -> None:
    (problem,) = refusals(replace(GOOD, outputs=tensors({"scores": "FP64[10]"})))
    assert problem.message.endswith(
        "TYPE_FP32 is inferred from model classify while TYPE_FP64 is inferred from model pipe"
    )
    assert problem.place == place_of(GOOD, "output[0]")


@pytest.mark.fault("E1")
def test_rule_G15_shapes_must_agree() -> None:
    larger = model("classify", {"X": "FP32[3,16,16]"}, {"SCORES": "FP32[10]"})
    (problem,) = refusals(GOOD, DECODE, larger)
    assert problem.rule == "G15"
    assert problem.message == (
        "in ensemble pipe, ensemble tensor pixels: inconsistent shape: [-1,3,8,8] is inferred from model decode "
        "while [-1,3,16,16] is inferred from model classify"
    )


def test_rule_G15_suggests_a_correct_reshape_for_equal_element_counts() -> None:
    flat = model("classify", {"X": "FP32[192]"}, {"SCORES": "FP32[10]"})
    (problem,) = refusals(GOOD, DECODE, flat)
    assert problem.hint == (
        "'IMAGE' of 'decode' meets 'X' of 'classify' here; they hold equally many elements: "
        "dims: [ 3, 8, 8 ] reshape { shape: [ 192 ] } for 'X' of 'classify'"
    )
    mended = replace(flat, inputs=(replace(flat.inputs[0], dims=(3, 8, 8), reshape=(192,)),))
    compile_ensemble(GOOD, 1, available(DECODE, mended))

    laid_out = replace(flat, inputs=(replace(flat.inputs[0], reshape=(16, 12)),))
    (problem,) = refusals(GOOD, DECODE, laid_out)
    assert problem.hint.endswith("dims: [ 3, 8, 8 ] reshape { shape: [ 16, 12 ] } for 'X' of 'classify'")

    square = replace(GOOD, outputs=(replace(GOOD.outputs[0], dims=(2, 5)),))
    (problem,) = refusals(square, DECODE, CLASSIFY)
    assert problem.hint.endswith("dims: [ 2, 5 ] reshape { shape: [ 10 ] } for 'scores' of 'pipe'")
    mended_too = replace(square, outputs=(replace(square.outputs[0], reshape=(10,)),))
    compile_ensemble(mended_too, 1, available(DECODE, CLASSIFY))


def test_rule_G15_suggests_removing_a_batch_dimension_from_dims() -> None:
    twice = model("classify", {"X": "FP32[-1,3,8,8]"}, {"SCORES": "FP32[10]"})
    (problem,) = refusals(GOOD, DECODE, twice)
    assert problem.hint.endswith("dims leave out the batch dimension, and those of 'X' of 'classify' begin with it?")


def test_rule_G15_a_dimension_of_minus_one_matches_anything() -> None:
    loose = model("classify", {"X": "FP32[3,-1,-1]"}, {"SCORES": "FP32[-1]"})
    assert compile_ensemble(GOOD, 1, available(DECODE, loose)).nodes[1].inputs[0].is_variable


@pytest.mark.fault("E1")
def test_rule_G15_contradicting_readers_are_refused_even_if_the_writer_has_minus_one() -> None:
    loose = model("decode", {"BYTES": "BYTES[1]"}, {"IMAGE": "FP32[-1]"})
    three = model("three", {"X": "FP32[3]"}, {"Y": "FP32[10]"})
    four = model("four", {"X": "FP32[4]"}, {"Y": "FP32[10]"})
    config = with_steps(
        ("decode", {"BYTES": "picture"}, {"IMAGE": "pixels"}),
        ("three", {"X": "pixels"}, {"Y": "scores"}),
        ("four", {"X": "pixels"}, {"Y": "more"}),
        outputs={"scores": "FP32[10]", "more": "FP32[10]"},
    )
    (problem,) = refusals(config, loose, three, four)
    assert "[-1,3] is inferred from model three while [-1,4] is inferred from model four" in problem.message


@pytest.mark.fault("E1")
def test_rule_G15_a_minus_one_of_a_nested_ensemble_does_not_hide_a_disagreement() -> None:
    inner = ensemble("inner", {"x": "FP32[-1,8,8]"}, {"y": "FP32[10]"}, [("classify", {"X": "x"}, {"SCORES": "y"})])
    flat = model("decode", {"BYTES": "BYTES[1]"}, {"IMAGE": "FP32[1,8,8]"})
    config = with_steps(
        ("decode", {"BYTES": "picture"}, {"IMAGE": "pixels"}),
        ("inner", {"x": "pixels"}, {"y": "scores"}),
    )
    (problem,) = refusals(config, flat, CLASSIFY, inner)
    assert problem.rule == "G15"
    assert (
        "[-1,1,8,8] is inferred from model decode while [-1,3,8,8] is inferred from model classify" in problem.message
    )


def test_rule_G15_a_batch_dimension_may_match_an_ordinary_dimension() -> None:
    find = model("find", {"PAGE": "UINT8[-1,-1]"}, {"GLYPHS": "FP32[-1,1,28,28]"}, max_batch_size=0)
    read = model("read", {"X": "FP32[1,28,28]"}, {"SCORES": "FP32[62]"}, max_batch_size=64)
    join = model("join", {"SCORES": "FP32[-1,62]"}, {"TEXT": "BYTES[1]"}, max_batch_size=0)
    config = ensemble(
        "text",
        {"page": "UINT8[-1,-1]"},
        {"text": "BYTES[1]"},
        [
            ("find", {"PAGE": "page"}, {"GLYPHS": "glyphs"}),
            ("read", {"X": "glyphs"}, {"SCORES": "scores"}),
            ("join", {"SCORES": "scores"}, {"TEXT": "text"}),
        ],
        max_batch_size=0,
    )
    graph = compile_ensemble(config, 1, available(find, read, join))
    assert [node.max_batch_size > 0 for node in graph.nodes] == [False, True, False]


def test_a_model_without_a_batch_dimension_may_feed_one_that_has_it() -> None:
    """A missing dimension is added on the way, as on Triton; a full shape that matches is unchanged."""
    single = model("decode", {"BYTES": "BYTES[-1,1]"}, {"IMAGE": "FP32[3,8,8]"}, max_batch_size=0)
    first, second, third = compile_ensemble(GOOD, 1, available(single, CLASSIFY)).edges
    assert (first.conversion, second.conversion, third.conversion) == (None, Conversion((), 1, (3, 8, 8)), None)


@pytest.mark.fault("E5")
def test_rule_G17_an_ensemble_may_not_allow_more_than_its_smallest_step() -> None:
    (problem,) = refusals(replace(GOOD, max_batch_size=16), DECODE, replace(CLASSIFY, max_batch_size=32))
    assert problem.rule == "G17"
    assert problem.message == (
        "ensemble pipe allows maximum batch size 16, but it contains model decode which only allows maximum"
        " batch size to be 8"
    )
    assert problem.place == place_of(GOOD, "max_batch_size")


def doubling(levels: int) -> list[ModelConfig]:
    """Ensembles of which each uses the inner one twice."""
    made = [model("e0", {"x": "FP32[1]"}, {"y": "FP32[1]"})]
    for level in range(1, levels + 1):
        below = f"e{level - 1}"
        made.append(
            ensemble(
                f"e{level}",
                {"x": "FP32[1]"},
                {"y": "FP32[1]"},
                [
                    (below, {"x": "x"}, {"y": "half"}),
                    (below, {"x": "half"}, {"y": "y"}),
                ],
            )
        )
    return made


def test_rule_G19_ensembles_with_too_many_steps_are_refused_before_folding() -> None:
    made = doubling(40)
    (problem,) = refusals(made[-1], *made)
    assert problem.rule == "G19"
    assert f"has {2**40} steps" in problem.message


def test_rule_G19_ensembles_nested_too_deeply_are_refused_without_a_recursion_error() -> None:
    made = [model("e0", {"x": "FP32[1]"}, {"y": "FP32[1]"})]
    made += [
        ensemble(f"e{i}", {"x": "FP32[1]"}, {"y": "FP32[1]"}, [(f"e{i - 1}", {"x": "x"}, {"y": "y"})])
        for i in range(1, 300)
    ]
    (problem,) = refusals(made[-1], *made)
    assert problem.rule == "G19"
    assert "nests ensembles 299 deep" in problem.message


def test_all_mistakes_of_an_ensemble_are_found_at_once_in_the_order_of_the_file() -> None:
    config = with_steps(
        ("decoed", {"BYTES": "picture"}, {"IMAGE": "pixels"}),
        ("classify", {"Z": "pixels"}, {"SCORES": "scores", "EMBEDDING": "embedding"}),
        ("decode", {"BYTES": "pictures"}, {"IMAGE": "again"}),
        max_batch_size=9,
    )
    found = refusals(config)
    assert {problem.rule for problem in found} == {"G2", "G5", "G7", "G10", "G12", "G13", "G17"}
    assert list(found) == sorted(found, key=lambda problem: cast("Place", problem.place))


def test_every_rule_has_a_test_that_names_it() -> None:
    files = [Path(__file__), Path(__file__).with_name("test_spaces.py")]
    named = {name for file in files for name in re.findall(r"def test_rule_(G\d+)_", file.read_text())}
    assert named == set(RULES) | {"G19"}
