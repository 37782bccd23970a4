"""What is in force: which models are to be served, on which graphs, and why some are not.

Decided here: what one change means for everything else, and that it takes effect in one go: new generations, the
ensembles that are compiled against them, what is withdrawn. Between two requests everything is old or everything is
new. It does not know what asked for the change (control.py) nor how a model is opened (loader.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import trio

from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Unavailable
from flowserve.graph.types import ModelKey
from flowserve.repository.containment import Containment, steps_of
from flowserve.repository.labels import output_labels
from flowserve.repository.read import ReadModel
from flowserve.repository.resolve import Resolution, resolve
from flowserve.runtime.deployment import Entry
from flowserve.runtime.engine import Engine
from flowserve.runtime.lifecycle import Generation
from flowserve.runtime.loader import Loaded, Loader

log = logging.getLogger("flowserve.load")

UNLOADED = "unloaded"


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """Something happened to a name. `state` is "loading", "ready", "failed" or "unloaded"."""

    name: str
    state: str
    reason: str = ""
    seconds: float = 0.0


Report = Callable[[LoadEvent], None]


@dataclass(frozen=True, slots=True)
class Known:
    """A name that is to be served, as it was read.

    `digest` is that of the files it was read from, "" where nobody compares or part of it came with a load call.
    `files` is the private folder of one that did. `is_explicit`: somebody asked for it by name, not only for what
    contains it.
    """

    read: ReadModel
    digest: str = ""
    files: object = None
    is_explicit: bool = True

    @property
    def name(self) -> str:
        return self.read.config.name


@dataclass(frozen=True, slots=True)
class Built:
    """A name that is ready to take over. `loaded` is empty for an ensemble."""

    known: Known
    loaded: Mapping[int, Loaded] = field(default_factory=dict)
    seconds: float = 0.0


class Registry:
    """Touched from the loop's thread. Changes are put in force one after the other."""

    def __init__(self, engine: Engine, loader: Loader, report: Report) -> None:
        self.known: dict[str, Known] = {}
        self.made_of = Containment()  # exactly the names of `known`
        self.failed: dict[str, FlowserveError] = {}  # why a name is not served that is known, or was asked for
        self.last: dict[str, ModelConfig] = {}  # how each name was configured when it served last
        self.report = report
        self._engine = engine
        self._loader = loader
        self._keys: dict[str, list[ModelKey]] = {}  # the current generations of each plain model
        self._one_by_one = trio.Lock()

    def is_serving(self, name: str) -> bool:
        entry = self._engine.entries.get(name)
        return entry is not None and bool(entry.ready)

    def goes_with(self, name: str) -> frozenset[str]:
        """The steps of `name` that were loaded only because of it."""
        return self.made_of.goes_with(name, lambda step: self.known[step].is_explicit)

    def loading(self, name: str, *, is_wanted: bool = False) -> None:
        """Something that does not serve yet is being loaded. `is_wanted`: the server is not ready without it."""
        entry = self._engine.entries.setdefault(name, Entry(name))
        entry.is_wanted = entry.is_wanted or is_wanted
        if not entry.ready:
            entry.state, entry.reason = "LOADING", ""

    def fail(self, name: str, error: FlowserveError) -> None:
        """A load failed. What serves under this name goes on serving, and the index says why it is not the new one."""
        entry = self._engine.entries.setdefault(name, Entry(name))
        if entry.ready:
            entry.reason = f"the last load failed, the one before it serves on: {error}"
        else:
            self.failed[name] = error
            entry.state, entry.reason = "UNAVAILABLE", str(error)
        self.report(LoadEvent(name, "failed", str(error)))

    def unchanged(self, name: str, *, is_explicit: bool) -> None:
        """It was asked for again, and is what serves already."""
        if is_explicit:
            self.known[name] = replace(self.known[name], is_explicit=True)
        self._engine.entries[name].reason = ""

    async def put_in_force(self, built: Sequence[Built]) -> dict[str, FlowserveError]:
        """Let these take over, and compile again whatever contains them. Returns which of them could not, and why.

        An ensemble that does not fit what is there does not replace one that does.
        """
        async with self._one_by_one:
            accepted = {one.known.name: one for one in built}
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
        """Serve these no longer, nor what contains them. Returns what each ran on, which closes after their last
        request; `unloaded` waits for that.
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
                retired[name] = self._retire(name, keep=())
                self._engine.withdraw_name(name, UNLOADED)
                entry = self._engine.entries[name]
                entry.state, entry.is_wanted = "UNLOADING", False
            for name in self._announce({}, resolution, affected):
                self._engine.entries[name].is_wanted = False  # whoever unloads a step means it
            return retired

    async def unloaded(self, name: str, generations: Collection[Generation], *, is_gone: bool = False) -> None:
        """Say that a name is unloaded, once the last request that ran on it is over. `is_gone`: there is no folder of
        that name any more, so nobody need know it.
        """
        for generation in generations:
            await generation.closed.wait()
        entry = self._engine.entries.get(name)
        if entry is not None and entry.state == "UNLOADING":  # and not being loaded again
            entry.state = "UNAVAILABLE"
            if is_gone:
                del self._engine.entries[name]
                self.failed.pop(name, None)
                self.last.pop(name, None)
        self.report(LoadEvent(name, "unloaded"))

    async def _resolve(self, changed: Mapping[str, Known | None]) -> tuple[Resolution, frozenset[str]]:
        """What can be served of `changed`, as they will be (None: not at all), and of what contains them; and which
        names these are.
        """
        coming = {name: one for name, one in changed.items() if one is not None}
        affected = (self.made_of.above(changed) - changed.keys()) | coming.keys()
        steps = {name: steps_of(one.read.config) for name, one in coming.items()}
        names = affected | self.made_of.below(affected, steps)
        if not names <= self.known.keys() | coming.keys() | self.failed.keys():
            names |= self.known.keys() | self.failed.keys()  # of which one may be meant by what nobody heard of
        after = {name: changed[name] if name in changed else self.known.get(name) for name in names}
        configs = {name: one.read.config for name, one in after.items() if one is not None}
        versions = {name: one.read.versions for name, one in after.items() if one is not None}
        failed = {name: self.failed[name] for name in names - affected if name in self.failed}
        return await trio.to_thread.run_sync(resolve, configs, versions, failed, affected), affected

    def _swap(self, built: Mapping[str, Built], resolution: Resolution, affected: Collection[str]) -> None:
        """Synchronous: no request sees half of it."""
        for name, one in built.items():
            self.known[name] = one.known
            self.last[name] = one.known.read.config
            self.made_of.put(name, steps_of(one.known.read.config))
            self._loader.give(one.known.read, one.loaded, one.known.files)
            keys = [ModelKey(name, version) for version in one.loaded]
            self._retire(name, keep=keys)
            self._keys[name] = keys
        self._announce(built, resolution, affected)

    def _announce(self, built: Mapping[str, Built], resolution: Resolution, affected: Collection[str]) -> list[str]:
        """Let everything affected run on its new graphs. Returns what served and cannot any more."""
        lost = []
        for name in sorted(affected):
            if name in resolution.graphs:
                self.failed.pop(name, None)
                graphs = resolution.graphs[name].values()
                labels = output_labels(next(iter(graphs)), lambda model: self.known[model].read.labels)
                self._engine.announce(self.known[name].read.config, *graphs, labels=labels)
                one = built.get(name)
                seconds = 0.0 if one is None else one.seconds
                for version in () if one is None else one.loaded:
                    self._engine.statistics_of(ModelKey(name, version)).load_s = seconds
                self.report(LoadEvent(name, "ready", seconds=seconds))
                continue
            error = self.failed[name] = resolution.failed[name]
            if self.is_serving(name):
                lost.append(name)
            if name in built or self.is_serving(name):
                self.report(LoadEvent(name, "failed", str(error)))
            self._engine.withdraw_name(name, str(error))
        return lost

    def _retire(self, name: str, keep: Collection[ModelKey]) -> list[Generation]:
        """Retire the current generations of a name, but for those that were just replaced."""
        keys = self._keys.pop(name, [])
        return [self._engine.generations.retire(key) for key in keys if key not in keep]
