"""One operation from beginning to end: names that are loaded, with what they are made of, or taken out.

Decided here: what a load brings along, that operations on one name wait for each other, what is loaded at the same
time and takes over together, and that a model is made of files as they were at one moment. What taking over means for
everything else is registry.py's; who may ask is control.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio

from flowserve.errors import FlowserveError, Invalid
from flowserve.repository.layout import Found, ModelFolder, find_models, look_again, why_missing
from flowserve.repository.override import Override, write_files
from flowserve.repository.snapshot import Stamp, digest, stamp
from flowserve.runtime.clock import SECOND_NS
from flowserve.runtime.engine import Engine
from flowserve.runtime.lifecycle import Generation
from flowserve.runtime.loader import Gathering, Loader
from flowserve.runtime.registry import Built, Known, LoadEvent, Registry
from flowserve.runtime.turns import Turn, Turns

READS_MAX: Final = 3  # how often a folder that changes meanwhile is read again
T = TypeVar("T")
Wanted = Mapping[str, Override | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A name that is to be loaded. `steps` are what its configuration says that it is made of, `files` the private
    folder of what came with the call. `digest` is "" where no other will be compared with it.
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
        """The configuration that came with the call, "" for the folder's own."""
        return self.override.config if self.override is not None else ""


# What looking at a name came to. None: it is what serves already.
Seen = Candidate | FlowserveError | None


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

    async def find(self, only: Collection[str] | None = None) -> Found:
        """What the repositories hold now, or `only` of these names. Raises NotFound or Problems where one of them
        cannot be read.
        """
        return await _in_thread(lambda: find_models(self._repositories, only))

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
                seen = await self._look_at_all(wanted)
                if seen.keys() <= names:
                    return await self._carry_out(turn, wanted, seen)
            names |= seen.keys()  # it is made of others: come back when these have nothing else to do

    def give_up(self, names: Iterable[str]) -> None:
        """Their files are others by now: what is being opened of them is not waited for."""
        for name in names:
            self._loader.give_up(name, "its files changed while it was loading")

    async def take_out(self, name: str, *, dependents: bool, within: str = "") -> dict[str, list[Generation]]:
        """Serve a name no longer, nor what was loaded only because of it where `dependents` says so. Returns what each
        ran on. A load of it that is under way is not waited for, which might hang. `within` as for `bring_up`.
        """
        # Again and again, since a load that is in the way goes through several things that may hang.
        insist = partial(self._loader.give_up, name, "it was unloaded while it was loading")
        names = {name}
        while True:
            async with self._turns.take(names, within, insist):
                more = self._registry.goes_with(name) if dependents else frozenset()
                if more <= names:
                    return await self._registry.take_out({name, *more})
            names |= more

    async def _look_at_all(self, wanted: Wanted) -> dict[str, Seen]:
        """Look at `wanted`, and at what it is made of, as far as that is in the repository."""
        seen: dict[str, Seen] = {}
        looked_for: set[str] = set()

        async def look_at(name: str, override: Override | None, is_explicit: bool) -> None:
            try:
                if name in found.duplicates:
                    raise found.duplicates[name]
                seen[name] = await self._look_at(name, folders.get(name), override, is_explicit)
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
                    nursery.start_soon(look_at, name, override, name in wanted, name=f"look at {name}")
            wave = self._steps_to_look_for(seen, looked_for) if self._takes_steps else {}
        return seen

    def _steps_to_look_for(self, seen: Mapping[str, Seen], looked_for: Collection[str]) -> dict[str, None]:
        """Steps of what was looked at. A step whose configuration came with a load call stays as it is."""
        inside = (one.steps for one in seen.values() if isinstance(one, Candidate))
        steps = set().union(*inside).difference(looked_for)
        return {
            name: None
            for name in sorted(steps)
            if not self._registry.is_serving(name) or self._registry.known[name].digest
        }

    async def _look_at(
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
                raise NotThere(
                    name, f"no file of the call is in a version folder: not 'file:{path}', but 'file:{inside}'"
                )
            folder = private[0]
        if folder is None:
            raise NotThere(name, await _in_thread(lambda: why_missing(self._repositories, name)))
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
        turn: Turn,
        wanted: Wanted,
        seen: Mapping[str, Seen],
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
        gathering = Gathering(self._loader, others, candidates)
        together = [*self._registry.made_of.groups(steps)]
        turn.groups = [*map(frozenset, together), *([frozenset(turn.names)] if turn.names - candidates.keys() else [])]
        async with trio.open_nursery() as nursery:
            for group in together:
                members = [candidates[name] for name in sorted(group)]
                nursery.start_soon(self._carry_out_group, turn, members, gathering, errors)
        return errors

    async def _carry_out_group(
        self,
        turn: Turn,
        group: Sequence[Candidate],
        gathering: Gathering,
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
                built = await self._build(one, gathering)
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

    async def _build(self, candidate: Candidate, gathering: Gathering) -> Built:
        """Read a model and open every instance of it, of files that stayed the same from the first read to the last."""
        mark, folder = candidate.digest, candidate.folder
        for _ in range(READS_MAX):
            outcome = await self._build_once(candidate, folder, mark, gathering)
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
        self, candidate: Candidate, folder: ModelFolder, mark: str, gathering: Gathering
    ) -> Built | FlowserveError:
        """A failure is returned: it is one of files that may be others by now."""
        try:
            read = await self._loader.read(folder, candidate.config, self._registry.last.get(candidate.name))
            gathering.has_read(candidate.name, read)
            mark = "" if candidate.override is not None else mark
            known = Known(read, mark, candidate.files, candidate.is_explicit)
            if read.config.is_ensemble:
                return Built(known)
            company = await gathering.company()
            self._registry.report(LoadEvent(candidate.name, "loading"))
            started_ns = self._engine.clock()
            loaded = await self._loader.load(read, company)
            return Built(known, loaded, (self._engine.clock() - started_ns) / SECOND_NS)
        except FlowserveError as error:
            gathering.has_read(candidate.name, None)
            return error

    async def _drop(self, outcome: Built | FlowserveError) -> None:
        if isinstance(outcome, Built):
            await self._loader.drop(outcome.loaded)

    def _fail(self, name: str, error: FlowserveError, errors: dict[str, FlowserveError]) -> None:
        # It is kept, and what it went through is not: the files that came with the call, a process, half a model.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        errors[name] = error
        if isinstance(error, NotThere) and name not in self._engine.entries:
            return  # nothing of that name anywhere: the index has no row for what somebody mistyped
        self._registry.fail(name, error)


class NotThere(Invalid):
    """No repository has a model of that name."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{not_polled(name)}: {why}")


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
