"""A repository read without serving it, for those who only look.

Decided here: that reading goes as far as it can: what is wrong with one deployment says nothing about the others, and
one mistake of it hides no other that can be known; that it says nothing about the GPUs of the machine it is read on,
which need not be the one it is served on; and where models' own code runs that has to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import trio

from flowserve.backends import registry
from flowserve.config.doubt import UNWRITTEN, fields_of
from flowserve.config.instances import ASSUMED
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Place, Problem, Problems
from flowserve.render.facts import Facts, gather_facts
from flowserve.repository.layout import find_models
from flowserve.repository.read import Complete, Examined, ReadModel, examine
from flowserve.repository.resolve import Resolution, resolve
from flowserve.runtime.children import SUPPORTED
from flowserve.runtime.clock import running_clock
from flowserve.runtime.completion import Completer, complete
from flowserve.runtime.hosts import PROCESS, Processes
from flowserve.runtime.pump import NoBursts

Judge = Callable[[ReadModel], None]  # raises FlowserveError


def trust(read: ReadModel) -> None:
    """Its configuration is enough."""


@dataclass(frozen=True, slots=True)
class Reading:
    """`configs` are those that are right by themselves; `resolution` says which of them can be served together.
    `warnings` come with the name of the deployment that they are about, "" for none.
    """

    configs: Mapping[str, ModelConfig]
    resolution: Resolution
    warnings: tuple[tuple[str, Problem], ...]

    def only(self, name: str) -> Reading:
        """What it says of one deployment. `configs` are still all: those of its steps are among them."""
        resolution = self.resolution
        return Reading(
            self.configs,
            Resolution(
                tuple(model for model in resolution.models if model == name),
                tuple(ensemble for ensemble in resolution.ensembles if ensemble == name),
                {one: graphs for one, graphs in resolution.graphs.items() if one == name},
                {one: failure for one, failure in resolution.failed.items() if one == name},
            ),
            tuple(warning for warning in self.warnings if warning[0] == name),
        )

    def facts(self) -> Facts:
        """What pictures say about the models."""
        return gather_facts(self.configs.values())


def read_apart(repositories: Sequence[Path], config_name: str = "", judge: Judge = trust) -> Reading:
    """As `read_repositories`, with models' own code in processes of its own, as a server has it: what breaks or never
    ends there ends with the command. For programs that run no loop; where there are no such processes it is the same.
    """
    if not SUPPORTED:
        return read_repositories(repositories, config_name, judge=judge)
    return trio.run(_read_apart, repositories, config_name, judge)


async def _read_apart(repositories: Sequence[Path], config_name: str, judge: Judge) -> Reading:
    processes = Processes(running_clock(), NoBursts())
    apart = Completer(PROCESS, processes)
    outcome: Reading | FlowserveError
    async with trio.open_nursery() as nursery:
        await nursery.start(processes.run)
        read = partial(read_repositories, repositories, config_name, apart, judge)
        try:
            outcome = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        except FlowserveError as error:
            outcome = error  # out of the nursery, which would make a group of it
        finally:
            with trio.CancelScope(shield=True):
                await processes.close()
            nursery.cancel_scope.cancel()
    if isinstance(outcome, FlowserveError):
        raise outcome
    return outcome


def read_repositories(
    repositories: Sequence[Path], config_name: str = "", complete: Complete = complete, judge: Judge = trust
) -> Reading:
    """Read and compile everything. `config_name`: which of the configurations that models have by name counts. `judge`
    refuses models that are right by their configurations, but not by what it looks at (verification.py). Blocks. Raises
    FlowserveError where a repository itself cannot be read.
    """
    found = find_models([path.absolute() for path in repositories])  # wherever a model may change to
    read: dict[str, ReadModel] = {}
    failed: dict[str, FlowserveError] = dict(found.duplicates)
    half_right: dict[str, ModelConfig] = {}
    warnings = [("", warning) for warning in found.warnings]
    for folder in found.folders:
        seen = examine(folder, registry.default_files(), complete, gpus=ASSUMED, config_name=config_name)
        problems = [*seen.problems, *_judged(seen, judge)]
        if problems:
            failed[folder.name] = _together(problems)
        if seen.read and problems and seen.read.config.is_ensemble:
            half_right[folder.name] = seen.read.config
        if seen.read and not problems:
            read[folder.name] = seen.read
        warnings += [(folder.name, warning) for warning in (seen.read or folder).warnings]
    configs = {name: model.config for name, model in read.items()}
    versions = {name: model.versions for name, model in read.items()}
    resolution = resolve(configs, versions, failed)
    return Reading(configs, _with_wiring(resolution, half_right, configs, versions), tuple(warnings))


def _together(problems: Sequence[Problem]) -> Problems:
    """Each once, in the order of the files."""
    return Problems(sorted(dict.fromkeys(problems), key=lambda problem: problem.place or Place("")))


def _judged(seen: Examined, judge: Judge) -> Sequence[Problem]:
    """What `judge` says of it, but for fields that a rule spoke of already."""
    if seen.read is None:
        return ()
    try:
        judge(seen.read)
    except FlowserveError as error:
        found = error.problems if isinstance(error, Problems) else (Problem(str(error), error.place),)
        told = seen.broken - {UNWRITTEN}
        return [one for one in found if told.isdisjoint(fields_of([one], seen.read.config.source))]
    return ()


def _with_wiring(
    resolution: Resolution,
    half_right: Mapping[str, ModelConfig],
    configs: Mapping[str, ModelConfig],
    versions: Mapping[str, Sequence[int]],
) -> Resolution:
    """With what is wrong with the graphs of ensembles that have other mistakes, too."""
    if not half_right:
        return resolution
    others = {name: failure for name, failure in resolution.failed.items() if name not in half_right}
    some_version = dict.fromkeys(half_right, (1,))
    wired = resolve({**configs, **half_right}, {**versions, **some_version}, others, only=half_right.keys())
    failed = dict(resolution.failed)
    for name in half_right:
        known, found = failed[name], wired.failed.get(name)
        if isinstance(known, Problems) and isinstance(found, Problems):
            failed[name] = _together([*known.problems, *found.problems])
    return replace(resolution, failed=failed)
