"""Error cascade filter: suppresses problems that are consequences of other mistakes.

Decides which fields determine the validity of others. A mistake in one of those causes further ones (a wrong
max_batch_size shifts every dimension); a mistake in any other field does not affect the rest, so that all independent
mistakes are reported in one run. An omitted field counts as determining, because its intended value is unknown.
Callers: `load`, `repository/read`, `runtime`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from flowserve.config.schema import MODEL_CONFIG
from flowserve.config.suggest import nearest
from flowserve.config.types import SourceMap
from flowserve.errors import Problem

UNWRITTEN: Final = ""
DETERMINING: Final = frozenset(
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


INDEPENDENT: Final = frozenset({"name", "version_policy"})  # their rules read no other field
DEPENDS_ON_BACKEND: Final = frozenset({"instance_group", "parameters"})  # their rules read only the backend besides


def can_check_others(fields: Iterable[str]) -> bool:
    """Whether the other fields can be checked despite mistakes in these fields."""
    return DETERMINING.isdisjoint(fields)


def field_of(path: str) -> str:
    """The top-level field of a path; an unknown name counts as the most similar field."""
    name = path.partition(".")[0].partition("[")[0]
    return name if name in MODEL_CONFIG.fields else nearest(name, MODEL_CONFIG.fields) or name


def broken_fields(problems: Iterable[Problem], source: SourceMap) -> set[str]:
    """The top-level fields in which rules found mistakes, by the places of the problems."""
    fields = {place: field_of(path) for path, place in source.places.items()}
    return {fields.get(problem.place, UNWRITTEN) if problem.place else UNWRITTEN for problem in problems}


def independent_problems(problems: Iterable[Problem], source: SourceMap, broken: Collection[str]) -> list[Problem]:
    """The problems in fields other than the `broken` ones that are no consequence of these."""
    fields = {*MODEL_CONFIG.fields}.difference(broken)
    if not can_check_others(broken):
        fields &= INDEPENDENT | DEPENDS_ON_BACKEND if {"backend", "platform"}.isdisjoint(broken) else INDEPENDENT
    return [problem for problem in problems if broken_fields([problem], source) <= fields]
