"""A graph as somebody wires it in Python: parts called on tensors, or joined by the names of tensors.

Decided here: what a call means, how its tensors are named, and where each piece was written: the line of Python outside
this package. What comes out is the configuration that a file would hold, with the place of every field, so that the
rules for files judge it with the same words. A mistake in the wiring is noted, not raised: all are told together.

Nothing here reads or writes files, nor knows what a part computes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from flowserve.config.types import LATEST, SourceMap
from flowserve.errors import FlowserveError, Place, Problem, Problems
from flowserve.graph.notation import input_json, output_json
from flowserve.graph.notation import tensor as parse_tensor
from flowserve.graph.types import DEPTH_LIMIT, GRAPH
from flowserve.values import TensorSpec

_OURS: Final = ("flowserve.graph.", "flowserve.authoring.")
# What an output is declared as whose tensor nobody writes: the rule that says so is the mistake to tell.
_UNKNOWN: Final = "FP32[-1]"
T = TypeVar("T")


def caller() -> Place:
    """The line of Python that called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    positions = list(frame.f_code.co_positions())
    line, _, column, _ = positions[frame.f_lasti // 2]
    return Place(_shown(frame.f_code.co_filename), line or frame.f_lineno, (column or 0) + 1)


def _shown(file: str) -> str:
    path, here = Path(file), Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.name


def wanted(value: T, kind: Any, what: str, hint: str = "") -> T:
    """`value`, which has to be of that kind of thing. Raises Problems: nothing could be wired with another."""
    if isinstance(value, kind):
        return value
    raise Problems([Problem(f"{what}, and not {type(value).__name__}", caller(), "B1", hint)])


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of a graph: what a part's output, or an input of the graph, will hold. It is wired, never computed."""

    graph: Sketch
    call: int  # GRAPH for an input of the graph
    port: str

    def __repr__(self) -> str:
        return f"<tensor {self.graph.name_of(self)!r} of graph {self.graph.name!r}>"


class Outputs:
    """What a call gives: its tensors by name (`made["SCORES"]`, `made.SCORES`) or in order (`a, b = part(x)`).

    One that has a single tensor can be used as that tensor.
    """

    __slots__ = ("_call", "_graph", "_part")

    def __init__(self, graph: Sketch, part: Part, call: int) -> None:
        self._graph = graph
        self._part = part
        self._call = call

    def __getitem__(self, name: str) -> Tensor:
        """Any name will do; one that the part does not have is told with the other mistakes."""
        return Tensor(self._graph, self._call, name)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):  # what Python and notebooks ask of anything
            raise AttributeError(name)
        return self[name]

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self[name] for name in self._part.output_names])

    def __len__(self) -> int:
        return len(self._part.output_names)

    def __repr__(self) -> str:
        return f"<outputs {', '.join(self._part.output_names)} of {self._part.name!r}>"


class Part(ABC):
    """What can be a step of a graph: a model, or a graph."""

    name: str
    place: Place

    @property
    def sketch(self) -> Sketch | None:
        """What it is made of, where that is parts again."""
        return None

    @property
    @abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    @abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    @abstractmethod
    def max_batch_size(self) -> int:
        """Rows it takes at once; 0: its tensors have no batch dimension."""

    # What an output of a graph is declared as its parts say, and theirs are graphs again: whoever wants to know one
    # thing asks for that alone, or the questions double with each graph that lies in another.

    @property
    def output_names(self) -> list[str]:
        """Those of `outputs`."""
        sketch = self.sketch
        return [one.name for one in (self.outputs if sketch is None else sketch.wanted)]

    def output_spec(self, name: str) -> TensorSpec:
        """The one of `outputs` that is called so."""
        sketch = self.sketch
        if sketch is None:
            return next(spec for spec in self.outputs if spec.name == name)
        return sketch.output_spec(next(one for one in sketch.wanted if one.name == name))

    def __call__(self, *tensors: Tensor | Outputs, **named: Tensor | Outputs) -> Outputs:
        """Make this a step of the tensors' graph. Tensors are the part's inputs in order, or by name."""
        given = [*tensors, *named.values()]
        anything: list[object] = [*given]
        strange = next((each for each in anything if not isinstance(each, Tensor | Outputs)), None)
        if not given or strange is not None:
            found = f"on {type(strange).__name__}" if given else "without any"
            hint = "a model's function computes: model.function(array)" if given else ""
            raise Problems(
                [Problem(f"'{self.name}' is called on tensors of a graph, not {found}", caller(), "B1", hint)]
            )
        first = given[0]
        graph = first.graph if isinstance(first, Tensor) else first._graph
        return graph.call(self, tensors, named)


class Declared(Part):
    """A part whose configuration is in Python. `folder` is where it was loaded from, None where it was not."""

    folder: Path | None = None

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The configuration as JSON spells it."""

    @abstractmethod
    def source(self) -> SourceMap:
        """Where each field of the configuration was written."""


@dataclass(slots=True, eq=False)
class Call:
    """One step. An input is a tensor, or the name of one; `named` are the outputs whose tensors were given names."""

    part: Part
    inputs: dict[str, Tensor | str]
    named: dict[str, str]
    place: Place
    version: int = LATEST


@dataclass(slots=True, eq=False)
class Wanted:
    """An output of the graph. `tensor` None: whichever is called `name`. `spec` None: as its writer says."""

    name: str
    tensor: Tensor | None
    spec: TensorSpec | None
    place: Place


@dataclass(slots=True, eq=False)
class Sketch:
    """The steps, inputs and outputs of one graph while it is written. `problems` are the mistakes noted so far."""

    name: str
    place: Place
    max_batch_size: int | None = None
    calls: list[Call] = field(default_factory=list)
    given: dict[str, tuple[TensorSpec, Place]] = field(default_factory=dict)
    wanted: list[Wanted] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    # Fields of the configuration that are no wiring; they are written as they are.
    options: dict[str, Any] = field(default_factory=dict)
    # An output was an input as it is: whatever else is missing then, that is what to mend first.
    hands_on_an_input: bool = False
    depth: int = 1  # of graphs in graphs, this one included

    # Writing it

    def add_input(self, name: str, text: str) -> Tensor:
        self._refuse_second(wanted(name, str, "the name of an input is a text"), "input", name in self.given)
        self.given[name] = (self._spec(name, text), caller())
        return Tensor(self, GRAPH, name)

    def add_output(self, name: str, tensor: Tensor | Outputs | None, text: str) -> None:
        wanted(name, str, "the name of an output is a text")
        self._refuse_second(name, "output", any(other.name == name for other in self.wanted))
        one = None if tensor is None else self._one(tensor)
        if one is not None and one.call == GRAPH:
            self._problem(f"input '{one.port}' cannot be output as it is; a step has to write what a graph answers")
            self.hands_on_an_input = True
            return
        if one is not None:
            self._give_name(one, name)
        self.wanted.append(Wanted(name, one, self._spec(name, text, is_output=True) if text else None, caller()))

    def add_step(self, part: Part, inputs: Mapping[str, Tensor | Outputs | str], outputs: Mapping[str, str]) -> None:
        wanted(part, Part, "a step is of a model or a graph", "@flowserve.model makes one of a function")
        wanted(inputs, Mapping, "the inputs of a step are a dict")
        wanted(outputs, Mapping, "the outputs of a step are a dict")
        given = {port: one if isinstance(one, str) else self._one(one) for port, one in inputs.items()}
        named = {port: wanted(one, str, "the name of a tensor is a text") for port, one in outputs.items()}
        self._add(Call(part, given, named, caller()))

    def call(self, part: Part, tensors: tuple[Tensor | Outputs, ...], named: Mapping[str, Tensor | Outputs]) -> Outputs:
        names = [spec.name for spec in part.inputs]
        if len(tensors) > len(names):
            self._problem(
                f"'{part.name}' has {len(names)} inputs ({', '.join(names)}), and is called on {len(tensors)}"
            )
        inputs = {name: self._one(tensor) for name, tensor in zip(names, tensors, strict=False)}
        for name, tensor in named.items():
            if name in inputs:
                self._problem(f"input '{name}' of '{part.name}' is given twice")
            inputs[name] = self._one(tensor)
        self._add(Call(part, {**inputs}, {}, caller()))
        return Outputs(self, part, len(self.calls) - 1)

    def _add(self, call: Call) -> None:
        """Raises Problems where the part contains this graph, since nobody could say any more what either of them is,
        and where they lie deeper in each other than anybody could look into.
        """
        inside = [call.part.sketch]
        seen: set[int] = set()
        while inside:
            sketch = inside.pop()
            if sketch is self:
                text = f"graph '{self.name}' cannot contain itself, not even through others"
                raise Problems([Problem(text, call.place, "B2")])
            if sketch is not None and id(sketch) not in seen:
                seen.add(id(sketch))
                inside += [one.part.sketch for one in sketch.calls]
        within = call.part.sketch
        depth = 1 + within.depth if within is not None else 1
        if depth > DEPTH_LIMIT:
            text = f"graph '{self.name}' nests graphs {depth} deep; at most {DEPTH_LIMIT} are allowed"
            raise Problems([Problem(text, call.place, "G19")])
        self.depth = max(self.depth, depth)
        self.calls.append(call)

    def _one(self, tensor: Tensor | Outputs) -> Tensor:
        """The tensor that is meant."""
        if isinstance(tensor, Outputs):
            names = tensor._part.output_names
            if len(names) != 1:
                self._problem(f"'{tensor._part.name}' has {len(names)} outputs; say which: {', '.join(names)}")
            tensor = tensor[names[0] if names else "?"]
        if wanted(tensor, Tensor, "what is read is a tensor of the graph").graph is not self:
            self._problem(
                f"tensor '{tensor.graph.name_of(tensor)}' is of graph '{tensor.graph.name}', not of '{self.name}'",
                hint="call that graph on tensors of this one, and use what it gives",
            )
        return tensor

    def _give_name(self, tensor: Tensor, name: str) -> None:
        named = self.calls[tensor.call].named if tensor.graph is self else {}
        if named.setdefault(tensor.port, name) != name:
            self._problem(
                f"a tensor has one name: output '{name}' is '{named[tensor.port]}' already",
                hint="a step that copies it can write the other",
            )

    def _spec(self, name: str, text: str, *, is_output: bool = False) -> TensorSpec:
        try:
            spec = parse_tensor(name, text)
        except FlowserveError as error:
            self._problem(str(error))
            return parse_tensor(name, _UNKNOWN)
        if spec.ragged:
            self._problem(f"tensor '{name}' of graph '{self.name}' is ragged: {text!r}", "only models batch; write -1")
        if spec.optional and is_output:
            self._problem(
                f"output '{name}' of graph '{self.name}' is optional", "an output that nobody writes is left out"
            )
        return spec

    def _refuse_second(self, name: str, what: str, is_second: bool) -> None:
        if is_second:
            self._problem(f"graph '{self.name}' has {what} '{name}' already")

    def _problem(self, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, caller(), "B2", hint))

    # Reading it

    def parts(self) -> list[Part]:
        """Each part once, in the order of its first call."""
        return list({id(call.part): call.part for call in self.calls}.values())

    def batch_size(self) -> int:
        """What was said, or else what all parts can take."""
        sizes: list[int] = []
        inside, seen = [self], {id(self)}
        while inside:  # each graph once, however many others it is in
            sketch = inside.pop()
            if sketch.max_batch_size is not None:
                sizes.append(sketch.max_batch_size)
                continue
            if not sketch.calls:
                sizes.append(0)
            for call in sketch.calls:
                within = call.part.sketch
                if within is None:
                    sizes.append(call.part.max_batch_size)
                elif id(within) not in seen:
                    seen.add(id(within))
                    inside.append(within)
        return min(sizes)

    def name_of(self, tensor: Tensor) -> str:
        """What a tensor is called: as an output of the graph, else after its step, "read.SCORES", "read#2.SCORES"."""
        if tensor.call == GRAPH:
            return tensor.port
        call = self.calls[tensor.call]
        if tensor.port in call.named:
            return call.named[tensor.port]
        before = sum(1 for other in self.calls[: tensor.call] if other.part.name == call.part.name)
        return f"{call.part.name}{f'#{before + 1}' if before else ''}.{tensor.port}"

    def input_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec, _ in self.given.values())

    def output_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(self.output_spec(output) for output in self.wanted)

    def output_spec(self, output: Wanted) -> TensorSpec:
        """What an output is declared as."""
        if output.spec is not None:
            return output.spec
        for number, call in enumerate(self.calls):
            for port in call.part.output_names:
                if self.name_of(Tensor(self, number, port)) == output.name:
                    spec = call.part.output_spec(port)
                    return TensorSpec(output.name, spec.dtype, spec.dims)
        return parse_tensor(output.name, _UNKNOWN)

    def config(self) -> dict[str, Any]:
        """The configuration as JSON spells it."""
        scheduling = {"step": [self._step(number, call) for number, call in enumerate(self.calls)]}
        return {
            "name": self.name,
            "platform": "ensemble",
            "max_batch_size": self.batch_size(),
            "input": [input_json(spec) for spec in self.input_specs()],
            "output": [output_json(spec) for spec in self.output_specs()],
            **self.options,
            "ensemble_scheduling": {**self.options.get("ensemble_scheduling", {}), **scheduling},
        }

    def _step(self, number: int, call: Call) -> dict[str, Any]:
        return {
            "model_name": call.part.name,
            "model_version": call.version,
            "input_map": {
                port: tensor if isinstance(tensor, str) else tensor.graph.name_of(tensor)
                for port, tensor in call.inputs.items()
            },
            "output_map": {port: self.name_of(Tensor(self, number, port)) for port in self._used(number)},
        }

    def _used(self, number: int) -> list[str]:
        """The outputs of a call that somebody reads or named, in the part's order."""
        call = self.calls[number]
        read = [tensor for other in self.calls for tensor in other.inputs.values() if isinstance(tensor, Tensor)]
        ports = [tensor.port for tensor in read if tensor.graph is self and tensor.call == number]
        by_name = {tensor for other in self.calls for tensor in other.inputs.values() if isinstance(tensor, str)}
        by_name |= {output.name for output in self.wanted if output.tensor is None}
        own = call.part.output_names
        ports += [port for port in own if self.name_of(Tensor(self, number, port)) in by_name]
        used = dict.fromkeys([*ports, *call.named])
        return [port for port in own if port in used] + [port for port in used if port not in own]

    def source(self) -> SourceMap:
        """Where each field of the configuration was written."""
        places = {"": self.place, "name": self.place, "ensemble_scheduling": self.place, "max_batch_size": self.place}
        places |= {f"input[{number}]": place for number, (_, place) in enumerate(self.given.values())}
        places |= {f"output[{number}]": output.place for number, output in enumerate(self.wanted)}
        places |= {f"ensemble_scheduling.step[{number}]": call.place for number, call in enumerate(self.calls)}
        return SourceMap(self.place.file, places)
