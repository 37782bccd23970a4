"""The models of an engine that are loaded, from their first possible batch until their instances are closed.

Decides what belongs to a loaded model besides its queue: its generation, the supervision of its instances in other
processes, the question whether its own code is ready, and the memory that its instances release. Does not know requests
or deployments, nor how a model was loaded. Used on the event loop by the engine; loading/ adds models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import trio

from flowserve.backends.base import LoadedModel
from flowserve.graph.types import ModelKey
from flowserve.observe.statistics import Statistics
from flowserve.runtime.admission.steps import StepCache
from flowserve.runtime.engine.generations import Generation, Generations
from flowserve.runtime.loop import StepLoop
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.runtime.readiness import ModelChecks
from flowserve.runtime.release import MemoryRelease
from flowserve.runtime.remote.shm import ProcessPool
from flowserve.runtime.workers.base import RunsElsewhere, Worker, WorkerContext, slots_of
from flowserve.runtime.workers.supervisor import Delays, Supervisor, WarmUp
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import Batcher
from flowserve.scheduling.rate_limit.limiter import Needs
from flowserve.scheduling.scheduler import Scheduler


class NewModel(NamedTuple):
    """A model version that is to be served, and its open instances.

    `passive` instances get no work, and are closed with the others. `files` is held until then. `needs` are the
    resources of each worker, if there is a rate limiter. `keeps_order`: responses leave in the order of their requests.
    `is_cached`: responses are cached, if the server has a response cache. `execution_timeout_ns`: a process whose batch
    runs longer is killed; 0: no limit. `warm_up`: runs on a restarted instance before it serves.
    """

    key: ModelKey
    batcher: Batcher
    workers: Sequence[Worker]
    model: LoadedModel
    passive: Sequence[Worker] = ()
    files: object = None
    needs: Sequence[Needs] = ()
    keeps_order: bool = False
    is_cached: bool = False
    execution_timeout_ns: int = 0
    warm_up: WarmUp | None = None


class LoadedModels:
    """`processes`: the worker processes of the instances; None where the system has none."""

    def __init__(self, scheduler: Scheduler, context: WorkerContext, loop: StepLoop, restarts: Delays) -> None:
        self.processes = ProcessPool(context.clock, loop) if SUPPORTED else None
        self.generations = Generations(self._forget)
        self.supervisor = Supervisor(scheduler, context, restarts)
        self.memory = MemoryRelease(context.clock, self.generations.workers, lambda: not scheduler.in_flight)
        self._scheduler = scheduler
        self._checks = ModelChecks(context.token)

    def add(self, new: NewModel, statistics: Statistics, cache: StepCache | None) -> None:
        """Add the queue of a model version; graphs that are announced from now on use it for its key."""
        workers = new.workers
        groups = {} if new.execution_timeout_ns else {worker: worker.route_group for worker in workers}
        queue = ModelQueue(
            new.key,
            new.batcher,
            slots_of(workers),
            is_pure=new.model.is_pure,
            statistics=statistics,
            needs=new.needs,
            keeps_order=new.keeps_order,
            route_groups=groups,
            computes_apart=all(worker.computes_apart for worker in workers),
            cache=cache,
        )
        self._scheduler.models.add(queue)
        self.generations.add(Generation(queue, [*workers, *new.passive], new.model, new.files))
        elsewhere = [worker for worker in workers if isinstance(worker, RunsElsewhere)]
        self.supervisor.watch(queue, elsewhere, new.execution_timeout_ns, new.warm_up)

    def _forget(self, queue: ModelQueue) -> None:
        """Remove a queue that gets no more work; its instances are about to be closed."""
        self._scheduler.models.remove(queue)
        self.supervisor.release(queue)

    async def objection(self, queues: Iterable[ModelQueue]) -> str:
        """Why the code of one of the models with these queues says that it is not ready, or ""."""
        return await self._checks.objection(worker for queue in queues for worker in queue.instances)

    def busy(self) -> list[str]:
        """The instances that compute outside of the event loop, including those whose callers have all left."""
        return [worker.name for worker in self.generations.workers() if worker.running is not None]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the background tasks. Ends only by cancellation."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.generations.run, name="closing of models")
            nursery.start_soon(self.memory.run, name="release of memory")
            await nursery.start(self.supervisor.run)
            if self.processes is not None:
                await nursery.start(self.processes.run)
            task_status.started()
