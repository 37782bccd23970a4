"""Responses of Python models are read in two ways, one of them for most batches only: both have the same result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, event, find, given, settings
from hypothesis import strategies as st

from flowserve.backends.base import Results, Work
from flowserve.backends.python import answers
from flowserve.backends.python.answers import AnswerReader
from flowserve.backends.python.pb_utils.inference import InferenceResponse, TritonError
from flowserve.backends.python.pb_utils.inference import Tensor as Answer
from flowserve.config.types import ModelConfig, SequenceBatching, SequenceState
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec
from tests.support.backends import config_of, spec

T = TypeVar("T")
ANY_ROWS = -1
NAMES = ("y", "z", "w")
SMALL_BYTES = 100  # instead of POOLED_BYTES_MIN, so that some of these small arrays count as large
FAULTS = ("dtype", "shape", "shape", "name", "wanted", "dropped", "added", "swapped", "none", "error", "parameters")
DTYPES = (*(DType.FP32,) * 5, *(DType.INT64,) * 2, DType.BYTES)


class GeneralReader(AnswerReader):
    """Reads each batch as one that is not uniform."""

    def _read_uniform(self, responses: list[InferenceResponse], work: Work) -> Results | None:
        return None


@dataclass(frozen=True)
class Output:
    """One tensor of a response; without a dtype, an object that is no tensor."""

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    value: int

    def made(self) -> Any:
        if self.dtype is None:
            return self.shape
        numbers = np.arange(self.value, self.value + int(np.prod(self.shape))).reshape(self.shape)
        array: Array = numbers.astype(self.dtype)
        return Answer(self.name, array)


@dataclass(frozen=True)
class Member:
    """A response, and what its request wants. `how`: "" for a plain response."""

    outputs: tuple[Output, ...]
    wanted: tuple[str, ...]
    rows: int
    how: str = ""

    def response(self) -> Any:
        made = [output.made() for output in self.outputs]
        if self.how == "none":
            return None
        if self.how == "error":
            return InferenceResponse(made, TritonError("no"))
        return InferenceResponse(made, parameters={"seen": self.rows} if self.how == "parameters" else {})


@dataclass(frozen=True)
class Answers:
    """A batch of responses, and how it is read."""

    config: ModelConfig
    members: tuple[Member, ...]
    copies: bool
    strict: bool

    def read_by(self, kind: type[AnswerReader]) -> Results | Exception:
        reader = kind(self.config, copies=self.copies, strict=self.strict)
        try:
            with mock.patch.object(answers, "POOLED_BYTES_MIN", SMALL_BYTES):
                return reader.read([member.response() for member in self.members], self.work)
        except Exception as error:
            return error

    @property
    def work(self) -> Work:
        return Work([], [one.rows for one in self.members], [], [one.wanted for one in self.members])

    @property
    def is_uniform(self) -> bool:
        reader = AnswerReader(self.config, copies=self.copies, strict=self.strict)
        with mock.patch.object(answers, "POOLED_BYTES_MIN", SMALL_BYTES):
            return reader._read_uniform([member.response() for member in self.members], self.work) is not None


@st.composite
def batches(draw: st.DrawFn) -> Answers:
    """Most differ in one or two places from a uniform batch."""
    batching, decoupled = draw(_rarely(False, True, one_of=4)), draw(_rarely(True, False, one_of=5))
    specs = [draw(_specs(name)) for name in NAMES[: draw(st.integers(1, 3))]]
    states = [SequenceState("state", one.name, one.dtype, one.dims) for one in specs[: draw(_rarely(1, 0, one_of=4))]]
    sequence = SequenceBatching(0, is_direct=True, states=tuple(states)) if states else None
    config = config_of(
        outputs=specs, max_batch_size=8 if batching else 0, decoupled=decoupled, sequence=sequence, json={"name": "m"}
    )
    # What all responses of the batch have in common: sizes, the order of the outputs, what is left out or too much.
    layout = draw(st.permutations(specs))[draw(_rarely(1, 0, one_of=3)) :]
    layout += draw(_rarely([spec("unknown")], [])) + draw(_rarely(layout[:1], []))
    size, names = draw(st.integers(0, 3)), tuple(one.name for one in specs)
    wanted = draw(_rarely(names[: draw(st.integers(1, 3))], names, one_of=4))
    count = 1 if decoupled else draw(st.integers(1, 3))
    rows = [draw(st.integers(1, 3)) if batching else 1 for _ in range(count)]
    members = [
        Member(tuple(_as_configured(one, size, n, batching=batching) for one in layout), wanted, n) for n in rows
    ]
    for m in draw(st.lists(st.integers(0, count - 1), max_size=2)):
        members[m] = draw(_faulty(members[m]))
    if decoupled:
        members = [Member(members[0].outputs, members[0].wanted, ANY_ROWS, members[0].how)]
    return Answers(config, tuple(members), copies=draw(st.booleans()), strict=draw(_rarely(True, False, one_of=4)))


def _rarely(value: T, otherwise: T, one_of: int = 12) -> st.SearchStrategy[T]:
    return st.integers(1, one_of).map(lambda number: value if number == one_of else otherwise)


@st.composite
def _specs(draw: st.DrawFn, name: str) -> TensorSpec:
    dims = draw(st.sampled_from(((2,), (2,), (-1,), (), (2, -1))))
    reshape = draw(_rarely((1, 2), None)) if dims == (2,) else None
    return spec(name, dims, draw(st.sampled_from(DTYPES)), reshape=reshape)


def _as_configured(output: TensorSpec, size: int, rows: int, *, batching: bool) -> Output:
    dims = output.dims if output.reshape is None else output.reshape
    shape = tuple(size if dim < 0 else dim for dim in dims)
    dtype = "O" if output.dtype is DType.BYTES else output.dtype.numpy.str
    return Output(output.name, "S3" if dtype == "O" else dtype, (rows, *shape) if batching else shape, rows)


@st.composite
def _faulty(draw: st.DrawFn, member: Member) -> Member:
    """The member with one difference from the others, or from its configuration."""
    outputs, wanted = [*member.outputs], member.wanted
    k = draw(st.integers(0, len(outputs)))
    how = draw(st.sampled_from(FAULTS))
    one = outputs[k] if k < len(outputs) else None
    if how == "wanted":
        wanted = draw(st.sampled_from((wanted[1:], (*wanted[1:], *wanted[:1]), NAMES)))
    elif how == "added":
        outputs.insert(k, Output(draw(st.sampled_from((*NAMES, "unknown"))), "<f4", (member.rows, 2), 0))
    elif how == "swapped":
        outputs.reverse()
    elif one is None:
        pass
    elif how == "dropped":
        del outputs[k]
    elif how == "name":
        outputs[k] = replace(one, name=draw(st.sampled_from(NAMES)))
    elif how == "dtype":
        outputs[k] = replace(one, dtype=draw(st.sampled_from(("<f4", ">f4", "<i8", "<f8", "<c8", "S3", "U3", None))))
    elif how == "shape":
        shapes = (one.shape[1:], (*one.shape, 1), (1, *one.shape), (one.value + 1, *one.shape[1:]), (0, 2))
        outputs[k] = replace(one, shape=draw(st.sampled_from((*shapes, *((*one.shape[:-1], n) for n in (1, 3))))))
    return Member(tuple(outputs), wanted, member.rows, how)


def _shown(result: Results | Exception) -> Any:
    if isinstance(result, Exception):
        return type(result), str(result)
    return (
        [[_tensor(one) for one in column] for column in result.outputs],
        {m: (type(error), str(error)) for m, error in result.errors.items()},
        [*result.placed],
        dict(result.parameters),
        result.notes,
    )


def _tensor(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.array.tolist(), tensor.stop - tensor.start)


@given(batches())
@settings(max_examples=6 * settings().max_examples)
def test_a_uniform_batch_is_read_as_any_other(batch: Answers) -> None:
    event("uniform" if batch.is_uniform else "not uniform")
    assert _shown(batch.read_by(AnswerReader)) == _shown(batch.read_by(GeneralReader))


def _is_irregular(batch: Answers) -> bool:
    names: list[Sequence[str]] = [[output.name for output in member.outputs] for member in batch.members]
    return len(batch.members) > 1 and names[0] != [one.name for one in batch.config.outputs]


@pytest.mark.parametrize("copies", [True, False])
def test_uniform_batches_are_among_those_compared(copies: bool) -> None:
    found = settings(max_examples=2000, phases=[Phase.generate], database=None)
    find(batches(), lambda one: one.copies is copies and one.is_uniform and _is_irregular(one), settings=found)
