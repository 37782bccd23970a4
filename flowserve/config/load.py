"""From a model's folder to a configuration that the rest of the program trusts, in two steps.

Decided here: the order. `read_draft` reads what the user wrote and guesses the backend; the caller asks that backend
what the model's own files say; `judge` joins both, judges the whole and applies the defaults. Nothing here reads model
files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from flowserve.config.authored import authored
from flowserve.config.backends import fill_backend
from flowserve.config.complete import merge
from flowserve.config.convert import to_config
from flowserve.config.doubt import elsewhere, fields_of
from flowserve.config.ignored import ignored_fields
from flowserve.config.instances import NO_GPUS, Gpus
from flowserve.config.model_config_pb2 import ModelConfig as ModelConfigProto
from flowserve.config.normalise import fill_defaults, gpus_to_cpu
from flowserve.config.parse import Parsed, parse, read_text
from flowserve.config.rules import find_problems
from flowserve.config.rules.subject import Subject
from flowserve.config.types import Completion, ModelConfig, SourceMap
from flowserve.config.unsupported import UNSUPPORTED, refuse_backend
from flowserve.errors import Place, Problem, Problems

log = logging.getLogger("flowserve.config")

CONFIG_FILE: Final = "config.pbtxt"
VARIANTS: Final = "configs"  # the folder of configurations that have names


@dataclass(frozen=True, slots=True)
class Draft:
    """What the user wrote for one model folder, mistakes of the text included, before its own files were asked.

    `name` is the folder's name. `backend` is "" for ensembles and where it cannot be told. `preliminary` is what was
    written so far, unchecked, for `Backend.complete`. `backends` are those that exist.
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
class Judged:
    """The configuration with its defaults; every mistake of the text and violation of every rule, sorted by place;
    the configuration's own fields that they are in; and a warning for each field that nothing comes of.
    """

    config: ModelConfig
    problems: list[Problem]
    broken: frozenset[str]
    ignored: list[Problem]


def read_draft(folder: Path, repository: Path, default_files: Mapping[str, str], config_name: str = "") -> Draft:
    """Read one model folder's configs/NAME.pbtxt where `config_name` is NAME and there is such a file, else its
    config.pbtxt; where that is missing too, it is an empty configuration.

    `default_files`: the file a version of each existing backend holds ("onnxruntime": "model.onnx"). Raises `Problems`
    where the file cannot be read or is not a configuration.
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
    return path.exists() or path.is_symlink()  # a link that leads nowhere is a mistake and not a missing file


def draft_of(parsed: Parsed, folder: Path, default_files: Mapping[str, str]) -> Draft:
    """The draft of a configuration that is already parsed. Its message becomes the draft's own."""
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
    """The configuration to serve with. Raises `Problems` with all that `judge` finds."""
    judged = judge(draft, completion, gpus)
    if judged.problems:
        raise Problems(judged.problems)
    return judged.config


def judge(draft: Draft, completion: Completion | None, gpus: Gpus = NO_GPUS) -> Judged:
    """What comes of a draft. `completion` is what the model's own files say, None where nobody asked (ensembles).
    `gpus` are those that the model's instances may be on.
    """
    message = ModelConfigProto()
    message.CopyFrom(draft.message)
    if gpus.is_off:
        for group in gpus_to_cpu(message):
            log.warning("%s: instance group %s runs on the CPU instead of a GPU (--gpu=off)", draft.source.file, group)
    uses_gpus = completion is None or completion.gpu_instance_count > 0
    subject = Subject(message, draft.source, draft.name, draft.folder, gpus, uses_gpus)
    problems = merge(message, completion, draft.source) if completion else []
    problems += find_problems(subject)
    problems += find_problems(subject, UNSUPPORTED)
    problems += refuse_backend(subject, draft.backends)
    broken = draft.parsed.broken | fields_of(problems, draft.source)
    if draft.parsed.problems:
        problems = [*draft.parsed.problems, *elsewhere(problems, draft.source, draft.parsed.broken)]
    ignored = [*ignored_fields(message, draft.source)]
    fill_defaults(message, completion, gpus)
    return Judged(to_config(message, draft.source), _in_order(problems), broken, ignored)


def _in_order(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: problem.place or Place(""))
