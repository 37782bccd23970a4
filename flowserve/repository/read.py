"""Reads one model folder: configuration, completion from the model's own file, versions, label files, environment.

Decides: all of these are read before anything is refused, so that every mistake of a folder is reported at once; the
place of a backend's error that has none; the format of label files (UTF-8, one label per line, the first for index 0),
and that an ensemble's output without a label file has the labels of its producer's output. Decides also how the
parameter EXECUTION_ENV_PATH is interpreted, and the errors of an environment that can be found without running its
code; `runtime/processes` unpacks and starts it. Does not import backends: the caller passes a function that asks them.
Callers: `runtime/loading`, `runtime/processes`, `authoring`.
"""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from flowserve.config.backends import OTHER_BACKENDS
from flowserve.config.complete import forget_defaults
from flowserve.config.load import Draft, can_check_others, draft_of, read_draft, validate
from flowserve.config.parameters import ENVIRONMENT, MODEL_FOLDER
from flowserve.config.parse import parse
from flowserve.config.types import NO_GPUS, Completion, Gpus, ModelConfig
from flowserve.config.unsupported import (
    BATCH_STRATEGY_FILE,
    misspelt_parameters,
    unused_batching,
    unused_environment,
)
from flowserve.errors import FlowserveError, Invalid, Place, Problem, Problems, problems_of
from flowserve.graph.types import GRAPH, Graph
from flowserve.repository.layout import ModelFolder, versions_to_serve, without_folder
from flowserve.repository.resolve import steps_of

# Gets a completion from the backend for one version of a model. May block; raises FlowserveError.
Complete = Callable[[ModelConfig, ModelFolder, int], Completion]
REFUSED: Final = "M92"
# Rules about which model a folder has: its name, its backend.
UNPOLLED: Final = frozenset({"M2", "M3"})
PYTHONS: Final = ("bin/python", "bin/python3")
ENVIRONMENT_RULE: Final = "R14"


@dataclass(frozen=True, slots=True)
class ReadModel:
    """The result of reading one folder by itself.

    `versions` are those to serve, ascending, at least one if there is no problem. `labels` are those of its outputs.
    """

    folder: ModelFolder
    config: ModelConfig
    versions: tuple[int, ...]
    warnings: tuple[Problem, ...] = ()
    labels: OutputLabels = field(default_factory=dict)


class NoConfiguration(Problems):
    """A folder has no configuration that can be read, so that it is not known which model it has."""


@dataclass(frozen=True, slots=True)
class Examined:
    """The problems of a folder, and its contents; `read` is None if further checks would report the same mistakes
    again, and present if there is no problem. `broken` are the top-level fields with mistakes. `is_legible`: the
    configuration is one of a model, though it may be invalid. `version`: the version whose own files have all the
    problems, 0 for none.
    """

    problems: tuple[Problem, ...]
    read: ReadModel | None = None
    broken: frozenset[str] = frozenset()
    is_legible: bool = True
    version: int = 0

    def valid(self) -> ReadModel:
        """The contents. Raises Problems with every mistake of the folder, NoConfiguration if it is not legible."""
        if self.problems or self.read is None:
            error = Problems(self.problems) if self.is_legible else NoConfiguration(self.problems)
            error.version = self.version
            raise error
        return self.read


def examine(
    folder: ModelFolder,
    default_files: Mapping[str, str],
    complete: Complete,
    *,
    gpus: Gpus = NO_GPUS,
    config_json: str = "",
    config_name: str = "",
    served: ModelConfig | None = None,
    is_strict: bool = False,
) -> Examined:
    """Read one folder. Its files are opened once, so that a concurrent change gives the old or the new state, never a
    mixture.

    `default_files`: the model file of each backend. `gpus`: those available to instances. `config_json`: a
    configuration that replaces the folder's own, possibly that of `served` (the current, or last, configuration of this
    name) with changes; `config_name`: the named configuration to use. `is_strict`: the model's own files complete
    nothing in its configuration. Blocks.
    """
    try:
        draft = _draft(folder, default_files, config_json, config_name, served, is_strict=is_strict)
    except OSError as error:
        problem = Problem(f"cannot be read: {error.strerror}", Place(folder.name))
        return Examined((problem,), is_legible=False)
    except Problems as unreadable:
        return Examined(unreadable.problems, is_legible=False)
    versions: tuple[int, ...] = ()
    problems: list[Problem] = []
    try:
        versions = versions_to_serve(folder, draft.preliminary.version_policy, draft.preliminary.is_ensemble)
    except Problems as none:
        problems += none.problems
    completion: Completion | None = None
    refusals: Sequence[Problem] = ()
    if versions and _can_be_asked(draft):
        try:
            completion = _ask(draft, folder, versions[-1], default_files, complete)
        except Problems as refused:
            refusals = refused.problems
            problems += refusals
    validated = validate(draft, completion, gpus, is_strict=is_strict)
    # Without a completion, missing fields may be in the model's file, so only problems of written fields are reported.
    was_asked = completion is not None or not problems
    written = [one for one in validated.problems if was_asked or (one.place and one.place.line)]
    problems = [*problems, *written] or validated.problems
    is_legible = not draft.parsed.problems and UNPOLLED.isdisjoint(problem.rule for problem in problems)
    if refusals or not can_check_others(validated.broken):
        version = versions[-1] if problems == list(refusals) != [] else 0
        return Examined(tuple(problems), is_legible=is_legible, version=version)
    labels: OutputLabels = {}
    try:
        labels = read_labels(folder.path, validated.config)
    except Problems as unlabelled:
        problems += unlabelled.problems
    config = replace(validated.config, name=folder.name)  # the name in the file may be a mistake
    warnings = (*folder.warnings, *validated.ignored, *_warnings(folder, config, versions))
    read = ReadModel(folder, config, versions, warnings, labels)
    return Examined(tuple(problems), read, validated.broken, is_legible)


def _can_be_asked(draft: Draft) -> bool:
    """Whether a backend completes the configuration. One that is unknown is asked too, and reports that; a rule refuses
    Triton's others.
    """
    backend = draft.preliminary.backend
    is_known = bool(backend) and (backend in draft.backends or backend not in OTHER_BACKENDS)
    return is_known and can_check_others(draft.parsed.broken)


def read_steps(
    folder: ModelFolder, default_files: Mapping[str, str], *, config_json: str = "", config_name: str = ""
) -> frozenset[str]:
    """The steps in a folder's configuration, read without asking a backend; mistakes are left to `examine`."""
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
    *,
    is_strict: bool = False,
) -> Draft:
    if not config_json:
        return read_draft(folder.path, folder.repository, default_files, config_name, is_strict=is_strict)
    try:
        parsed = parse(config_json, _file_of_an_override(folder.name), "json")
    except Problems as unreadable:
        raise Problems(_of_an_override(unreadable.problems)) from None
    if served is not None:
        forget_defaults(parsed.message, served)
    return draft_of(replace(parsed, problems=_of_an_override(parsed.problems)), folder.path, default_files)


def is_of_override(error: FlowserveError, name: str) -> bool:
    """Whether a load failed because of the configuration in its call only, and not of the model's files or code."""
    return isinstance(error, Problems) and all(
        one.place is not None and one.place.file == _file_of_an_override(name) for one in error.problems
    )


def _file_of_an_override(name: str) -> str:
    return f"{name}/config"


def _of_an_override(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """The problems with Triton's prefix on the first."""
    first = tuple(replace(one, message=f"Invalid config override: {one.message}") for one in problems[:1])
    return (*first, *problems[1:])


def _ask(
    draft: Draft, folder: ModelFolder, version: int, default_files: Mapping[str, str], complete: Complete
) -> Completion:
    """The completion from the model's own files; every failure is raised as Problems."""
    failure: FlowserveError
    try:
        return complete(draft.preliminary, folder, version)
    except FlowserveError as error:
        failure = error
    except Exception as error:  # backends run third-party code: plug-ins and model.py files
        text = f"model '{draft.folder.name}': backend '{draft.preliminary.backend}' failed to read it"
        failure = Invalid(f"{text}: {type(error).__name__}: {error}")
    raise Problems(backend_refusals(failure, folder, version, draft.preliminary, default_files)) from failure


def backend_refusals(
    error: FlowserveError, folder: ModelFolder, version: int, config: ModelConfig, default_files: Mapping[str, str]
) -> list[Problem]:
    """A backend's errors about a version. Without a place they refer to the model's file."""
    file = config.default_model_filename or default_files.get(config.backend, "")
    place = error.place or Place("/".join(filter(None, (folder.name, str(version), file))))
    return [replace(one, place=one.place or place, rule=one.rule or REFUSED) for one in problems_of(error)]


def _warnings(folder: ModelFolder, config: ModelConfig, versions: Collection[int]) -> list[Problem]:
    place = config.source.place("version_policy")
    missing = [
        Problem(f"version {version} of its version policy is not there; served without it", place, "R8")
        for version in config.version_policy.specific
        if versions and version not in folder.versions  # without versions it is not served, which is reported elsewhere
    ]
    own = config.parameters.get("execution", "process")  # the operator's override is checked where it is known
    libraries = [
        Place("/".join((folder.name, *where, BATCH_STRATEGY_FILE)))
        for where in ((), *((str(version),) for version in versions))
        if folder.path.joinpath(*where, BATCH_STRATEGY_FILE).exists()
    ]
    return [
        *without_folder(folder, config, versions),
        *missing,
        *unused_environment(config, own),
        *unused_batching(config, libraries),
        *misspelt_parameters(config),
    ]


OutputLabels = Mapping[str, tuple[str, ...]]


def read_labels(folder: Path, config: ModelConfig) -> OutputLabels:
    """The labels of each output that names a file. Blocks. Raises Problems if one cannot be read."""
    labels: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    for index, spec in enumerate(config.outputs):
        if not spec.labels:
            continue
        try:
            text = (folder / spec.labels).read_text("utf-8")
            # Not splitlines, which also splits at characters that a label may contain and shifts all later labels.
            labels[spec.name] = tuple(text.removesuffix("\n").split("\n")) if text else ()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            place = config.source.place(f"output[{index}].label_filename")
            problems.append(Problem(f"label file '{spec.labels}' of output '{spec.name}' cannot be read: {why}", place))
    if problems:
        raise Problems(problems)
    return labels


def output_labels(graph: Graph, labels_of: Callable[[str], OutputLabels]) -> OutputLabels:
    """The labels of a graph's outputs. `labels_of` returns the labels of a model or ensemble, as from `read_labels`."""
    labels = dict(labels_of(graph.name))
    for edge in graph.edges:
        if edge.consumer == GRAPH and edge.producer != GRAPH:
            node = graph.nodes[edge.producer]
            found = labels_of(node.model.name).get(node.outputs[edge.output].name)
            if found:
                labels.setdefault(graph.outputs[edge.input].name, found)
    return labels


def environment_of(config: ModelConfig, folder: Path) -> Path | None:
    """The real path of the folder or archive of a Python model's environment; None for the server's own environment.
    Blocks. Raises Problems if it does not exist or is not an environment.
    """
    written = config.parameters.get(ENVIRONMENT, "")
    if config.backend != "python" or not written:
        return None
    path = Path(written.replace(MODEL_FOLDER, str(folder), 1))
    try:
        if path.is_dir():
            python_in(path)
        elif not path.exists():
            raise unusable(config, "there is no such file or folder", _where_it_may_be(written, folder))
        elif not (path.is_file() and _is_archive(path)):
            hint = "conda-pack writes one where the name of its output ends in .tar.gz"
            raise unusable(config, "it is neither a folder nor a tar archive", hint)
    except Invalid as error:
        raise error if isinstance(error, Problems) else unusable(config, str(error)) from None
    except OSError as error:
        raise unusable(config, f"it cannot be read: {error.strerror}") from None
    return Path(os.path.realpath(path))


def python_in(folder: Path) -> Path:
    """The Python executable of an environment. Raises Invalid if it has none."""
    found = [folder / name for name in PYTHONS]
    for python in found:
        if python.is_file():
            return python
    for python in found:
        if python.is_symlink():
            leads = os.path.realpath(python)
            raise Invalid(f"its {python.relative_to(folder)} leads to {leads}, which is not there")
    inside = next((one for one in folder.iterdir() if any((one / name).is_file() for name in PYTHONS)), None)
    there = f", but in {inside.name}/: it should be what is in that folder" if inside else ""
    raise Invalid(f"there is no {PYTHONS[0]} in it{there}")


def _is_archive(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (EOFError, zlib.error, lzma.LZMAError):  # it only begins like an archive
        return False


def unusable(config: ModelConfig, why: str, hint: str = "") -> Problems:
    """The error of a model that cannot run in its environment, with the place of the parameter."""
    place = config.source.place(f"parameters[{ENVIRONMENT}]")
    text = f"model '{config.name}' cannot run in its environment '{config.parameters[ENVIRONMENT]}': {why}"
    return Problems([Problem(text, place, ENVIRONMENT_RULE, hint)])


def _where_it_may_be(written: str, folder: Path) -> str:
    """The hint for a relative path, which is relative to the server's working directory, as on Triton."""
    if os.path.isabs(written) or MODEL_FOLDER in written:
        return ""
    if (folder / written).exists():
        return f'did you mean "{MODEL_FOLDER}/{written}"?'
    return f"a path in the model's folder begins with {MODEL_FOLDER}/"
