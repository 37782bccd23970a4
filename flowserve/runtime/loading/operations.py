"""One operation on model names from beginning to end: load names with their steps, or unload them.

Decides which steps a load includes, that operations on one name wait for each other, which models are loaded at the
same time and replaced together, and that a model is read from files that did not change in between. `registry.py`
decides what a replacement means for other models; `control.py` decides which operations are permitted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio

from flowserve.errors import FlowserveError, Invalid
from flowserve.repository.layout import FoundModels, ModelFolder, find_models, look_again, why_missing
from flowserve.repository.override import Override, write_files
from flowserve.repository.snapshot import Stamp, digest, stamp
from flowserve.runtime.clock import SECOND_NS
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.engine.generations import Generation
from flowserve.runtime.loading.loader import Loader, PendingReads
from flowserve.runtime.loading.name_locks import NameLock, NameLocks
from flowserve.runtime.loading.registry import Built, LoadEvent, RegisteredModel, Registry

READS_MAX: Final = 3  # attempts to read a folder that changes in between
T = TypeVar("T")
Wanted = Mapping[str, Override | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A name to load. `steps`: the steps in its configuration. `files`: the private folder with the files of the load
    call. `digest`: of its folder, "" if it is never compared.
    """

    name: str
    folder: ModelFolder
    steps: frozenset[str]
    override: Override | None
    files: object
    digest: str
    is_explicit: bool

    @property
    def config(self) -> str:
        """The configuration of the load call, "" for the folder's own."""
        return self.override.config if self.override is not None else ""


# The result of looking up a name. None: its files are those that are served already.
LookupResult = Candidate | FlowserveError | None


class Operations:
    """Used on the engine's thread only.

    `is_lasting`: loaded models will be compared with their folders again. `takes_steps`: loading an ensemble loads its
    steps too.
    """

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        loader: Loader,
        repositories: Sequence[Path],
        *,
        is_lasting: bool,
        takes_steps: bool,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._loader = loader
        self._repositories = tuple(repositories)
        self._is_lasting = is_lasting
        self._takes_steps = takes_steps
        self._locks = NameLocks()

    async def find(self, only: Collection[str] | None = None) -> FoundModels:
        """The models in the repositories, or only those with these names. Raises NotFound or Problems if a repository
        cannot be read.
        """
        return await _in_thread(lambda: find_models(self._repositories, only))

    async def stamps(self) -> dict[str, Stamp]:
        """The stamp of every model's folder. Raises as `find` does."""
        return await _in_thread(lambda: _stamps(find_models(self._repositories)))

    async def bring_up(self, wanted: Wanted, *, within: str = "") -> dict[str, FlowserveError]:
        """Load these names and their steps. Returns the errors by name. `within`: the model whose own load makes this
        call. Raises Unavailable if the two loads would wait for each other.
        """
        names = set(wanted)
        while True:
            async with self._locks.take(names, within) as lock:
                seen = await self._look_up_all(wanted)
                if seen.keys() <= names:
                    return await self._carry_out(lock, wanted, seen)
            names |= seen.keys()  # steps were found: lock them too, and look again

    def give_up(self, names: Iterable[str]) -> None:
        """Their files changed: abandon their loads in progress."""
        for name in names:
            self._loader.give_up(name, "its files changed while it was loading")

    async def take_out(self, name: str, *, dependents: bool, within: str = "") -> dict[str, list[Generation]]:
        """Unload a name; `dependents`: also the steps that were loaded only because of it. Returns the generations of
        each. Loads of it in progress, which may hang, are abandoned. `within` as for `bring_up`.
        """
        # Repeatedly: a load in progress has several stages, each of which may hang.
        insist = partial(self._loader.give_up, name, "it was unloaded while it was loading")
        names = {name}
        while True:
            async with self._locks.take(names, within, insist):
                more = self._registry.goes_with(name) if dependents else frozenset()
                if more <= names:
                    return await self._registry.take_out({name, *more})
            names |= more

    async def _look_up_all(self, wanted: Wanted) -> dict[str, LookupResult]:
        """Look up `wanted` and, if `takes_steps`, their steps in the repository."""
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
            if not self._registry.is_serving(name) or self._registry.known[name].digest
        }

    async def _look_up(
        self, name: str, folder: ModelFolder | None, override: Override | None, is_explicit: bool
    ) -> Candidate | None:
        files = None
        if override is not None and override.files:
            contents = override.files
            files = await _in_thread(lambda: write_files(name, contents))
            private = await _in_thread(lambda: find_models([files.path]).folders)
            if not private:
                path = next(iter(contents))
                inside = f"1/{path.rpartition('/')[2]}"
                raise NoSuchModel(
                    name, f"no file of the call is in a version folder: not 'file:{path}', but 'file:{inside}'"
                )
            folder = private[0]
        if folder is None:
            raise NoSuchModel(name, await _in_thread(lambda: why_missing(self._repositories, name)))
        mark = ""
        if self._is_lasting and files is None:
            mark, folder = await _digest(folder)
        before = self._registry.known.get(name)
        if override is None and before is not None and before.digest == mark != "" and self._registry.is_serving(name):
            return None
        steps = await self._loader.steps(folder, override.config if override is not None else "")
        is_explicit = is_explicit or (before is not None and before.is_explicit)
        return Candidate(name, folder, steps, override, files, mark, is_explicit)

    async def _carry_out(
        self,
        lock: NameLock,
        wanted: Wanted,
        seen: Mapping[str, LookupResult],
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
        others = (known.read for known in self._registry.known.values())
        reads = PendingReads(self._loader, others, candidates)
        together = [*self._registry.made_of.groups(steps)]
        lock.groups = [*map(frozenset, together), *([frozenset(lock.names)] if lock.names - candidates.keys() else [])]
        async with trio.open_nursery() as nursery:
            for group in together:
                members = [candidates[name] for name in sorted(group)]
                nursery.start_soon(self._carry_out_group, lock, members, reads, errors)
        return errors

    async def _carry_out_group(
        self,
        lock: NameLock,
        group: Sequence[Candidate],
        reads: PendingReads,
        errors: dict[str, FlowserveError],
    ) -> None:
        """Load models connected by containment. They are put in force together, when all are ready; a model that was
        not served before, so that nothing depends on it, as soon as it is ready itself.
        """
        together: list[Built] = []

        async def build(one: Candidate) -> None:
            name = one.name
            self._registry.loading(name)
            try:
                built = await self._build(one, reads)
            except FlowserveError as error:
                self._fail(name, error, errors)
                return
            if built.loaded and not self._registry.is_serving(name):
                errors.update(await self._registry.put_in_force([built]))
            else:
                together.append(built)

        async with trio.open_nursery() as nursery:
            for one in group:
                nursery.start_soon(build, one, name=f"load {one.name}")
        errors.update(await self._registry.put_in_force(together))
        self._locks.done(lock, [one.name for one in group])

    async def _build(self, candidate: Candidate, reads: PendingReads) -> Built:
        """Read a model and open its instances. Repeated if its files changed in between."""
        mark, folder = candidate.digest, candidate.folder
        for _ in range(READS_MAX):
            outcome = await self._build_once(candidate, folder, mark, reads)
            try:
                now, folder = await _digest(folder) if mark else ("", folder)
            except FlowserveError:
                await self._drop(outcome)
                raise
            if now == mark:
                if isinstance(outcome, FlowserveError):
                    raise outcome
                return outcome
            await self._drop(outcome)
            mark = now
        raise Invalid("its files kept changing while they were read; load it again when they are complete")

    async def _build_once(
        self, candidate: Candidate, folder: ModelFolder, mark: str, reads: PendingReads
    ) -> Built | FlowserveError:
        """One attempt. An error is returned, not raised: if the files changed, it is obsolete."""
        try:
            read = await self._loader.read(folder, candidate.config, self._registry.last.get(candidate.name))
            reads.done(candidate.name, read)
            mark = "" if candidate.override is not None else mark
            known = RegisteredModel(read, mark, candidate.files, candidate.is_explicit)
            if read.config.is_ensemble:
                return Built(known)
            context = await reads.context()
            self._registry.report(LoadEvent(candidate.name, "loading"))
            started_ns = self._engine.clock()
            loaded = await self._loader.load(read, context)
            return Built(known, loaded, (self._engine.clock() - started_ns) / SECOND_NS)
        except FlowserveError as error:
            reads.done(candidate.name, None)
            return error

    async def _drop(self, outcome: Built | FlowserveError) -> None:
        if isinstance(outcome, Built):
            await self._loader.drop(outcome.loaded)

    def _fail(self, name: str, error: FlowserveError, errors: dict[str, FlowserveError]) -> None:
        # The error is kept; its traceback would keep files, processes and partly loaded models alive.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        errors[name] = error
        if isinstance(error, NoSuchModel) and name not in self._engine.deployments.entries:
            return  # an unknown name gets no row in the index
        self._registry.fail(name, error)


class NoSuchModel(Invalid):
    """No repository has a model with that name."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{not_polled(name)}: {why}")


def not_polled(name: str) -> str:
    """Triton's text for a name that cannot be read at all."""
    return f"failed to load '{name}', failed to poll from model repository"


def _stamps(found: FoundModels) -> dict[str, Stamp]:
    twice = dict.fromkeys(found.duplicates, (("in two repositories", 0, 0, 0, 0),))
    return {**twice, **{folder.name: stamp(folder.path) for folder in found.folders}}


async def _digest(folder: ModelFolder) -> tuple[str, ModelFolder]:
    """The digest of a folder, then its contents: a change between the two shows in the next digest."""
    try:
        return await _in_thread(lambda: (digest(folder.path), look_again(folder)))
    except OSError as error:
        raise Invalid(f"{folder.name}: cannot be read: {error.strerror}") from None


async def _in_thread(work: Callable[[], T]) -> T:
    """Read files on a thread outside LoadThreads: a load that hangs does not block it."""
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
