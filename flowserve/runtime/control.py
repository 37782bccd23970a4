"""Loading and unloading, at the start and while the server runs: who may ask for what.

Decided here: the three control modes, that an operation goes on when its caller leaves, and when a repository that is
polled is looked at. How an operation is carried out is operations.py's.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

import trio

from flowserve.errors import FlowserveError, Internal, Invalid, NotFound, Problems, Unavailable
from flowserve.repository.changes import Settled, Watch
from flowserve.repository.layout import Found
from flowserve.repository.override import Override, check_name
from flowserve.runtime.engine import Engine
from flowserve.runtime.lifecycle import Generation
from flowserve.runtime.load_threads import PATIENCE_S
from flowserve.runtime.loader import Loader
from flowserve.runtime.operations import Operations, not_polled
from flowserve.runtime.registry import LoadEvent, Registry, Report
from flowserve.runtime.repository_calls import NOT_ALLOWED

log = logging.getLogger("flowserve.load")

ALL: Final = "*"  # in ControlOptions.load: everything there is
RESTLESS_S: Final = 0.25  # how soon a folder that just changed is looked at again
STOPPING: Final = "Server is stopping, models are neither loaded nor unloaded any more"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """`load`: what to load at the start in mode explicit, or ("*",). `poll_s`: seconds between two looks."""

    mode: Literal["none", "poll", "explicit"] = "none"
    load: tuple[str, ...] = ()
    poll_s: float = 15.0


@asynccontextmanager
async def open_control(engine: Engine, repositories: Sequence[Path], options: ControlOptions) -> AsyncIterator[Control]:
    """Loads into `engine` from `repositories`. Leaving the block gives up what is still being loaded."""

    async def work(task_status: trio.TaskStatus[trio.Nursery]) -> None:
        # A nursery of its own, so that stopping cancels the operations and nothing of what the block does.
        async with trio.open_nursery() as operations:
            task_status.started(operations)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        control = engine.asks.control = Control(engine, repositories, options, await nursery.start(work))
        try:
            yield control
        finally:
            control.stop()


class Control:
    """Made by `open_control`; touched from the engine's thread only."""

    def __init__(
        self, engine: Engine, repositories: Sequence[Path], options: ControlOptions, nursery: trio.Nursery
    ) -> None:
        self._engine = engine
        self._options = options
        self._nursery = nursery
        loader = Loader(engine)
        repositories = [path.absolute() for path in repositories]  # wherever a model may change to
        self._registry = Registry(engine, loader, _log_event)
        self._operations = Operations(
            engine,
            self._registry,
            loader,
            repositories,
            is_lasting=options.mode != "none",
            takes_steps=options.mode == "explicit",
        )

    @property
    def is_explicit(self) -> bool:
        """Whether models are loaded and unloaded by whoever asks."""
        return self._options.mode == "explicit"

    async def start(self, report: Report) -> dict[str, str]:
        """Load what the mode says, telling `report`. Returns what failed, by name, with the reason.

        Raises NotFound or Problems where a repository itself cannot be read. Failed names stay in the index.
        """
        found = await self._find()
        for warning in found.warnings:
            log.warning("%s", warning)
        names = [*found.duplicates, *(folder.name for folder in found.folders)]
        if self._options.mode == "explicit" and self._options.load != (ALL,):
            names = list(self._options.load)
        elif not names:
            log.warning("there is no model here: a repository is a folder of models' folders")
        watch = Watch()
        if self._options.mode == "poll":
            watch.knows(await self._operations.stamps())
        for name in names:
            self._registry.loading(name, is_wanted=True)
        if self._options.mode == "poll":  # from now on, since one that hangs while it loads stops nobody else
            self._nursery.start_soon(self._poll, watch, name="poll the repository")
        self._registry.report = report
        try:
            errors = await self._operations.bring_up(dict.fromkeys(names))
        finally:
            self._registry.report = _log_event
        self._engine.loaded()
        return {name: str(error) for name, error in sorted(errors.items())}

    async def load(self, name: str, override: Override | None = None, *, loads: str = "") -> None:
        """Load a name, or load it again if its files changed, with the steps it is made of. `override` takes the place
        of its files. Returns when it serves; whatever served before does so until then. `loads`: the model that asks
        for it while it is loaded itself.

        Raises Unavailable where the mode does not allow it or the two would wait for each other, Invalid where it
        cannot be loaded: then whatever served before goes on.
        """
        self._must_be_explicit()
        check_name(name)
        if override is not None and override.files and not override.config:
            raise Invalid(f"{not_polled(name)}: 'file:' parameters need the parameter 'config' beside them")
        try:
            errors = await self._to_the_end(lambda: self._operations.bring_up({name: override}, within=loads))
        except (NotFound, Problems) as error:  # with the path, which is not a client's business
            log.warning("%s", error)
            raise Invalid(f"{not_polled(name)}: it cannot be read any more; what is loaded serves on") from None
        if name in errors:
            text = str(errors[name])
            raise Invalid(text if text.startswith(not_polled(name)) else f"load failed for model '{name}': {text}")

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Serve a name no longer. `dependents`: nor its steps, but for those that were loaded by name or that something
        else is made of. Returns when the last request that ran on it is over. An unknown name is no mistake, as on
        Triton. Raises Unavailable where the mode does not allow it.
        """
        for generation in await self.retire(name, dependents=dependents):
            await generation.closed.wait()

    async def retire(self, name: str, *, dependents: bool = False, loads: str = "") -> list[Generation]:
        """The same for somebody who may be what others wait for: returns when the name is served no longer, and what is
        still to be closed. `loads` as for `load`.
        """
        self._must_be_explicit()
        return await self._to_the_end(lambda: self._take_out(name, dependents=dependents, loads=loads))

    def post(
        self, operation: Callable[[], Awaitable[object]], answered: Callable[[FlowserveError | None], None]
    ) -> None:
        """Carry out what this class offers, and tell `answered` how it ended: None, or why it failed."""

        async def carry_out() -> None:
            try:
                await operation()
            except FlowserveError as error:
                answered(error.with_traceback(None))
            except trio.Cancelled:
                answered(Unavailable(STOPPING))
                raise
            else:
                answered(None)

        if self._nursery.cancel_scope.cancel_called:
            answered(Unavailable(STOPPING))
        else:
            self._nursery.start_soon(carry_out)

    async def index(self, *, ready_only: bool = False) -> list[dict[str, str]]:
        """Rows of the repository index; in mode explicit, what lies there and was never loaded is only a name."""
        if not self.is_explicit or ready_only:
            return self._engine.index(ready_only=ready_only)
        try:
            found = await self._find()
        except FlowserveError as error:
            log.warning("%s", error)
            return self._engine.index()
        rows = self._engine.index()  # not before: what begins to load meanwhile would be in neither
        names = {*found.duplicates, *(folder.name for folder in found.folders)} - self._engine.entries.keys()
        return sorted([*rows, *({"name": name} for name in names)], key=lambda row: row["name"])

    def stop(self) -> None:
        """The server ends: nothing is loaded any more, and who waits for a load hears so."""
        self._nursery.cancel_scope.cancel()

    async def _find(self) -> Found:
        found = await self._operations.find()
        if self.is_explicit:  # remembered, since no refused request should have to look at a disk
            self._engine.not_loaded = frozenset(folder.name for folder in found.folders)
        return found

    def _must_be_explicit(self) -> None:
        if not self.is_explicit:
            what = "loads its models once, at start" if self._options.mode == "none" else "follows its repository"
            raise Unavailable(f"{NOT_ALLOWED}; this server {what}; --model-control-mode=explicit allows it")

    async def _to_the_end(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Carry out an operation, also when the caller does not stay: half a load would be in nobody's hands."""
        outcome: _Outcome[T] = _Outcome()

        async def carry_out() -> None:
            try:
                outcome.values = [await operation()]
            except FlowserveError as error:
                outcome.error = error
            except Exception as error:
                log.exception("loading or unloading failed")
                outcome.error = Internal(f"{type(error).__name__}: {error}")
            finally:
                outcome.done.set()

        if not self._nursery.cancel_scope.cancel_called:
            self._nursery.start_soon(carry_out)
            await outcome.done.wait()
        for value in outcome.values:
            return value
        raise outcome.error

    async def _take_out(
        self, name: str, *, dependents: bool, loads: str = "", is_gone: bool = False
    ) -> list[Generation]:
        retired = await self._operations.take_out(name, dependents=dependents, within=loads)
        for one, generations in retired.items():
            self._nursery.start_soon(partial(self._registry.unloaded, one, generations, is_gone=is_gone))
        return [generation for generations in retired.values() for generation in generations]

    async def _poll(self, watch: Watch) -> None:
        """Follow the repository, for ever. What is loaded serves on where it cannot be read."""
        is_lost = False
        while True:
            await trio.sleep(min(RESTLESS_S, self._options.poll_s) if watch.is_restless else self._options.poll_s)
            try:
                stamps = await self._operations.stamps()
            except FlowserveError as error:
                if not is_lost:
                    log.error("%s; nothing is unloaded, what is loaded serves on", error)
                is_lost = True
                continue
            if is_lost:
                log.info("the model repository can be read again")
            is_lost = False
            settled = watch.look(stamps, self._engine.clock())
            if settled.gone and not stamps:
                text = "no model is left in the model repository, so that all are unloaded: %d; is it mounted?"
                log.warning(text, len(settled.gone))
            if settled.changed or settled.gone:
                # Not awaited: a model that hangs while it loads must not keep the others from being followed.
                self._nursery.start_soon(self._follow, settled, watch, name="follow the repository")

    async def _follow(self, settled: Settled, watch: Watch) -> None:
        """What changed comes up before what is gone is taken out, so that who follows a step to its new name misses
        none; unless something hangs on its way up.
        """
        is_up = trio.Event()
        self._operations.give_up(settled.changed)
        bring_up = partial(self._operations.bring_up, dict.fromkeys(sorted(settled.changed)))
        self._nursery.start_soon(self._carry_on, bring_up, is_up)
        with trio.move_on_after(PATIENCE_S):
            await is_up.wait()
        for name in sorted(settled.gone):
            if not watch.has(name):  # it may have come back meanwhile
                self._nursery.start_soon(self._carry_on, partial(self._take_out, name, dependents=False, is_gone=True))

    async def _carry_on(self, operation: Callable[[], Awaitable[object]], over: trio.Event | None = None) -> None:
        """An operation that nobody asked for: what it raises is a line in the log."""
        try:
            await operation()
        except FlowserveError as error:
            log.error("%s; what is loaded serves on", error)
        except Exception:
            log.exception("following the repository failed")
        finally:
            if over is not None:
                over.set()


class _Outcome(Generic[T]):
    """What an operation came to, for whoever still waits for it. `values` has one, or none where it failed."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.values: list[T] = []
        self.error: FlowserveError = Unavailable(STOPPING)


def _log_event(event: LoadEvent) -> None:
    if event.state == "failed":
        log.warning("failed to load %s: %s", event.name, event.reason)
    elif event.state != "loading":
        log.info("%s %s", event.state, event.name)
