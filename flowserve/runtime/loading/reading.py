"""Reads a repository without serving it, for commands that only check or draw.

Decides that reading goes as far as possible: an error in one deployment hides no error in another, nor a further error
in the same one; that problems do not depend on the GPUs of this machine; and where models' own code runs if it is
needed to complete a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import trio

from flowserve.backends import registry
from flowserve.config.error_cascade import UNWRITTEN, broken_fields
from flowserve.config.instances import ASSUMED
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Place, Problem, Problems
from flowserve.render.facts import Facts, gather_facts
from flowserve.repository.layout import find_models
from flowserve.repository.read import Complete, Examined, ReadModel, examine
from flowserve.repository.resolve import Resolution, resolve
from flowserve.runtime.clock import running_clock
from flowserve.runtime.loading.completion import Completer, complete
from flowserve.runtime.loop import StepLoop
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.runtime.workers.factory import PROCESS
from flowserve.runtime.workers.process_pool import ProcessPool

Check = Callable[[ReadModel], None]  # raises FlowserveError


def accept(read: ReadModel) -> None:
    """No check beyond the configuration."""


@dataclass(frozen=True, slots=True)
class Reading:
    """`configs`: the configurations that are valid by themselves; `resolution`: which of them can be served together.
    `warnings`: each with the name of its deployment, "" for none.
    """

    configs: Mapping[str, ModelConfig]
    resolution: Resolution
    warnings: tuple[tuple[str, Problem], ...]

    def only(self, name: str) -> Reading:
        """The reading of one deployment. `configs` stays complete, since it includes those of its steps."""
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
        """The facts about the models that pictures show."""
        return gather_facts(self.configs.values())


def read_apart(repositories: Sequence[Path], config_name: str = "", check: Check = accept) -> Reading:
    """As `read_repositories`, with models' own code in separate processes, as in a server: code that crashes or hangs
    ends with the command. For programs without an event loop. Without support for processes, as `read_repositories`.
    """
    if not SUPPORTED:
        return read_repositories(repositories, config_name, check=check)
    return trio.run(_read_apart, repositories, config_name, check)


async def _read_apart(repositories: Sequence[Path], config_name: str, check: Check) -> Reading:
    clock = running_clock()
    processes = ProcessPool(clock, StepLoop(lambda: None, clock))
    apart = Completer(PROCESS, processes)
    outcome: Reading | FlowserveError
    async with trio.open_nursery() as nursery:
        await nursery.start(processes.run)
        read = partial(read_repositories, repositories, config_name, apart, check)
        try:
            outcome = await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        except FlowserveError as error:
            outcome = error  # raised outside the nursery, which would wrap it in a group
        finally:
            with trio.CancelScope(shield=True):
                await processes.close()
            nursery.cancel_scope.cancel()
    if isinstance(outcome, FlowserveError):
        raise outcome
    return outcome


def read_repositories(
    repositories: Sequence[Path], config_name: str = "", complete: Complete = complete, check: Check = accept
) -> Reading:
    """Read and compile all deployments. `config_name`: the named configuration to use. `check` refuses models with a
    valid configuration whose files are invalid (verification.py). Blocks. Raises FlowserveError if a repository itself
    cannot be read.
    """
    found = find_models([path.absolute() for path in repositories])  # models may change the working directory
    read: dict[str, ReadModel] = {}
    failed: dict[str, FlowserveError] = dict(found.duplicates)
    partly_valid: dict[str, ModelConfig] = {}
    warnings = [("", warning) for warning in found.warnings]
    for folder in found.folders:
        seen = examine(folder, registry.default_files(), complete, gpus=ASSUMED, config_name=config_name)
        problems = [*seen.problems, *_checked(seen, check)]
        if problems:
            failed[folder.name] = _together(problems)
        if seen.read and problems and seen.read.config.is_ensemble:
            partly_valid[folder.name] = seen.read.config
        if seen.read and not problems:
            read[folder.name] = seen.read
        warnings += [(folder.name, warning) for warning in (seen.read or folder).warnings]
    configs = {name: model.config for name, model in read.items()}
    versions = {name: model.versions for name, model in read.items()}
    resolution = resolve(configs, versions, failed)
    return Reading(configs, _with_wiring(resolution, partly_valid, configs, versions), tuple(warnings))


def _together(problems: Sequence[Problem]) -> Problems:
    """Each once, in the order of the files."""
    return Problems(sorted(dict.fromkeys(problems), key=lambda problem: problem.place or Place("")))


def _checked(seen: Examined, check: Check) -> Sequence[Problem]:
    """The problems that `check` finds, except in fields whose problems were reported already."""
    if seen.read is None:
        return ()
    try:
        check(seen.read)
    except FlowserveError as error:
        found = error.problems if isinstance(error, Problems) else (Problem(str(error), error.place),)
        reported = seen.broken - {UNWRITTEN}
        return [one for one in found if reported.isdisjoint(broken_fields([one], seen.read.config.source))]
    return ()


def _with_wiring(
    resolution: Resolution,
    partly_valid: Mapping[str, ModelConfig],
    configs: Mapping[str, ModelConfig],
    versions: Mapping[str, Sequence[int]],
) -> Resolution:
    """Add the graph problems of ensembles that have other problems."""
    if not partly_valid:
        return resolution
    others = {name: failure for name, failure in resolution.failed.items() if name not in partly_valid}
    some_version = dict.fromkeys(partly_valid, (1,))
    wired = resolve({**configs, **partly_valid}, {**versions, **some_version}, others, only=partly_valid.keys())
    failed = dict(resolution.failed)
    for name in partly_valid:
        known, found = failed[name], wired.failed.get(name)
        if isinstance(known, Problems) and isinstance(found, Problems):
            failed[name] = _together([*known.problems, *found.problems])
    return replace(resolution, failed=failed)
