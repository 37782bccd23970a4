"""One model folder, read whole: configuration, the model's own word, versions.

Decided here: that all three are asked before anything is refused, so that a user sees every mistake of a folder at
once; and which file a backend means that does not say. What the backends say comes through a function that is handed
in: this room and theirs do not know each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from flowserve.config.doubt import may_go_on
from flowserve.config.ignored import (
    BATCH_STRATEGY_FILE,
    misspelt_parameters,
    unused_batching,
    unused_environment,
)
from flowserve.config.instances import NO_GPUS, Gpus
from flowserve.config.load import Draft, draft_of, judge, read_draft
from flowserve.config.normalise import forget_defaults
from flowserve.config.parse import parse
from flowserve.config.types import Completion, ModelConfig
from flowserve.config.unsupported import OTHER_BACKENDS
from flowserve.errors import FlowserveError, Invalid, Place, Problem, Problems
from flowserve.repository.containment import steps_of
from flowserve.repository.labels import Labels, read_labels
from flowserve.repository.layout import ModelFolder, missing_versions, versions_to_serve

# Asks the backend of a configuration about one version of it. May block; raises FlowserveError.
Complete = Callable[[ModelConfig, ModelFolder, int], Completion]
REFUSED: Final = "M92"


@dataclass(frozen=True, slots=True)
class ReadModel:
    """A folder, read as far as can be seen from itself.

    `versions` are those to serve, ascending, at least one where nothing is wrong. `labels` are those of its outputs.
    """

    folder: ModelFolder
    config: ModelConfig
    versions: tuple[int, ...]
    warnings: tuple[Problem, ...] = ()
    labels: Labels = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Examined:
    """What is wrong with a folder, and what it says: None where whoever judges that would speak of the same mistakes
    again. Without any problem it is there. `broken` are the configuration's own fields with mistakes in them.
    """

    problems: tuple[Problem, ...]
    read: ReadModel | None = None
    broken: frozenset[str] = frozenset()


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
    """As `examine`, for whoever wants all of it. Raises Problems with every mistake of the folder."""
    found = examine(
        folder, default_files, complete, gpus=gpus, config_json=config_json, config_name=config_name, served=served
    )
    if found.problems or found.read is None:
        raise Problems(found.problems)
    return found.read


def examine(
    folder: ModelFolder,
    default_files: Mapping[str, str],
    complete: Complete,
    *,
    gpus: Gpus = NO_GPUS,
    config_json: str = "",
    config_name: str = "",
    served: ModelConfig | None = None,
) -> Examined:
    """Read one folder; its files are opened once, so that a change meanwhile gives the old or the new state, never a
    mixture.

    `default_files`: what a version folder holds, by backend. `gpus`: those that instances may be on.
    `config_json`: a configuration in the place of the folder's own, perhaps that of `served` (what this name is, or was
    last) with changes; `config_name`: which of those that it has by name counts. Blocks.
    """
    try:
        draft = _draft(folder, default_files, config_json, config_name, served)
    except OSError as error:
        return Examined((Problem(f"cannot be read: {error.strerror}", Place(folder.name)),))
    except Problems as unreadable:
        return Examined(unreadable.problems)
    versions, problems = _versions(folder, draft)
    completion: Completion | None = None
    was_refused = False
    if versions and may_go_on(draft.parsed.broken) and _can_be_asked(draft):
        try:
            completion = _ask(draft, folder, versions[-1], default_files, complete)
        except Problems as refused:
            was_refused = True
            problems += refused.problems
    judged = judge(draft, completion, gpus)
    # Whoever could not be asked might have filled in what is not written, so only what is written counts against it.
    was_asked = completion is not None or not problems
    written = [one for one in judged.problems if was_asked or (one.place and one.place.line)]
    problems = [*problems, *written] or judged.problems
    if was_refused or not may_go_on(judged.broken):
        return Examined(tuple(problems))
    labels: Labels = {}
    try:
        labels = read_labels(folder.path, judged.config)
    except Problems as unlabelled:
        problems += unlabelled.problems
    config = replace(judged.config, name=folder.name)  # which is not what it says where that is a mistake
    warnings = (*folder.warnings, *judged.ignored, *_warnings(folder, config, versions))
    return Examined(tuple(problems), ReadModel(folder, config, versions, warnings, labels), judged.broken)


def read_steps(
    folder: ModelFolder, default_files: Mapping[str, str], *, config_json: str = "", config_name: str = ""
) -> frozenset[str]:
    """What a folder's configuration says that it is made of, as quickly as a file is read: no model is asked, and what
    is wrong with it is for `read_model` to say.
    """
    try:
        draft = _draft(folder, default_files, config_json, config_name)
    except (OSError, Problems):
        return frozenset()
    return frozenset() if draft.parsed.problems else steps_of(draft.preliminary)


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
        parsed = parse(config_json, f"{folder.name}/config", "json")
    except Problems as unreadable:
        raise Problems(_of_an_override(unreadable.problems)) from None
    if served is not None:
        forget_defaults(parsed.message, served)
    return draft_of(replace(parsed, problems=_of_an_override(parsed.problems)), folder.path, default_files)


def _of_an_override(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """With Triton's words before the first."""
    first = tuple(replace(one, message=f"Invalid config override: {one.message}") for one in problems[:1])
    return (*first, *problems[1:])


def _versions(folder: ModelFolder, draft: Draft) -> tuple[tuple[int, ...], list[Problem]]:
    policy, is_ensemble = draft.preliminary.version_policy, draft.preliminary.is_ensemble
    try:
        return versions_to_serve(folder, policy, is_ensemble), []
    except Problems as none:
        return (), list(none.problems)


def _can_be_asked(draft: Draft) -> bool:
    """Also a backend that nobody knows, which says so; a rule speaks of those that are known to be somebody else's."""
    return bool(draft.backend) and (draft.backend in draft.backends or draft.backend not in OTHER_BACKENDS)


def _ask(
    draft: Draft, folder: ModelFolder, version: int, default_files: Mapping[str, str], complete: Complete
) -> Completion:
    """What the model's own files say, every failure as Problems."""
    failure: FlowserveError
    try:
        return complete(draft.preliminary, folder, version)
    except FlowserveError as error:
        failure = error
    except Exception as error:  # backends run other people's code: plug-ins, and model.py files through them
        text = f"model '{draft.name}': backend '{draft.backend}' failed to read it: {type(error).__name__}: {error}"
        failure = Invalid(text)
    raise Problems(refusals(failure, folder, version, draft.preliminary, default_files)) from failure


def refusals(
    error: FlowserveError, folder: ModelFolder, version: int, config: ModelConfig, default_files: Mapping[str, str]
) -> list[Problem]:
    """What a backend says of a version. Where it does not say what it means, that is the model's file."""
    file = config.default_model_filename or default_files.get(config.backend, "")
    place = error.place or Place("/".join(filter(None, (folder.name, str(version), file))))
    problems = error.problems if isinstance(error, Problems) else (Problem(str(error)),)
    return [replace(one, place=one.place or place, rule=one.rule or REFUSED) for one in problems]


def _warnings(folder: ModelFolder, config: ModelConfig, versions: Collection[int]) -> list[Problem]:
    place = config.source.place("version_policy")
    missing = [
        Problem(f"version {version} of its version policy is not there; served without it", place, "R8")
        for version in missing_versions(folder, config.version_policy)
        if versions  # without any it is not served, which is said
    ]
    own = config.parameters.get("execution", "process")  # what the operator says is told by whoever knows it
    libraries = [
        Place("/".join((folder.name, *where, BATCH_STRATEGY_FILE)))
        for where in ((), *((str(version),) for version in versions))
        if folder.path.joinpath(*where, BATCH_STRATEGY_FILE).exists()
    ]
    return [
        *missing,
        *unused_environment(config, own),
        *unused_batching(config, libraries),
        *misspelt_parameters(config),
    ]
