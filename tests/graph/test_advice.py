"""Warnings about batches that are split between steps."""

from __future__ import annotations

from dataclasses import replace

from flowserve.config.types import DynamicBatching, ModelConfig, SequenceBatching
from flowserve.graph.advice import advise
from flowserve.graph.compile import compile_ensemble
from tests.support.ensembles import available, ensemble, model

FIRST = model("first", {"X": "FP32[4]"}, {"Y": "FP32[4]"}, max_batch_size=16)
SECOND = model("second", {"X": "FP32[4]"}, {"Y": "FP32[4]"}, max_batch_size=16)
PIPE = ensemble(
    "pipe",
    {"x": "FP32[4]"},
    {"y": "FP32[4]"},
    [("first", {"X": "x"}, {"Y": "half"}), ("second", {"X": "half"}, {"Y": "y"})],
)


def advice(first: ModelConfig, second: ModelConfig) -> list[str]:
    graph = compile_ensemble(PIPE, 1, available(first, second))
    return [str(problem) for problem in advise(graph, {"first": first, "second": second})]


def batched(config: ModelConfig, rows: int = 16) -> ModelConfig:
    return replace(config, max_batch_size=rows, dynamic_batching=DynamicBatching())


def test_models_that_all_batch_alike_need_no_advice() -> None:
    assert advice(batched(FIRST), batched(SECOND)) == []


def test_without_batches_there_is_no_advice() -> None:
    assert advice(FIRST, SECOND) == []


def test_a_model_without_a_batcher_after_one_with_a_batcher_is_named() -> None:
    (text,) = advice(batched(FIRST), SECOND)
    assert text == (
        "second/config.pbtxt: ensemble 'pipe': batches fall apart at model 'second': model 'first' before it"
        " makes batches of up to 16 rows, and it takes them request by request: it has no dynamic_batching"
        " (add `dynamic_batching { }`) [A1]"
    )


def test_a_model_with_a_smaller_batch_size_than_the_one_before_is_named_with_both_numbers() -> None:
    (text,) = advice(batched(FIRST), batched(SECOND, rows=8))
    assert text == (
        "second/config.pbtxt: ensemble 'pipe': batches fall apart at model 'second': model 'first' before it"
        " makes batches of up to 16 rows, and it takes 8 rows at most"
        " (raise its max_batch_size to 16, or lower that of 'first' to 8) [A2]"
    )


def test_a_step_that_fails_for_several_rows_is_named() -> None:
    (text,) = advice(FIRST, replace(SECOND, max_batch_size=0))
    assert text == (
        "pipe/config.pbtxt:10:1: ensemble 'pipe' takes up to 8 rows, and requests of more than one fail"
        " at step 'second', whose model has no batch dimension"
        " (give 'second' a batch dimension, or lower the max_batch_size of 'pipe' to 1) [A3]"
    )
    single = replace(PIPE, max_batch_size=1)
    second = replace(SECOND, max_batch_size=0)
    graph = compile_ensemble(single, 1, available(FIRST, second))
    assert [*advise(graph, {"first": FIRST, "second": second})] == []


def test_no_advice_after_a_model_with_smaller_batches_or_none() -> None:
    assert advice(batched(FIRST, rows=8), batched(SECOND)) == []
    assert advice(FIRST, batched(SECOND)) == []


def test_only_models_that_read_a_tensor_of_the_batch_get_advice() -> None:
    """The largest batches are formed at the end, next to a small model that does not read them."""
    wide = batched(replace(SECOND, name="wide"), rows=64)
    pipe = ensemble(
        "pipe",
        {"x": "FP32[4]"},
        {"y": "FP32[4]", "z": "FP32[4]"},
        [("first", {"X": "x"}, {"Y": "half"}), ("second", {"X": "half"}, {"Y": "y"}), ("wide", {"X": "x"}, {"Y": "z"})],
    )
    models = (batched(FIRST, rows=8), batched(SECOND, rows=8), wide)
    graph = compile_ensemble(pipe, 1, available(*models))
    assert list(advise(graph, {model.name: model for model in models})) == []


def test_responses_of_a_decoupled_model_get_no_advice() -> None:
    assert advice(replace(batched(FIRST), decoupled=True), batched(SECOND, rows=8)) == []


def test_a_sequence_model_gets_no_advice() -> None:
    assert advice(batched(FIRST), replace(SECOND, sequence=SequenceBatching(idle_us=1, is_direct=True))) == []


def test_a_model_with_single_rows_is_not_advised_to_batch() -> None:
    first, second = batched(FIRST), replace(SECOND, max_batch_size=1)
    graph = compile_ensemble(replace(PIPE, max_batch_size=1), 1, available(first, second))
    (problem,) = advise(graph, {"first": first, "second": second})
    assert problem.message.endswith("batches of up to 16 rows, and it takes single rows")
    assert problem.hint == "raise its max_batch_size to 16"


def test_a_decoupled_function_gets_no_advice() -> None:
    many = replace(SECOND, decoupled=True, backend="callable")
    assert advice(batched(FIRST), many) == []
    (text,) = advice(batched(FIRST), replace(many, backend="python"))
    assert "batches fall apart at model 'second'" in text
