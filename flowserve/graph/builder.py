"""Builder of graphs in Python: parts are called on tensors, or joined by tensor names.

Decides the short notation of tensors (`"FP32[3,-1]"`), the meaning of a call, the names of its tensors, and the place
of each element: the line of Python outside flowserve. The result is the configuration that a file would contain, with
the place of every field, so that the rules for files apply with the same messages. A wiring mistake is recorded, not
raised, so that all are reported together.

Does not read or write files, and does not know what a part computes. Callers: `authoring`, `function_model`, user
programs.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Final, TypeVar

from flowserve.config.suggest import did_you_mean
from flowserve.config.types import LATEST, SourceMap
from flowserve.errors import FlowserveError, Invalid, Place, Problem, Problems
from flowserve.graph.types import DEPTH_LIMIT, GRAPH
from flowserve.values import BY_WIRE, TensorSpec

_OURS: Final = ("flowserve.graph.", "flowserve.authoring.")
# The declaration of an output whose tensor has no writer; the rule about the missing writer reports the mistake.
_UNKNOWN: Final = "FP32[-1]"
T = TypeVar("T")


def parse_tensor(name: str, text: str) -> TensorSpec:
    """`parse_tensor("X", "FP32[3,-1]")`: data type and dims without the batch dimension. -1 varies between batches, *
    also within a batch (the tensor is ragged); a trailing "?" makes it optional. Raises Invalid.
    """
    match = re.fullmatch(r"(\w+)\s*\[([-*\d,\s]*)\](\??)", str(text).strip())
    if match is None:
        raise Invalid(f"tensor '{name}': {text!r} is not a data type with dims, as in 'FP32[3,224,224]' or 'BYTES[1]'")
    dtype, dims, optional = match.groups()
    if dtype not in BY_WIRE:
        is_string = dtype.upper() in ("STRING", "STR", "TYPE_STRING")
        hint = "strings are BYTES here" if is_string else did_you_mean(dtype.upper(), BY_WIRE)
        hint = hint or f"known are {', '.join(BY_WIRE)}"
        raise Invalid(f"tensor '{name}': there is no data type '{dtype}' ({hint})")
    words = [word.strip() for word in dims.split(",") if word.strip()]
    try:
        sizes = tuple(-1 if word == "*" else int(word) for word in words)
        return TensorSpec(name, BY_WIRE[dtype], sizes, bool(optional), ragged="*" in words)
    except ValueError:
        raise Invalid(f"tensor '{name}': the dims of {text!r} are not whole numbers") from None


def input_json(spec: TensorSpec) -> dict[str, Any]:
    """An entry of `input` in JSON form."""
    made = output_json(spec)
    if spec.optional:
        made["optional"] = True
    if spec.ragged:
        made["allow_ragged_batch"] = True
    return made


def output_json(spec: TensorSpec) -> dict[str, Any]:
    """An entry of `output` in JSON form."""
    made: dict[str, Any] = {"name": spec.name, "data_type": spec.dtype.config_name, "dims": list(spec.dims)}
    if spec.reshape is not None:
        made["reshape"] = {"shape": list(spec.reshape)}
    if spec.labels:
        made["label_filename"] = spec.labels
    return made


def calling_line() -> Place:
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


def require(value: T, kind: Any, what: str, hint: str = "") -> T:
    """`value`, checked to be of type `kind`. Raises Problems, because nothing can be wired with another type."""
    if isinstance(value, kind):
        return value
    raise Problems([Problem(f"{what}, and not {type(value).__name__}", calling_line(), "B1", hint)])


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of a graph: an output of a part, or an input of the graph. It is wired, never computed."""

    graph: GraphBuilder
    call: int  # GRAPH for an input of the graph
    port: str

    def __repr__(self) -> str:
        return f"<tensor {self.graph.name_of(self)!r} of graph {self.graph.name!r}>"

    # Comparisons with a number make the test of a condition.

    def __eq__(self, number: object) -> Any:
        return _equals(self, number) if isinstance(number, int) else self is number

    def __ne__(self, number: object) -> Any:
        return ~_equals(self, number) if isinstance(number, int) else self is not number

    def __gt__(self, number: float) -> TensorTest:
        return TensorTest(self, above=number)

    def __lt__(self, number: float) -> TensorTest:
        return TensorTest(self, below=number)

    __hash__ = object.__hash__

    def is_in(self, *numbers: int) -> TensorTest:
        """The test whether the tensor's number is one of these."""
        return TensorTest(self, equals=numbers)


@dataclass(frozen=True, slots=True, eq=False)
class TensorTest:
    """A test of a tensor that has one number in each row, as `RowTest`. `tensor`: the tensor, or its name."""

    tensor: Tensor | str
    negate: bool = False
    above: float | None = None
    below: float | None = None
    equals: tuple[int, ...] = ()
    otherwise: bool = False

    def __invert__(self) -> TensorTest:
        return replace(self, negate=not self.negate)

    def __and__(self, other: TensorTest) -> TensorTest:
        """Above one number and below another."""
        is_range = _is_same(self.tensor, other.tensor) and not (
            self.negate or other.negate or self.equals or other.equals
        )
        if (
            not is_range
            or (self.above is None) == (other.above is None)
            or (self.below is None) == (other.below is None)
        ):
            raise Invalid(
                "`&` joins `tensor > number` and `tensor < number`; conditions in each other test two tensors"
            )
        above = self.above if self.above is not None else other.above
        return replace(self, above=above, below=self.below if self.below is not None else other.below)

    def __bool__(self) -> bool:
        raise Invalid("a test has no value before a request is there; `with graph.when(test):` runs steps under it")

    def as_json(self) -> dict[str, Any]:
        """The field `when` of a step; the tensor's name is that in its graph."""
        name = self.tensor if isinstance(self.tensor, str) else self.tensor.graph.name_of(self.tensor)
        options = {"not": self.negate, "equals": [*self.equals], "otherwise": self.otherwise}
        limits = {"above": self.above, "below": self.below}
        return {"tensor": name, **{key: value for key, value in options.items() if value}} | {
            key: value for key, value in limits.items() if value is not None
        }


def _equals(tensor: Tensor, number: int) -> TensorTest:
    return TensorTest(tensor, negate=not number) if isinstance(number, bool) else TensorTest(tensor, equals=(number,))


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """The tensors, or their names, whose items some steps run for, as `EachItem`."""

    tensors: tuple[Tensor | str, ...]
    count: Tensor | str = ""
    at_most: int = 0

    def as_json(self) -> dict[str, Any]:
        """The field `each` of a step."""
        named = [one if isinstance(one, str) else one.graph.name_of(one) for one in (*self.tensors, self.count)]
        made: dict[str, Any] = {"tensor": named[:-1]}
        if named[-1]:
            made["count"] = named[-1]
        return made | ({"at_most": self.at_most} if self.at_most else {})


def _is_same(one: Tensor | str, other: Tensor | str) -> bool:
    """Whether both are one tensor. Not compared by identity, because `made.SCORE` is a new object each time."""
    if isinstance(one, str) or isinstance(other, str):
        return one is other
    return one.graph is other.graph and (one.call, one.port) == (other.call, other.port)


class Outputs:
    """The result of a call: its tensors by name (`made["SCORES"]`, `made.SCORES`) or in order (`a, b = part(x)`).

    With a single tensor it can be used as that tensor.
    """

    __slots__ = ("_call", "_graph", "_part")

    def __init__(self, graph: GraphBuilder, part: Part, call: int) -> None:
        self._graph = graph
        self._part = part
        self._call = call

    def __getitem__(self, name: str) -> Tensor:
        """Any name is accepted; an unknown output is reported with the other mistakes."""
        return Tensor(self._graph, self._call, name)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):  # Python and notebooks look such names up on every object
            raise AttributeError(name)
        return self[name]

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self[name] for name in self._part.output_names])

    def __len__(self) -> int:
        return len(self._part.output_names)

    def __eq__(self, number: object) -> Any:
        return self._graph._one(self) == number if isinstance(number, int) else self is number

    def __ne__(self, number: object) -> Any:
        return self._graph._one(self) != number if isinstance(number, int) else self is not number

    def __gt__(self, number: float) -> TensorTest:
        return self._graph._one(self) > number

    def __lt__(self, number: float) -> TensorTest:
        return self._graph._one(self) < number

    __hash__ = object.__hash__

    def is_in(self, *numbers: int) -> TensorTest:
        """As `Tensor.is_in`, of the only output."""
        return self._graph._one(self).is_in(*numbers)

    def __repr__(self) -> str:
        return f"<outputs {', '.join(self._part.output_names)} of {self._part.name!r}>"


class Part:
    """A possible step of a graph: a model, or another graph."""

    name: str
    place: Place
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int  # rows per batch; 0: its tensors have no batch dimension

    # An output of a graph is declared by its parts, which may be graphs again. `output_names` and `output_spec` look up
    # only what is needed; reading all of `outputs` would double the work with each level of nesting.

    @property
    def output_names(self) -> list[str]:
        """The names of `outputs`."""
        return [spec.name for spec in self.outputs]

    def output_spec(self, name: str) -> TensorSpec:
        """The output of that name."""
        return next(spec for spec in self.outputs if spec.name == name)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """The representation in notebooks: a table of its tensors."""
        rows = [("input", spec) for spec in self.inputs] + [("output", spec) for spec in self.outputs]
        cells = [
            f"<tr><td>{side}</td><td>{escape(spec.name)}</td><td>{spec.dtype}{[*spec.dims]}</td></tr>"
            for side, spec in rows
        ]
        batches = f"batches of up to {self.max_batch_size}" if self.max_batch_size else "no batches"
        caption = f"<caption><b>{escape(self.name)}</b>, {batches}</caption>"
        return {"text/html": f"<table>{caption}{''.join(cells)}</table>", "text/plain": repr(self)}

    def __call__(self, *tensors: Tensor | Outputs, **named: Tensor | Outputs) -> Outputs:
        """Add this part as a step to the tensors' graph. Tensors are the part's inputs in order, or by name."""
        given = [*tensors, *named.values()]
        anything: list[object] = [*given]
        strange = next((each for each in anything if not isinstance(each, Tensor | Outputs)), None)
        if not given or strange is not None:
            found = f"on {type(strange).__name__}" if given else "without any"
            hint = "a model's function computes: model.function(array)" if given else ""
            raise Problems(
                [Problem(f"'{self.name}' is called on tensors of a graph, not {found}", calling_line(), "B1", hint)]
            )
        first = given[0]
        graph = first.graph if isinstance(first, Tensor) else first._graph
        return graph.call(self, tensors, named)


class DeclaredPart(Part, ABC):
    """A part whose configuration is in Python. `folder` is the folder it was loaded from, if any."""

    folder: Path | None = None

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The configuration in JSON form."""

    @abstractmethod
    def source(self) -> SourceMap:
        """The place of each field of the configuration."""


@dataclass(slots=True, eq=False)
class StepCall:
    """One step. An input is a tensor, or the name of one; `named` maps outputs to the tensor names given to them. It
    runs for the items of `each` (for the graph's rows if None) that pass the tests of `when`; `depth` is the number of
    nested `each` blocks.
    """

    part: Part
    inputs: dict[str, Tensor | str]
    named: dict[str, str]
    place: Place
    version: int = LATEST
    when: tuple[TensorTest, ...] = ()
    each: Items | None = None
    name: str = ""
    depth: int = 0


@dataclass(slots=True, eq=False)
class GraphOutput:
    """An output of the graph. `tensor` None: the tensor called `name`. `spec` None: as its writer declares it."""

    name: str
    tensor: Tensor | None
    spec: TensorSpec | None
    place: Place


class GraphBuilder(DeclaredPart):
    """The steps, inputs and outputs of one graph while it is written. `problems` are the mistakes recorded so far."""

    def __init__(self, name: str, *, max_batch_size: int | None = None, max_inflight_requests: int = 0) -> None:
        self.name = require(name, str, "the name of a graph is a text")
        self.place = calling_line()
        self.declared_batch_size = max_batch_size
        self.calls: list[StepCall] = []
        self.declared_inputs: dict[str, tuple[TensorSpec, Place]] = {}
        self.declared_outputs: list[GraphOutput] = []
        self.problems: list[Problem] = []
        self.options: dict[str, Any] = {}  # fields of the configuration besides the wiring, copied unchanged
        if max_inflight_requests:
            self.options["ensemble_scheduling"] = {"max_inflight_requests": max_inflight_requests}
        # An input was used directly as an output: the mistake to fix first, whatever else is missing.
        self.outputs_an_input = False
        self.depth = 1  # of nested graphs, this one included
        self._rows: list[TensorTest | Items] = []  # the blocks of `when` and `each` that are open, outermost first
        self._merged: dict[tuple[int, str], tuple[tuple[int, str], ...]] = {}  # as `_merged_with`
        self._fills: dict[tuple[int, str], dict[str, Any]] = {}  # by the first of `_merged_with`

    # Building

    def input(self, name: str, tensor: str) -> Tensor:
        """Declare an input: `graph.input("IMAGE", "UINT8[-1,-1,3]")`, dims without the batch dimension."""
        self._refuse_second(require(name, str, "the name of an input is a text"), "input", name in self.declared_inputs)
        self.declared_inputs[name] = (self._spec(name, tensor), calling_line())
        return Tensor(self, GRAPH, name)

    def output(self, name: str, tensor: Tensor | Outputs | None = None, *, spec: str = "") -> None:
        """Declare an output. `tensor` None: the tensor a step gave this name. `spec` "": as the step declares it."""
        require(name, str, "the name of an output is a text")
        self._refuse_second(name, "output", any(other.name == name for other in self.declared_outputs))
        one = None if tensor is None else self._one(tensor)
        if one is not None and one.call == GRAPH:
            self._problem(f"input '{one.port}' cannot be output as it is; a step has to write what a graph answers")
            self.outputs_an_input = True
            return
        if one is not None:
            self._give_name(one, name)
        declared = self._spec(name, spec, is_output=True) if spec else None
        self.declared_outputs.append(GraphOutput(name, one, declared, calling_line()))

    def step(self, part: Part, inputs: Mapping[str, str | Tensor | Outputs], outputs: Mapping[str, str]) -> None:
        """Add a step wired by names, as in a file: the part's tensor -> the graph's tensor."""
        require(part, Part, "a step is of a model or a graph", "@flowserve.model makes one of a function")
        require(inputs, Mapping, "the inputs of a step are a dict")
        require(outputs, Mapping, "the outputs of a step are a dict")
        given = {port: one if isinstance(one, str) else self._one(one) for port, one in inputs.items()}
        named = {port: require(one, str, "the name of a tensor is a text") for port, one in outputs.items()}
        self._add(StepCall(part, given, named, calling_line()))

    @contextmanager
    def when(self, test: TensorTest | Tensor | Outputs) -> Iterator[None]:
        """The steps that are added in this block run only for the rows that pass the test: `kind == 0`, `score > 0.5`,
        `~test`, or a BOOL tensor, which is true. `merge` makes their outputs known for every row.
        """
        if not isinstance(test, TensorTest):
            test = TensorTest(self._one(test))
        self._rows.append(test)
        try:
            yield
        finally:
            self._rows.pop()

    def otherwise(self, tensor: Tensor | Outputs) -> AbstractContextManager[None]:
        """As `when`, for the rows that pass no other test of this tensor."""
        return self.when(TensorTest(self._one(tensor), otherwise=True))

    @contextmanager
    def each(
        self, *tensors: Tensor | Outputs, count: Tensor | Outputs | None = None, at_most: int = 0
    ) -> Iterator[Any]:
        """The steps that are added in this block run for each item of the tensors, which are their first dimension
        without the batch dimension. The block gets the items: a tensor for one, a tuple for several. Outside of the
        block, an output of these steps has a dimension of items. `count`: a tensor with the number of items in each
        row. `at_most`: items in one request, 0 for 10,000.
        """
        taken = tuple(self._one(tensor) for tensor in tensors)
        if not taken:
            raise Problems([Problem("`each` takes at least one tensor apart", calling_line(), "B1")])
        self._rows.append(Items(taken, "" if count is None else self._one(count), at_most))
        try:
            yield taken[0] if len(taken) == 1 else taken
        finally:
            self._rows.pop()

    def merge(self, *tensors: Tensor | Outputs, otherwise: Tensor | Outputs | float | str | None = None) -> Tensor:
        """Merge tensors that steps of several conditions write, each for other rows. `otherwise`: the value of rows
        that no condition has, or a tensor that has all rows. From now on each of the tensors is the merged one.
        """
        default = otherwise if isinstance(otherwise, (Tensor, Outputs)) else None
        merged = [self._one(tensor) for tensor in (*tensors, *([] if default is None else [default]))]
        for tensor in merged:
            if tensor.call == GRAPH:
                self._problem(f"input '{tensor.port}' cannot be merged; a step that copies it can write it")
                return tensor
        keys = dict.fromkeys(key for tensor in merged for key in self._merged_with(tensor))
        names = {self.calls[call].named[port] for call, port in keys if port in self.calls[call].named}
        if len(names) > 1:
            self._problem(f"a tensor has one name: {' and '.join(sorted(names))} cannot be merged")
        self._merged.update(dict.fromkeys(keys, tuple(keys)))
        for name in names:
            self._give_name(merged[0], name)
        fills = [self._fills.pop(key) for key in keys if key in self._fills]
        if otherwise is not None and not isinstance(otherwise, (Tensor, Outputs)):
            fills.append({"string_value" if isinstance(otherwise, str) else "value": otherwise})
        if fills:
            self._fills[next(iter(keys))] = self._one_fill(fills)
        return merged[0]

    def _one_fill(self, fills: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The fill of merged tensors, from their own and the one of the merge."""
        values = dict.fromkeys(value for fill in fills for name, value in fill.items() if name != "present")
        if len(values) > 1:
            given = " and ".join(map(repr, values))
            self._problem(f"a tensor has one value where no step writes it, not {given}; a step may copy it in between")
        return {name: value for fill in fills for name, value in fill.items()}

    def present(self, tensor: Tensor | Outputs, name: str) -> None:
        """Name a BOOL tensor that is true in the rows and items in which `tensor` was written; `output(name)` makes it
        an output.
        """
        self._fill(self._one(tensor))["present"] = name

    def _merged_with(self, tensor: Tensor) -> tuple[tuple[int, str], ...]:
        """The outputs, as (call, port), that are merged with this one, itself included."""
        key = (tensor.call, tensor.port)
        return self._merged.get(key, (key,))

    def _fill(self, tensor: Tensor) -> dict[str, Any]:
        """The `fill` of a tensor, added if there is none."""
        return self._fills.setdefault(self._merged_with(tensor)[0], {})

    def _level(self, call: int) -> int:
        return 0 if call == GRAPH else self.calls[call].depth

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
        self._add(StepCall(part, {**inputs}, {}, calling_line()))
        return Outputs(self, part, len(self.calls) - 1)

    def _add(self, call: StepCall) -> None:
        """Raises Problems if the part contains this graph, because neither would be well-defined, and if graphs are
        nested deeper than DEPTH_LIMIT.
        """
        parts = [call.part]
        seen: set[int] = set()
        while parts:
            part = parts.pop()
            if part is self:
                text = f"graph '{self.name}' cannot contain itself, not even through others"
                raise Problems([Problem(text, call.place, "B2")])
            if isinstance(part, GraphBuilder) and id(part) not in seen:
                seen.add(id(part))
                parts += [one.part for one in part.calls]
        call.when = tuple(one for one in self._rows if isinstance(one, TensorTest))
        levels = [one for one in self._rows if isinstance(one, Items)]
        call.each, call.depth = levels[-1] if levels else None, len(levels)
        for tensor in call.inputs.values():  # a tensor that is read outside of its items is gathered
            if isinstance(tensor, Tensor) and tensor.graph is self and self._level(tensor.call) > call.depth:
                self._fill(tensor)
        depth = 1 + call.part.depth if isinstance(call.part, GraphBuilder) else 1
        if depth > DEPTH_LIMIT:
            text = f"graph '{self.name}' nests graphs {depth} deep; at most {DEPTH_LIMIT} are allowed"
            raise Problems([Problem(text, call.place, "G19")])
        self.depth = max(self.depth, depth)
        self.calls.append(call)

    def _one(self, tensor: Tensor | Outputs) -> Tensor:
        """The tensor itself; a call with a single output stands for that output."""
        if isinstance(tensor, Outputs):
            names = tensor._part.output_names
            if len(names) != 1:
                self._problem(f"'{tensor._part.name}' has {len(names)} outputs; say which: {', '.join(names)}")
            tensor = tensor[names[0] if names else "?"]
        if require(tensor, Tensor, "what is read is a tensor of the graph").graph is not self:
            self._problem(
                f"tensor '{tensor.graph.name_of(tensor)}' is of graph '{tensor.graph.name}', not of '{self.name}'",
                hint="call that graph on tensors of this one, and use what it gives",
            )
        return tensor

    def _give_name(self, tensor: Tensor, name: str) -> None:
        for call, port in self._merged_with(tensor) if tensor.graph is self else ():
            named = self.calls[call].named
            if named.setdefault(port, name) != name:
                self._problem(
                    f"a tensor has one name: output '{name}' is '{named[port]}' already",
                    hint="a step that copies it can write the other",
                )
                return

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
                f"output '{name}' of graph '{self.name}' is optional", "an output without a writer is left out"
            )
        return spec

    def _refuse_second(self, name: str, what: str, is_second: bool) -> None:
        if is_second:
            self._problem(f"graph '{self.name}' has {what} '{name}' already")

    def _problem(self, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, calling_line(), "B2", hint))

    # Reading

    def parts(self) -> list[Part]:
        """Each part once, in the order of its first call."""
        return list({id(call.part): call.part for call in self.calls}.values())

    @property
    def max_batch_size(self) -> int:  # type: ignore[override]  # read-only, because it is computed
        """The declared `max_batch_size`, or else the minimum of all parts."""
        sizes: list[int] = []
        parts: list[Part] = [self]
        seen = {id(self)}
        while parts:  # each graph once, even if several others contain it
            part = parts.pop()
            if not isinstance(part, GraphBuilder):
                sizes.append(part.max_batch_size)
            elif part.declared_batch_size is not None:
                sizes.append(part.declared_batch_size)
            else:
                inside = part.parts()
                if not inside:
                    sizes.append(0)
                parts += [one for one in inside if id(one) not in seen]
                seen.update(map(id, inside))
        return min(sizes)

    def name_of(self, tensor: Tensor) -> str:
        """A tensor's name: that of the graph's output, else derived from its step: "read.SCORES", "read#2.SCORES"."""
        if tensor.call == GRAPH:
            return tensor.port
        number, port = self._merged_with(tensor)[0]
        call = self.calls[number]
        if port in call.named:
            return call.named[port]
        before = sum(1 for other in self.calls[:number] if other.part.name == call.part.name)
        return f"{call.part.name}{f'#{before + 1}' if before else ''}.{port}"

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:  # type: ignore[override]
        return tuple(spec for spec, _ in self.declared_inputs.values())

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:  # type: ignore[override]
        return tuple(map(self._output_spec, self.declared_outputs))

    @property
    def output_names(self) -> list[str]:
        return [output.name for output in self.declared_outputs]

    def output_spec(self, name: str) -> TensorSpec:
        return self._output_spec(next(output for output in self.declared_outputs if output.name == name))

    def _output_spec(self, output: GraphOutput) -> TensorSpec:
        if output.spec is not None:
            return output.spec
        for number, call in enumerate(self.calls):
            for port in call.part.output_names:
                if self.name_of(Tensor(self, number, port)) == output.name:
                    spec = call.part.output_spec(port)
                    return TensorSpec(output.name, spec.dtype, (*[-1] * call.depth, *spec.dims))
        for (number, _), fill in self._fills.items():
            if fill.get("present") == output.name:
                return TensorSpec(output.name, BY_WIRE["BOOL"], (*[-1] * self.calls[number].depth, 1))
        return parse_tensor(output.name, _UNKNOWN)

    def config(self) -> dict[str, Any]:
        scheduling: dict[str, Any] = {"step": [self._step(number, call) for number, call in enumerate(self.calls)]}
        if self._fills:
            scheduling["fill"] = [
                *self.options.get("ensemble_scheduling", {}).get("fill", ()),
                *({"tensor": self.name_of(Tensor(self, *key)), **fill} for key, fill in self._fills.items()),
            ]
        return {
            "name": self.name,
            "platform": "ensemble",
            "max_batch_size": self.max_batch_size,
            "input": [input_json(spec) for spec in self.inputs],
            "output": [output_json(spec) for spec in self.outputs],
            **self.options,
            "ensemble_scheduling": {**self.options.get("ensemble_scheduling", {}), **scheduling},
        }

    def _step(self, number: int, call: StepCall) -> dict[str, Any]:
        return {
            "model_name": call.part.name,
            "model_version": call.version,
            "input_map": {
                port: tensor if isinstance(tensor, str) else tensor.graph.name_of(tensor)
                for port, tensor in call.inputs.items()
            },
            "output_map": {port: self.name_of(Tensor(self, number, port)) for port in self._used(number)},
            **({"when": [test.as_json() for test in call.when]} if call.when else {}),
            **({"each": call.each.as_json()} if call.each is not None else {}),
            **({"name": call.name} if call.name else {}),
        }

    def _reads(self) -> Iterator[Tensor | str]:
        """The tensors, or their names, that the steps read, and those that decide for which rows they run."""
        for call in self.calls:
            yield from call.inputs.values()
            yield from (test.tensor for test in call.when)
            if call.each is not None:
                yield from (*call.each.tensors, call.each.count)

    def _used(self, number: int) -> list[str]:
        """The outputs of a call that are read or named, in the part's order."""
        call = self.calls[number]
        read = [tensor for tensor in self._reads() if isinstance(tensor, Tensor)]
        keys = {key for tensor in read if tensor.graph is self for key in self._merged_with(tensor)}
        keys |= {key for one in self._fills for key in self._merged.get(one, (one,))}
        ports = [port for number_of, port in keys if number_of == number]
        by_name = {tensor for tensor in self._reads() if isinstance(tensor, str)}
        by_name |= {output.name for output in self.declared_outputs if output.tensor is None}
        own = call.part.output_names
        ports += [port for port in own if self.name_of(Tensor(self, number, port)) in by_name]
        used = dict.fromkeys([*ports, *call.named])
        return [port for port in own if port in used] + [port for port in used if port not in own]

    def source(self) -> SourceMap:
        places = {"": self.place, "name": self.place, "ensemble_scheduling": self.place, "max_batch_size": self.place}
        places |= {f"input[{number}]": place for number, (_, place) in enumerate(self.declared_inputs.values())}
        places |= {f"output[{number}]": output.place for number, output in enumerate(self.declared_outputs)}
        places |= {f"ensemble_scheduling.step[{number}]": call.place for number, call in enumerate(self.calls)}
        return SourceMap(self.place.file, places)
