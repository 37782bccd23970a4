"""One operation from beginning to end: names that are loaded, with what they are made of, or taken out.

Decided here: what a load brings along, that operations on one name wait for each other, what is loaded at the same
time and takes over together, and that a model is made of files as they were at one moment. What taking over means for
everything else is registry.py's; who may ask is control.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import trio

from flowserve.errors import FlowserveError, Invalid
from flowserve.repository.containment import steps_of
from flowserve.repository.layout import Found, ModelFolder, find_models, look_again
from flowserve.repository.override import Override, write_files
from flowserve.repository.snapshot import Stamp, digest, stamp
from flowserve.runtime.clock import SECOND_NS
from flowserve.runtime.engine import Engine
from flowserve.runtime.lifecycle import Generation
from flowserve.runtime.loader import Company, Loaded, Loader
from flowserve.runtime.registry import Built, Known, LoadEvent, Registry
from flowserve.runtime.turns import Turn, Turns

READS_MAX: Final = 3  # how often a folder that changes meanwhile is read again
T = TypeVar("T")
Wanted = Mapping[str, Override | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A name that was read and is not loaded yet. `digest` is "" where no other will be compared with it."""

    known: Known
    folder: ModelFolder
    override: Override | None
    digest: str

    @property
    def name(self) -> str:
        return self.known.name


# What reading a name came to. None: it is what serves already.
Read = Candidate | FlowserveError | None


class Operations:
    """Touched from the engine's thread only.

    `is_lasting`: what is loaded now will be compared with its folder again. `takes_steps`: loading an ensemble loads
    what it is made of.
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
        self._turns = Turns()

    async def find(self) -> Found:
        """What the repositories hold now. Raises NotFound or Problems where one of them cannot be read."""
        return await _in_thread(lambda: find_models(self._repositories))

    async def stamps(self) -> dict[str, Stamp]:
        """How the folder of every name looks now. Raises as `find` does."""
        return await _in_thread(lambda: _stamps(find_models(self._repositories)))

    async def bring_up(self, wanted: Wanted, *, within: str = "") -> dict[str, FlowserveError]:
        """Load these names, and what they are made of. Returns what failed, and why. `within`: the model that asks for
        it while it is loaded itself. Raises Unavailable where the two would wait for each other.
        """
        names = set(wanted)
        while True:
            async with self._turns.take(names, within) as turn:
                read = await self._read_all(wanted, await self.find())
                if read.keys() <= names:
                    return await self._carry_out(turn, wanted, read)
            names |= read.keys()  # it is made of others: come back when these have nothing else to do

    def give_up(self, names: Iterable[str]) -> None:
        """Their files are others by now: what is being opened of them is not waited for."""
        for name in names:
            self._loader.give_up(name, "its files changed while it was loading")

    async def take_out(self, name: str, *, dependents: bool, within: str = "") -> dict[str, list[Generation]]:
        """Serve a name no longer, nor what was loaded only because of it where `dependents` says so. Returns what each
        ran on. A load of it that is under way is not waited for, which might hang. `within` as for `bring_up`.
        """
        self._loader.give_up(name, "it was unloaded while it was loading")
        names = {name}
        while True:
            async with self._turns.take(names, within):
                more = self._registry.goes_with(name) if dependents else frozenset()
                if more <= names:
                    return await self._registry.take_out({name, *more})
            names |= more

    async def _read_all(self, wanted: Wanted, found: Found) -> dict[str, Read]:
        """Read `wanted`, and what it is made of."""
        folders = {folder.name: folder for folder in found.folders}
        read: dict[str, Read] = {}

        async def read_one(name: str, override: Override | None, is_explicit: bool) -> None:
            try:
                if name in found.duplicates:
                    raise found.duplicates[name]
                read[name] = await self._read(name, folders.get(name), override, is_explicit)
            except FlowserveError as error:
                read[name] = error

        wave: Wanted = wanted
        while wave:
            async with trio.open_nursery() as nursery:
                for name, override in wave.items():
                    nursery.start_soon(read_one, name, override, name in wanted, name=f"read {name}")
            wave = self._steps_to_read(read, folders) if self._takes_steps else {}
        return read

    def _steps_to_read(self, read: Mapping[str, Read], folders: Mapping[str, ModelFolder]) -> dict[str, None]:
        """Steps of what was read that are in the repository and were not read. A step whose configuration came with a
        load call stays as it is.
        """
        steps = {
            step
            for one in read.values()
            if isinstance(one, Candidate)
            for step in steps_of(one.known.read.config)
            if step in folders and step not in read
        }
        return {
            name: None
            for name in sorted(steps)
            if not self._registry.is_serving(name) or self._registry.known[name].digest
        }

    async def _read(
        self, name: str, folder: ModelFolder | None, override: Override | None, is_explicit: bool
    ) -> Candidate | None:
        files = None
        if override is not None and override.files:
            contents = override.files
            files = await _in_thread(lambda: write_files(name, contents))
            private = await _in_thread(lambda: find_models([files.path]).folders)
            folder = private[0] if private else None
        if folder is None:
            raise Invalid(not_polled(name))
        mark = ""
        if self._is_lasting and files is None:
            mark, folder = await _digest(folder)
        before = self._registry.known.get(name)
        if override is None and before is not None and before.digest == mark != "" and self._registry.is_serving(name):
            return None
        read = await self._loader.read(folder, override.config if override is not None else "")
        known = Known(read, "" if override is not None else mark, files, is_explicit)
        if before is not None and before.is_explicit:
            known = Known(read, known.digest, files, is_explicit=True)
        return Candidate(known, folder, override, mark)

    async def _carry_out(
        self,
        turn: Turn,
        wanted: Wanted,
        read: Mapping[str, Read],
    ) -> dict[str, FlowserveError]:
        errors: dict[str, FlowserveError] = {}
        candidates: dict[str, Candidate] = {}
        for name, one in read.items():
            if isinstance(one, Candidate):
                candidates[name] = one
            elif one is None:
                self._registry.unchanged(name, is_explicit=name in wanted)
            else:
                self._fail(name, one, errors)
        steps = {name: steps_of(one.known.read.config) for name, one in candidates.items()}
        after = {name: known.read for name, known in self._registry.known.items()}
        after |= {name: one.known.read for name, one in candidates.items()}
        company = self._loader.company(after.values())
        together = [*self._registry.made_of.groups(steps)]
        turn.groups = [*map(frozenset, together), *([frozenset(turn.names)] if turn.names - candidates.keys() else [])]
        async with trio.open_nursery() as nursery:
            for group in together:
                members = [candidates[name] for name in sorted(group)]
                nursery.start_soon(self._carry_out_group, turn, members, company, errors)
        return errors

    async def _carry_out_group(
        self,
        turn: Turn,
        group: Sequence[Candidate],
        company: Company,
        errors: dict[str, FlowserveError],
    ) -> None:
        """What is joined by containment takes over in one go, when all of it is ready; what nothing can depend on yet,
        because it did not serve, as soon as it is ready itself.
        """
        together: list[Built] = []

        async def build(one: Candidate) -> None:
            name = one.name
            self._registry.loading(name)
            try:
                built = await self._build(one, company)
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
        self._turns.done(turn, [one.name for one in group])

    async def _build(self, candidate: Candidate, company: Company) -> Built:
        """Open every instance of a model, of files that stayed the same from the first read to the last."""
        known, mark = candidate.known, candidate.digest
        for _ in range(READS_MAX):
            loaded: dict[int, Loaded] = {}
            failure: FlowserveError | None = None
            if known.read.config.is_ensemble:
                seconds = 0.0
            else:
                self._registry.report(LoadEvent(known.name, "loading"))
                started_ns = self._engine.clock()
                try:
                    loaded = await self._loader.load(known.read, company)
                except FlowserveError as error:
                    failure = error  # of files that may be others by now
                seconds = (self._engine.clock() - started_ns) / SECOND_NS
            now, folder = await _digest(candidate.folder) if mark else ("", candidate.folder)
            if now == mark and failure is not None:
                raise failure
            if now == mark:
                return Built(known, loaded, seconds)
            await self._loader.drop(loaded)
            mark = now
            override = candidate.override
            read = await self._loader.read(folder, override.config if override is not None else "")
            known = Known(read, "" if override is not None else mark, known.files, known.is_explicit)
        raise Invalid("its files kept changing while they were read; load it again when they are complete")

    def _fail(self, name: str, error: FlowserveError, errors: dict[str, FlowserveError]) -> None:
        errors[name] = error
        if str(error) == not_polled(name) and name not in self._engine.entries:
            return  # nothing of that name anywhere: the index has no row for what somebody mistyped
        self._registry.fail(name, error)


def not_polled(name: str) -> str:
    """Triton's words for a name that cannot be read at all."""
    return f"failed to load '{name}', failed to poll from model repository"


def _stamps(found: Found) -> dict[str, Stamp]:
    twice = dict.fromkeys(found.duplicates, (("in two repositories", 0, 0, 0, 0),))
    return {**twice, **{folder.name: stamp(folder.path) for folder in found.folders}}


async def _digest(folder: ModelFolder) -> tuple[str, ModelFolder]:
    """The digest of a folder, and after it what is there: what comes between the two shows in the next digest."""
    try:
        return await _in_thread(lambda: (digest(folder.path), look_again(folder)))
    except OSError as error:
        raise Invalid(f"{folder.name}: cannot be read: {error.strerror}") from None


async def _in_thread(work: Callable[[], T]) -> T:
    """Looking at files, beside the threads that load: a model that hangs there keeps nobody from looking."""
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
