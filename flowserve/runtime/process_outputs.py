"""What a model's process says it answered, checked and made tensors.

Decided here: nothing that a child says is believed. Every offset, length and shape must lie within a block of its own
memory and be what the configuration promises before a view of it is made; what is wrong raises `Garbled`, and whoever
reads the socket ends such a child. Strings are decoded into the server's own memory, everything else is a read-only
view of the child's, which comes home when its last reader is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np

from flowserve.backends.child.protocol import APART, DONE, DONE_HEAD, NOTHING, TOGETHER, pack
from flowserve.backends.shapes import fits
from flowserve.errors import Invalid
from flowserve.memory import bytes_codec
from flowserve.memory.arena import aligned
from flowserve.memory.assemble import scatter
from flowserve.memory.segment import Lease
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

Column = list[Tensor | None]
# For so many sizes of a batch it is kept what is said of them. Some sizes come from a child, and it may say any.
_USUAL_MAX: Final = 1024


class Garbled(Exception):
    """A child said something that cannot be."""


class Usual:
    """How outputs of fixed shapes lie where each begins at the next place at which it may: the words that say so, and
    for each its shape, its type and where it begins. `tail` is how a DONE that says so ends, after its `DONE_HEAD`,
    whose first word is `first`.
    """

    __slots__ = ("first", "length", "nbytes", "pieces", "placed", "tail", "words")

    def __init__(self, specs: Sequence[TensorSpec], rows: tuple[int, ...]) -> None:
        words: list[int] = []
        size = 0
        self.pieces: list[tuple[tuple[int, ...], np.dtype[Any], int]] = []
        self.placed: list[int] = []
        for spec in specs:
            shape = (*rows, *spec.dims)
            nbytes = prod(shape) * spec.dtype.itemsize
            start = aligned(size)
            words += (TOGETHER, start, nbytes, 0, len(shape), *shape)
            self.pieces.append((shape, spec.dtype.numpy, start))
            self.placed.append(nbytes)
            size = start + nbytes
        self.words = tuple(words)
        self.nbytes = size
        message = pack(DONE, [0] * 7 + words)
        self.first = DONE_HEAD.unpack_from(message)[0]
        self.tail = message[DONE_HEAD.size :]
        self.length = len(message)


class OutputReader:
    """Reads the outputs of one model's batches."""

    def __init__(self, model: str, specs: Sequence[TensorSpec], *, batches: bool) -> None:
        self._model = model
        self._specs = specs
        self._batches = batches
        self._is_fixed = not any(spec.dtype is DType.BYTES or -1 in spec.dims for spec in specs)
        self._usual: dict[int, Usual] = {}

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

    def usual(self, rows: Sequence[int]) -> Usual | None:
        """What is said of a batch of members with `rows` by nearly every model: it answers all outputs, and these have
        fixed shapes. None where they have not.
        """
        if not self._is_fixed:
            return None
        total = rows[0] if len(rows) == 1 else sum(rows)
        return self._usual.get(total) or self._expect(total)

    def cut(self, usual: Usual, block: Lease, rows: Sequence[int]) -> list[Column]:
        """The outputs in a block in which they lie as usual."""
        return [self._shares(block.piece(*one), rows) for one in usual.pieces]

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
        return [*scatter(array, rows)] if self._batches else [Tensor(array)]

    def _expect(self, total: int) -> Usual:
        if len(self._usual) > _USUAL_MAX:
            self._usual.clear()
        usual = self._usual[total] = Usual(self._specs, (total,) if self._batches else ())
        return usual

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
            flat = bytes_codec.decode(encoded.tobytes(), count, name=spec.name, model=self._model)
        except Invalid as error:
            raise Garbled(str(error)) from None
        return flat.reshape(shape)
