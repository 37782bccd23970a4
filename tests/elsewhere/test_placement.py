"""Placement files: what they say, and where each mistake is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowserve.config.types import (
    Ensemble,
    InstanceGroup,
    LimitedResource,
    ModelConfig,
    RateLimiter,
    SourceMap,
)
from flowserve.elsewhere.placement import ModelPlace, misplaced, parse_placement, read_placement, why_not_placed
from flowserve.errors import Problems

GOOD = """
cluster { address: "10.0.0.1:6379" }   # the head node
place {
  model: "detect"  count: 2
  resources { key: "GPU" value: 0.5 }  resources { key: "CPU" value: 2 }
  labels { key: "ray.io/accelerator-type" value: "L4" }
}
place { model: "classify" }
segment { name: "text" models: [ "crop", "read" ] count: 3 resources { key: "CPU" value: 2 } }
segment { name: "one" models: "join" count: 1 }
"""


def problems(text: str) -> list[str]:
    with pytest.raises(Problems) as raised:
        parse_placement(text, "cluster.pbtxt")
    return [f"{one.place}: {one.message} [{one.rule}]" for one in raised.value.problems]


def test_a_file_names_models_with_what_their_instances_need() -> None:
    placement = parse_placement(GOOD, "cluster.pbtxt")
    assert placement.address == "10.0.0.1:6379"
    accelerator = {"ray.io/accelerator-type": "L4"}
    assert placement.places == {
        "detect": ModelPlace("detect", 2, {"GPU": 0.5, "CPU": 2.0}, accelerator, "place[0].model"),
        "classify": ModelPlace("classify", path="place[1].model"),
        "crop": ModelPlace("crop", 3, {"CPU": 2.0}, {}, "segment[0].models[0]", "text"),
        "read": ModelPlace("read", 3, {"CPU": 2.0}, {}, "segment[0].models[1]", "text"),
        "join": ModelPlace("join", 1, {}, {}, "segment[1].models[0]", "one"),
    }
    for address in ("auto", "head.example:1", "[fd00::1]:6379"):
        assert parse_placement(f'cluster {{ address: "{address}" }}', "f").address == address


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('cluster { address: "10.0.0.1" }', '1:11: the address of the cluster is "10.0.0.1" [P1]'),
        ('cluster { address: "h:70000" }', '1:11: the address of the cluster is "h:70000" [P1]'),
        ("place { count: 1 }", "1:1: a place without a model [P2]"),
        ('place { model: "a" }\nplace { model: "a" }', "2:9: model 'a' is placed 2 times [P3]"),
        ('place { model: "a" count: 1025 }', "1:20: 1025 instances of model 'a' [P4]"),
        ('segment { name: "s" models: "a" }', "1:1: 0 processes of segment 's' [P4]"),
        ('segment { name: "s" models: "a" count: 0 }', "1:33: 0 processes of segment 's' [P4]"),
        ('segment { name: "s" models: "a" count: 1025 }', "1:33: 1025 processes of segment 's' [P4]"),
        ('segment { models: "a" count: 1 }', "1:1: a segment without a name [P2]"),
        ('segment { name: "s" count: 1 }', "1:1: segment 's' without a model [P2]"),
        ('segment { name: "s" models: [ "a", "" ] count: 1 }', "1:36: segment 's' without a model [P2]"),
        (
            'place { model: "a" }\nsegment { name: "s" models: [ "b", "a" ] count: 1 }',
            "2:36: model 'a' is placed 2 times [P3]",
        ),
        (
            'segment { name: "s" models: [ "b", "a" ] count: 1 }\nsegment { name: "t" models: "a" count: 1 }',
            "2:21: model 'a' is placed 2 times [P3]",
        ),
        ('segment { name: "s" models: [ "a", "a" ] count: 1 }', "1:36: model 'a' is placed 2 times [P3]"),
        (
            'segment { name: "s" models: "a" count: 1 }\nsegment { name: "s" models: "b" count: 1 }',
            "2:11: segment 's' is placed 2 times [P3]",
        ),
        (
            'segment { name: "s" models: "a" count: 1 resources { key: "CPU" value: -1 } }',
            "1:54: each process of segment 's' needs -1 of resource 'CPU' [P5]",
        ),
        (
            'place { model: "a" resources { key: "CPU" value: 0 } }',
            "1:32: each instance of model 'a' needs 0 of resource 'CPU' [P5]",
        ),
        (
            'place { model: "a" resources { key: "CPU" value: inf } }',
            "1:32: each instance of model 'a' needs inf of resource 'CPU' [P5]",
        ),
        (
            'place { model: "a" labels { value: "b" } resources { key: "CPU" value: 1 } }',
            "1:20: labels of model 'a' have an entry without a key [P5]",
        ),
    ],
)
def test_rules_of_the_file_alone(text: str, found: str) -> None:
    assert problems(text) == [f"cluster.pbtxt:{found}"]


def test_all_mistakes_are_reported_together_with_their_places() -> None:
    assert problems('place { modle: "a" }\nplace { model: 3 count: -1 }') == [
        "cluster.pbtxt:1:1: a place without a model [P2]",
        'cluster.pbtxt:1:9: Message type "placement.Place" has no field named "modle" []',
        "cluster.pbtxt:2:1: a place without a model [P2]",
        'cluster.pbtxt:2:16: field "model": Expected string, found 3 (did you mean "3", in quotes?) []',
        'cluster.pbtxt:2:25: field "count": Integer out of range (-1); uint32 holds 0 to 4294967295 []',
    ]


def test_a_label_given_twice_is_a_warning_and_the_last_one_counts() -> None:
    text = 'place { model: "m" labels { key: "a" value: "1" }\nlabels { key: "a" value: "2" } }'
    placement = parse_placement(text, "cluster.pbtxt")
    assert placement.places["m"].labels == {"a": "2"}
    (warning,) = placement.warnings
    assert str(warning.place) == "cluster.pbtxt:2:10"
    assert warning.hint == "the one before is at cluster.pbtxt:1:29"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(Problems, match=r"cluster\.pbtxt: .*No such file"):
        read_placement(tmp_path / "cluster.pbtxt")


PLAIN = ModelConfig("m", "python", "", 8, (), (), SourceMap("m"))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (replace(PLAIN, backend="callable"), "is a function, which has no files"),
        (replace(PLAIN, backend="remote"), "runs on another server already"),
        (
            replace(
                PLAIN,
                instance_groups=(InstanceGroup("g", rate_limiter=RateLimiter((LimitedResource("R", 1),))),),
            ),
            "uses resources of the rate limiter",
        ),
        (replace(PLAIN, ensemble=Ensemble(())), "place the models of its steps"),
    ],
)
def test_rule_P6_models_that_cannot_run_on_another_machine(config: ModelConfig, why: str) -> None:
    assert why in why_not_placed(config)
    placement = parse_placement('place { model: "m" }', "cluster.pbtxt")
    (problem,) = misplaced(placement, {"m": config})
    assert str(problem.place) == "cluster.pbtxt:1:9"
    assert problem.rule == "P6"


def test_rule_P6_models_that_do_not_exist() -> None:
    assert why_not_placed(PLAIN) == ""
    segment = parse_placement('segment { name: "s" models: [ "m", "x" ] count: 1 }', "f")
    assert [str(one.place) for one in misplaced(segment, {"m": PLAIN})] == ["f:1:36"]
    (problem,) = misplaced(parse_placement('place { model: "mm" }', "f"), {"m": PLAIN})
    assert problem.message == "model 'mm' is not in the repository"
    assert problem.hint == 'did you mean "m"?'
