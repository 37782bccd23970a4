"""Where batches that were formed once fall apart again, said in a warning."""

from __future__ import annotations

from dataclasses import replace

from flowserve.config.types import DynamicBatching, ModelConfig, SequenceBatching
from flowserve.graph.advice import advise
from flowserve.graph.compile import compile_ensemble
from flowserve.testing.ensembles import available, ensemble, model

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


def test_where_nobody_forms_batches_none_fall_apart() -> None:
    assert advice(FIRST, SECOND) == []


def test_a_model_without_a_batcher_behind_one_that_has_it_is_named() -> None:
    (text,) = advice(batched(FIRST), SECOND)
    assert text == (
        "second/config.pbtxt: ensemble 'pipe': batches fall apart at model 'second': model 'first' before it"
        " makes batches of up to 16 rows, and it takes them request by request: it has no dynamic_batching"
        " (add `dynamic_batching { }`) [A1]"
    )


def test_a_model_that_takes_fewer_rows_than_the_one_before_it_is_named_with_both_numbers() -> None:
    (text,) = advice(batched(FIRST), batched(SECOND, rows=8))
    assert text == (
        "second/config.pbtxt: ensemble 'pipe': batches fall apart at model 'second': model 'first' before it"
        " makes batches of up to 16 rows, and it takes 8 rows at most"
        " (raise its max_batch_size to 16, or lower that of 'first' to 8) [A2]"
    )


def test_a_step_that_several_rows_cannot_pass_is_named_where_the_ensemble_takes_them() -> None:
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


def test_nothing_falls_apart_behind_a_model_that_makes_smaller_batches_or_none() -> None:
    assert advice(batched(FIRST, rows=8), batched(SECOND)) == []
    assert advice(FIRST, batched(SECOND)) == []


def test_only_what_a_model_reads_falls_apart_there() -> None:
    """The largest batches are made at the end, beside a small model that never sees them."""
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


def test_answers_of_a_model_that_has_many_come_one_by_one_and_so_do_not_fall_apart() -> None:
    assert advice(replace(batched(FIRST), decoupled=True), batched(SECOND, rows=8)) == []


def test_a_model_of_sequences_is_not_told_to_batch_otherwise() -> None:
    assert advice(batched(FIRST), replace(SECOND, sequence=SequenceBatching(idle_us=1, is_direct=True))) == []


def test_a_model_that_takes_one_row_is_not_told_to_batch() -> None:
    first, second = batched(FIRST), replace(SECOND, max_batch_size=1)
    graph = compile_ensemble(replace(PIPE, max_batch_size=1), 1, available(first, second))
    (problem,) = advise(graph, {"first": first, "second": second})
    assert problem.message.endswith("batches of up to 16 rows, and it takes single rows")
    assert problem.hint == "raise its max_batch_size to 16"


def test_a_function_that_answers_many_times_cannot_batch_and_gets_no_advice() -> None:
    many = replace(SECOND, decoupled=True, backend="callable")
    assert advice(batched(FIRST), many) == []
    (text,) = advice(batched(FIRST), replace(many, backend="python"))
    assert "batches fall apart at model 'second'" in text
