"""What a model's process says it answered, checked and made tensors.

Decided here: nothing that a child says is believed. Every offset, length and shape must lie within a block of its own
memory and be what the configuration promises before a view of it is made; what is wrong raises `Garbled`, and whoever
reads the socket ends such a child. Strings are decoded into the server's own memory, everything else is a read-only
view of the child's, which comes home when its last reader is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from flowserve.backends.child.protocol import APART, NOTHING, TOGETHER
from flowserve.backends.child.usual import Usual, Usuals
from flowserve.backends.shapes import fits
from flowserve.errors import Invalid
from flowserve.memory import bytes_codec
from flowserve.memory.assemble import scatter
from flowserve.memory.segment import Lease
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

Column = list[Tensor | None]
# Why what a child sent along with a message is not there.
NO_DESCRIPTOR: Final = "the server has as many files open as it may (RLIMIT_NOFILE)"


class Garbled(Exception):
    """A child said something that cannot be."""


class OutputReader:
    """Reads the outputs of one model's batches."""

    def __init__(self, model: str, specs: Sequence[TensorSpec], *, batches: bool) -> None:
        self.model = model
        self._specs = specs
        self._batches = batches
        self.usual = Usuals(specs, batches=batches).of

    def read(
        self, words: Sequence[int], at: int, block: Lease | None, rows: Sequence[int]
    ) -> tuple[list[Column], Sequence[int]]:
        """The outputs that `words` tell of from `at` on, and the bytes of each. `block` holds them, of members with
        `rows`. Raises Garbled.

        Where all outputs are answered, and have fixed shapes, everything is checked by one comparison with the only
        words that can be right.
        """
        usual = self.usual(rows)
        if usual is not None and block is not None and words[at:] == usual.words and block.nbytes == usual.nbytes:
            return self.cut(usual, block, rows), usual.placed
        memory = np.empty(0, np.uint8) if block is None else block.view()
        columns: list[Column] = []
        placed: list[int] = []
        try:
            for spec in self._specs:
                kind = words[at]
                at += 1
                before = at
                if kind == TOGETHER:
                    column, at = self._together(spec, words, at, memory, rows)
                    placed.append(words[before + 1])
                elif kind == APART:
                    column, nbytes, at = self._apart(spec, words, at, memory, rows)
                    placed.append(nbytes)
                elif kind == NOTHING:
                    column = [None] * len(rows)
                    placed.append(0)
                else:
                    raise Garbled(f"output '{spec.name}' is said to lie as {kind}")
                columns.append(column)
        except IndexError:
            raise Garbled("the message ends within an output") from None
        except ValueError as error:  # a shape that numpy does not have
            raise Garbled(str(error)) from None
        if at != len(words):
            raise Garbled(f"the message has {len(words) - at} words too many")
        return columns, placed

    def cut(self, usual: Usual, block: Lease, rows: Sequence[int]) -> list[Column]:
        """The outputs in a block in which they lie as usual."""
        columns: list[Column] = []
        for shape, dtype, start in usual.pieces:
            columns.append(self._shares(np.ndarray(shape, dtype, block, start), rows))
        return columns

    def _together(
        self, spec: TensorSpec, words: Sequence[int], at: int, memory: Array, rows: Sequence[int]
    ) -> tuple[Column, int]:
        offset, nbytes, count = words[at], words[at + 1], words[at + 2]
        at += 3
        absent = frozenset(words[at : at + count]) if count else ()
        at += count
        dimensions = words[at]
        shape = tuple(words[at + 1 : at + 1 + dimensions])
        array = self.array(spec, offset, nbytes, shape, memory)
        at += 1 + dimensions
        if not self._batches:
            return self._shares(array, rows), at
        cuts = rows if not absent else [n for m, n in enumerate(rows) if m not in absent]
        if sum(cuts) != shape[0]:
            raise Garbled(f"output '{spec.name}' has {shape[0]} rows, its members have {sum(cuts)}")
        present = self._shares(array, cuts)
        if not absent:
            return present, at
        following = iter(present)
        return [None if m in absent else next(following) for m in range(len(rows))], at

    def _shares(self, array: Array, rows: Sequence[int]) -> Column:
        if len(rows) == 1:
            return [Tensor(array, 0, rows[0]) if self._batches else Tensor(array)]
        return [*scatter(array, rows)]

    def _apart(
        self, spec: TensorSpec, words: Sequence[int], at: int, memory: Array, rows: Sequence[int]
    ) -> tuple[Column, int, int]:
        column: Column = []
        total = 0
        for n in rows:
            is_there = words[at]
            at += 1
            if not is_there:
                column.append(None)
                continue
            offset, nbytes, dimensions = words[at], words[at + 1], words[at + 2]
            at += 3
            array = self.array(spec, offset, nbytes, tuple(words[at : at + dimensions]), memory)
            at += dimensions
            if self._batches and len(array) != n:
                raise Garbled(f"output '{spec.name}' has {len(array)} rows for a member of {n}")
            column.append(Tensor(array, 0, n) if self._batches else Tensor(array))
            total += nbytes
        return column, total, at

    def array(self, spec: TensorSpec, offset: int, nbytes: int, shape: tuple[int, ...], memory: Array) -> Array:
        """The one tensor that is said to lie there. Raises Garbled."""
        if not fits(shape[1:] if self._batches else shape, spec.dims):
            raise Garbled(f"output '{spec.name}' of shape {[*shape]} is not what the configuration promises")
        if offset + nbytes > len(memory) or offset % 8:
            raise Garbled(f"output '{spec.name}' does not lie in its block")
        dtype = spec.dtype
        if dtype is DType.BYTES:
            return self._strings(spec, memory[offset : offset + nbytes], shape)
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
