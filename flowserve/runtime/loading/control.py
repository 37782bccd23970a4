"""Loading and unloading, at the start and while the server runs: which mode permits which operation.

Decides the three control modes, that an operation continues after its caller has left, and when a polled repository is
read. `operations.py` decides how an operation is carried out.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio

from flowserve.errors import FlowserveError, Internal, Invalid, NotFound, Problems, Unavailable
from flowserve.observe.log_fields import of
from flowserve.repository.layout import FoundModels
from flowserve.repository.mirror.mirror import RepositoryMirror
from flowserve.repository.override import Override, check_name
from flowserve.repository.read import NoConfiguration, is_of_override
from flowserve.repository.snapshot import FolderWatch, Settled
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.engine.generations import Generation
from flowserve.runtime.group import Agree
from flowserve.runtime.loading.loader import HANG_AFTER_S, Loader
from flowserve.runtime.loading.operations import Mode, Operations, not_polled
from flowserve.runtime.loading.registry import LoadEvent, Registry, Report
from flowserve.runtime.model_calls.server_requests import NOT_ALLOWED

log = logging.getLogger("flowserve.load")

ALL: Final = "*"  # in ControlOptions.load: all models of the repositories
RESTLESS_S: Final = 0.25  # poll interval after a change, until the folder is stable
FILES_CHANGED: Final = "its files changed while it was loading"
LOADS_STOPPED: Final = "Server is stopping, models are neither loaded nor unloaded any more"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """`load`: the names to load at the start in mode explicit, or ("*",). `poll_s`: the poll interval in seconds.
    `mirrors`: of the repositories that are in a store; their folders are among the repositories.
    """

    mode: Mode = "none"
    load: tuple[str, ...] = ()
    poll_s: float = 15.0
    mirrors: tuple[RepositoryMirror, ...] = ()


@asynccontextmanager
async def open_control(
    engine: Engine,
    repositories: Sequence[Path],
    options: ControlOptions,
    on_change: Callable[[], None] = lambda: None,
) -> AsyncIterator[Control]:
    """Loads into `engine` from `repositories`. `on_change` is called after each load, failed load and unload. Leaving
    the block cancels all loads in progress.
    """

    async def work(task_status: trio.TaskStatus[trio.Nursery]) -> None:
        # A separate nursery: stopping cancels the operations, but not the block's own tasks.
        async with trio.open_nursery() as operations:
            task_status.started(operations)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        control = engine.calls.server_requests.control = Control(
            engine, repositories, options, await nursery.start(work), on_change
        )
        try:
            yield control
        finally:
            control.stop()


class Control:
    """Created by `open_control`. Used on the engine's thread only."""

    def __init__(
        self,
        engine: Engine,
        repositories: Sequence[Path],
        options: ControlOptions,
        nursery: trio.Nursery,
        on_change: Callable[[], None],
    ) -> None:
        self.is_explicit = options.mode == "explicit"  # whether clients may load and unload models
        self.mirrors = options.mirrors
        self._engine = engine
        self._options = options
        self._nursery = nursery
        loader = Loader(engine)
        repositories = [path.absolute() for path in repositories]  # models may change the working directory
        self._report: Report = _log_event
        self._on_change = on_change
        self._registry = Registry(engine, loader, self._happened)
        self._operations = Operations(engine, self._registry, loader, repositories, options.mode, options.mirrors)

    async def start(self, report: Report) -> dict[str, str]:
        """Load the models that the mode selects; `report` receives each event. Returns the failures: reasons by name.

        Raises NotFound or Problems if a repository itself cannot be read. Failed names stay in the index.
        """
        found = await self._find()
        for warning in found.warnings:
            log.warning("%s", warning)
        names = [*found.duplicates, *self._names(found)]
        if self.is_explicit and self._options.load != (ALL,):
            names = list(self._options.load)
        elif not names:
            log.warning("there is no model here: a repository is a folder of models' folders")
        watch = FolderWatch()
        if self._options.mode == "poll":
            watch.mark_seen(await self._operations.stamps())
        for name in names:
            self._registry.loading(name, is_wanted=True)
        if self._options.mode == "poll":  # started before the load, so that a model that hangs does not stop polling
            self._nursery.start_soon(self._poll, watch, name="poll the repository")
        self._report = report
        try:
            errors = await self._operations.bring_up(dict.fromkeys(names))
        finally:
            self._report = _log_event
        self._engine.deployments.is_loaded = True
        return {name: str(error) for name, error in sorted(errors.items())}

    async def load(self, name: str, override: Override | None = None, *, loads: str = "") -> None:
        """Load a name with its steps, or reload it if its files changed. `override` replaces its files. Returns when it
        is ready; the previous deployment serves until then. `loads`: the model whose own load makes this call.

        Raises Unavailable if the mode does not allow it or the two loads would wait for each other; Invalid if the load
        fails: the previous deployment then stays in force.
        """
        self._must_be_explicit()
        check_name(name)
        if override is not None and override.files and not override.config:
            raise Invalid(f"{not_polled(name)}: 'file:' parameters need the parameter 'config' beside them")
        group = self._engine.group
        if group is None or loads:  # a model that loads another does so in each server
            await self.load_here(name, override, loads=loads)
        else:
            await self._to_the_end(lambda: group.load(name, override))

    async def load_here(
        self, name: str, override: Override | None = None, *, loads: str = "", agree: Agree | None = None
    ) -> None:
        """As `load`, in this server only. With `agree`, as `Operations.bring_up`."""
        try:
            errors = await self._to_the_end(
                lambda: self._operations.bring_up({name: override}, within=loads, agree=agree)
            )
        except (NotFound, Problems) as error:  # contains the path, which clients must not see
            log.warning("%s", error)
            raise Invalid(f"{not_polled(name)}: it cannot be read any more; what is loaded serves on") from None
        if name in errors:
            text = str(errors[name])
            if text.startswith(not_polled(name)):
                raise Invalid(text)
            is_unread = isinstance(errors[name], NoConfiguration) or is_of_override(errors[name], name)
            failed = not_polled(name) if is_unread else f"load failed for model '{name}'"
            if version := errors[name].version:
                failed = f"{failed}: version {version} is at UNAVAILABLE state"
            raise Invalid(f"{failed}: {text}")

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload a name. `dependents`: its steps too, except those loaded by name or used by another ensemble. Returns
        when the last request that ran on it has finished. An unknown name is no error, as on Triton. Raises Unavailable
        if the mode does not allow it.
        """
        self._must_be_explicit()
        group = self._engine.group
        if group is None:
            await self.unload_here(name, dependents=dependents, waits=True)
        else:
            await self._to_the_end(lambda: group.unload(name, dependents=dependents, waits=True))

    async def unload_here(self, name: str, *, dependents: bool, waits: bool) -> None:
        """As `unload`, in this server only. `waits`: until the last request has finished."""
        retired = await self._to_the_end(lambda: self._take_out(name, dependents=dependents))
        for generation in retired if waits else ():
            await generation.closed.wait()

    async def retire(self, name: str, *, dependents: bool = False, loads: str = "") -> list[Generation]:
        """As `unload`, without waiting for requests in flight, which may depend on the caller: returns the generations
        that are not closed yet. `loads` as for `load`.
        """
        self._must_be_explicit()
        group = self._engine.group
        if group is None or loads:
            return await self._to_the_end(lambda: self._take_out(name, dependents=dependents, loads=loads))
        await self._to_the_end(lambda: group.unload(name, dependents=dependents, waits=False))
        return []

    def post(
        self, operation: Callable[[], Awaitable[object]], answered: Callable[[FlowserveError | None], None]
    ) -> None:
        """Run a method of this class as a task. `answered` receives None, or the error."""

        def ended(result: object) -> None:
            answered(result.with_traceback(None) if isinstance(result, FlowserveError) else None)

        self._start(operation, ended)

    async def index(self, *, ready_only: bool = False) -> list[dict[str, str]]:
        """Rows of the repository index; in mode explicit, a model that was never loaded has only a name."""
        if not self.is_explicit or ready_only:
            return self._engine.deployments.index(ready_only=ready_only)
        try:
            found = await self._find()
        except FlowserveError as error:
            log.warning("%s", error)
            return self._engine.deployments.index()
        rows = self._engine.deployments.index()  # read last: a load that starts in between must be in one of the two
        names = {*found.duplicates, *self._names(found)}
        rows += [{"name": name} for name in names - self._engine.deployments.entries.keys()]
        return sorted(rows, key=lambda row: row["name"])

    @property
    def failures(self) -> Mapping[str, FlowserveError]:
        """Why names that were to be served are not, by name."""
        return self._registry.failed

    def give_up(self, names: Iterable[str], why: str) -> None:
        """Abandon the loads in progress of these names, as far as they run in processes: they fail for this reason."""
        self._operations.give_up(names, why)

    def stop(self) -> None:
        """The server ends: all loads in progress fail, and later ones are refused."""
        self._nursery.cancel_scope.cancel()

    def _happened(self, event: LoadEvent) -> None:
        self._report(event)
        if event.state != "loading":
            self._on_change()

    async def _find(self) -> FoundModels:
        found = await self._operations.find()
        if self.is_explicit:  # cached, so that refusing a request needs no file access
            self._engine.deployments.not_loaded = frozenset(self._names(found))
        return found

    def _names(self, found: FoundModels) -> list[str]:
        """The names of models that can be loaded, from folders and from stores."""
        return sorted({folder.name for folder in found.folders} | self._operations.in_stores)

    def _must_be_explicit(self) -> None:
        if not self.is_explicit:
            what = "loads its models once, at start" if self._options.mode == "none" else "follows its repository"
            raise Unavailable(f"{NOT_ALLOWED}; this server {what}; --model-control-mode=explicit allows it")

    async def _to_the_end(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Run an operation to its end even if the caller is cancelled: a partial load would have no owner."""
        results: list[T | FlowserveError] = []
        done = trio.Event()

        def ended(result: T | FlowserveError) -> None:
            results.append(result)
            done.set()

        self._start(operation, ended)
        await done.wait()
        (result,) = results
        if isinstance(result, FlowserveError):
            raise result
        return result

    def _start(self, operation: Callable[[], Awaitable[T]], ended: Callable[[T | FlowserveError], None]) -> None:
        """Run an operation as a task. `ended` receives its result or its error, also if the server stops."""

        async def carry_out() -> None:
            result: T | FlowserveError = Unavailable(LOADS_STOPPED)
            try:
                result = await operation()
            except FlowserveError as error:
                result = error
            except Exception as error:
                log.exception("loading or unloading failed")
                result = Internal(f"{type(error).__name__}: {error}")
            finally:
                ended(result)

        if self._nursery.cancel_scope.cancel_called:
            ended(Unavailable(LOADS_STOPPED))
        else:
            self._nursery.start_soon(carry_out)

    async def _take_out(
        self, name: str, *, dependents: bool, loads: str = "", is_gone: bool = False
    ) -> list[Generation]:
        retired = await self._operations.take_out(name, dependents=dependents, within=loads)
        for one, generations in retired.items():
            self._nursery.start_soon(partial(self._registry.unloaded, one, generations, is_gone=is_gone))
        return [generation for generations in retired.values() for generation in generations]

    async def _poll(self, watch: FolderWatch) -> None:
        """Follow changes of the repository until cancelled. If it cannot be read, loaded models stay in force."""
        is_lost = False
        group, follows = self._engine.group, False
        while True:
            await trio.sleep(min(RESTLESS_S, self._options.poll_s) if watch.has_unsettled else self._options.poll_s)
            if group is not None and not group.leads:
                follows = True
                continue
            if follows:  # the leading server has ended: find the changes since then again
                follows, watch = False, FolderWatch()
                watch.mark_seen(dict.fromkeys(self._engine.deployments.entries, ()))
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
            settled = watch.update(stamps, self._engine.clock())
            if settled.gone and not stamps:
                text = "no model is left in the model repository, so that all are unloaded: %d; is it mounted?"
                log.warning(text, len(settled.gone))
            if settled.changed or settled.gone:
                # Not awaited: a model that hangs during its load must not stop polling.
                self._nursery.start_soon(self._follow, settled, watch, name="follow the repository")

    async def _follow(self, settled: Settled, watch: FolderWatch) -> None:
        """Load changed models before removed ones are unloaded, so that an ensemble whose step was renamed stays
        served; unless a load hangs.
        """
        group = self._engine.group
        self._operations.give_up(settled.changed, FILES_CHANGED)
        changed = sorted(settled.changed)
        if group is None:
            bring_up: Callable[[], Awaitable[object]] = partial(self._operations.bring_up, dict.fromkeys(changed))
        else:
            bring_up = partial(group.follow, changed, ())
        if changed:
            with trio.move_on_after(HANG_AFTER_S):
                await self._to_the_end(partial(self._carry_on, bring_up))
        gone = [name for name in sorted(settled.gone) if not watch.was_seen(name)]  # it may exist again
        if gone:
            take_out = self._take_out_gone if group is None else partial(group.follow, ())
            self._nursery.start_soon(self._carry_on, partial(take_out, gone))

    async def follow_here(self, changed: Sequence[str], gone: Sequence[str], agree: Agree) -> None:
        """Load changed models and unload removed ones in this server, with the others' agreement."""
        self._operations.give_up(changed, FILES_CHANGED)
        await self._to_the_end(lambda: self._operations.bring_up(dict.fromkeys(changed), agree=agree))
        await self._take_out_gone(gone)

    async def _take_out_gone(self, names: Sequence[str]) -> None:
        for name in names:
            self._nursery.start_soon(self._carry_on, partial(self._take_out, name, dependents=False, is_gone=True))

    async def _carry_on(self, operation: Callable[[], Awaitable[object]]) -> None:
        """Run an operation without a caller: its errors are logged."""
        try:
            await operation()
        except FlowserveError as error:
            log.error("%s; what is loaded serves on", error)
        except Exception:
            log.exception("following the repository failed")


def _log_event(event: LoadEvent) -> None:
    if event.state == "failed":
        for problem in event.reason.splitlines():  # a record for each
            log.warning("failed to load %s: %s", event.name, problem, extra=of(model=event.name))
    elif event.state != "loading":
        log.info("%s %s", event.state, event.name, extra=of(model=event.name))
