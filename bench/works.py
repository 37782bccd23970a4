"""Workloads: the steps of each small deployment, its inputs, its expected outputs, and the same work by direct calls.

Knows neither the files of a repository (repositories) nor HTTP (requests, load, servers).

Every tensor is FP32; a step reads one or more inputs and writes Y. All steps batch, up to BATCH_MAX rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench import networks

Array = npt.NDArray[np.float32]

BATCH_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Python:
    """A `model.py` that computes one numpy expression over its inputs' names for each request. `first` is a statement
    that it runs once per batch."""

    expression: str
    first: str = "pass"


@dataclass(frozen=True, slots=True)
class Onnx:
    """An ONNX file with input X and output Y."""

    build: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Step:
    """One node of the graph. `inputs`: the model's input names and the ensemble tensors they read; `output`: the
    ensemble tensor that its Y becomes. `dims` and `dims_out` are without the batch; all inputs have the same."""

    model: str
    inputs: Mapping[str, str]
    output: str
    dims: tuple[int, ...]
    dims_out: tuple[int, ...]
    kind: Python | Onnx


@dataclass(frozen=True, slots=True)
class Work:
    """One deployment, named `name`, that reads X and writes Y. A single step is served as a plain model.

    * `environment`: variables for every server that is measured on it, flowserve and Triton alike.
    * `slowest`: a step that is measured by itself as well; "" for none.
    * `echo`: whether an HTTP echo of the same body is measured as well, which shows the cost of receiving it.
    * `limit`: the ensemble's `max_inflight_requests`, 0 for none.
    * `partner`: a second deployment on the same server, which gets every second request. Steps that name the same model
      share it.
    """

    name: str
    about: str
    steps: tuple[Step, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    slowest: str = ""
    echo: bool = False
    limit: int = 0
    partner: Work | None = None

    @property
    def deployments(self) -> tuple[Work, ...]:
        return (self, self.partner) if self.partner else (self,)

    @property
    def varies(self) -> bool:
        """Whether requests of other lengths than the first dimension of `dims` are possible."""
        return len(self.dims) == 1 and not any(isinstance(step.kind, Onnx) for step in self.steps)

    @property
    def dims(self) -> tuple[int, ...]:
        return self.steps[0].dims

    @property
    def is_ensemble(self) -> bool:
        return len(self.steps) > 1

    def rows(self, count: int) -> Array:
        """`count` inputs [count, *dims], all different, so that a response to the wrong request is detected."""
        generator = np.random.default_rng(7)
        if any(isinstance(step.kind, Onnx) for step in self.steps):
            # Each row has an offset of its own; otherwise the networks would map all rows to nearly the same output.
            lean = generator.uniform(-1.0, 1.0, (count, self.dims[0], *(1 for _ in self.dims[1:])))
            noise = generator.standard_normal((count, *self.dims), dtype=np.float32)
            return (noise * 0.25 + lean).astype(np.float32)
        # Small whole numbers: the results are exact in any order of the arithmetic.
        return generator.integers(-1000, 1000, (count, *self.dims)).astype(np.float32)

    def alone(self) -> Work:
        """The slowest step as a work of its own, with the same input."""
        step = next(step for step in self.steps if step.model == self.slowest)
        return Work(step.model, "", (replace(step, inputs={"X": "X"}, output="Y"),), self.environment)

    def direct(self) -> Callable[[Array], Array]:
        """The whole work as plain calls of numpy and onnxruntime on [rows, *dims]: the upper limit of any server."""
        functions = [(step, _function(step)) for step in self.steps]

        def call(rows: Array) -> Array:
            tensors = {"X": rows}
            for step, function in functions:
                tensors[step.output] = function(*(tensors[name] for name in step.inputs.values()))
            return tensors["Y"]

        return call


def _function(step: Step) -> Callable[..., Array]:
    match step.kind:
        case Python(expression, first):
            # The same text as in the served model.py.
            names: dict[str, Any] = {"np": np, "time": time}
            exec(f"def function({', '.join(step.inputs)}):\n    {first}\n    return {expression}", names)
            function: Callable[..., Array] = names["function"]
            return function
        case Onnx(build):
            return _session(build())


def _session(model: bytes) -> Callable[[Array], Array]:
    import onnxruntime  # slow to import, and most works do not need it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = os.cpu_count() or 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(rows: Array) -> Array:
        answer: Array = session.run(["Y"], {"X": rows})[0]
        return answer

    return run


def _line(prefix: str, dims: tuple[int, ...], *stages: tuple[str, Python | Onnx, tuple[int, ...]]) -> tuple[Step, ...]:
    """A chain of steps; a stage is (name, kind, dims of its output)."""
    steps, source = [], "X"
    for name, kind, dims_out in stages:
        target = "Y" if name == stages[-1][0] else name
        steps.append(Step(f"{prefix}_{name}", {"X": source}, target, dims, dims_out, kind))
        source, dims = target, dims_out
    return tuple(steps)


def _chain(name: str, dims: tuple[int, ...]) -> tuple[Step, ...]:
    stages = (("double", "X * 2"), ("add", "X + 1"), ("subtract", "X - 3"))
    return _line(name, dims, *((stage, Python(expression), dims) for stage, expression in stages))


def _diamond(dims: tuple[int, ...]) -> tuple[Step, ...]:
    return (
        Step("diamond_a", {"X": "X"}, "top", dims, dims, Python("X * 2")),
        Step("diamond_b", {"X": "top"}, "left", dims, dims, Python("X + 1")),
        Step("diamond_c", {"X": "top"}, "right", dims, dims, Python("X - 3")),
        Step("diamond_d", {"LEFT": "left", "RIGHT": "right"}, "Y", dims, dims, Python("LEFT + RIGHT")),
    )


def _shared(name: str, first: str) -> tuple[Step, ...]:
    """A chain whose middle step, `shared_add`, is a model that other works use as well."""
    return (
        Step(f"{name}_{first}", {"X": "X"}, "first", _SMALL, _SMALL, Python("X * 2" if first == "double" else "X * 3")),
        Step("shared_add", {"X": "first"}, "second", _SMALL, _SMALL, Python("X + 1")),
        Step(f"{name}_subtract", {"X": "second"}, "Y", _SMALL, _SMALL, Python("X - 3")),
    )


def _around(name: str, first: str) -> tuple[Step, ...]:
    """A step that does `first` for each batch, between two cheap ones."""
    stages = (("before", Python("X * 2")), ("slow", Python("X + 1", first)), ("after", Python("X - 3")))
    return _line(name, _SMALL, *((stage, kind, _SMALL) for stage, kind in stages))


_SOFTMAX = Python("(e := np.exp(X)) / e.sum(axis=-1, keepdims=True)")
_SMALL = (64,)
# Some milliseconds of Python, so that the other steps and the server together take about a tenth of the CPU.
_COMPUTING = "sum(range(150_000))"
_CLASSES = (networks.CLASSES,)
# glibc gives large blocks back to the system and fetches them again, page by page, unless told otherwise.
_MALLOC_TUNED = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "268435456"}

WORKS: Final[Mapping[str, Work]] = {
    work.name: work
    for work in (
        Work("identity", "one Python model, 64 floats", _line("identity", _SMALL, ("only", Python("X"), _SMALL))),
        Work("chain", "three Python steps, 64 floats", _chain("chain", _SMALL)),
        Work("diamond", "four Python steps, a branch that joins, 64 floats", _diamond(_SMALL)),
        Work(
            "shared",
            "two chains of three Python steps, 64 floats, that share the model in the middle",
            _shared("shared", "double"),
            partner=Work("shared_other", "", _shared("shared_other", "triple")),
        ),
        Work("chain_limited", "chain with max_inflight_requests 64", _chain("chain_limited", _SMALL), limit=64),
        Work("chain_big", "three Python steps, 600 KB", _chain("chain_big", networks.IMAGE), _MALLOC_TUNED),
        Work(
            "mlp",
            "Python, perceptron, Python; 256 floats",
            _line(
                "mlp",
                (networks.FEATURES,),
                ("pre", Python("X * 2 - 0.5"), (networks.FEATURES,)),
                ("net", Onnx(networks.perceptron), _CLASSES),
                ("post", _SOFTMAX, _CLASSES),
            ),
        ),
        Work(
            "cnn",
            "Python, convolutions, Python; 3x224x224",
            _line(
                "cnn",
                networks.IMAGE,
                ("pre", Python("X * 2 - 0.5"), networks.IMAGE),
                ("net", Onnx(networks.convolutions), _CLASSES),
                ("post", _SOFTMAX, _CLASSES),
            ),
            echo=True,
        ),
        Work(
            "slowest",
            "three Python steps, the middle one sleeps 5 ms for each batch",
            _around("slowest", "time.sleep(0.005)"),
            slowest="slowest_slow",
        ),
        Work(
            "slowest_busy",
            "the same, the middle one computes for some milliseconds",
            _around("slowest_busy", _COMPUTING),
            slowest="slowest_busy_slow",
        ),
    )
}
