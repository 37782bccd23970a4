"""Rules for ensembles before folding, one function per numbered rule.

Decides which mistakes are reported, their text (Triton's, if it has one, because clients match on it), their place in
the user's file and a hint. Every rule always runs; a rule skips cases that another rule refuses.

Does not compile (`compile`, which also has the rules that need the folded graph). Callers: `compile`, `repository`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Final

import networkx as nx

from flowserve.config.suggest import did_you_mean
from flowserve.config.types import LATEST, ModelConfig
from flowserve.errors import Place, Problem
from flowserve.graph.spaces import Arrangement, arrange
from flowserve.graph.types import GRAPH, inside
from flowserve.graph.wiring import (
    Declaration,
    End,
    WiredStep,
    Wiring,
    circles,
    circles_below,
    dims_meet,
    ensembles_below,
    feeds_required_input,
    first_step_per_model,
    known_steps,
    shapes_meet,
    steps_that_reach_an_output,
    wire,
)
from flowserve.values import shape_text

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
            hint=did_you_mean(name, [one for one in (*w.available, *w.failed) if one != w.name]),
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
        if w.has_spaces and GRAPH not in (first.step, *(end.step for end in others)):
            continue  # rule G31
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
        where = "of `fill`" if writers[0].field else "of the output_map"
        yield Problem(
            f"ensemble tensor '{tensor}' is unused in ensemble '{w.name}'",
            w.place_of_writer(writers[0]),
            hint=did_you_mean(tensor, wanted) or f"it has no reader; leave it out {where}",
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


def contradictions(
    w: Wiring, agree: Callable[[Declaration, Declaration], bool]
) -> Iterator[tuple[str, Declaration, Declaration, Place]]:
    """For each end of each tensor, the first earlier end that disagrees with it: the other writers and the readers are
    compared with the first writer, and with each other. All are declared as where the tensor is written.
    """
    made = arrange(w)
    for tensor in w.tensors() if made.is_sound else ():
        writers = w.writers.get(tensor, ())[: None if w.has_spaces else 1]
        ends = [(_side(w, made, tensor, end, is_writer=True), w.place_of_writer(end)) for end in writers]
        ends += [
            (_side(w, made, tensor, end, is_writer=False), w.place_of_reader(end)) for end in w.readers.get(tensor, ())
        ]
        sides = [(side, place) for side, place in ends if side is not None]
        for later, (second, place) in enumerate(sides):
            first = next((side for side, _ in sides[:later] if not agree(side, second)), None)
            if first is not None:
                yield tensor, first, second, place


def _side(w: Wiring, made: Arrangement, tensor: str, end: End, *, is_writer: bool) -> Declaration | None:
    """The declaration of an end; of the ensemble's own inputs and outputs, as its steps see them."""
    if end.step == GRAPH:
        model, specs = w.config, tuple(map(inside, w.config.inputs if is_writer else w.config.outputs))
    else:
        step = w.steps[end.step]
        if step.model is None:
            return None
        model, specs = step.model, step.model.outputs if is_writer else step.model.inputs
    spec = next((spec for spec in specs if spec.name == end.port), None)
    if spec is None or end.field:
        return None
    home, space = made.homes.get(tensor, 0), made.of_step.get(end.step, 0)
    has_rows = True if max(home, space) and (made.has_rows(w, home) or made.has_rows(w, space)) else None
    if is_writer or not (home or space):
        return Declaration(model, spec, has_rows)
    common = made.common(home, space)
    dims = spec.dims
    for one in made.path(home)[len(made.path(common)) :]:
        if made.spaces[one].each is not None:  # gathered outside: a dimension of items more
            dims = dims[1:]
    for one in made.path(space)[len(made.path(common)) :]:
        if (each := made.spaces[one].each) is not None and tensor in each.tensors:
            dims = (-1, *dims)
    return Declaration(model, replace(spec, dims=dims), has_rows)


def _data_types_agree(w: Wiring) -> Iterator[Problem]:
    for tensor, first, second, place in contradictions(w, lambda a, b: a.spec.dtype is b.spec.dtype):
        yield Problem(
            f"in ensemble {w.name}, ensemble tensor {tensor}: inconsistent data type: {first.spec.dtype.config_name}"
            " is inferred from model"
            f" {first.owner.name} while {second.spec.dtype.config_name} is inferred from model {second.owner.name}",
            place,
            hint=f"{first} meets {second} here; {CONVERT}",
        )


def _shapes_agree(w: Wiring) -> Iterator[Problem]:
    for tensor, first, second, place in contradictions(w, shapes_meet):
        hint = _shape_hint(first, second, w.config)
        yield Problem(inconsistent_shape(w.name, tensor, first, second), place, hint=hint)


def _batch_sizes_fit(w: Wiring) -> Iterator[Problem]:
    made = arrange(w)
    for step, model in known_steps(w):
        if made.of_step.get(step.index, 0):
            continue  # its rows are divided into parts
        if 0 < model.max_batch_size < w.config.max_batch_size:
            yield Problem(
                f"ensemble {w.name} allows maximum batch size {w.config.max_batch_size}, but it contains model"
                f" {model.name}"
                f" which only allows maximum batch size to be {model.max_batch_size}",
                w.place("max_batch_size"),
                hint=f"lower it to {model.max_batch_size}, or raise it in '{model.name}' (step {step.index})",
            )


def _of_spaces(number: str) -> EnsembleRule:
    """The violations of one of the rules that `spaces` checks."""

    def rule(w: Wiring) -> Iterator[Problem]:
        return (problem for problem in arrange(w).problems if problem.rule == number)

    return rule


def _sequences_have_all_their_requests(w: Wiring) -> Iterator[Problem]:
    made = arrange(w)
    for step, model in known_steps(w):
        space = made.of_step.get(step.index, 0)
        if space and model.sequence is not None:
            text = f"{_step_text(w, step.index)} is a sequence model and runs only for `{made.spaces[space]}`"
            hint = "a sequence would miss requests, its first or last among them; let the model decide"
            yield Problem(f"in ensemble {w.name}, {text}", w.place(step.written.path), hint=hint)


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


def inconsistent_shape(ensemble: str, tensor: str, first: Declaration, second: Declaration) -> str:
    """Triton's message for two ends with different shapes."""
    return (
        f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent shape: {shape_text(first.full)} is inferred"
        f" from model {first.owner.name} while {shape_text(second.full)} is inferred from model {second.owner.name}"
    )


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


CONVERT: Final = "change one of the two, or put a step between them that converts"


def _shape_hint(first: Declaration, second: Declaration, ensemble: ModelConfig) -> str:
    """The hint for two shapes that do not match: the change that was probably intended, else both ends."""
    both = f"{first} meets {second} here"
    for one, other in ((first, second), (second, first)):
        dims = one.spec.dims
        if one.batches and other.batches and dims[:1] == (-1,) and dims_meet(dims[1:], other.spec.dims):
            return f"{both}; dims leave out the batch dimension, and those of {one} begin with it?"
    own, dims = first.spec.dims, second.spec.dims
    if -1 in (*own, *dims) or first.batches != second.batches or prod(own) != prod(dims):
        return f"{both}; {CONVERT}"
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
    "G30": _of_spaces("G30"),
    "G31": _of_spaces("G31"),
    "G34": _sequences_have_all_their_requests,
    "G35": _of_spaces("G35"),
    "G36": _of_spaces("G36"),
}
