"""One model folder, read whole: configuration, the model's own word, versions.

Decided here: that all three are asked before anything is refused, so that a user sees every mistake of a folder at
once. What the backends say comes through a function that is handed in: this room and theirs do not know each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from flowserve.config.ignored import unused_environment
from flowserve.config.instances import NO_GPUS, Gpus
from flowserve.config.load import Draft, draft_of, finish, parse_model_config, read_draft
from flowserve.config.normalise import forget_defaults
from flowserve.config.types import Completion, ModelConfig
from flowserve.config.unsupported import OTHER_BACKENDS
from flowserve.errors import FlowserveError, Place, Problem, Problems
from flowserve.repository.containment import steps_of
from flowserve.repository.labels import Labels, read_labels
from flowserve.repository.layout import ModelFolder, missing_versions, versions_to_serve

# Asks the backend of a configuration about one version of it. May block; raises FlowserveError.
Complete = Callable[[ModelConfig, ModelFolder, int], Completion]


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A folder that is right as far as can be seen from itself.

    `versions` are those to serve, ascending, at least one. `labels` are those of its outputs.
    """

    folder: ModelFolder
    config: ModelConfig
    versions: tuple[int, ...]
    warnings: tuple[Problem, ...] = ()
    labels: Labels = field(default_factory=dict)


def read_model(
    folder: ModelFolder,
    default_files: Mapping[str, str],
    complete: Complete,
    *,
    gpus: Gpus = NO_GPUS,
    config_json: str = "",
    config_name: str = "",
    served: ModelConfig | None = None,
) -> ReadModel:
    """Read one folder; its files are opened once, so that a change meanwhile gives the old or the new state, never a
    mixture.

    `default_files`: what a version folder holds, by backend. `gpus`: those that instances may be on.
    `config_json`: a configuration in the place of the folder's own, perhaps that of `served` (what this name is, or was
    last) with changes; `config_name`: which of those that it has by name counts. Blocks.
    Raises Problems with every mistake of the folder.
    """
    try:
        draft = _draft(folder, default_files, config_json, config_name, served)
    except OSError as error:
        raise Problems([Problem(f"cannot be read: {error.strerror}", Place(folder.name))]) from error
    versions, problems = _versions(folder, draft)
    completion: Completion | None = None
    if versions and _can_be_asked(draft):
        try:
            completion = _ask(draft, folder, versions[-1], complete)
        except Problems as refused:
            problems += refused.problems
    try:
        config = finish(draft, completion, gpus)
    except Problems as broken:
        # Whoever could not be asked might have filled in what is not written, so only what is written counts against
        # it.
        was_asked = completion is not None or not problems
        problems += [problem for problem in broken.problems if was_asked or (problem.place and problem.place.line)]
        raise Problems(problems or broken.problems) from None
    if problems:
        raise Problems(problems)
    labels = read_labels(folder.path, config)
    return ReadModel(folder, config, versions, (*folder.warnings, *_warnings(folder, config)), labels)


def read_steps(
    folder: ModelFolder, default_files: Mapping[str, str], *, config_json: str = "", config_name: str = ""
) -> frozenset[str]:
    """What a folder's configuration says that it is made of, as quickly as a file is read: no model is asked, and what
    is wrong with it is for `read_model` to say.
    """
    try:
        return steps_of(_draft(folder, default_files, config_json, config_name).preliminary)
    except (OSError, Problems):
        return frozenset()


def _draft(
    folder: ModelFolder,
    default_files: Mapping[str, str],
    config_json: str,
    config_name: str,
    served: ModelConfig | None = None,
) -> Draft:
    if not config_json:
        return read_draft(folder.path, folder.repository, default_files, config_name)
    try:
        message, source = parse_model_config(config_json, f"{folder.name}/config", "json")
    except Problems as problems:
        first, *others = problems.problems
        said = replace(first, message=f"Invalid config override: {first.message}")
        raise Problems([said, *others]) from None
    if served is not None:
        forget_defaults(message, served)
    return draft_of(message, source, folder.path, default_files)


def _versions(folder: ModelFolder, draft: Draft) -> tuple[tuple[int, ...], list[Problem]]:
    policy, is_ensemble = draft.preliminary.version_policy, draft.preliminary.is_ensemble
    try:
        return versions_to_serve(folder, policy, is_ensemble), []
    except Problems as none:
        return (), list(none.problems)


def _can_be_asked(draft: Draft) -> bool:
    """Also a backend that nobody knows, which says so; a rule speaks of those that are known to be somebody else's."""
    return bool(draft.backend) and (draft.backend in draft.backends or draft.backend not in OTHER_BACKENDS)


def _ask(draft: Draft, folder: ModelFolder, version: int, complete: Complete) -> Completion:
    """What the model's own files say, every failure as Problems at the place of the configuration."""
    place = draft.source.place("")
    try:
        return complete(draft.preliminary, folder, version)
    except Problems:
        raise
    except FlowserveError as error:
        raise Problems([Problem(str(error), place)]) from error
    except Exception as error:  # backends run other people's code: plug-ins, and model.py files through them
        text = f"model '{draft.name}': backend '{draft.backend}' failed to read it: {type(error).__name__}: {error}"
        raise Problems([Problem(text, place)]) from error


def _warnings(folder: ModelFolder, config: ModelConfig) -> list[Problem]:
    place = config.source.place("version_policy")
    missing = [
        Problem(f"version {version} of its version policy is not there; served without it", place, "R8")
        for version in missing_versions(folder, config.version_policy)
    ]
    return [*missing, *unused_environment(config)]
