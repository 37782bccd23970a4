"""The registry: which models are served, on which graphs, and why some are not.

Decides what one change means for all other models, and that it takes effect atomically: new generations, the ensembles
compiled against them, the deployments that are withdrawn. Does not know what caused the change (control.py), nor how a
model is opened (loader.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Problems, Unavailable
from flowserve.graph.types import ModelKey
from flowserve.repository.read import NoConfiguration, ReadModel, output_labels
from flowserve.repository.resolve import Containment, Resolution, resolve, steps_of
from flowserve.repository.snapshot import Contents
from flowserve.runtime.engine.deployments import UNLOADED, Entry, Idle
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.engine.generations import Generation
from flowserve.runtime.loading.loader import Loaded, Loader

log = logging.getLogger("flowserve.load")

# Rules about the steps of an ensemble and about a name in two repositories: unknown, invalid, ambiguous.
CAUSED_BY_OTHERS: Final = frozenset({"G2", "G3", "R2"})


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """A change of a name's state. `state` is "loading", "ready", "failed" or "unloaded"."""

    name: str
    state: str
    reason: str = ""
    seconds: float = 0.0


Report = Callable[[LoadEvent], None]


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A name to be served, as it was read.

    `contents`: of its folder, None if they are never compared. `is_overridden`: its configuration came with a load
    call; `files`: the private folder with files of the call. `is_explicit`: it was loaded by name, not only as a step.
    """

    read: ReadModel
    contents: Contents | None = None
    is_overridden: bool = False
    files: object = None
    is_explicit: bool = True


@dataclass(frozen=True, slots=True)
class Built:
    """A name that is ready to be put in force. `loaded`: the versions that were loaded; `kept`: those that serve
    already and go on. Both are empty for an ensemble. `seconds`: its load time.
    """

    known: RegisteredModel
    loaded: Mapping[int, Loaded] = field(default_factory=dict)
    kept: Collection[int] = ()
    seconds: float = 0.0


class Registry:
    """Used on the event loop's thread. Changes are put in force one after the other."""

    def __init__(self, engine: Engine, loader: Loader, report: Report) -> None:
        self.known: dict[str, RegisteredModel] = {}
        self.made_of = Containment()  # exactly the names of `known`
        self.failed: dict[str, FlowserveError] = {}  # why a known or requested name is not served
        self.last: dict[str, ModelConfig] = {}  # the configuration with which each name was served last
        self.report = report
        self._engine = engine
        self._loader = loader
        self._keys: dict[str, list[ModelKey]] = {}  # the current generations of each plain model
        self._one_by_one = trio.Lock()

    def is_serving(self, name: str) -> bool:
        entry = self._engine.deployments.entries.get(name)
        return entry is not None and bool(entry.ready)

    def loading(self, name: str, *, is_wanted: bool = False) -> None:
        """A name is being loaded. `is_wanted`: the server is not ready without it."""
        entry = self._engine.deployments.entries.setdefault(name, Entry(name))
        entry.is_wanted = entry.is_wanted or is_wanted
        if not entry.ready:
            entry.state, entry.reason = "LOADING", ""
            for one in entry.idle.values():
                one.state, one.reason = "LOADING", ""

    def opening(self, name: str, versions: Collection[int]) -> None:
        """These versions of a name are being loaded, and no others."""
        entry = self._engine.deployments.entries[name]
        for one in entry.idle.values():
            one.stop_loading(UNLOADED)
        for version in versions:
            if version not in entry.ready:
                entry.idle[version] = Idle("LOADING")

    def is_unknown(self, name: str) -> bool:
        """Whether no model of that name was ever served, or failed to load."""
        entry = self._engine.deployments.entries.get(name)
        is_new = entry is None or (entry.state == "LOADING" and not entry.ready)
        return is_new and name not in self.last and name not in self.failed

    def forget(self, name: str, error: FlowserveError) -> None:
        """No repository has the name: it gets no row in the index."""
        if self._engine.deployments.entries.pop(name, None) is not None:  # it was to be loaded at start
            self.report(LoadEvent(name, "failed", str(error)))

    def fail(self, name: str, error: FlowserveError) -> None:
        """A load failed. The previous deployment stays in force. The index has the reason at the version that failed,
        or at every version if the error is of none.
        """
        entry = self._engine.deployments.entries.setdefault(name, Entry(name))
        text = str(error)
        failed = {error.version} if error.version else entry.ready.keys()
        kept = f"the last load failed, the one before it serves on: {text}"
        entry.outdated = dict.fromkeys(failed & entry.ready.keys(), kept)
        for version in failed - entry.ready.keys():
            entry.idle[version] = Idle("UNAVAILABLE", text)
        for one in entry.idle.values():  # those of a version are closed again because another one failed
            one.stop_loading(UNLOADED if error.version else text)
        if not entry.ready:
            self.failed[name] = error
            entry.state, entry.reason = "UNAVAILABLE", text
            entry.is_wanted = entry.is_wanted and self._counts(error)
        self.report(LoadEvent(name, "failed", text))

    def _counts(self, error: FlowserveError) -> bool:
        """Whether the server is not ready without a name that it failed to load at start. As on Triton, not for lack of
        a configuration; and not for an ensemble whose steps are the cause: they count themselves.
        """
        if isinstance(error, NoConfiguration):
            return False
        if not isinstance(error, Problems):
            return True
        return not all(problem.rule in CAUSED_BY_OTHERS for problem in error.problems)

    def unchanged(self, name: str, *, is_explicit: bool) -> None:
        """A load was requested whose files are served already."""
        if is_explicit:
            self.known[name] = replace(self.known[name], is_explicit=True)
        self._engine.deployments.entries[name].outdated = {}

    async def put_in_force(self, built: Sequence[Built]) -> dict[str, FlowserveError]:
        """Put these in force, and recompile the ensembles that contain them. Returns the errors by name.

        An ensemble that cannot be compiled does not replace one that is served.
        """
        async with self._one_by_one:
            accepted = {one.known.read.config.name: one for one in built}
            refused: dict[str, FlowserveError] = {}
            while accepted:
                resolution, affected = await self._resolve({name: one.known for name, one in accepted.items()})
                worse = {name for name in accepted if name in resolution.failed and self.is_serving(name)}
                if not worse:
                    self._swap(accepted, resolution, affected)
                    refused |= {name: resolution.failed[name] for name in accepted if name in resolution.failed}
                    break
                for name in worse:
                    refused[name] = resolution.failed[name]
                    self.fail(name, refused[name])
                    del accepted[name]
            return refused

    async def take_out(self, names: Collection[str]) -> dict[str, list[Generation]]:
        """Unload these, and the ensembles that contain them. Returns the generations of each, which close after their
        last request; `unloaded` waits for that.
        """
        async with self._one_by_one:
            out = [name for name in names if name in self.known or name in self.failed]
            retired: dict[str, list[Generation]] = {}
            for name in out:
                self.failed[name] = Unavailable(UNLOADED)
            resolution, affected = await self._resolve(dict.fromkeys(out))
            for name in out:
                self.known.pop(name, None)
                self.made_of.drop(name)
                gone = self._retire(name, keep=())
                retired[name] = [*gone.values()]
                self._engine.deployments.withdraw_name(name, UNLOADED, _ends(gone))
                entry = self._engine.deployments.entries[name]
                entry.state, entry.is_wanted = "UNLOADING", False
            # An unload of a step is intended, so readiness does not require its ensembles.
            for name in self._announce({}, resolution, affected, {}):
                self._engine.deployments.entries[name].is_wanted = False
            return retired

    async def unloaded(self, name: str, generations: Collection[Generation], *, is_gone: bool = False) -> None:
        """Report a name as unloaded once its last request has finished. `is_gone`: its folder does not exist any more,
        so the index drops its row.
        """
        for generation in generations:
            await generation.closed.wait()
        entry = self._engine.deployments.entries.get(name)
        if entry is not None and entry.state == "UNLOADING":  # not being reloaded
            entry.state = "UNAVAILABLE"
            if is_gone:
                del self._engine.deployments.entries[name]
                self.failed.pop(name, None)
                self.last.pop(name, None)
        self.report(LoadEvent(name, "unloaded"))

    async def _resolve(self, changed: Mapping[str, RegisteredModel | None]) -> tuple[Resolution, frozenset[str]]:
        """Resolve `changed` (None: unloaded) and the ensembles that contain them. Returns the resolution and the
        affected names.
        """
        coming = {name: one for name, one in changed.items() if one is not None}
        affected = (self.made_of.above(changed) - changed.keys()) | coming.keys()
        steps = {name: steps_of(one.read.config) for name, one in coming.items()}
        names = affected | self.made_of.below(affected, steps)
        if not names <= self.known.keys() | coming.keys() | self.failed.keys():
            names |= self.known.keys() | self.failed.keys()  # for suggestions on an unknown name
        after = {name: changed[name] if name in changed else self.known.get(name) for name in names}
        configs = {name: one.read.config for name, one in after.items() if one is not None}
        versions = {name: one.read.versions for name, one in after.items() if one is not None}
        failed = {name: self.failed[name] for name in names - affected if name in self.failed}
        return await trio.to_thread.run_sync(resolve, configs, versions, failed, affected), affected

    def _swap(self, built: Mapping[str, Built], resolution: Resolution, affected: Collection[str]) -> None:
        """Synchronous, so that a request sees all of the change or nothing."""
        retired: dict[str, dict[int, Generation]] = {}
        for name, one in built.items():
            self.known[name] = one.known
            self.last[name] = one.known.read.config
            self.made_of.put(name, steps_of(one.known.read.config))
            self._loader.give(one.known.read, one.loaded, one.known.files)
            keys = [ModelKey(name, version) for version in sorted([*one.loaded, *one.kept])]
            retired[name] = self._retire(name, keep=keys)
            self._keys[name] = keys
            if one.kept:
                numbers = [", ".join(map(str, some)) or "none" for some in (one.loaded, retired[name], one.kept)]
                log.info("versions of %s: loaded %s, unloaded %s, unchanged %s", name, *numbers)
        self._announce(built, resolution, affected, retired)

    def _announce(
        self,
        built: Mapping[str, Built],
        resolution: Resolution,
        affected: Collection[str],
        retired: Mapping[str, Mapping[int, Generation]],
    ) -> list[str]:
        """Put the new graphs of all affected names in force. `retired`: the generations of versions that are not served
        any more. Returns the names that are not served any more.
        """
        lost = []
        for name in sorted(affected):
            if name in resolution.graphs:
                self.failed.pop(name, None)
                graphs = resolution.graphs[name].values()
                labels = output_labels(next(iter(graphs)), lambda model: self.known[model].read.labels)
                self._engine.deployments.announce(
                    self.known[name].read.config, *graphs, labels=labels, retired=_ends(retired.get(name, {}))
                )
                seconds = built[name].seconds if name in built else 0.0
                for version in built[name].loaded if name in built else ():
                    self._engine.deployments.statistics_of(ModelKey(name, version)).was_loaded(seconds)
                self.report(LoadEvent(name, "ready", seconds=seconds))
                for wing in self._engine.options.wings:
                    for warning in wing.warnings(next(iter(graphs))):
                        log.warning("%s", warning)
                continue
            error = self.failed[name] = resolution.failed[name]
            if self.is_serving(name):
                lost.append(name)
            if name in built and not self.is_serving(name):
                entry = self._engine.deployments.entries[name]
                entry.is_wanted = entry.is_wanted and self._counts(error)
            if name in built or self.is_serving(name):
                self.report(LoadEvent(name, "failed", str(error)))
            self._engine.deployments.withdraw_name(name, str(error))
        return lost

    def _retire(self, name: str, keep: Collection[ModelKey]) -> dict[int, Generation]:
        """Retire the current generations of a name, except `keep`, which go on or have been replaced already. Returns
        them by version.
        """
        gone = [key for key in self._keys.pop(name, []) if key not in keep]
        return {key.version: self._engine.loaded.generations.retire(key) for key in gone}


def _ends(generations: Mapping[int, Generation]) -> dict[int, trio.Event]:
    return {version: generation.closed for version, generation in generations.items()}
