"""Loads a model folder's configuration in two steps.

Decides the order: `read_draft` reads the user's file and guesses the backend; the caller asks that backend for the
declarations in the model's own files; `validate` merges both, checks all rules and applies the defaults. It also keeps
the places of configurations that this process generated from Python code, so that messages name the user's line.

Decides also which problems are suppressed as consequences of other mistakes, by the fields that determine the validity
of others. A mistake in one of those causes further ones (a wrong max_batch_size shifts every dimension); a mistake in
any other field does not affect the rest, so that all independent mistakes are reported in one run. An omitted field
counts as determining, because its intended value is unknown.

Does not read model files. Callers: `repository`, `authoring`, `runtime`.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Final

from flowserve.config import model_config_pb2 as pb
from flowserve.config.backends import fill_backend
from flowserve.config.build import MODEL_CONFIG, PROBLEMS_MAX
from flowserve.config.complete import fill_defaults, gpus_to_cpu, merge
from flowserve.config.convert import to_config
from flowserve.config.parse import Parsed, field_of, parse, read_text
from flowserve.config.rules import RULES, RuleInput
from flowserve.config.types import NO_GPUS, Completion, Gpus, ModelConfig, SourceMap
from flowserve.config.unsupported import OTHER_BACKEND, ignored_fields, refusals, repeated_outputs, unused_whole_batches
from flowserve.errors import Place, Problem, Problems

log = logging.getLogger("flowserve.config")

CONFIG_FILE: Final = "config.pbtxt"
VARIANTS: Final = "configs"  # the folder of named configurations
NO_CONFIG: Final = "R15"
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


@dataclass(frozen=True, slots=True)
class Draft:
    """The user's configuration of one model folder, mistakes included, before completion from the model's own files.

    `preliminary` is the unchecked configuration for `Backend.complete`; its `backend` is "" for ensembles and if it is
    unknown. `backends` are the available ones.
    """

    folder: Path
    parsed: Parsed
    preliminary: ModelConfig
    backends: frozenset[str]


@dataclass(frozen=True, slots=True)
class Validated:
    """The configuration with its defaults; all mistakes of the text and violations of rules, sorted by place; the
    top-level fields that contain them; and a warning for each field or value that is ignored.
    """

    config: ModelConfig
    problems: list[Problem]
    broken: frozenset[str]
    ignored: list[Problem]


def read_draft(
    folder: Path,
    repository: Path,
    default_files: Mapping[str, str],
    config_name: str = "",
    *,
    is_strict: bool = False,
) -> Draft:
    """Read one model folder's configs/NAME.pbtxt if `config_name` is NAME and the file exists, else its config.pbtxt;
    if that is missing too, the configuration is empty, which is an error if `is_strict`.

    `default_files`: the model file of each available backend ("onnxruntime": "model.onnx"). Raises `Problems` if the
    file cannot be read or has a syntax error.
    """
    home = folder.relative_to(repository).as_posix()
    named = (f"{VARIANTS}/{config_name}.pbtxt",) if config_name else ()
    # A broken link is a mistake, not a missing file.
    present = (name for name in (*named, CONFIG_FILE) if (folder / name).exists() or (folder / name).is_symlink())
    found = next(present, None)
    if found is not None:
        file = f"{home}/{found}"
        parsed = parse(read_text(folder / found, file), file)
        parsed = replace(parsed, source=authored(folder, parsed.source))
    elif is_strict:
        text = f"failed to open text file for read {home}/{CONFIG_FILE}: No such file or directory"
        hint = "configurations are not completed (--disable-auto-complete-config), so that each model needs one"
        raise Problems([Problem(text, Place(home), NO_CONFIG, hint)])
    else:
        parsed = Parsed(pb.ModelConfig(), SourceMap(home))
    return draft_of(parsed, folder, default_files)


def draft_of(parsed: Parsed, folder: Path, default_files: Mapping[str, str]) -> Draft:
    """The draft of a parsed configuration, whose message it takes over."""
    message = parsed.message
    message.name = message.name or folder.name
    fill_backend(message, folder, default_files)
    return Draft(folder, parsed, to_config(message, parsed.source), frozenset(default_files))


def finish(draft: Draft, completion: Completion | None, gpus: Gpus = NO_GPUS) -> ModelConfig:
    """The final configuration. Raises `Problems` with all problems that `validate` finds."""
    validated = validate(draft, completion, gpus)
    if validated.problems:
        raise Problems(validated.problems)
    return validated.config


def validate(
    draft: Draft, completion: Completion | None, gpus: Gpus = NO_GPUS, *, is_strict: bool = False
) -> Validated:
    """Complete and check a draft. `completion` has the declarations of the model's own files, None for ensembles.
    `gpus` are those available to the model's instances. `is_strict`: the declarations are compared with the draft and
    complete nothing.
    """
    message, source = pb.ModelConfig(), draft.parsed.source
    message.CopyFrom(draft.parsed.message)
    if gpus.is_off:
        for group in gpus_to_cpu(message):
            log.warning("%s: instance group %s runs on the CPU instead of a GPU (--gpu=off)", source.file, group)
    uses_gpus = completion is None or completion.gpu_instance_count > 0
    subject = RuleInput(message, source, draft.folder, gpus, uses_gpus, is_strict)
    problems = merge(message, completion, source, is_strict=is_strict) if completion else []
    problems += find_problems(subject)
    problems += refusals(subject, draft.backends)
    broken = draft.parsed.broken | broken_fields(problems, source)
    if refused := [problem for problem in problems if problem.rule == OTHER_BACKEND]:
        problems = refused  # the user replaces the model: its other fields do not matter
    elif draft.parsed.problems:
        problems = [*draft.parsed.problems, *independent_problems(problems, source, draft.parsed.broken)]
    repeated = islice(repeated_outputs(message, source), PROBLEMS_MAX)
    ignored = [*draft.parsed.warnings, *repeated, *ignored_fields(message, source), *unused_whole_batches(subject)]
    fill_defaults(message, completion, gpus)
    problems.sort(key=lambda problem: problem.place or Place(""))
    return Validated(to_config(message, source), problems, broken, ignored)


def can_check_others(fields: Iterable[str]) -> bool:
    """Whether the other fields can be checked despite mistakes in these fields."""
    return DETERMINING.isdisjoint(fields)


def broken_fields(problems: Iterable[Problem], source: SourceMap) -> set[str]:
    """The top-level fields in which rules found mistakes, by the places of the problems."""
    fields = {place: field_of(path) for path, place in source.places.items()}
    return {fields.get(problem.place, UNWRITTEN) if problem.place else UNWRITTEN for problem in problems}


def independent_problems(problems: Iterable[Problem], source: SourceMap, broken: Collection[str]) -> list[Problem]:
    """The problems in fields other than the `broken` ones that are not consequences of these."""
    fields = {*MODEL_CONFIG.fields}.difference(broken)
    if not can_check_others(broken):
        fields &= INDEPENDENT | DEPENDS_ON_BACKEND if {"backend", "platform"}.isdisjoint(broken) else INDEPENDENT
    return [problem for problem in problems if broken_fields([problem], source) <= fields]


_sources: dict[str, SourceMap] = {}  # by the real path of a model's folder


def note_author(folder: Path, source: SourceMap, owner: object) -> None:
    """Use the places of `source` for the configuration in a model's folder, as long as `owner` is alive."""
    path = os.path.realpath(folder)
    _sources[path] = source
    weakref.finalize(owner, _sources.pop, path, None)


def authored(folder: Path, read: SourceMap) -> SourceMap:
    """The places of a configuration read from a folder: those noted by `note_author`, if any."""
    source = _sources.get(os.path.realpath(folder)) if _sources else None
    if source is None:
        return read
    return SourceMap(source.file, {path: source.place(path) for path in read.places})


def find_problems(subject: RuleInput) -> list[Problem]:
    """Every violation of every rule, by rule."""
    return sorted(chain.from_iterable(rule(subject) for rule in RULES), key=lambda problem: int(problem.rule[1:]))
