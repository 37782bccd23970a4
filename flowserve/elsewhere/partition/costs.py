"""The cost of running each model of a graph in the server or on a kind of other machines.

Decides the cost of an assignment, from the time of each model, the transfer time of its batches, and the capacity of
the machines; and how many instances a model needs. A `Crossing` is one transfer: it takes time if its model is on
another machine and not on the same one as all models at the other end. The other end is the server for a model whose
tensors always pass through the server, and its neighbours for a model that may share a process with them. Times are
seconds, per request unless said otherwise. Callers: `search`, `cli`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

SERVER: Final = 0  # as a kind of machine: the server's own; as a place in an assignment
AT_SERVER: Final = -1  # as the other end of a crossing: clients and the server itself
UTILISATION: Final = 0.7  # the share of its capacity up to which a machine or an instance is used
OVERLOAD: Final = 1000.0  # the cost of overload by a whole machine; a second of latency costs 1 per request
_ROUNDING: Final = 1e-9

Assignment = tuple[int, ...]  # of each model, the kind of machine that runs it


@dataclass(frozen=True, slots=True)
class MachineKind:
    """`count` equal machines, each with so many cores and GPUs. An instance takes one core, or one GPU."""

    name: str
    count: int
    cores: int
    gpus: int = 0

    def room(self, *, of_gpus: bool) -> int:
        """How many instances they have room for, on GPUs or on cores."""
        return self.count * (self.gpus if of_gpus else self.cores)


@dataclass(frozen=True, slots=True)
class PlaceableModel:
    """A model that may be placed. `server_s`, `remote_s`: how long an instance works on a request, in the server and on
    another machine, without crossings. `taken_s`: how long a request occupies an instance on another machine.
    `carry_s`: how long the server's cores are then busy with sending and receiving. `allowed`: the kinds of machines
    that can run it, at least one.
    """

    name: str
    server_s: float
    remote_s: float
    taken_s: float
    carry_s: float
    allowed: frozenset[int]
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Crossing:
    """`seconds` on the way, if `model` is not in the server and at least one of `others` is not on the same kind of
    machines. `model` and `others` are indices of models; AT_SERVER among the others is never on its machine.
    """

    model: int
    others: frozenset[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class PartitionTask:
    """`kinds[SERVER]` is the server's machine. `rate`: requests per second."""

    models: tuple[PlaceableModel, ...]
    kinds: tuple[MachineKind, ...]
    crossings: tuple[Crossing, ...]
    rate: float


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """The use of the cores, or of the GPUs, of one kind of machine: for the server the mean number of busy ones, for
    other machines the number of instances. `most`: how many may be used.
    """

    kind: int
    of_gpus: bool
    used: float
    most: float

    @property
    def overload(self) -> float:
        """The excess over `most`, as a share of it; 0 if there is none."""
        over = self.used - self.most
        return over / max(self.most, 1.0) if over > _ROUNDING else 0.0


def instances_needed(task: PartitionTask, model: int, *, in_server: bool = False) -> int:
    """How many instances of a model are used up to UTILISATION at the task's rate; at least 1."""
    one = task.models[model]
    busy = task.rate * (one.server_s if in_server else one.taken_s)
    return max(1, ceil(busy / UTILISATION - _ROUNDING))


def crossing_s(task: PartitionTask, assignment: Assignment) -> float:
    """The sum of all transfer times of a request."""
    return sum(one.seconds for one in task.crossings if crosses(one, assignment))


def crosses(crossing: Crossing, assignment: Assignment) -> bool:
    """Whether a crossing takes place."""
    kind = assignment[crossing.model]
    return kind != SERVER and any(other == AT_SERVER or assignment[other] != kind for other in crossing.others)


def loads(task: PartitionTask, assignment: Assignment) -> list[MachineLoad]:
    """The use of each kind of machine, of cores and of GPUs."""
    found = []
    for kind, machines in enumerate(task.kinds):
        share = UTILISATION if kind == SERVER else 1.0
        for of_gpus in (False, True):
            here = [i for i, one in enumerate(task.models) if assignment[i] == kind and one.on_gpu == of_gpus]
            if kind == SERVER:
                carried_s = 0.0 if of_gpus else _carried_s(task, assignment)
                used = task.rate * (sum(task.models[i].server_s for i in here) + carried_s)
            else:
                used = float(sum(instances_needed(task, i) for i in here))
            found.append(MachineLoad(kind, of_gpus, used, share * machines.room(of_gpus=of_gpus)))
    return found


def _carried_s(task: PartitionTask, assignment: Assignment) -> float:
    """How long the server is busy with the tensors of models on other machines, for a request."""
    return sum(one.carry_s for one, kind in zip(task.models, assignment, strict=True) if kind != SERVER)


def assignment_cost(task: PartitionTask, assignment: Assignment) -> float:
    """The total latency, in seconds, of the requests of one second if none waits, and OVERLOAD for each missing
    machine's capacity.
    """
    return unloaded_cost(task, assignment) + OVERLOAD * sum(one.overload for one in loads(task, assignment))


def unloaded_cost(task: PartitionTask, assignment: Assignment, core_price: float = 0.0) -> float:
    """The part of the cost that does not depend on the room of machines. `core_price`: the additional cost of a busy
    second of the server's cores.
    """
    seconds = sum(
        price_here(one, core_price) if kind == SERVER else price_elsewhere(one, core_price)
        for one, kind in zip(task.models, assignment, strict=True)
    )
    return task.rate * (seconds + crossing_s(task, assignment))


def price_here(model: PlaceableModel, core_price: float) -> float:
    """The cost of a model in the server for a request, in seconds."""
    return model.server_s * (1 + (0 if model.on_gpu else core_price))


def price_elsewhere(model: PlaceableModel, core_price: float) -> float:
    """The cost of a model on another machine for a request, in seconds, without crossings."""
    return model.remote_s + core_price * model.carry_s
