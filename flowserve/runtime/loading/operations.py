"""One operation on model names from beginning to end: load names with their steps, or unload them.

Decides which steps a load includes, which models are loaded at the same time and replaced together, and that a model is
read from files that did not change in between. `registry.py` decides what a replacement means for other models;
`control.py` decides which operations are permitted.

Decides too which operation is next: operations on the same name run one after the other, in order of arrival. An
operation takes all its names at once and waits for every earlier operation that holds one of them, so two operations
cannot deadlock. The exception is an operation that a model starts while it is loaded itself: if its load would wait for
it, the operation is refused.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import trio
from trio.lowlevel import ParkingLot

from flowserve.errors import FlowserveError, Invalid, Unavailable
from flowserve.repository.layout import FoundModels, ModelFolder, find_models, model_folder_at, why_missing
from flowserve.repository.mirror.mirror import RepositoryMirror
from flowserve.repository.override import Override, write_files
from flowserve.repository.read import ReadModel
from flowserve.repository.snapshot import Contents, Stamp, read_contents, stamp
from flowserve.repository.unchanged import unchanged_versions
from flowserve.runtime.clock import SECOND_NS
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.engine.generations import Generation
from flowserve.runtime.group import Agree, Errors
from flowserve.runtime.loading.loader import LoadContext, Loaded, Loader, PendingReads
from flowserve.runtime.loading.registry import Built, LoadEvent, RegisteredModel, Registry

log = logging.getLogger("flowserve.load")

INSIST_S: Final = 0.5


class NameLock:
    """One queued or running operation. `names`: the names that it still holds; the names of a group are released
    together. `within`: the name whose own operation continues only after this one, "" for none.
    """

    def __init__(self, names: Collection[str], within: str = "") -> None:
        self.names = set(names)
        self.groups: list[frozenset[str]] = [frozenset(names)]
        self.within = within
        self.is_waiting = True


class NameLocks:
    """The queue of operations. Used on one trio thread."""

    def __init__(self) -> None:
        self._queue: list[NameLock] = []
        self._moved = ParkingLot()  # the operations that wait

    @asynccontextmanager
    async def take(
        self, names: Collection[str], within: str = "", insist: Callable[[], object] = lambda: None
    ) -> AsyncIterator[NameLock]:
        """Hold `names` exclusively inside the block, except names that `done` released. While another operation holds
        one of them, `insist` is called every INSIST_S seconds. Raises Unavailable on a deadlock: the operation on
        `within` waits for this one.
        """
        lock = NameLock(names, within)
        self._queue.append(lock)
        try:
            if within and self._waits_for_itself(lock):
                raise Unavailable(f"model '{within}' is being loaded, and this would have to wait for it")
            while any(before.names & lock.names for before in self._queue[: self._queue.index(lock)]):
                insist()
                with trio.move_on_after(INSIST_S):
                    await self._moved.park()
            lock.is_waiting = False
            yield lock
        finally:
            self._queue.remove(lock)
            self._moved.unpark_all()

    def done(self, lock: NameLock, names: Collection[str]) -> None:
        """Release these names of the operation."""
        lock.names -= set(names)
        self._moved.unpark_all()

    def _waits_for_itself(self, lock: NameLock) -> bool:
        """Whether `lock` waits, directly or not, for the operation that waits for it."""
        todo = [*self._waited_for(lock)]
        seen = set(todo)
        while todo:
            before, group = todo.pop()
            if lock.within in group:
                return True
            more = [*self._waited_for(before)] if before.is_waiting else []
            for one in self._queue:
                if one.within in group:  # finishes after all of `group`
                    more += [*self._waited_for(one), *((one, whole & one.names) for whole in one.groups)]
            todo += [pair for pair in more if pair not in seen]
            seen.update(more)
        return False

    def _waited_for(self, lock: NameLock) -> Iterator[tuple[NameLock, frozenset[str]]]:
        for before in self._queue[: self._queue.index(lock)]:
            shared = before.names & lock.names
            yield from ((before, group & before.names) for group in before.groups if group & shared)


READS_MAX: Final = 3  # attempts to read a folder that changes in between
T = TypeVar("T")
Wanted = Mapping[str, Override | None]
Mode = Literal["none", "poll", "explicit"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A name to load. `steps`: the steps in its configuration. `config`: the configuration of the load call, "" for the
    folder's own. `files`: the private folder with the files of the load call. `contents`: of its folder, None if they
    are never compared.
    """

    name: str
    folder: ModelFolder
    steps: frozenset[str]
    config: str
    files: object
    contents: Contents | None
    is_explicit: bool


# The result of looking up a name. None: its files are those that are served already.
LookupResult = Candidate | FlowserveError | None


class Operations:
    """Used on the engine's thread only.

    `mode`: the control mode. Unless it is none, loaded models will be compared with their folders again; if it is
    explicit, loading an ensemble loads its steps too.
    """

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        loader: Loader,
        repositories: Sequence[Path],
        mode: Mode,
        mirrors: Sequence[RepositoryMirror] = (),
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._loader = loader
        self._repositories = tuple(repositories)
        self._mirrors = tuple(mirrors)
        self._is_lasting = mode != "none"
        self._takes_steps = mode == "explicit"
        self._locks = NameLocks()

    async def find(self, only: Collection[str] | None = None) -> FoundModels:
        """The models in the repositories, or only those with these names. Raises NotFound or Problems if a repository
        cannot be read.
        """
        if self._mirrors:
            await _in_thread(lambda: self._update_mirrors(only))
        found = await _in_thread(lambda: find_models(self._repositories, only))
        problems = {name: one for mirror in self._mirrors for name, one in mirror.problems.items()}
        if only is not None:
            problems = {name: one for name, one in problems.items() if name in only}
        here = {folder.name for folder in found.folders}
        return replace(found, duplicates={**{n: p for n, p in problems.items() if n not in here}, **found.duplicates})

    def _update_mirrors(self, only: Collection[str] | None) -> None:
        """Fetch the models of stores. Models that clients load are fetched when they are loaded."""
        for mirror in self._mirrors:
            mirror.update(only, is_listed_only=only is None and self._takes_steps)

    @property
    def in_stores(self) -> frozenset[str]:
        """The names of models that stores have, whether they were fetched or not."""
        return frozenset().union(*(mirror.names for mirror in self._mirrors))

    async def stamps(self) -> dict[str, Stamp]:
        """The stamp of every model's folder. Raises as `find` does."""
        found = await self.find()
        twice = dict.fromkeys(found.duplicates, (("in two repositories", 0, 0, 0, 0),))
        return twice | await _in_thread(lambda: {folder.name: stamp(folder.path) for folder in found.folders})

    async def bring_up(
        self, wanted: Wanted, *, within: str = "", agree: Agree | None = None
    ) -> dict[str, FlowserveError]:
        """Load these names and their steps. Returns the errors by name. `within`: the model whose own load makes this
        call. With `agree`, a model is put in force only after all servers have prepared it without an error. Raises
        Unavailable if the two loads would wait for each other.
        """
        names = set(wanted)
        while True:
            async with self._locks.take(names, within) as lock:
                seen = await self._look_up_all(wanted)
                if seen.keys() <= names:
                    return await self._carry_out(lock, wanted, seen, agree)
            names |= seen.keys()  # steps were found: lock them too, and look again

    def give_up(self, names: Iterable[str], why: str) -> None:
        """Abandon their loads in progress, for the reason `why`."""
        for name in names:
            self._loader.give_up(name, why)

    async def take_out(self, name: str, *, dependents: bool, within: str = "") -> dict[str, list[Generation]]:
        """Unload a name; `dependents`: also the steps that were loaded only because of it. Returns the generations of
        each. Loads of it in progress, which may hang, are abandoned. `within` as for `bring_up`.
        """
        # Repeatedly: a load in progress has several stages, each of which may hang.
        insist = partial(self._loader.give_up, name, "it was unloaded while it was loading")
        names = {name}
        known, made_of = self._registry.known, self._registry.made_of
        while True:
            async with self._locks.take(names, within, insist):
                more = made_of.goes_with(name, lambda step: known[step].is_explicit) if dependents else frozenset()
                if more <= names:
                    return await self._registry.take_out({name, *more})
            names |= more

    async def _look_up_all(self, wanted: Wanted) -> dict[str, LookupResult]:
        """Look up `wanted` and, in mode explicit, their steps in the repository."""
        seen: dict[str, LookupResult] = {}
        looked_for: set[str] = set()

        async def look_up(name: str, override: Override | None, is_explicit: bool) -> None:
            try:
                if name in found.duplicates:
                    raise found.duplicates[name]
                seen[name] = await self._look_up(name, folders.get(name), override, is_explicit)
            except FlowserveError as error:
                seen[name] = error

        wave: Wanted = wanted
        while wave:
            found = await self.find(wave)
            folders = {folder.name: folder for folder in found.folders}
            looked_for |= wave.keys()
            if wave is not wanted:
                wave = dict.fromkeys(folders)
            async with trio.open_nursery() as nursery:
                for name, override in wave.items():
                    nursery.start_soon(look_up, name, override, name in wanted, name=f"look at {name}")
            wave = self._steps_to_look_for(seen, looked_for) if self._takes_steps else {}
        return seen

    def _steps_to_look_for(self, seen: Mapping[str, LookupResult], looked_for: Collection[str]) -> dict[str, None]:
        """The steps to look up next. A step whose configuration came with a load call stays as it is."""
        inside = (one.steps for one in seen.values() if isinstance(one, Candidate))
        steps = set().union(*inside).difference(looked_for)
        return {
            name: None
            for name in sorted(steps)
            if not self._registry.is_serving(name) or not self._registry.known[name].is_overridden
        }

    async def _look_up(
        self, name: str, folder: ModelFolder | None, override: Override | None, is_explicit: bool
    ) -> Candidate | None:
        files = None
        if override is not None and override.files:
            given = override.files
            try:
                files = await _in_thread(lambda: write_files(name, given))
            except Invalid as error:
                raise NoSuchModel(f"{not_polled(name)}: {error}") from None
            private = await _in_thread(lambda: find_models([files.path]).folders)
            if not private:
                path = next(iter(given))
                inside = f"1/{path.rpartition('/')[2]}"
                why = f"no file of the call is in a version folder: not 'file:{path}', but 'file:{inside}'"
                raise NoSuchModel(f"{not_polled(name)}: {why}")
            folder = private[0]
        if folder is None:
            why = await _in_thread(lambda: why_missing(self._repositories, name))
            if any(mirror.outage for mirror in self._mirrors):  # the log has the address, which clients must not see
                why = "it was not fetched yet, and the store of its repository cannot be asked just now"
            raise NoSuchModel(f"{not_polled(name)}: {why}")
        contents = None
        if self._is_lasting:
            contents, folder = await _read_contents(folder)
        before = self._registry.known.get(name)
        if (
            override is None
            and before is not None
            and not before.is_overridden
            and _is_at(before, folder, files)
            and before.contents == contents is not None
            and self._registry.is_serving(name)
        ):
            return None
        config = override.config if override is not None else ""
        steps = await self._loader.steps(folder, config)
        is_explicit = is_explicit or (before is not None and before.is_explicit)
        return Candidate(name, folder, steps, config, files, contents, is_explicit)

    async def _carry_out(
        self, lock: NameLock, wanted: Wanted, seen: Mapping[str, LookupResult], agree: Agree | None
    ) -> dict[str, FlowserveError]:
        errors: dict[str, FlowserveError] = {}
        candidates: dict[str, Candidate] = {}
        for name, one in seen.items():
            if isinstance(one, Candidate):
                candidates[name] = one
            elif one is None:
                self._registry.unchanged(name, is_explicit=name in wanted)
            else:
                self._fail(name, one, errors)
        steps = {name: one.steps for name, one in candidates.items()}
        reads = PendingReads((known.read for known in self._registry.known.values()), candidates)
        together = [*self._registry.made_of.groups(steps)]
        lock.groups = [*map(frozenset, together), *([frozenset(lock.names)] if lock.names - candidates.keys() else [])]
        vote = None if agree is None else _Vote(together, errors, agree)
        try:
            async with trio.open_nursery() as nursery:
                for group in together:
                    members = [candidates[name] for name in sorted(group)]
                    nursery.start_soon(self._carry_out_group, lock, members, reads, errors, vote)
                if vote is not None:
                    await vote.take()
        except BaseException:
            for built in () if vote is None else vote.built.values():
                with trio.CancelScope(shield=True):
                    await self._loader.drop(built.loaded)
            raise
        return errors

    async def _carry_out_group(
        self,
        lock: NameLock,
        group: Sequence[Candidate],
        reads: PendingReads,
        errors: dict[str, FlowserveError],
        vote: _Vote | None,
    ) -> None:
        """Load models connected by containment. They are put in force together, when all are ready; a model that was
        not served before, so that nothing depends on it, as soon as it is ready itself, unless there is a vote.
        """
        together: list[Built] = []

        async def build(one: Candidate) -> None:
            name = one.name
            self._registry.loading(name, is_wanted=not self._engine.deployments.is_loaded)
            try:
                built = await self._build(one, reads)
            except FlowserveError as error:
                self._fail(name, error, errors)
                return
            if vote is not None:
                vote.built[name] = built
                together.append(built)
            elif built.loaded and not self._registry.is_serving(name):
                errors.update(await self._registry.put_in_force([built]))
            else:
                together.append(built)

        async with trio.open_nursery() as nursery:
            for one in group:
                nursery.start_soon(build, one, name=f"load {one.name}")
        if vote is not None:
            failed = await vote.result_for(group)
            for built in together:
                del vote.built[built.known.read.config.name]  # the registry owns it from now on, or it is dropped
                if built.known.read.config.name in failed:
                    await self._drop(built)
            together = [built for built in together if built.known.read.config.name not in failed]
            for name, error in failed.items():
                if name not in errors:
                    self._fail(name, error, errors)
        errors.update(await self._registry.put_in_force(together))
        self._locks.done(lock, [one.name for one in group])

    async def _build(self, candidate: Candidate, reads: PendingReads) -> Built:
        """Read a model and open its instances. Repeated if its files changed in between."""
        contents, folder = candidate.contents, candidate.folder
        now: Contents | None = None
        for _ in range(READS_MAX):
            outcome = await self._build_once(candidate, folder, contents, reads)
            try:
                if contents is not None:
                    now, folder = await _read_contents(folder)
            except FlowserveError:
                await self._drop(outcome)
                raise
            if now == contents:
                if isinstance(outcome, FlowserveError):
                    raise outcome
                return outcome
            await self._drop(outcome)
            contents = now
        raise Invalid("its files kept changing while they were read; load it again when they are complete")

    async def _build_once(
        self, candidate: Candidate, folder: ModelFolder, contents: Contents | None, reads: PendingReads
    ) -> Built | FlowserveError:
        """One attempt. An error is returned, not raised: if the files changed, it is obsolete."""
        name, files = candidate.name, candidate.files
        try:
            read = await self._loader.read(folder, candidate.config, self._registry.last.get(name))
            reads.done(name, read)
            known = RegisteredModel(read, contents, bool(candidate.config), files, candidate.is_explicit)
            kept = self._kept(known)
            coming = [version for version in read.versions if version not in kept]
            self._registry.opening(name, coming)
            if read.config.is_ensemble:
                return Built(known)
            context = await reads.context()
            if coming:
                self._registry.report(LoadEvent(name, "loading"))
            started_ns = self._engine.clock()
            loaded = await self._load(read, coming, context)
            return Built(known, loaded, kept, (self._engine.clock() - started_ns) / SECOND_NS)
        except FlowserveError as error:
            reads.done(name, None)
            return error

    async def _load(self, read: ReadModel, versions: Collection[int], context: LoadContext) -> dict[int, Loaded]:
        """Load versions of a model, again if that fails, as often as the options say."""
        for _ in range(self._engine.options.load_retries):
            try:
                return await self._loader.load(read, versions, context)
            except FlowserveError as error:
                log.warning("failed to load %s, which is tried again: %s", read.config.name, error)
        return await self._loader.load(read, versions, context)

    def _kept(self, coming: RegisteredModel) -> tuple[int, ...]:
        """The versions that serve and that the load of `coming` need not load."""
        name = coming.read.config.name
        served = self._registry.known.get(name)
        if (
            served is None
            or not self._registry.is_serving(name)
            or not _is_at(served, coming.read.folder, coming.files)
            or served.contents is None
            or coming.contents is None
        ):
            return ()
        return unchanged_versions(served.read, served.contents, coming.read, coming.contents)

    async def _drop(self, outcome: Built | FlowserveError) -> None:
        if isinstance(outcome, Built):
            await self._loader.drop(outcome.loaded)

    def _fail(self, name: str, error: FlowserveError, errors: dict[str, FlowserveError]) -> None:
        # The error is kept; its traceback would keep files, processes and partly loaded models alive.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        errors[name] = error
        if isinstance(error, NoSuchModel) and self._registry.is_unknown(name):
            self._registry.forget(name, error)
        else:
            self._registry.fail(name, error)


class _Vote:
    """Several servers load the same models: each waits here for the others when everything is prepared. `built`: the
    prepared models that are not in force, by name. `errors`: this server's.
    """

    def __init__(self, groups: Sequence[Collection[str]], errors: dict[str, FlowserveError], agree: Agree) -> None:
        self.built: dict[str, Built] = {}
        self._names = frozenset().union(*groups)
        self._missing = len(groups)
        self._errors = errors
        self._agree = agree
        self._all_here, self._is_over = trio.Event(), trio.Event()
        self._failed: Errors = {}
        if not groups:
            self._all_here.set()

    async def take(self) -> None:
        """Wait for every group, and then for the other servers. An error of `agree` is the error of every model."""
        await self._all_here.wait()
        try:
            self._failed = await self._agree(dict(self._errors))
        except FlowserveError as error:
            self._failed = dict.fromkeys(self._names, error)
        self._is_over.set()

    async def result_for(self, group: Sequence[Candidate]) -> dict[str, FlowserveError]:
        """The errors of all servers for these models. Called once for each group."""
        self._missing -= 1
        if not self._missing:
            self._all_here.set()
        await self._is_over.wait()
        names = {one.name for one in group}
        return {name: error for name, error in self._failed.items() if name in names}


class NoSuchModel(Invalid):
    """No repository has a model with that name."""


def not_polled(name: str) -> str:
    """Triton's text for a name that cannot be read at all."""
    return f"failed to load '{name}', failed to poll from model repository"


def _is_at(served: RegisteredModel, folder: ModelFolder, files: object) -> bool:
    """Whether a model comes from where it was loaded from: its folder, or a load call. The files of a load call stay
    until the last version that was loaded from them is closed.
    """
    return served.read.folder.path == folder.path or (served.files is not None and files is not None)


async def _read_contents(folder: ModelFolder) -> tuple[Contents, ModelFolder]:
    """The digests of a folder's contents, then its versions: a change between the two shows in the next digests."""
    try:
        return await _in_thread(lambda: (read_contents(folder.path), model_folder_at(folder.path)))
    except OSError as error:
        raise Invalid(f"{folder.name}: cannot be read: {error.strerror}") from None


async def _in_thread(work: Callable[[], T]) -> T:
    """Read files on a thread outside LoadThreads: a load that hangs does not block it."""
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
