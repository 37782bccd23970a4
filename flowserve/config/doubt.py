"""Which mistakes leave the rest of a configuration to be judged, so that all of them are told in one run.

Decided here: the fields that others are judged by. A mistake in one of those would be followed by more that go with it
(a wrong max_batch_size shifts every dimension); one in any other field says nothing about the rest. What is not written
at all counts as one of those: nobody knows what it would have said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from flowserve.config.schema import MODEL_CONFIG
from flowserve.config.suggest import nearest
from flowserve.config.types import SourceMap
from flowserve.errors import Problem

UNWRITTEN: Final = ""
JUDGED_BY: Final = frozenset(
    {
        UNWRITTEN,
        "platform",
        "backend",
        "max_batch_size",
        "input",
        "output",
        "batch_input",
        "batch_output",
        "sequence_batching",
        "ensemble_scheduling",
        "default_model_filename",
    }
)


ALONE: Final = frozenset({"name", "version_policy"})  # whose rules look at nothing else
OF_ITS_BACKEND: Final = frozenset({"instance_group", "parameters"})  # nor these, but for what the backend is


def may_go_on(fields: Iterable[str]) -> bool:
    """Whether mistakes in these fields of a configuration leave the others to be judged."""
    return JUDGED_BY.isdisjoint(fields)


def field_of(path: str) -> str:
    """The configuration's own field that a path leads through; what is no field stands for the one it is close to."""
    name = path.partition(".")[0].partition("[")[0]
    return name if name in MODEL_CONFIG.fields else nearest(name, MODEL_CONFIG.fields) or name


def fields_of(problems: Iterable[Problem], source: SourceMap) -> set[str]:
    """The fields that rules found mistakes in, by their places."""
    fields = {place: field_of(path) for path, place in source.places.items()}
    return {fields.get(problem.place, UNWRITTEN) if problem.place else UNWRITTEN for problem in problems}


def elsewhere(problems: Iterable[Problem], source: SourceMap, broken: Collection[str]) -> list[Problem]:
    """Those that rules found in other fields than the `broken` ones, and that are no consequence of these."""
    fields = {*MODEL_CONFIG.fields}.difference(broken)
    if not may_go_on(broken):
        fields &= ALONE | OF_ITS_BACKEND if {"backend", "platform"}.isdisjoint(broken) else ALONE
    return [problem for problem in problems if fields_of([problem], source) <= fields]
