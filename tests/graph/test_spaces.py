"""Rows that some steps run for: the rules about them, and where steps and tensors are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowserve.config.convert import to_config
from flowserve.config.parse import config_message, parse
from flowserve.config.types import ModelConfig, SequenceBatching, SourceMap
from flowserve.errors import Place, Problem, Problems
from flowserve.graph.compile import compile_ensemble
from flowserve.graph.plan import make_plan
from flowserve.graph.types import Derivation, Graph
from tests.support.ensembles import available, model

DETECT = model(
    "detect",
    {"IMAGE": "FP32[4]"},
    {"CROPS": "FP32[-1,3]", "KIND": "INT32[-1,1]", "COUNT": "INT32[1]", "SURE": "BOOL[1]", "SCORE": "FP32[1]"},
)
NAME = model("name", {"X": "FP32[3]"}, {"LABEL": "INT32[1]"}, 4)
WHOLE = model("whole", {"IMAGE": "FP32[4]"}, {"LABEL": "INT32[1]"})
OTHER = model("other", {"IMAGE": "FP32[4]"}, {"LABEL": "FP32[1]"})
WORDS = model("words", {"IMAGE": "FP32[4]"}, {"TEXT": "BYTES[1]", "LABEL": "INT32[1]"})
JOIN = model("join", {"A": "INT32[1]", "B": "INT32[1]"}, {"LABEL": "INT32[1]"})
STREAM = replace(model("stream", {"X": "FP32[3]"}, {"LABEL": "INT32[1]"}), decoupled=True)
MODELS = (DETECT, NAME, WHOLE, OTHER, WORDS, JOIN, STREAM)

FIND: dict[str, Any] = {
    "model_name": "detect",
    "input_map": {"IMAGE": "IMAGE"},
    "output_map": {"CROPS": "crops", "KIND": "kind", "COUNT": "count", "SURE": "sure", "SCORE": "score"},
}


def step(model_name: str, reads: dict[str, str], writes: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"model_name": model_name, "input_map": reads, "output_map": writes, **more}


def config_of(
    *steps: dict[str, Any],
    fill: list[dict[str, Any]] | None = None,
    outputs: str = "INT32[1]",
    rows: int = 8,
    name: str = "LABEL",
) -> ModelConfig:
    """The ensemble "pipe" of the detector and these steps. Places are the paths in the configuration."""
    dtype, dims = outputs.removesuffix("]").split("[")
    written: list[dict[str, Any]] = [{"model_version": -1, **FIND, "output_map": {**FIND["output_map"]}}]
    written += [{"model_version": -1, **one} for one in steps]
    read = {value for one in written for value in one["input_map"].values()}
    read |= {test["tensor"] for one in written for test in one.get("when", [])}
    read |= {t for one in written if "each" in one for t in (*one["each"]["tensor"], one["each"].get("count", ""))}
    written[0]["output_map"] = {port: t for port, t in FIND["output_map"].items() if t in read}
    fields = {
        "name": "pipe",
        "platform": "ensemble",
        "max_batch_size": rows,
        "input": [{"name": "IMAGE", "data_type": "TYPE_FP32", "dims": [4]}],
        "output": [{"name": name, "data_type": f"TYPE_{dtype}", "dims": [int(dim) for dim in dims.split(",")]}],
        "ensemble_scheduling": {"step": written, "fill": fill or []},
    }
    return to_config(config_message(fields, "pipe"), SourceMap("pipe"))


def compiled(config: ModelConfig, *models: ModelConfig) -> Graph:
    return compile_ensemble(config, 1, available(*(models or MODELS)))


def refused(config: ModelConfig, *models: ModelConfig) -> Problem:
    """The only problem of an ensemble."""
    with pytest.raises(Problems) as caught:
        compiled(config, *models)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.problems[0]


EACH = {"tensor": ["crops", "kind"]}
PERSON = {"tensor": "kind", "equals": [0]}
CAR = {"tensor": "kind", "equals": [1]}
NAMED = step("name", {"X": "crops"}, {"LABEL": "LABEL"}, each=EACH, when=[PERSON])


def test_a_step_runs_in_the_space_that_it_names_or_in_that_of_what_it_reads() -> None:
    config = config_of(
        step("name", {"X": "crops"}, {"LABEL": "person"}, each=EACH, when=[PERSON]),
        step("name", {"X": "crops"}, {"LABEL": "car"}, each=EACH, when=[CAR]),
        step("join", {"A": "person", "B": "person"}, {"LABEL": "LABEL"}),
        step("join", {"A": "car", "B": "car"}, {"LABEL": "LABEL"}),
        fill=[{"tensor": "LABEL", "value": -1}],
        outputs="INT32[-1,1]",
    )
    graph = compiled(config)
    assert [space.name for space in graph.spaces] == ["each crops, kind", "when kind = 0", "when kind = 1"]
    assert [space.parent for space in graph.spaces] == [0, 1, 1]
    assert [node.space for node in graph.nodes] == [0, 2, 3, 2, 3]
    assert [one.how for one in graph.derived] == [
        Derivation.ITEMS,
        Derivation.ITEMS,
        Derivation.TAKE,
        Derivation.TAKE,
        Derivation.MERGE,
        Derivation.GATHER,
    ]


def test_what_an_unrequested_output_needs_is_left_out_of_the_plan() -> None:
    config = config_of(NAMED, fill=[{"tensor": "LABEL", "value": -1}], outputs="INT32[-1,1]")
    whole = make_plan(compiled(config))
    assert whole.regions is not None
    assert (
        len(whole.regions.operations) == 7
    )  # two spaces, the items twice, the rows of one, its filling, its gathering
    nothing = make_plan(compiled(config), ())
    assert nothing.regions is not None
    assert nothing.regions.operations == ()
    assert nothing.first == ()


def test_steps_have_names_of_their_own() -> None:
    config = config_of(
        step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[{"tensor": "sure"}], name="quick"),
        step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[{"tensor": "sure", "not": True}]),
    )
    assert [node.name for node in compiled(config).nodes] == ["detect", "quick", "whole"]


def test_rule_G30_a_tensor_of_some_rows_is_not_read_for_all() -> None:
    config = config_of(step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[{"tensor": "sure"}]))
    problem = refused(config)
    assert problem.rule == "G30"
    assert problem.message == "in ensemble pipe, tensor 'LABEL' exists for some rows only, those of `when sure`"
    assert "give `fill` a value" in problem.hint
    assert compiled(replace(config, max_batch_size=1)).derived[-1].fill is None  # then it is left out of the response


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"equals": [0]}, {"equals": [0, 1]}),
        ({"above": 0.5}, {"below": 0.6}),
        ({"above": 0.5}, {"equals": [1]}),
        ({"equals": [0]}, {"equals": [0]}),
        ({"above": 0.5, "not": True}, {"below": 0.5}),
    ],
)
def test_rule_G31_steps_that_write_one_tensor_run_for_other_rows(first: Any, second: Any) -> None:
    tests = [{"tensor": "score", **first}, {"tensor": "score", **second}]
    config = config_of(*(step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[test]) for test in tests))
    problem = refused(config)
    assert problem.rule == "G31"
    assert "it is already written by step 1, and both may run for the same row" in problem.message


@pytest.mark.parametrize(
    ("first", "second", "tensor"),
    [
        ({"equals": [0]}, {"equals": [0], "not": True}, "count"),
        ({}, {"not": True}, "sure"),
        ({"above": 0.5}, {"otherwise": True}, "score"),
        ({"above": 3}, {"below": 4}, "count"),
    ],
)
def test_conditions_that_are_complete_need_no_fill(first: Any, second: Any, tensor: str) -> None:
    tests = [{"tensor": tensor, **first}, {"tensor": tensor, **second}]
    config = config_of(*(step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[test]) for test in tests))
    assert len(compiled(config).spaces) == 2


def test_rule_G31_conditions_that_leave_rows_out_need_a_fill() -> None:
    tests = [{"tensor": "score", "above": 0.5}, {"tensor": "score", "above": 0.5, "not": True}]  # NaN passes neither
    config = config_of(*(step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[test]) for test in tests))
    problem = refused(config)
    assert problem.message == (
        "in ensemble pipe, tensor 'LABEL' is written for some rows only: no step writes it for the others"
    )


def test_rule_G31_a_fill_has_something_to_fill_and_the_tensors_type() -> None:
    always = step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"})
    assert "is written for every row" in refused(config_of(always, fill=[{"tensor": "LABEL"}])).message
    assert "which no step writes" in refused(config_of(always, fill=[{"tensor": "lable"}])).message
    sometimes = step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[{"tensor": "sure"}])
    wrong = refused(config_of(sometimes, fill=[{"tensor": "LABEL", "value": 0.5}]))
    assert "tensor 'LABEL' is INT32, which cannot be 0.5" in wrong.message
    for dtype, value, shown in (
        ("FP16", 1e6, "1000000"),
        ("BF16", 1e39, "9.9999999999999994e+38"),
        ("INT64", 2**53 + 1, "9007199254740992"),
    ):
        one = model("one", {"IMAGE": "FP32[4]"}, {"LABEL": f"{dtype}[1]"})
        some = step("one", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[{"tensor": "sure"}])
        config = config_of(some, fill=[{"tensor": "LABEL", "value": value}], outputs=f"{dtype}[1]")
        found = refused(config, DETECT, one)
        assert f"tensor 'LABEL' is {dtype}, which cannot be {shown}" in found.message
        assert ("2 to the power of 53" in found.hint) is (dtype == "INT64")
    unread = refused(config_of(sometimes, fill=[{"tensor": "LABEL", "present": "known"}]))
    assert (unread.rule, unread.hint) == ("G12", "it has no reader; leave it out of `fill`")
    text = refused(config_of(sometimes, fill=[{"tensor": "LABEL", "string_value": "-"}]))
    assert "`string_value` fills BYTES only" in text.message


def test_rule_G14_what_is_merged_has_one_type() -> None:
    config = config_of(
        step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[{"tensor": "sure"}]),
        step("other", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[{"tensor": "sure", "not": True}]),
    )
    with pytest.raises(Problems) as caught:
        compiled(config)
    assert {problem.rule for problem in caught.value.problems} == {"G14"}


def test_a_decoupled_step_may_run_for_items_but_not_in_two_branches_of_one_tensor() -> None:
    config = config_of(
        step("stream", {"X": "crops"}, {"LABEL": "LABEL"}, each={"tensor": ["crops"]}), outputs="INT32[-1,1]"
    )
    regions = make_plan(compiled(config)).regions
    assert regions is not None
    assert [compiled(config).nodes[n].name for n in regions.splits] == ["stream"]
    parallel = config_of(
        step("stream", {"X": "crops"}, {"LABEL": "LABEL"}, each={"tensor": ["crops"]}, when=[{"tensor": "sure"}]),
        step(
            "stream",
            {"X": "crops"},
            {"LABEL": "LABEL"},
            each={"tensor": ["crops"]},
            when=[{"tensor": "sure", "not": True}],
        ),
        outputs="INT32[-1,1]",
    )
    problem = refused(parallel)
    assert problem.rule == "G20"
    assert "originated from different decoupled models: 'stream' and 'stream#2'" in problem.message


def test_rule_G34_a_sequence_gets_every_request() -> None:
    sequence = replace(NAME, name="sequence", sequence=SequenceBatching(0, is_direct=True))
    config = config_of(
        step("sequence", {"X": "crops"}, {"LABEL": "LABEL"}, each={"tensor": ["crops"]}), outputs="INT32[-1,1]"
    )
    problem = refused(config, *MODELS, sequence)
    assert problem.rule == "G34"
    assert "is a sequence model and runs only for `each crops`" in problem.message


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ({"tensor": "crops", "equals": [1]}, "'crops' has dims [-1, 3]; a test needs one number for each row"),
        ({"tensor": "text"}, "'text' is BYTES and cannot be tested"),
        ({"tensor": "count", "otherwise": True}, "`otherwise` of 'count', which no other step tests"),
    ],
)
def test_rule_G35_a_test_has_one_number_for_each_row(condition: dict[str, Any], text: str) -> None:
    words = step("words", {"IMAGE": "IMAGE"}, {"TEXT": "text"} if condition["tensor"] == "text" else {"LABEL": "x"})
    more = [] if condition["tensor"] == "text" else [step("join", {"A": "x", "B": "x"}, {"LABEL": "y"})]
    last = step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[condition])
    if more:
        words, more = step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "LABEL"}, when=[condition]), []
        last = words
    steps = [words, last] if condition["tensor"] == "text" else [last]
    problem = refused(config_of(*steps, fill=[{"tensor": "LABEL"}]))
    assert problem.rule == "G35"
    assert text in problem.message


def test_rule_G35_steps_that_take_a_tensor_apart_say_it_alike() -> None:
    config = config_of(
        step("name", {"X": "crops"}, {"LABEL": "x"}, each={"tensor": ["crops"]}),
        step("join", {"A": "x", "B": "x"}, {"LABEL": "LABEL"}, each={"tensor": ["crops"], "count": "count"}),
        outputs="INT32[-1,1]",
    )
    problem = refused(config)
    assert problem.rule == "G35"
    assert "takes 'crops' apart, of which it reads one item already" in problem.message


def test_rule_G36_a_step_reads_tensors_that_exist_for_the_same_rows() -> None:
    config = config_of(
        step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "a"}, when=[{"tensor": "sure"}]),
        step("whole", {"IMAGE": "IMAGE"}, {"LABEL": "b"}, when=[{"tensor": "sure", "not": True}]),
        step("join", {"A": "a", "B": "b"}, {"LABEL": "LABEL"}),
    )
    problem = refused(config)
    assert problem.rule == "G36"
    assert "reads 'b', which exists for the rows of `when not sure`, and another tensor" in problem.message


def test_the_place_of_a_problem_is_the_field_in_the_file() -> None:
    text = """
    platform: "ensemble"
    max_batch_size: 8
    input { name: "IMAGE" data_type: TYPE_FP32 dims: [ 4 ] }
    output { name: "LABEL" data_type: TYPE_INT32 dims: [ 1 ] }
    ensemble_scheduling {
      step { model_name: "detect" model_version: -1
             input_map { key: "IMAGE" value: "IMAGE" } output_map { key: "SURE" value: "sure" } }
      step { model_name: "whole" model_version: -1 when { tensor: "shure" }
             input_map { key: "IMAGE" value: "IMAGE" } output_map { key: "LABEL" value: "LABEL" } }
      fill { tensor: "LABEL" }
    }
    """

    parsed = parse(text, "pipe/config.pbtxt")
    config = replace(to_config(parsed.message, parsed.source), name="pipe")
    with pytest.raises(Problems) as caught:
        compiled(config)
    problem = next(one for one in caught.value.problems if one.rule == "G10")
    assert problem.place == Place("pipe/config.pbtxt", 9, 52)
    assert problem.hint == 'did you mean "sure"?'
