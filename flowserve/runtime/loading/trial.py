"""Loads the deployments of a reading once, as a server does, for commands that check and do not serve.

Decides which deployments are loaded, when a load that makes no progress is abandoned, what such a load is reported as,
and that a model on a thread cannot end the command by `os._exit`, which would look like a success. Does not decide how
a model is loaded (`control`), nor how problems are printed (`cli/check`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

import trio

from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Problem, Problems, Unavailable
from flowserve.repository.resolve import steps_of
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import Control, ControlOptions, open_control
from flowserve.runtime.loading.reading import Reading
from flowserve.runtime.loading.registry import LoadEvent

LOOK_S: Final = 0.1
GIVE_UP_S: Final = 5.0  # for the processes of abandoned loads to end; code on threads cannot be ended
EXIT_TIMEOUT_S: Final = 5.0


async def load_all(
    repositories: Sequence[Path], reading: Reading, options: EngineOptions, patience_s: float
) -> Reading:
    """The reading, in which the deployments that do not load have failed. All that could be loaded is closed again, and
    all processes have ended. Loads are abandoned if none has ended for `patience_s` seconds.
    """
    names = (*reading.resolution.models, *reading.resolution.ensembles)
    if not names:
        return reading
    with _without_log(), _without_exit():
        async with (
            open_engine(options, exit_timeout_s=EXIT_TIMEOUT_S) as engine,
            open_control(engine, repositories, ControlOptions("explicit", names)) as control,
        ):
            failed = await _Trial(engine, control, patience_s).run(reading.configs)
    resolution = reading.resolution
    return replace(
        reading,
        resolution=replace(
            resolution,
            models=tuple(name for name in resolution.models if name not in failed),
            ensembles=tuple(name for name in resolution.ensembles if name not in failed),
            graphs={name: graphs for name, graphs in resolution.graphs.items() if name not in failed},
            failed={**resolution.failed, **failed},
        ),
    )


@contextmanager
def _without_log() -> Iterator[None]:
    """No record of a load, as each failure becomes a problem, and warnings were found before."""
    log = logging.getLogger("flowserve")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _without_exit() -> Iterator[None]:
    """In this process `os._exit` raises SystemExit, which fails the load of the model that calls it. The processes that
    its code forks end as usual.
    """
    here, leave = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != here:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


@dataclass(slots=True)
class _Trial:
    engine: Engine
    control: Control
    patience_s: float
    moved_at: float = 0.0  # when a load began or ended

    async def run(self, configs: Mapping[str, ModelConfig]) -> dict[str, FlowserveError]:
        """Load what the control was opened for. Returns the errors by name."""
        self.moved_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            await self.control.start(self._report)
            nursery.cancel_scope.cancel()
        failed = dict(self.control.failures)
        stuck = self._loading()
        for name in stuck:
            failed[name] = self._never_loaded(name, configs[name], [*stuck, *failed])
        return failed

    def _report(self, event: LoadEvent) -> None:
        self.moved_at = trio.current_time()

    async def _watch(self, loads: trio.CancelScope) -> None:
        """Abandon loads that make no progress; in the end without waiting for them."""
        while True:
            await trio.sleep(LOOK_S)
            if trio.current_time() < self.moved_at + self.patience_s:
                continue
            names = self._loading()
            with trio.move_on_after(GIVE_UP_S):
                while self._loading() == names:
                    self.control.give_up(names, self._why)
                    await trio.sleep(LOOK_S)
            if self._loading() == names:
                loads.cancel()
            self.moved_at = trio.current_time()

    def _loading(self) -> list[str]:
        entries = self.engine.deployments.entries
        return [name for name, entry in entries.items() if entry.state == "LOADING"]

    def _never_loaded(self, name: str, config: ModelConfig, failed: Sequence[str]) -> FlowserveError:
        if not config.is_ensemble:
            return Unavailable(f"model '{name}' does not load: {self._why}")
        steps = sorted(steps_of(config) & set(failed))
        return Problems(
            [
                Problem(f"ensemble '{name}' depends on '{step}' which is not valid", rule="G3", depends_on=step)
                for step in steps
            ]
        )

    @property
    def _why(self) -> str:
        return f"no load has ended for {self.patience_s:g} s (--load-timeout-secs)"
