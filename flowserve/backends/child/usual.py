"""How a batch is answered by nearly every model: all outputs are there, and their shapes are fixed.

Decided here: where such outputs lie in their block, and the words that say so. Both ends know these before a model has
run: the server checks an answer by one comparison, and a process that hands its batch to the next one sees by one that
there is nothing the server should look at first. This file does not know who says the words, nor to whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np

from flowserve.backends.child.protocol import DONE, DONE_HEAD, TOGETHER, pack
from flowserve.backends.shapes import has_fixed_shapes
from flowserve.memory.arena import aligned
from flowserve.values import TensorSpec

# For so many sizes of a batch it is kept what is said of them. Some sizes come from a child, and it may say any.
_SIZES_MAX: Final = 1024


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


class Usuals:
    """What is usual of one model's answers, by the rows of a batch."""

    def __init__(self, specs: Sequence[TensorSpec], *, batches: bool) -> None:
        self._specs = specs
        self._batches = batches
        self.are_fixed = has_fixed_shapes(specs)
        self._by_rows: dict[int, Usual] = {}

    def of(self, rows: Sequence[int]) -> Usual | None:
        """What is said of a batch of members with `rows`. None where shapes are not fixed."""
        if not self.are_fixed:
            return None
        total = rows[0] if len(rows) == 1 else sum(rows)
        return self._by_rows.get(total) or self._expect(total)

    def of_answer(self, rows: Sequence[int], words: Sequence[int]) -> Usual | None:
        """The same where `words` of a DONE, from `number` on, say just that. None where there is nothing in it."""
        usual = self.of(rows)
        if usual is None or not usual.nbytes or words[6] != usual.nbytes or tuple(words[7:]) != usual.words:
            return None
        return usual

    def _expect(self, total: int) -> Usual:
        if len(self._by_rows) >= _SIZES_MAX:
            self._by_rows.clear()
        usual = self._by_rows[total] = Usual(self._specs, (total,) if self._batches else ())
        return usual
