"""Containment of deployments and the effects of a change, with property tests."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from flowserve.repository.resolve import Containment, Steps, steps_of
from tests.support.ensembles import ensemble, model

# `outer` contains `inner` and `c`, `inner` contains `a` and `b`; `alone` contains nothing.
STEPS = {"a": (), "b": (), "c": (), "alone": (), "inner": ("a", "b"), "outer": ("inner", "c")}
NAMES = st.sampled_from("abcdefgh")
ANY_STEPS = st.dictionaries(NAMES, st.sets(NAMES))


def goes_with(name: str, steps: Steps, *stay: str) -> frozenset[str]:
    return Containment(steps).goes_with(name, set(stay).__contains__)


def test_the_steps_of_an_ensemble_are_unique_names_and_a_model_has_none() -> None:
    config = ensemble(
        "e", {"x": "FP32[4]"}, {"y": "FP32[4]"}, [("m", {"x": "x"}, {"y": "t"}), ("m", {"x": "t"}, {"y": "y"})]
    )
    assert steps_of(config) == {"m"}
    assert steps_of(model("m", {"x": "FP32[4]"}, {"y": "FP32[4]"})) == frozenset()


def test_above_has_every_ensemble_that_contains_a_name() -> None:
    made_of = Containment(STEPS)
    assert made_of.above(["a"]) == {"inner", "outer"}
    assert made_of.above(["c", "alone"]) == {"outer"}
    assert made_of.above(["inner"]) == {"outer"}
    assert made_of.above(["outer"]) == frozenset()


def test_below_has_every_name_that_a_name_will_contain() -> None:
    made_of = Containment(STEPS)
    assert made_of.below(["outer"], {}) == {"inner", "a", "b", "c"}
    assert made_of.below(["outer"], {"inner": ("new",)}) == {"inner", "new", "c"}
    assert made_of.below(["a"], {}) == frozenset()


def test_ensembles_that_contain_each_other_terminate() -> None:
    circle = {"a": ("b",), "b": ("a",)}
    assert Containment(circle).above(["a"]) == Containment(circle).below(["a"], {}) == {"a", "b"}
    assert goes_with("a", circle) == {"b"}


def test_an_unload_includes_steps_that_only_this_ensemble_contains() -> None:
    assert goes_with("outer", STEPS, "outer") == {"a", "b", "c", "inner"}
    assert goes_with("outer", STEPS, "outer", "inner") == {"c"}
    assert goes_with("outer", {**STEPS, "other": ("inner",)}, "outer", "other") == {"c"}
    assert goes_with("inner", STEPS, "inner") == {"a", "b"}
    assert goes_with("a", STEPS) == frozenset()
    assert goes_with("unknown", STEPS) == frozenset()


def test_changes_connected_by_containment_are_in_one_group() -> None:
    made_of = Containment(STEPS)
    assert made_of.groups({"a": (), "c": (), "alone": ()}) == [{"a", "c"}, {"alone"}]
    assert Containment().groups({"a": (), "b": ()}) == [{"a"}, {"b"}]
    assert made_of.groups({"inner": ("a",), "b": ()}) == [{"b"}, {"inner"}]  # no longer contained
    assert made_of.groups({}) == []


@given(ANY_STEPS, ANY_STEPS)
def test_property_groups_partition_changes_and_keep_steps_with_their_ensemble(
    steps: Mapping[str, set[str]], changed: Mapping[str, set[str]]
) -> None:
    found = Containment(steps).groups(changed)
    assert sorted(name for group in found for name in group) == sorted(changed)
    of = {name: number for number, group in enumerate(found) for name in group}
    for outer, inside in {**steps, **changed}.items():
        for step in inside:
            if outer in of and step in of:
                assert of[outer] == of[step]


@given(st.lists(st.tuples(NAMES, st.none() | st.sets(NAMES)), max_size=20), st.sets(NAMES), NAMES)
def test_property_put_and_drop_in_any_order_leave_the_remaining_names(
    script: list[tuple[str, set[str] | None]], names: set[str], name: str
) -> None:
    made_of, left = Containment(), dict[str, set[str]]()
    for one, inside in script:
        left.pop(one, None)
        if inside is None:
            made_of.drop(one)
        else:
            made_of.put(one, inside)
            left[one] = inside
    anew = Containment(left)
    assert made_of.above(names) == anew.above(names)
    assert made_of.below(names, {}) == anew.below(names, {})
    assert made_of.goes_with(name, names.__contains__) == anew.goes_with(name, names.__contains__)
