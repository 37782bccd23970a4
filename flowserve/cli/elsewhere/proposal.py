"""A placement file from measured figures: which models run on other machines, how many instances, and why.

Decides how figures become costs (`PartitionTask`), which models may be on which machines, and the text of the file.
Models are assigned one by one, as if all tensors passed through the server; neighbours on one machine then become a
segment, unless several of them would share one interpreter of Python. Does not know how figures were measured, how the
assignment is found (`partition`), or what is printed beside the file. Caller: `place`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from flowserve.cli.elsewhere.options import GPU
from flowserve.cli.elsewhere.step_figures import BatchTime, GraphFigures, MeasuredGraph, StepFigures
from flowserve.config.types import ModelConfig
from flowserve.elsewhere.actors import DEPTH
from flowserve.elsewhere.partition.costs import (
    AT_SERVER,
    SERVER,
    Assignment,
    Crossing,
    MachineKind,
    MachineLoad,
    PartitionTask,
    PlaceableModel,
    instances_needed,
    loads,
)
from flowserve.elsewhere.partition.groups import convex_groups
from flowserve.elsewhere.partition.search import partition
from flowserve.elsewhere.placement import COUNT_MAX, why_not_placed
from flowserve.errors import Invalid, Problem, Problems
from flowserve.graph.types import GRAPH, Edge, Graph

KIND_LABEL: Final = "kind"  # of machines, where there are several kinds that could run a model
ON_SERVER: Final = "server"
PYTHON: Final = "python"  # the backend of models that would share an interpreter
_NO_TIME: Final = 1e-9


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """The link between the server and another machine: the round-trip time `each_s` of a batch without its bytes, and
    `bytes_per_s`.
    """

    each_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ModelProposal:
    """Where one model runs. `where`: "server", or the kind of machine; `on_gpu`: on a GPU of it. `instances`: how many
    it needs there at the rate; `has`: how many it will have. `at_once`: how many batches those work on at a time; one
    travels while another is computed. `takes`: the time of a batch, with its round trip. `row_bytes`: in and out, of a
    row. `hops`, `crossing_bytes`: for a request, of a placed model.
    """

    model: str
    where: str
    on_gpu: bool
    instances: int
    has: int
    at_once: int
    takes: BatchTime
    row_bytes: float
    hops: float
    crossing_bytes: float
    why: str

    @property
    def is_placed(self) -> bool:
        return self.where != ON_SERVER


@dataclass(frozen=True, slots=True)
class GroupProposal:
    """Neighbours on one kind of machine. As a segment they save `saves_s` of a request. `count` processes have `cores`
    each. `is_segment`: whether they are one in the file.
    """

    models: tuple[str, ...]
    saves_s: float
    count: int
    cores: int
    is_segment: bool


@dataclass(frozen=True, slots=True)
class Proposal:
    """A placement at `rate` requests per second. `groups` are disjoint."""

    rate: float
    models: tuple[ModelProposal, ...]
    overloads: tuple[str, ...]
    groups: tuple[GroupProposal, ...]


def propose(
    subject: MeasuredGraph, figures: GraphFigures, kinds: Sequence[MachineKind], link: LinkTimes, rate: float
) -> Proposal:
    """The cheapest placement found at `rate` requests per second. `kinds[0]` is the server. Raises Problems if a model
    can run nowhere, Invalid if one needs more instances than a placement file may ask for.
    """
    models = tuple(_placeable(subject, figures, link, name, kinds) for name in figures.models)
    task = PartitionTask(models, tuple(kinds), tuple(_crossings(subject.graph, figures, link)), rate)
    return _Draft(subject, figures, link, task, partition(task)).proposal()


def _placeable(
    subject: MeasuredGraph, figures: GraphFigures, link: LinkTimes, name: str, kinds: Sequence[MachineKind]
) -> PlaceableModel:
    config, one = subject.configs[name], figures.models[name]
    batches = one.rows / one.batch_rows  # of a request, under load
    here_s, remote_s = (time.of(one.batch_rows) * batches for time in (one.here, one.compute))
    way_s = batches * link.each_s + _bytes_of(subject, figures, name) / link.bytes_per_s
    taken_s = max(remote_s, (remote_s + way_s) / DEPTH)
    carry_s = batches * link.each_s / 2
    on_gpu = needs_gpu(config)
    return PlaceableModel(name, here_s, remote_s, taken_s, carry_s, _allowed(config, one, kinds, on_gpu=on_gpu), on_gpu)


def _allowed(
    config: ModelConfig, figures: StepFigures, kinds: Sequence[MachineKind], *, on_gpu: bool
) -> frozenset[int]:
    """The kinds of machines that can run a model. Raises Problems if none can."""
    allowed = {number for number, kind in enumerate(kinds) if kind.gpus or not on_gpu}
    stays = _why_it_stays(config, figures)
    if stays:
        allowed &= {SERVER}
    if not allowed:
        text = stays or "neither this machine nor --machines has one"
        where = config.source.place("instance_group[0].kind")
        hint = "" if stays else f"name machines with a GPU, such as --machines {GPU}*1"
        raise Problems([Problem(f"model '{config.name}' needs a GPU: {text}", where, hint=hint)])
    return frozenset(allowed)


def _bytes_of(subject: MeasuredGraph, figures: GraphFigures, name: str) -> float:
    """The bytes of all inputs and outputs of a model, for a request."""
    nodes = {node.index for node in subject.graph.nodes if node.model.name == name}
    sides = figures.input_bytes, figures.output_bytes
    return sum(nbytes for side in sides for (node, _), nbytes in side.items() if node in nodes)


def _why_it_stays(config: ModelConfig, figures: StepFigures) -> str:
    what = ""
    if config.decoupled:
        what = "is decoupled"
    elif config.sequence is not None:
        what = "is one of sequences"
    elif figures.calls:
        what = "calls other models"
    unknown = f"model '{config.name}' {what}: what it costs on another machine is not measured"
    return why_not_placed(config) or (unknown if what else "")


def needs_gpu(config: ModelConfig) -> bool:
    """Whether the configuration asks for a GPU itself."""
    return any(group.kind == "KIND_GPU" for group in config.active_groups)


def _crossings(graph: Graph, figures: GraphFigures, link: LinkTimes, *, may_join: bool = False) -> Iterator[Crossing]:
    """For each node the messages in both directions, and the bytes of its inputs and outputs. `may_join`: models on one
    kind of machine pass tensors on without the server.
    """
    numbers = {name: number for number, name in enumerate(figures.models)}
    nodes = Counter(node.model.name for node in graph.nodes)

    def other_end(edge: Edge, end: int) -> int:
        is_passed_on = may_join and edge.derived < 0 and end != GRAPH
        return numbers[graph.nodes[end].model.name] if is_passed_on else AT_SERVER

    for node in graph.nodes:
        name = node.model.name
        message_s = link.each_s / 2 * figures.models[name].batches / nodes[name]
        read = [(edge.input, other_end(edge, edge.producer)) for edge in graph.edges if edge.consumer == node.index]
        made = [(edge.output, other_end(edge, edge.consumer)) for edge in graph.edges if edge.producer == node.index]
        for ends, nbytes in ((read, figures.input_bytes), (made, figures.output_bytes)):
            if ends:
                yield Crossing(numbers[name], frozenset(end for _, end in ends), message_s)
            for port in sorted({port for port, _ in ends}):
                others = frozenset(end for one, end in ends if one == port)
                seconds = nbytes.get((node.index, port), 0.0) / link.bytes_per_s
                yield Crossing(numbers[name], others, seconds)


@dataclass(frozen=True, slots=True)
class _Draft:
    """An assignment, from which its proposal is made."""

    subject: MeasuredGraph
    figures: GraphFigures
    link: LinkTimes
    task: PartitionTask
    assignment: Assignment

    def proposal(self) -> Proposal:
        models = tuple(self._model(number) for number in range(len(self.assignment)))
        for one in models:
            if one.is_placed and one.instances > COUNT_MAX:
                at = f"at {rate_text(self.task.rate)} requests/s"
                raise Invalid(
                    f"model '{one.model}' would need {one.instances} instances {at}; {COUNT_MAX} are the most"
                )
        overloads = tuple(self._overload_text(one) for one in loads(self.task, self.assignment) if one.overload)
        return Proposal(self.task.rate, models, overloads, tuple(self._groups(models)))

    def _model(self, number: int) -> ModelProposal:
        model, kind = self.task.models[number], self.assignment[number]
        one, config = self.figures.models[model.name], self.subject.configs[model.name]
        nbytes = _bytes_of(self.subject, self.figures, model.name)
        row_bytes = nbytes / max(one.rows, 1)
        needed = instances_needed(self.task, number, in_server=kind == SERVER)
        why = self._why(number)
        if kind == SERVER:
            has = sum(group.count * max(1, len(group.gpus)) for group in config.active_groups)
            return ModelProposal(
                model.name, ON_SERVER, model.on_gpu, needed, has, has, one.here, row_bytes, 0.0, 0.0, why
            )
        per_row_s = one.compute.row_s + row_bytes / self.link.bytes_per_s
        takes = BatchTime(one.compute.fixed_s + self.link.each_s, per_row_s)
        longer = takes.of(one.batch_rows) / max(one.compute.of(one.batch_rows), _NO_TIME)
        at_once = int(needed * min(DEPTH, longer))
        where = self.task.kinds[kind].name
        return ModelProposal(
            model.name, where, model.on_gpu, needed, needed, at_once, takes, row_bytes, one.batches, nbytes, why
        )

    def _why(self, number: int) -> str:
        model = self.task.models[number]
        if self.assignment[number] != SERVER:
            if SERVER not in model.allowed:
                return "it needs a GPU, which the server does not have"
            back = tuple(SERVER if i == number else kind for i, kind in enumerate(self.assignment))
            load = self._server_load(back, of_gpus=model.on_gpu)
            if load.overload:
                return f"with it the server would need {_use_text(load)}"
            return "a batch takes less time there, with its way there and back"
        if len(model.allowed) == 1:
            stays = _why_it_stays(self.subject.configs[model.name], self.figures.models[model.name])
            return stays or "no other machine is of a kind that it can run on"
        if model.carry_s >= model.server_s:
            return "the server would be as busy with sending its tensors away"
        if self._server_load(self.assignment, of_gpus=model.on_gpu).overload:
            return "the other machines have no room for it"
        way_ms = 1000 * sum(one.seconds for one in self.task.crossings if one.model == number)
        return f"the server has room, and its tensors would be {way_ms:.2f} ms on the way"

    def _server_load(self, assignment: Assignment, *, of_gpus: bool) -> MachineLoad:
        return next(one for one in loads(self.task, assignment) if one.kind == SERVER and one.of_gpus == of_gpus)

    def _overload_text(self, load: MachineLoad) -> str:
        if load.kind == SERVER:
            return f"the server would need {_use_text(load)}"
        name = self.task.kinds[load.kind].name
        return f"machines '{name}' have room for {load.most:g} instances, and {load.used:g} are needed"

    def _groups(self, proposed: Sequence[ModelProposal]) -> Iterator[GroupProposal]:
        """Neighbours that could run as one step."""
        graph, names = self.subject.graph, [one.name for one in self.task.models]
        places = [self.assignment[names.index(node.model.name)] for node in graph.nodes]
        edges, joinable = _joinable(graph)
        crossings = [*_crossings(graph, self.figures, self.link, may_join=True)]
        for group in convex_groups(places, edges, joinable):
            members = tuple(graph.nodes[index].model.name for index in group)
            together = frozenset(map(names.index, members))
            # With a machine for each placed model, all crossings take place; on one machine for the group, not those
            # between its models.
            saves_s = sum(one.seconds for one in crossings if one.model in together and one.others <= together)
            inside = [one for one in proposed if one.model in members]
            count = max(one.instances for one in inside)
            cores = ceil(sum(one.instances for one in inside) / count)
            interpreted = sum(self.subject.configs[name].backend == PYTHON for name in members)
            has_room = cores <= self.task.kinds[self.assignment[names.index(members[0])]].cores
            is_segment = interpreted < 2 and has_room and not any(one.on_gpu for one in inside)
            yield GroupProposal(members, saves_s, count, cores, is_segment)


def _joinable(graph: Graph) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """All pairs of neighbours, and those that could run as one step: of models with one node each, whose tensors are
    passed on as they are.
    """
    inner = [edge for edge in graph.edges if GRAPH not in (edge.producer, edge.consumer)]
    edges = {(edge.producer, edge.consumer) for edge in inner}
    changed = {(one.producer, one.consumer) for one in inner if one.derived >= 0 or one.conversion is not None}
    nodes = Counter(node.model.name for node in graph.nodes)
    once = {node.index for node in graph.nodes if nodes[node.model.name] == 1}
    return edges, {pair for pair in edges - changed if once.issuperset(pair)}


def _use_text(load: MachineLoad) -> str:
    return f"{load.used:.2f} {'GPUs' if load.of_gpus else 'cores'}, and {load.most:.2f} may be busy"


def rate_text(rate: float) -> str:
    """A number of requests per second, as it is shown."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def file_text(proposal: Proposal, title: str, kinds: Sequence[MachineKind]) -> str:
    """The placement file, with comments."""
    lines = [f"# {title}", '# With Ray, add its head node: cluster { address: "HOST:6379" }']
    elsewhere = kinds[1:]
    placed = {one.model: one for one in proposal.models if one.is_placed}
    segments = [group for group in proposal.groups if group.is_segment]
    in_segments = {name for group in segments for name in group.models}
    # A GPU decides itself; of several kinds of machines with cores, a label does.
    labels = {
        name: f' labels {{ key: "{KIND_LABEL}" value: "{one.where}" }}' if len(elsewhere) > 1 and not one.on_gpu else ""
        for name, one in placed.items()
    }
    for name, one in placed.items():
        if name not in in_segments:
            needs = _needs_text(one.instances, "GPU" if one.on_gpu else "CPU", 1, labels[name])
            lines += [f"# {name}: {one.why}.", f'place {{ model: "{name}" {needs} }}']
    for group in segments:
        lines += [f"# {name}: {placed[name].why}." for name in group.models]
        names = ", ".join(f'"{name}"' for name in group.models)
        needs = _needs_text(group.count, "CPU", group.cores, labels[group.models[0]])
        lines.append(f"# As one step, {_saves_text(group)}.")
        lines.append(f'segment {{ name: "{"-".join(group.models)}" models: [ {names} ] {needs} }}')
    if not placed:
        lines.append("# No model is placed: the server is the best place for all of them.")
    lines += [
        f"# neighbours on one machine: {', '.join(group.models)} (as a segment, {_saves_text(group)})"
        for group in proposal.groups
        if not group.is_segment
    ]
    return "\n".join([*lines, ""])


def _needs_text(count: int, resource: str, amount: int, labels: str) -> str:
    return f'count: {count} resources {{ key: "{resource}" value: {amount} }}{labels}'


def _saves_text(group: GroupProposal) -> str:
    return f"{1000 * group.saves_s:.2f} ms less of a request"
