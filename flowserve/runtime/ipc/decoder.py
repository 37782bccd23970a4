"""The outputs that a worker process reports, checked and turned into columns.

Decides that nothing in a message is trusted: every offset, length and shape must lie within a block of the process's
own memory and match the configuration before a view of it is made. A violation raises `Garbled`, and the
reader of the socket ends the process. Strings are decoded into the server's own memory; everything else is a read-only
view of the process's memory, which is free again when its last reader is gone. Does not know sockets. Called on the
event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from flowserve.backends.shapes import fits
from flowserve.backends.worker.protocol import APART, NOTHING, TOGETHER
from flowserve.backends.worker.run_message import Stage
from flowserve.errors import Invalid
from flowserve.memory import bytes_codec
from flowserve.memory.column import Column, scatter
from flowserve.memory.segment import Lease
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

# Why the descriptor that a process sent with a message is missing.
NO_DESCRIPTOR: Final = "the server has as many files open as it may (RLIMIT_NOFILE)"
_NO_MEMORY: Final = np.empty(0, np.uint8)


class Garbled(Exception):
    """A worker process sent a message that cannot be right."""


class OutputReader:
    """Reads the outputs of one model's batches."""

    def __init__(self, model: str, specs: Sequence[TensorSpec], *, batches: bool) -> None:
        self.model = model
        self._specs = specs
        self._batches = batches
        self._free = {spec.name for spec in specs if set(spec.dims) == {-1}}  # outputs whose dims may all vary

    def read(
        self, words: Sequence[int], at: int, block: Lease | None, rows: Sequence[int]
    ) -> tuple[list[Column], Sequence[int]]:
        """The outputs that `words` describe from `at` on, and the bytes of each. `block` contains them, of members with
        `rows`. Raises Garbled.
        """
        memory = _NO_MEMORY if block is None else block
        columns: list[Column] = []
        placed: list[int] = []
        try:
            for spec in self._specs:
                kind = words[at]
                at += 1
                if kind == TOGETHER:
                    offset, nbytes, absent = words[at], words[at + 1], words[at + 2]
                    placed.append(nbytes)
                    shape_at = at + 3 + absent
                    at = shape_at + 1 + words[shape_at]
                    array = self.array(spec, offset, nbytes, tuple(words[shape_at + 1 : at]), memory)
                    if absent:
                        column = self._with_gaps(spec, array, rows, frozenset(words[shape_at - absent : shape_at]))
                    elif self._batches and sum(rows) == len(array):
                        column = Column(rows, array)
                    else:
                        column = self._column(array, rows, spec)
                elif kind == APART:
                    column, nbytes, at = self._apart(spec, words, at, memory, rows)
                    placed.append(nbytes)
                elif kind == NOTHING:
                    column = Column.of([None] * len(rows), rows)
                    placed.append(0)
                else:
                    raise Garbled(f"output '{spec.name}' has an unknown form: {kind}")
                columns.append(column)
        except IndexError:
            raise Garbled("the message ends within an output") from None
        except ValueError as error:  # a shape that numpy does not have
            raise Garbled(str(error)) from None
        if at != len(words):
            raise Garbled(f"the message has {len(words) - at} words too many")
        return columns, placed

    def read_stage(self, stage: Stage, block: Lease | None, rows: Sequence[int]) -> list[Column]:
        """The outputs that a stage of a route made. Raises Garbled."""
        memory = _NO_MEMORY if block is None else block
        columns = []
        try:
            for spec, (offset, nbytes, shape) in zip(self._specs, stage.outputs, strict=True):
                if shape:
                    columns.append(self._column(self.array(spec, offset, nbytes, shape, memory), rows, spec))
                else:
                    columns.append(Column.of([None] * len(rows), rows))
        except ValueError as error:
            raise Garbled(str(error)) from None
        return columns

    def _with_gaps(self, spec: TensorSpec, array: Array, rows: Sequence[int], absent: frozenset[int]) -> Column:
        """The column of an output that some members do not have."""
        present = [n for m, n in enumerate(rows) if m not in absent]
        following = iter(self._column(array, present, spec))
        return Column.of([None if m in absent else next(following) for m in range(len(rows))], rows)

    def _column(self, array: Array, rows: Sequence[int], spec: TensorSpec) -> Column:
        if not self._batches:
            if len(rows) == 1:
                return Column.of([Tensor(array)], rows)
            return Column.of([*scatter(array, rows)], rows)
        if sum(rows) != len(array):
            raise Garbled(f"output '{spec.name}' has {len(array)} rows, its members have {sum(rows)}")
        return Column(rows, array)

    def _apart(
        self, spec: TensorSpec, words: Sequence[int], at: int, memory: Array, rows: Sequence[int]
    ) -> tuple[Column, int, int]:
        tensors: list[Tensor | None] = []
        total = 0
        for n in rows:
            is_there = words[at]
            at += 1
            if not is_there:
                tensors.append(None)
                continue
            offset, nbytes, dimensions = words[at], words[at + 1], words[at + 2]
            at += 3
            array = self.array(spec, offset, nbytes, tuple(words[at : at + dimensions]), memory)
            at += dimensions
            if self._batches and len(array) != n:
                raise Garbled(f"output '{spec.name}' has {len(array)} rows for a member of {n}")
            tensors.append(Tensor(array, 0, n) if self._batches else Tensor(array))
            total += nbytes
        return Column.of(tensors, rows), total, at

    def array(self, spec: TensorSpec, offset: int, nbytes: int, shape: tuple[int, ...], memory: Array) -> Array:
        """The tensor that is at `offset` of a block. Raises Garbled."""
        is_free = spec.name in self._free and len(shape) == len(spec.dims) + self._batches
        if not is_free and not fits(shape[1:] if self._batches else shape, spec.dims):
            raise Garbled(f"output '{spec.name}' of shape {[*shape]} is not what the configuration promises")
        if offset + nbytes > len(memory) or offset % 8:
            raise Garbled(f"output '{spec.name}' is not within its block")
        dtype = spec.dtype
        if dtype is DType.BYTES:
            return self._strings(spec, np.ndarray(nbytes, np.uint8, memory, offset), shape)
        if prod(shape) * dtype.itemsize != nbytes:
            raise Garbled(f"output '{spec.name}' of shape {[*shape]} is said to have {nbytes} bytes")
        if not nbytes:
            return np.empty(shape, dtype.numpy)
        return np.ndarray(shape, dtype.numpy, memory, offset)

    def _strings(self, spec: TensorSpec, encoded: Array, shape: tuple[int, ...]) -> Array:
        count = prod(shape)
        if count * 4 > len(encoded):  # before room for so many is made
            raise Garbled(f"output '{spec.name}' of shape {[*shape]} is said to have {len(encoded)} bytes")
        try:
            flat = bytes_codec.decode(encoded.tobytes(), count, name=spec.name, model=self.model)
        except Invalid as error:
            raise Garbled(str(error)) from None
        return flat.reshape(shape)
