"""Models that are Python functions over numpy arrays: the `flowserve.model` decorator.

Decides the declaration of a function (data types, dims and batching, next to it), its checks, and the configuration of
such a model. Does not know how a function runs on a batch (`backends/functions`), or how its calls on tensors are wired
(`builder`). Callers: user programs, `authoring`, `testing`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from flowserve.config.types import SourceMap
from flowserve.errors import FlowserveError, Place, Problem, Problems
from flowserve.graph.builder import DeclaredPart, calling_line, input_json, output_json, parse_tensor, require
from flowserve.values import TensorSpec

ExecutionPlace = Literal["thread", "auto", "inline"]
Function = Callable[..., Any]
BACKEND: Final = "callable"
PURE: Final = "pure"  # parameter: whether a failed batch may run again, if it is not what the decorator says


@dataclass(eq=False, repr=False)
class FunctionModel(DeclaredPart):
    """A function with its declaration. Calling it on tensors wires it; `function` is the decorated function."""

    function: Function
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    max_queue_delay_us: int
    instances: int
    execution: ExecutionPlace
    is_pure: bool
    decoupled: bool
    place: Place

    def __post_init__(self) -> None:
        # For a batch these are lists with an array per request. A configuration cannot express it.
        self.ragged_outputs = frozenset(spec.name for spec in self.outputs if spec.ragged)
        self.outputs = tuple(replace(spec, ragged=False) for spec in self.outputs)

    def __repr__(self) -> str:
        return f"<model {self.name!r} of function {self.function.__module__}.{self.function.__qualname__}>"

    def config(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "name": self.name,
            "backend": BACKEND,
            "max_batch_size": self.max_batch_size,
            "input": [input_json(spec) for spec in self.inputs],
            "output": [output_json(spec) for spec in self.outputs],
            "instance_group": [{"count": self.instances, "kind": "KIND_CPU"}],
            "parameters": {"execution": {"string_value": self.execution}},
        }
        if not self.is_pure:
            made["parameters"][PURE] = {"string_value": "false"}
        if self.decoupled:
            made["model_transaction_policy"] = {"decoupled": True}
        elif self.max_batch_size:
            delay = {"max_queue_delay_microseconds": self.max_queue_delay_us} if self.max_queue_delay_us else {}
            made["dynamic_batching"] = delay
        return made

    def source(self) -> SourceMap:
        """The place of every field is the decorator."""
        return SourceMap(self.place.file, dict.fromkeys(("", *self.config()), self.place))


def model(
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    *,
    name: str = "",
    max_batch_size: int = 0,
    max_queue_delay_us: int = 0,
    instances: int = 1,
    execution: ExecutionPlace = "thread",
    is_pure: bool = True,
    decoupled: bool = False,
) -> Callable[[Function], FunctionModel]:
    """Declare a function as a model: `@model({"X": "FP32[4]"}, {"Y": "FP32[1]"}, max_batch_size=16)`.

    The function gets one array per input, in the order of `inputs`, and returns one per output: an array, a tuple in
    the order of `outputs`, or a dict by name. With `max_batch_size` above 0 it gets whole batches formed by the dynamic
    batcher, rows on axis 0. Arrays are read-only; BYTES are object arrays of `bytes`.

    An input "FP32[4]?" is optional: None if the request omits it. An input "FP32[*]" is ragged: requests of different
    lengths run together, and the function gets a list with one array per request; an output "FP32[*]" is returned in
    the same form. `decoupled`: the function handles one request at a time and yields any number of responses (as a
    generator, or as any iterator that it returns), each with any number of rows.

    `name` defaults to the function's. `execution`: "thread" gives each instance its own thread, "inline" runs on the
    event loop (only for functions of a few microseconds), "auto" measures. A batch that raised runs again in halves, so
    that one bad request does not fail the others; `is_pure=False` prevents that for a function with side effects. A
    function refuses a request by raising `flowserve.Invalid`. Raises Problems.
    """
    place = calling_line()
    for side in (inputs, outputs):
        require(side, Mapping, "the tensors of a function are a dict", "as in {'X': 'FP32[4]'}")
    numbers = {"max_batch_size": max_batch_size, "max_queue_delay_us": max_queue_delay_us, "instances": instances}

    def decorate(function: Function) -> FunctionModel:
        mistakes = _mismatch(function, len(inputs))
        given, made = (_specs(side, mistakes) for side in (inputs, outputs))
        mistakes += [
            f"output '{spec.name}' is optional; a function returns all of its outputs" for spec in made if spec.optional
        ]
        if not max_batch_size:
            ragged = [spec.name for spec in (*given, *made) if spec.ragged]
            mistakes += [f"tensor '{port}' is ragged ([*]), and nothing is batched: write -1" for port in ragged]
        mistakes += [
            f"{one} is a whole number from 0 on, not {value!r}" for one, value in numbers.items() if _is_odd(value)
        ]
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            mistakes.append(f"function '{function.__name__}' is async; an ordinary one may block, for it has a thread")
        if decoupled:
            mistakes += _not_decoupled((*given, *made), max_queue_delay_us, execution)
        elif inspect.isgeneratorfunction(function):
            mistakes.append(f"function '{function.__name__}' yields its answers: say decoupled=True")
        if mistakes:
            raise Problems([Problem(text, place, "B3") for text in mistakes])
        return FunctionModel(
            function,
            name=name or function.__name__,
            inputs=given,
            outputs=made,
            max_batch_size=max_batch_size,
            max_queue_delay_us=max_queue_delay_us,
            instances=instances,
            execution=execution,
            is_pure=is_pure,
            decoupled=decoupled,
            place=place,
        )

    return decorate


def _is_odd(value: Any) -> bool:
    try:
        return isinstance(value, bool) or operator.index(value) < 0
    except TypeError:
        return True


def _not_decoupled(tensors: Sequence[TensorSpec], max_queue_delay_us: int, execution: ExecutionPlace) -> Iterator[str]:
    """The options that contradict a decoupled function, which handles one request at a time."""
    for spec in tensors:
        if spec.ragged:
            yield f"tensor '{spec.name}' is ragged ([*]), and a decoupled function gets one request at a time: write -1"
    if max_queue_delay_us:
        yield "max_queue_delay_us waits for a larger batch, and a decoupled function gets one request at a time"
    if execution != "thread":
        yield f"a decoupled function runs on a thread, not {execution}: on the event loop its answers could not be sent"


def _specs(side: Mapping[str, str], mistakes: list[str]) -> tuple[TensorSpec, ...]:
    """The valid tensors of one side; errors of the others are added to `mistakes`."""
    specs = []
    for port, text in side.items():
        try:
            specs.append(parse_tensor(port, text))
        except FlowserveError as error:
            mistakes.append(str(error))
    return tuple(specs)


def _mismatch(function: Function, count: int) -> list[str]:
    """The error if a function cannot be called with `count` arrays; [] if it can, or if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in functions often have none
        return []
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return [f"function '{function.__name__}' does not take {count} arrays: it is {function.__name__}{signature}"]
    return []
