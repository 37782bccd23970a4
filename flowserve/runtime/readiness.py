"""Whether the own code of models says that they are ready: `is_ready` of a Python model.

Decides that each check is a call on a thread of its own, so that neither the event loop nor the instance's batches wait
for it; that an instance has one check at a time, whose result all requests get that arrive meanwhile; and that a model
that has not answered within ANSWER_S_MAX is not ready. How the code is reached is decided by the worker and, in a
process, by backends/worker/readiness.py. Used on the event loop by the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

import trio

from flowserve.runtime.workers.base import AsksModel, Worker

ANSWER_S_MAX: Final = 5.0  # as in Triton


class ModelChecks:
    """The checks in progress."""

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._checks: dict[Worker, _Check] = {}

    async def objection(self, workers: Iterable[Worker]) -> str:
        """Why the code of one of these instances says that it is not ready, or ""."""
        checks = []
        for worker in workers:
            ask = worker.readiness() if isinstance(worker, AsksModel) else None
            if ask is not None:
                checks.append(self._check(worker, ask))
        with trio.move_on_after(ANSWER_S_MAX):
            for check in checks:
                await check.ended.wait()
                if check.objection:
                    return check.objection
            return ""
        return f"its is_ready has not returned within {ANSWER_S_MAX:g} s"

    def _check(self, worker: Worker, ask: Callable[[], str]) -> _Check:
        check = self._checks.get(worker)
        if check is None:
            check = _Check()
            arguments = worker, check, ask
            threading.Thread(target=self._run, args=arguments, name="flowserve readiness", daemon=True).start()
            self._checks[worker] = check  # only now: `_end` runs on this thread later, and a start may fail
        return check

    def _run(self, worker: Worker, check: _Check, ask: Callable[[], str]) -> None:
        check.objection = ask()
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._end, worker, check)

    def _end(self, worker: Worker, check: _Check) -> None:
        del self._checks[worker]
        check.ended.set()


class _Check:
    """One call of a model's code. `objection`: its result, once it has `ended`."""

    def __init__(self) -> None:
        self.objection = ""
        self.ended = trio.Event()
