"""What is made of what, and what a change means for others. Pure, with laws."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from flowserve.repository.containment import Containment, Steps, steps_of
from flowserve.testing.ensembles import ensemble, model

# `outer` is made of `inner` and `c`, `inner` of `a` and `b`; `alone` of nothing.
STEPS = {"a": (), "b": (), "c": (), "alone": (), "inner": ("a", "b"), "outer": ("inner", "c")}
NAMES = st.sampled_from("abcdefgh")
ANY_STEPS = st.dictionaries(NAMES, st.sets(NAMES))


def goes_with(name: str, steps: Steps, *stay: str) -> frozenset[str]:
    return Containment(steps).goes_with(name, set(stay).__contains__)


def test_the_steps_of_an_ensemble_are_names_once_and_a_model_has_none() -> None:
    config = ensemble(
        "e", {"x": "FP32[4]"}, {"y": "FP32[4]"}, [("m", {"x": "x"}, {"y": "t"}), ("m", {"x": "t"}, {"y": "y"})]
    )
    assert steps_of(config) == {"m"}
    assert steps_of(model("m", {"x": "FP32[4]"}, {"y": "FP32[4]"})) == frozenset()


def test_what_contains_a_name_at_any_depth_is_above_it() -> None:
    made_of = Containment(STEPS)
    assert made_of.above(["a"]) == {"inner", "outer"}
    assert made_of.above(["c", "alone"]) == {"outer"}
    assert made_of.above(["inner"]) == {"outer"}
    assert made_of.above(["outer"]) == frozenset()


def test_what_a_name_is_made_of_at_any_depth_is_below_it_as_it_will_be() -> None:
    made_of = Containment(STEPS)
    assert made_of.below(["outer"], {}) == {"inner", "a", "b", "c"}
    assert made_of.below(["outer"], {"inner": ("new",)}) == {"inner", "new", "c"}
    assert made_of.below(["a"], {}) == frozenset()


def test_ensembles_that_contain_each_other_do_not_go_on_for_ever() -> None:
    circle = {"a": ("b",), "b": ("a",)}
    assert Containment(circle).above(["a"]) == Containment(circle).below(["a"], {}) == {"a", "b"}
    assert goes_with("a", circle) == {"b"}


def test_an_ensemble_takes_along_what_only_it_is_made_of_and_nobody_named() -> None:
    assert goes_with("outer", STEPS, "outer") == {"a", "b", "c", "inner"}
    assert goes_with("outer", STEPS, "outer", "inner") == {"c"}
    assert goes_with("outer", {**STEPS, "other": ("inner",)}, "outer", "other") == {"c"}
    assert goes_with("inner", STEPS, "inner") == {"a", "b"}
    assert goes_with("a", STEPS) == frozenset()
    assert goes_with("unknown", STEPS) == frozenset()


def test_what_takes_over_together_is_joined_by_containment_also_through_what_does_not_change() -> None:
    made_of = Containment(STEPS)
    assert made_of.groups({"a": (), "c": (), "alone": ()}) == [{"a", "c"}, {"alone"}]
    assert Containment().groups({"a": (), "b": ()}) == [{"a"}, {"b"}]
    assert made_of.groups({"inner": ("a",), "b": ()}) == [{"b"}, {"inner"}]  # which it is made of no longer
    assert made_of.groups({}) == []


@given(ANY_STEPS, ANY_STEPS)
def test_groups_divide_what_changes_and_never_part_a_step_from_its_ensemble(
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
def test_what_was_put_and_dropped_in_any_order_is_what_is_left_of_it(
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
