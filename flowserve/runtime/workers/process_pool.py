"""State that the worker processes of a server share.

Decides that each process has a number of its own, and holds the objects that all process workers share: the starter of
processes, the poller of their sockets, and the batches in flight. Does not know models. Made by the engine, on the
event loop.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from itertools import count

import trio

from flowserve.backends.worker.protocol import Job
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.ipc.poller import Readiness
from flowserve.runtime.loop import StepLoop
from flowserve.runtime.processes.children import Children, SpawnChild
from flowserve.runtime.processes.environments import Environment, Environments
from flowserve.runtime.workers.process_run import ProcessRun


class ProcessPool:
    """The worker processes of a server. Made on the event loop."""

    def __init__(self, clock: ClockNs, loop: StepLoop) -> None:
        self.clock = clock
        self.children = Children(clock)
        self.environments = Environments(self.children)
        self.spawn: SpawnChild = self.children.spawn
        self.readiness = Readiness(loop)
        self.runs: dict[int, ProcessRun] = {}  # the batches that they have, by number
        self.run_numbers = count(1)
        self._numbers = count(1)

    def numbered(self, job: Job) -> Job:
        """The same job with the number of a new process. On any thread."""
        return replace(job, number=next(self._numbers))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve them. Ends by cancellation, after `close`."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.children.run)
            nursery.start_soon(self.readiness.run, name="sockets of worker processes")
            task_status.started()

    def within(self, environment: Environment) -> ProcessPool:
        """The same, for a model that runs in that environment. Not kept by its caller."""
        within = copy(self)
        within.spawn = environment.spawn
        return within

    async def close(self) -> None:
        """End every process that still lives."""
        await self.children.close()
        self.environments.close()
