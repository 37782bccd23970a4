"""Rules for ensembles before folding, one function per numbered rule; and the wiring of one ensemble that they read.

Decides which mistakes are reported, their text (Triton's, if it has one, because clients match on it), their place in
the user's file and a hint. Every rule always runs; a rule skips cases that another rule refuses.

The wiring has the steps, the tensors, the writer and the readers of each. Decides the model and version of each step,
when two ends of a tensor match, which steps lead to an output and which are on a cycle. A step with an unknown model
stays, with `model` None, so that other mistakes are still found.

Does not compile (`compile`, which also has the rules that need the folded graph). Callers: `compile`, `repository`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final

import networkx as nx

from flowserve.config.suggest import did_you_mean
from flowserve.config.types import LATEST, EnsembleStep, ModelConfig
from flowserve.errors import Place, Problem
from flowserve.graph.types import GRAPH, inside
from flowserve.values import TensorSpec, shape_text

# Wiring

AvailableModels = Mapping[str, Mapping[int, ModelConfig]]


@dataclass(frozen=True, slots=True)
class WiredStep:
    """A step and its model. `version` and `model` are None if the model or version is not available."""

    index: int
    written: EnsembleStep
    version: int | None
    model: ModelConfig | None


@dataclass(frozen=True, slots=True)
class End:
    """One end of a tensor.

    `step` is a step's index, or GRAPH for the ensemble itself; `port` the name of the input or output there.
    """

    step: int
    port: str


@dataclass(frozen=True, slots=True)
class Wiring:
    """`writers[T]` and `readers[T]` in the order of the file, the ensemble itself first among the writers and last
    among the readers.
    """

    config: ModelConfig
    available: AvailableModels
    failed: Mapping[str, str]
    steps: tuple[WiredStep, ...]
    writers: Mapping[str, list[End]] = field(default_factory=dict)
    readers: Mapping[str, list[End]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.config.name

    def tensors(self) -> Iterator[str]:
        """Every tensor once: the written ones first, then those that are only read."""
        yield from dict.fromkeys([*self.writers, *self.readers])

    def place(self, path: str) -> Place:
        return self.config.source.place(path)

    def place_of_reader(self, end: End) -> Place:
        if end.step == GRAPH:
            return self.place(f"output[{port_index(self.config.outputs, end.port)}]")
        return self.place(f"{self.steps[end.step].written.path}.input_map[{end.port}]")

    def place_of_writer(self, end: End) -> Place:
        if end.step == GRAPH:
            return self.place(f"input[{port_index(self.config.inputs, end.port)}]")
        return self.place(f"{self.steps[end.step].written.path}.output_map[{end.port}]")

    def step_graph(self) -> nx.DiGraph[int]:
        """Steps joined by tensors. An edge's attribute `tensor` is the first tensor that joins the two."""
        joined: nx.DiGraph[int] = nx.DiGraph()
        joined.add_nodes_from(step.index for step in self.steps)
        for tensor in self.tensors():
            for writer in self.writers.get(tensor, ()):
                for reader in self.readers.get(tensor, ()):
                    if GRAPH not in (writer.step, reader.step) and not joined.has_edge(writer.step, reader.step):
                        joined.add_edge(writer.step, reader.step, tensor=tensor)
        return joined


def port_index(specs: tuple[TensorSpec, ...], name: str) -> int:
    """The position of the port called `name`; raises ValueError if there is none."""
    return [spec.name for spec in specs].index(name)


def find_step_model(step: EnsembleStep, available: AvailableModels) -> tuple[int | None, ModelConfig | None]:
    """The version and configuration of a step's model, (None, None) if they are not available."""
    versions = available.get(step.model, {})
    version = max(versions, default=LATEST) if step.version == LATEST else step.version
    return (version, versions[version]) if version in versions else (None, None)


def wire(config: ModelConfig, available: AvailableModels, failed: Mapping[str, str]) -> Wiring:
    """Collect the writers and readers of every tensor of an ensemble."""
    steps = tuple(WiredStep(index, step, *find_step_model(step, available)) for index, step in enumerate(config.steps))
    writers: dict[str, list[End]] = {}
    readers: dict[str, list[End]] = {}
    for spec in config.inputs:
        writers.setdefault(spec.name, []).append(End(GRAPH, spec.name))
    for step in steps:
        for port, tensor in step.written.output_map.items():
            writers.setdefault(tensor, []).append(End(step.index, port))
        for port, tensor in step.written.input_map.items():
            readers.setdefault(tensor, []).append(End(step.index, port))
    for spec in config.outputs:
        readers.setdefault(spec.name, []).append(End(GRAPH, spec.name))
    return Wiring(config, available, failed, steps, writers, readers)


def ensembles_below(config: ModelConfig, available: AvailableModels) -> nx.DiGraph[str]:
    """The containment graph of all ensembles reachable from `config`.

    A node's attribute `config` is the ensemble's configuration; an edge's attribute `step` is the path of the first
    such step.
    """
    below: nx.DiGraph[str] = nx.DiGraph()
    below.add_node(config.name, config=config)
    waiting = [config]
    while waiting:
        outer = waiting.pop()
        for step in outer.steps:
            if step.model not in below:
                inner = find_step_model(step, available)[1]
                if inner is None or not inner.is_ensemble:
                    continue
                below.add_node(inner.name, config=inner)
                waiting.append(inner)
            if not below.has_edge(outer.name, step.model):
                below.add_edge(outer.name, step.model, step=step.path)
    return below


def containment_order(configs: Mapping[str, ModelConfig]) -> list[str]:
    """The names of all ensembles, each after those it contains; ties, and those on a cycle, by name."""
    contains: nx.DiGraph[str] = nx.DiGraph()
    contains.add_nodes_from(name for name, config in configs.items() if config.is_ensemble)
    contains.add_edges_from(
        (step.model, name) for name, config in configs.items() for step in config.steps if step.model in contains
    )
    groups = nx.condensation(contains)
    members = {group: sorted(groups.nodes[group]["members"]) for group in groups}
    order = nx.lexicographical_topological_sort(groups, key=lambda group: members[group])
    return [name for group in order for name in members[group]]


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of a tensor at one end: the input or output `spec` of the model or ensemble `owner`."""

    owner: ModelConfig
    spec: TensorSpec

    @property
    def batches(self) -> bool:
        return self.owner.max_batch_size > 0

    @property
    def full(self) -> tuple[int, ...]:
        """The full shape, with a leading -1 for the batch dimension if there is one."""
        return (-1, *self.spec.dims) if self.batches else self.spec.dims

    def __str__(self) -> str:
        return f"'{self.spec.name}' of '{self.owner.name}'"


def shapes_meet(a: Declaration, b: Declaration) -> bool:
    """Whether the full shapes of two ends can match (-1 matches anything), or the dims match and only one end has a
    batch dimension: a leading 1 is then added or removed.
    """
    return dims_meet(a.full, b.full) or (a.batches != b.batches and dims_meet(a.spec.dims, b.spec.dims))


def dims_meet(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) == len(b) and all(x == y or -1 in (x, y) for x, y in zip(a, b, strict=True))


def contradictions(
    w: Wiring, agree: Callable[[Declaration, Declaration], bool]
) -> Iterator[tuple[str, Declaration, Declaration, Place]]:
    """For each end of each tensor, the first earlier end that disagrees with it: readers are compared with the writer,
    and with each other.
    """
    for tensor in w.tensors():
        ends = [(_side(w, end, is_writer=True), w.place_of_writer(end)) for end in w.writers.get(tensor, ())[:1]]
        ends += [(_side(w, end, is_writer=False), w.place_of_reader(end)) for end in w.readers.get(tensor, ())]
        sides = [(side, place) for side, place in ends if side is not None]
        for later, (second, place) in enumerate(sides):
            first = next((side for side, _ in sides[:later] if not agree(side, second)), None)
            if first is not None:
                yield tensor, first, second, place


def _side(w: Wiring, end: End, *, is_writer: bool) -> Declaration | None:
    """The declaration of an end; of the ensemble's own inputs and outputs, as its steps see them."""
    if end.step == GRAPH:
        model, specs = w.config, tuple(map(inside, w.config.inputs if is_writer else w.config.outputs))
    else:
        step = w.steps[end.step]
        if step.model is None:
            return None
        model, specs = step.model, step.model.outputs if is_writer else step.model.inputs
    spec = next((spec for spec in specs if spec.name == end.port), None)
    return None if spec is None else Declaration(model, spec)


def inconsistent_shape(ensemble: str, tensor: str, first: Declaration, second: Declaration) -> str:
    """Triton's message for two ends with different shapes."""
    return (
        f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent shape: {shape_text(first.full)} is inferred"
        f" from model {first.owner.name} while {shape_text(second.full)} is inferred from model {second.owner.name}"
    )


def circles(joined: nx.DiGraph[Any]) -> list[list[Any]]:
    """The groups of nodes of a directed graph that are on a common cycle, each sorted."""
    groups = sorted(map(sorted, nx.strongly_connected_components(joined)))
    return [group for group in groups if len(group) > 1 or joined.has_edge(group[0], group[0])]


def known_steps(w: Wiring) -> Iterator[tuple[WiredStep, ModelConfig]]:
    for step in w.steps:
        if step.model is not None:
            yield step, step.model


def first_step_per_model(w: Wiring) -> Iterable[tuple[str, WiredStep]]:
    """Each model's name with the first step that names it."""
    return {step.written.model: step for step in reversed(w.steps)}.items()


def steps_that_reach_an_output(w: Wiring) -> set[int]:
    joined = w.step_graph()
    last = {end.step for spec in w.config.outputs for end in w.writers.get(spec.name, ()) if end.step != GRAPH}
    return last.union(*(nx.ancestors(joined, step) for step in last))


def feeds_required_input(w: Wiring, ensemble: ModelConfig, tensor: str) -> bool:
    """Whether an optional input of a nested ensemble feeds a required input of a model."""
    inner = wire(ensemble, w.available, {})
    seen = {(ensemble.name, tensor)}
    waiting = [(inner, tensor)]
    while waiting:
        at, name = waiting.pop()
        for end in at.readers.get(name, ()):
            model = at.steps[end.step].model if end.step != GRAPH else None
            spec = next((spec for spec in model.inputs if spec.name == end.port), None) if model else None
            if model is None or spec is None:
                continue
            if not spec.optional:
                return True
            if model.is_ensemble and (model.name, end.port) not in seen:
                seen.add((model.name, end.port))
                waiting.append((wire(model, w.available, {}), end.port))
    return False


def circles_below(w: Wiring) -> dict[str, str]:
    """Ensembles below this one that are invalid because of a cycle without this one, with the cycle's text."""
    below = ensembles_below(w.config, w.available)
    found: dict[str, str] = {}
    for members in circles(below):
        if w.name in members:
            continue
        path = [a for a, _ in nx.find_cycle(below.subgraph(members), members[0])]
        text = f"circular dependency between ensembles: {' -> '.join([*path, path[0]])}"
        found.update(dict.fromkeys([*members, *sorted(nx.ancestors(below, members[0]) - {w.name})], text))
    return found


# Rules

EnsembleRule = Callable[[Wiring], Iterator[Problem]]


def ensemble_problems(wiring: Wiring) -> list[Problem]:
    """Every violation of every rule, in the order of the file."""
    found = [replace(problem, rule=number) for number, rule in RULES.items() for problem in rule(wiring)]
    return sorted(found, key=lambda problem: problem.place or Place(""))


# Models and versions


def _no_ensemble_contains_itself(w: Wiring) -> Iterator[Problem]:
    below = ensembles_below(w.config, w.available)
    for inner in below.successors(w.name):
        if nx.has_path(below, inner, w.name):
            circle = [w.name, *nx.shortest_path(below, inner, w.name)]
            yield Problem(
                f"circular dependency between ensembles: {' -> '.join(circle)}",
                w.place(below.edges[w.name, inner]["step"]),
                hint="an ensemble cannot contain itself, not even through others",
            )


def _every_model_exists(w: Wiring) -> Iterator[Problem]:
    for name, step in first_step_per_model(w):
        if name in w.available or name in w.failed or name == w.name:
            continue
        yield Problem(
            f"ensemble {w.name} contains models that are not available or ambiguous: {name}",
            w.place(f"{step.written.path}.model_name"),
            hint=did_you_mean(name, [*w.available, *w.failed]),
        )


def _every_model_is_valid(w: Wiring) -> Iterator[Problem]:
    below = ensembles_below(w.config, w.available)
    circles = circles_below(w)
    for name, step in first_step_per_model(w):
        if name in below and nx.has_path(below, name, w.name):
            continue
        reason = w.failed.get(name) or circles.get(name) or _first_problem_inside(w, step)
        if reason:
            yield _depends_on_failed(w, step, reason)


def _depends_on_failed(w: Wiring, step: WiredStep, reason: str) -> Problem:
    name = step.written.model
    return Problem(
        f"ensemble '{w.name}' depends on '{name}' which is not valid. Model '{name}' failed with error: {reason}",
        w.place(f"{step.written.path}.model_name"),
        depends_on=name,
    )


def _no_model_is_known_to_have_failed(w: Wiring) -> Iterator[Problem]:
    """Rule G3 for a nested ensemble, without checking the inner ensemble again."""
    for name, step in first_step_per_model(w):
        if name in w.failed:
            yield _depends_on_failed(w, step, w.failed[name])


def _every_version_exists(w: Wiring) -> Iterator[Problem]:
    for step in w.steps:
        name, wanted = step.written.model, step.written.version
        if step.version is not None or name not in w.available or name == w.name:
            continue
        versions = sorted(w.available[name])
        place = w.place(f"{step.written.path}.model_version")
        if not versions:
            yield Problem(f"ensemble '{w.name}' depends on '{name}' which has no loaded version", place)
            continue
        hint = f"'{name}' has version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"
        if wanted == 0:
            hint = "a step that does not say model_version asks for version 0; write `model_version: -1` for the latest"
        elif wanted < LATEST:
            hint += "; -1 means the latest"
        elif not (policy := w.available[name][versions[-1]].version_policy).all and wanted not in policy.specific:
            hint += (
                f"; if {name}/{wanted} is there, `version_policy {{ all {{ }} }}` in its configuration serves it too"
            )
        yield Problem(
            f"ensemble '{w.name}' depends on '{name}' whose required version {wanted} is not loaded.", place, hint=hint
        )


# Mappings


def _every_mapped_input_exists(w: Wiring) -> Iterator[Problem]:
    for step, model in known_steps(w):
        names = [spec.name for spec in model.inputs]
        for port, tensor in step.written.input_map.items():
            if port not in names:
                text = f"mapping to non-existing input {port} in model {model.name}"
                place = w.place_of_reader(End(step.index, port))
                hint = _port_hint(port, tensor, names, "inputs", is_joined=tensor in w.writers)
                yield Problem(f"in ensemble {w.name}, ensemble tensor {tensor} is {text}", place, hint=hint)


def _every_mapped_output_exists(w: Wiring) -> Iterator[Problem]:
    for step, model in known_steps(w):
        names = [spec.name for spec in model.outputs]
        for port, tensor in step.written.output_map.items():
            if port not in names:
                text = f"mapped from non-existing output {port} in model {model.name}"
                place = w.place_of_writer(End(step.index, port))
                hint = _port_hint(port, tensor, names, "outputs", is_joined=tensor in w.readers)
                yield Problem(f"in ensemble {w.name}, ensemble tensor {tensor} is {text}", place, hint=hint)


def _port_hint(port: str, tensor: str, names: list[str], what: str, *, is_joined: bool) -> str:
    """The hint for an unknown port. Key and value of the mapping were swapped if the model has a port called as the
    ensemble's tensor, unless the tensor has its other end: then the two may have the same name.
    """
    if tensor in names and not is_joined:
        return f'the key is what the model calls it: key: "{tensor}" value: "{port}"'
    listed = f"its {what} are {', '.join(map(repr, names))}" if names else ""
    return did_you_mean(port, names) or listed


def _every_required_input_is_mapped(w: Wiring) -> Iterator[Problem]:
    for step, model in known_steps(w):
        unmapped = [spec for spec in model.inputs if spec.name not in step.written.input_map]
        for spec in unmapped:
            if spec.optional and not feeds_required_input(w, model, spec.name):
                continue
            why = "it is optional there, but a step inside that ensemble needs it" if spec.optional else ""
            strays = [port for port in step.written.input_map if port not in {known.name for known in model.inputs}]
            close = difflib.get_close_matches(spec.name, strays, n=1)
            yield Problem(
                f"in ensemble {w.name}, input {spec.name} in model {model.name} is not mapped to any ensemble tensors",
                w.place(f"{step.written.path}.input_map"),
                hint=why or (f"is '{close[0]}' meant to be it?" if close else ""),
            )


# Tensors and their ends


def _every_tensor_has_one_writer(w: Wiring) -> Iterator[Problem]:
    for tensor, (first, *others) in w.writers.items():
        for writer in others:
            by = (
                "is an input of the ensemble"
                if first.step == GRAPH
                else f"is already written by {_step_text(w, first.step)}"
            )
            where = f"step {writer.step}" if writer.step != GRAPH else "input"
            yield Problem(
                f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{w.name}' {where}:"
                f" it {by}",
                w.place_of_writer(writer),
            )


def _every_input_is_read(w: Wiring) -> Iterator[Problem]:
    for index, spec in enumerate(w.config.inputs):
        if spec.name not in w.readers:
            orphans = [tensor for tensor in w.readers if tensor not in w.writers]
            yield Problem(
                f"ensemble input '{spec.name}' for ensemble '{w.name}' is not used",
                w.place(f"input[{index}]"),
                hint=did_you_mean(spec.name, orphans),
            )


def _every_tensor_that_is_read_is_written(w: Wiring) -> Iterator[Problem]:
    for tensor, readers in w.readers.items():
        if tensor in w.writers:
            continue
        spare = [name for name in w.writers if name not in w.readers]
        hint = did_you_mean(tensor, spare) or did_you_mean(tensor, w.writers)
        yield Problem(_not_written(w, tensor, readers), w.place_of_reader(readers[0]), hint=hint)


def _no_cycle(w: Wiring) -> Iterator[Problem]:
    joined = w.step_graph()
    for members in circles(joined):
        path = nx.find_cycle(joined.subgraph(members), members[0])
        texts = [f"{_step_text(w, a)} writes '{joined.edges[a, b]['tensor']}'" for a, b in path]
        tensor = joined.edges[path[-1]]["tensor"]
        reader = next(end for end in w.readers[tensor] if end.step == path[0][0])
        yield Problem(
            f"{_unreachable(w, tensor, {reader.step})}: cycle: {', '.join(texts)}, which"
            f" {_step_text(w, path[0][0])} reads",
            w.place_of_reader(reader),
            hint="a graph runs forward only; break the circle at one of these tensors",
        )


def _every_tensor_is_read(w: Wiring) -> Iterator[Problem]:
    alive = steps_that_reach_an_output(w)
    for tensor, writers in w.writers.items():
        if tensor in w.readers or writers[0].step == GRAPH or writers[0].step not in alive:
            continue
        wanted = [name for name in w.readers if name not in w.writers]
        yield Problem(
            f"ensemble tensor '{tensor}' is unused in ensemble '{w.name}'",
            w.place_of_writer(writers[0]),
            hint=did_you_mean(tensor, wanted) or "it has no reader; leave it out of the output_map",
        )


def _every_step_leads_to_an_output(w: Wiring) -> Iterator[Problem]:
    spared = steps_that_reach_an_output(w).union(*circles(w.step_graph()))
    for step in w.steps:
        if step.index in spared or not step.written.output_map:
            continue
        tensor = next(iter(step.written.output_map.values()))
        wanted = [name for name in w.readers if name not in w.writers]
        yield Problem(
            f"ensemble tensor '{tensor}' is unused in ensemble '{w.name}': {_step_text(w, step.index)} leads to no"
            " output of the ensemble",
            w.place(step.written.path),
            hint=did_you_mean(tensor, wanted),
        )


# Declarations at the two ends of a tensor


def _data_types_agree(w: Wiring) -> Iterator[Problem]:
    for tensor, first, second, place in contradictions(w, lambda a, b: a.spec.dtype is b.spec.dtype):
        yield Problem(
            f"in ensemble {w.name}, ensemble tensor {tensor}: inconsistent data type: {first.spec.dtype.config_name}"
            " is inferred from model"
            f" {first.owner.name} while {second.spec.dtype.config_name} is inferred from model {second.owner.name}",
            place,
            hint=f"{first} meets {second} here",
        )


def _shapes_agree(w: Wiring) -> Iterator[Problem]:
    for tensor, first, second, place in contradictions(w, shapes_meet):
        hint = _shape_hint(first, second, w.config)
        yield Problem(inconsistent_shape(w.name, tensor, first, second), place, hint=hint)


def _batch_sizes_fit(w: Wiring) -> Iterator[Problem]:
    for step, model in known_steps(w):
        if 0 < model.max_batch_size < w.config.max_batch_size:
            yield Problem(
                f"ensemble {w.name} allows maximum batch size {w.config.max_batch_size}, but it contains model"
                f" {model.name}"
                f" which only allows maximum batch size to be {model.max_batch_size}",
                w.place("max_batch_size"),
                hint=f"lower it to {model.max_batch_size}, or raise it in '{model.name}' (step {step.index})",
            )


def _first_problem_inside(w: Wiring, step: WiredStep) -> str:
    """The first problem of a nested ensemble, or of one inside it; "" if all are well formed.

    Cycles are checked once: if there is none below the outermost, there is none below the others (G1).
    """
    if step.model is None or not step.model.is_ensemble:
        return ""
    below = ensembles_below(step.model, w.available)
    if not nx.is_directed_acyclic_graph(below):
        return ""
    rules = {**RULES, "G3": _no_model_is_known_to_have_failed}
    del rules["G1"]
    for name in reversed(list(nx.lexicographical_topological_sort(below))):
        inside = wire(below.nodes[name]["config"], w.available, w.failed)
        for number, rule in rules.items():
            for problem in rule(inside):
                return str(replace(problem, rule=number))
    return ""


# Texts


def _step_text(w: Wiring, index: int) -> str:
    return f"step {index} (model '{w.steps[index].written.model}')"


def _not_written(w: Wiring, tensor: str, readers: list[End]) -> str:
    if readers[0].step == GRAPH:
        return f"ensemble output '{tensor}' for ensemble '{w.name}' is not used: no step writes it"
    by = f"no step writes '{tensor}', which {_step_text(w, readers[0].step)} reads as '{readers[0].port}'"
    if readers[-1].step == GRAPH:
        return f"output '{tensor}' for ensemble '{w.name}' is not written: {by}"
    return f"{_unreachable(w, tensor, {end.step for end in readers})}: {by}"


def _unreachable(w: Wiring, tensor: str, readers: set[int]) -> str:
    """Triton's text for a tensor that never gets a value; it names an output that depends on it, if there is one."""
    joined = w.step_graph()
    waiting = readers.union(*(nx.descendants(joined, step) for step in readers))
    for spec in w.config.outputs:
        if any(end.step in waiting for end in w.writers.get(spec.name, ())):
            return (
                f"output '{spec.name}' for ensemble '{w.name}' is not written:"
                f" at least one of its depending tensors, '{tensor}', is not connected"
            )
    return f"ensemble tensor '{tensor}' is unused in ensemble '{w.name}'"


def _shape_hint(first: Declaration, second: Declaration, ensemble: ModelConfig) -> str:
    """The hint for two shapes that do not match: the change that was probably intended, else both ends."""
    both = f"{first} meets {second} here"
    for one, other in ((first, second), (second, first)):
        dims = one.spec.dims
        if one.batches and other.batches and dims[:1] == (-1,) and dims_meet(dims[1:], other.spec.dims):
            return f"{both}; dims leave out the batch dimension, and those of {one} begin with it?"
    own, dims = first.spec.dims, second.spec.dims
    if -1 in (*own, *dims) or first.batches != second.batches or prod(own) != prod(dims):
        return both
    inner = dims if second.spec.reshape is None else second.spec.reshape
    outside, within = (dims, own) if second.owner is ensemble else (own, inner)
    wanted, shape = (", ".join(map(str, sizes)) for sizes in (outside, within))
    return f"{both}; they hold equally many elements: dims: [ {wanted} ] reshape {{ shape: [ {shape} ] }} for {second}"


RULES: Final[Mapping[str, EnsembleRule]] = {
    "G1": _no_ensemble_contains_itself,
    "G2": _every_model_exists,
    "G3": _every_model_is_valid,
    "G4": _every_version_exists,
    "G5": _every_mapped_input_exists,
    "G6": _every_mapped_output_exists,
    "G7": _every_required_input_is_mapped,
    "G8": _every_tensor_has_one_writer,
    "G9": _every_input_is_read,
    "G10": _every_tensor_that_is_read_is_written,
    "G11": _no_cycle,
    "G12": _every_tensor_is_read,
    "G13": _every_step_leads_to_an_output,
    "G14": _data_types_agree,
    "G15": _shapes_agree,
    "G17": _batch_sizes_fit,
}
