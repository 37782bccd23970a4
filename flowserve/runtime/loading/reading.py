"""Reads and checks a repository without serving it, for commands that only check or draw.

Decides that reading goes as far as possible: an error in one deployment hides no error in another, nor a further error
in the same one; that problems do not depend on the GPUs of this machine; and where models' own code runs if it is
needed to complete a configuration.

Decides too what can be verified without loading a model and without running code, so that its problems are those that
loading it would report: that each version's file matches the configuration, and that the files next to it (warm-up
samples, initial states of sequences) hold enough data. A backend decides what it checks and what it needs for that; a
backend without checks accepts every file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import trio

from flowserve.backends import registry
from flowserve.config.load import UNWRITTEN, broken_fields
from flowserve.config.types import ASSUMED, ModelConfig
from flowserve.errors import FlowserveError, Place, Problem, Problems, problems_of
from flowserve.repository.layout import find_models
from flowserve.repository.read import Complete, Examined, ReadModel, examine
from flowserve.repository.resolve import Resolution, resolve
from flowserve.runtime.clock import running_clock
from flowserve.runtime.factory import PROCESS
from flowserve.runtime.loading.completion import Completer, complete, problems_of_files
from flowserve.runtime.loop import StepLoop
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.runtime.remote.shm import ProcessPool

LOOK_S: Final = 0.1
Check = Callable[[ReadModel], None]  # raises FlowserveError


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
        whole = self.resolution
        resolution = Resolution(
            tuple(model for model in whole.models if model == name),
            tuple(ensemble for ensemble in whole.ensembles if ensemble == name),
            {one: graphs for one, graphs in whole.graphs.items() if one == name},
            {one: failure for one, failure in whole.failed.items() if one == name},
        )
        return Reading(self.configs, resolution, tuple(warning for warning in self.warnings if warning[0] == name))


def read_apart(
    repositories: Sequence[Path],
    config_name: str = "",
    check: Check = lambda read: None,
    *,
    is_strict: bool = False,
    patience_s: float = math.inf,
) -> Reading:
    """As `read_repositories`, with models' own code in separate processes, as in a server: code that crashes or hangs
    ends with the command, and code that runs longer than `patience_s` is ended. For programs without an event loop.
    Without support for processes, as `read_repositories`.
    """
    if not SUPPORTED:
        return read_repositories(repositories, config_name, check=check, is_strict=is_strict)
    return trio.run(_read_apart, repositories, config_name, check, is_strict, patience_s)


async def _read_apart(
    repositories: Sequence[Path], config_name: str, check: Check, is_strict: bool, patience_s: float
) -> Reading:
    clock = running_clock()
    processes = ProcessPool(clock, StepLoop(lambda: None, clock))
    apart = Completer(PROCESS, processes, is_strict=is_strict)
    outcome: Reading | FlowserveError
    async with trio.open_nursery() as nursery:
        await nursery.start(processes.run)
        if patience_s < math.inf:
            nursery.start_soon(_end_hanging, apart, patience_s)
        read = partial(read_repositories, repositories, config_name, apart, check, is_strict=is_strict)
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


async def _end_hanging(apart: Completer, patience_s: float) -> None:
    """End models' code that runs too long, until cancelled."""
    since: dict[str, float] = {}
    while True:
        now = trio.current_time()
        since = {name: since.get(name, now) for name in apart.running}
        for name, began in since.items():
            if now > began + patience_s:
                apart.give_up(name, f"it has run for {patience_s:g} s (--load-timeout-secs)")
        await trio.sleep(LOOK_S)


def read_repositories(
    repositories: Sequence[Path],
    config_name: str = "",
    complete: Complete = complete,
    check: Check = lambda read: None,
    *,
    is_strict: bool = False,
) -> Reading:
    """Read and compile all deployments. `config_name`: the named configuration to use. `check` refuses models with a
    valid configuration whose files are invalid (`verify`). `is_strict`: nothing completes a configuration. Blocks.
    Raises FlowserveError if a repository itself cannot be read.
    """
    found = find_models([path.absolute() for path in repositories])  # models may change the working directory
    read: dict[str, ReadModel] = {}
    failed: dict[str, FlowserveError] = dict(found.duplicates)
    partly_valid: dict[str, ModelConfig] = {}
    warnings = [("", warning) for warning in found.warnings]
    for folder in found.folders:
        seen = examine(
            folder, registry.default_files(), complete, gpus=ASSUMED, config_name=config_name, is_strict=is_strict
        )
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
        reported = seen.broken - {UNWRITTEN}
        return [one for one in problems_of(error) if reported.isdisjoint(broken_fields([one], seen.read.config.source))]
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


def verify(read: ReadModel) -> None:
    """Blocks while files are read. Raises Problems with all problems."""
    if read.config.is_ensemble:
        return
    problems: list[Problem] = []
    inner = read.config  # the configuration that the backend receives
    with _noting(problems, read.config, "model_warmup"):
        if read.config.warmup:
            from flowserve.runtime.loading.warmup import read_samples  # imports the engine; few models have samples

            read_samples(read.config, read.folder.path)
    with _noting(problems, read.config, "sequence_batching"):
        if read.config.sequence is not None:
            from flowserve.runtime.workers.state import SequenceAdapter

            inner = SequenceAdapter(read.config, read.folder.path).inner
        backend = registry.find(inner.backend)
        for version in read.versions:
            problems += problems_of_files(backend, inner, read.folder, version)
    if problems:
        raise Problems([*dict.fromkeys(problems)])  # versions often have the same problem


@contextmanager
def _noting(problems: list[Problem], config: ModelConfig, path: str) -> Iterator[None]:
    """Collect problems; `path` is the field of a failure that names none."""
    try:
        yield
    except FlowserveError as error:
        place = config.source.place(path)
        problems += [one if one.place else replace(one, place=place) for one in problems_of(error)]
