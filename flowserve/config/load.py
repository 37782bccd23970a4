"""Loads a model folder's configuration in two steps.

Decides the order: `read_draft` reads the user's file and guesses the backend; the caller asks that backend for the
declarations in the model's own files; `validate` merges both, checks all rules and applies the defaults. It also keeps
the places of configurations that this process generated from Python code, so that messages name the user's line. Does
not read model files. Callers: `repository`, `authoring`.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from flowserve.config.backends import fill_backend
from flowserve.config.complete import fill_defaults, gpus_to_cpu, merge
from flowserve.config.convert import to_config
from flowserve.config.error_cascade import broken_fields, independent_problems
from flowserve.config.instances import NO_GPUS, Gpus
from flowserve.config.model_config_pb2 import ModelConfig as ModelConfigProto
from flowserve.config.parse import Parsed, parse, read_text
from flowserve.config.rules import find_problems
from flowserve.config.rules.subject import RuleInput
from flowserve.config.types import Completion, ModelConfig, SourceMap
from flowserve.config.unsupported import UNSUPPORTED, ignored_fields, refuse_backend
from flowserve.errors import Place, Problem, Problems

log = logging.getLogger("flowserve.config")

CONFIG_FILE: Final = "config.pbtxt"
VARIANTS: Final = "configs"  # the folder of named configurations


@dataclass(frozen=True, slots=True)
class Draft:
    """The user's configuration of one model folder, mistakes included, before completion from the model's own files.

    `name` is the folder's name. `backend` is "" for ensembles and if it is unknown. `preliminary` is the unchecked
    configuration for `Backend.complete`. `backends` are the available ones.
    """

    name: str
    folder: Path
    source: SourceMap
    message: ModelConfigProto
    backend: str
    preliminary: ModelConfig
    backends: frozenset[str]
    parsed: Parsed


@dataclass(frozen=True, slots=True)
class Validated:
    """The configuration with its defaults; all mistakes of the text and violations of rules, sorted by place; the
    top-level fields that contain them; and a warning for each ignored field.
    """

    config: ModelConfig
    problems: list[Problem]
    broken: frozenset[str]
    ignored: list[Problem]


def read_draft(folder: Path, repository: Path, default_files: Mapping[str, str], config_name: str = "") -> Draft:
    """Read one model folder's configs/NAME.pbtxt if `config_name` is NAME and the file exists, else its config.pbtxt;
    if that is missing too, the configuration is empty.

    `default_files`: the model file of each available backend ("onnxruntime": "model.onnx"). Raises `Problems` if the
    file cannot be read or has a syntax error.
    """
    home = folder.relative_to(repository).as_posix()
    named = (f"{VARIANTS}/{config_name}.pbtxt",) if config_name else ()
    found = next((name for name in (*named, CONFIG_FILE) if _is_there(folder / name)), None)
    if found is not None:
        file = f"{home}/{found}"
        parsed = parse(read_text(folder / found, file), file)
        parsed = replace(parsed, source=authored(folder, parsed.source))
    else:
        parsed = Parsed(ModelConfigProto(), SourceMap(home))
    return draft_of(parsed, folder, default_files)


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()  # a broken link is a mistake, not a missing file


def draft_of(parsed: Parsed, folder: Path, default_files: Mapping[str, str]) -> Draft:
    """The draft of a parsed configuration, whose message it takes over."""
    message, source = parsed.message, parsed.source
    message.name = message.name or folder.name
    fill_backend(message, folder, default_files)
    return Draft(
        name=folder.name,
        folder=folder,
        source=source,
        message=message,
        backend=message.backend,
        preliminary=to_config(message, source),
        backends=frozenset(default_files),
        parsed=parsed,
    )


def finish(draft: Draft, completion: Completion | None, gpus: Gpus = NO_GPUS) -> ModelConfig:
    """The final configuration. Raises `Problems` with all problems that `validate` finds."""
    validated = validate(draft, completion, gpus)
    if validated.problems:
        raise Problems(validated.problems)
    return validated.config


def validate(draft: Draft, completion: Completion | None, gpus: Gpus = NO_GPUS) -> Validated:
    """Complete and check a draft. `completion` has the declarations of the model's own files, None for ensembles.
    `gpus` are those available to the model's instances.
    """
    message = ModelConfigProto()
    message.CopyFrom(draft.message)
    if gpus.is_off:
        for group in gpus_to_cpu(message):
            log.warning("%s: instance group %s runs on the CPU instead of a GPU (--gpu=off)", draft.source.file, group)
    uses_gpus = completion is None or completion.gpu_instance_count > 0
    subject = RuleInput(message, draft.source, draft.name, draft.folder, gpus, uses_gpus)
    problems = merge(message, completion, draft.source) if completion else []
    problems += find_problems(subject)
    problems += find_problems(subject, UNSUPPORTED)
    problems += refuse_backend(subject, draft.backends)
    broken = draft.parsed.broken | broken_fields(problems, draft.source)
    if draft.parsed.problems:
        problems = [*draft.parsed.problems, *independent_problems(problems, draft.source, draft.parsed.broken)]
    ignored = [*ignored_fields(message, draft.source)]
    fill_defaults(message, completion, gpus)
    return Validated(to_config(message, draft.source), _in_order(problems), broken, ignored)


def _in_order(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: problem.place or Place(""))


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
