"""The tensors of batches on their way to and from a worker process: `InputPacker` and `OutputReader`.

Decides which inputs are passed by reference, and where all others are copied. A column whose members are neighbours in
one block of memory that the process may read is passed by its place in a message; all others are copied contiguously,
once, into the arena of the process's own model. A tensor in shared memory is the output of another worker process, or
of a model whose outputs are placed there for this one, because a graph connects the two. So a process reads the arena
of its own model and the outputs of the models before it, never the inputs of others.

Decides that nothing in a message of a process is trusted: every offset, length and shape must lie within a block of the
process's own memory before a view of it is made, and every data type and shape must match the configuration or belong
to an output that the message reports to differ from it. A violation raises `Garbled`, and the reader of the socket ends
the process. Strings of up to 256 KiB are decoded into the server's own memory; everything else is a read-only view of
the process's memory, which is free again when its last reader is gone. The lengths of more strings are checked by their
reader (`EncodedBytes`), because the event loop would take too long for them.

Does not know sockets, nor when a batch runs. Used on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from flowserve.backends.base import Work
from flowserve.backends.worker import messages
from flowserve.backends.worker.messages import ColumnPlace, Garbled, Stage, request_facts
from flowserve.errors import Invalid
from flowserve.memory import raw
from flowserve.memory.arena import Arena, aligned
from flowserve.memory.column import scatter
from flowserve.memory.raw import EncodedBytes
from flowserve.memory.segment import Lease, Segment, locate
from flowserve.memory.tensor import Tensor, with_rows
from flowserve.values import BY_NUMBER, Array, DType, Request, TensorSpec, fits

# Why the descriptor that a process sent with a message is missing.
NO_DESCRIPTOR: Final = "the server has as many files open as it may (RLIMIT_NOFILE)"
# As the rows of a response of a decoupled model, each of which may have another number.
ANY_ROWS: Final = -1
_NO_MEMORY: Final = np.empty(0, np.uint8)
_as_uint8: Callable[[bytes | memoryview], Array] = partial(np.frombuffer, dtype=np.uint8)


class Packed(NamedTuple):
    """A batch in shared memory: the places of its inputs, and the memory to keep until the model is done with them.

    `segments` hold the inputs; `held` keeps their blocks alive. `taken[i]`: bytes of input i, of which `copied[i]` were
    copied. `columns` and `wanted` are those of its `RunMessage`; `facts`: the `request_facts` of the
    members, None if all are plain.
    """

    columns: list[ColumnPlace]
    copied: list[int]
    taken: list[int]
    held: list[Any]
    segments: list[Segment]
    wanted: Sequence[tuple[int, ...]]
    facts: Sequence[Any] | None


# Faster than the constructor, which is a Python function.
_make_packed: Callable[[Sequence[Any]], Packed] = partial(tuple.__new__, Packed)

# One output, or input, of a batch: a tensor for each member, None for a member without one.
Members = Sequence[Tensor | None]
# Arrays that will be contiguous in the batch's block, with their input and member (-1: all members).
_Copy = tuple[int, int, list[Array]]


class InputPacker:
    """Packs the batches of one model version; its instances share it. Used on the event loop only.

    `outputs` are the names of the model's outputs, in order.
    """

    def __init__(self, specs: Sequence[TensorSpec], outputs: Sequence[str]) -> None:
        self._specs = [(i, spec.dtype is DType.BYTES, spec.ragged) for i, spec in enumerate(specs)]
        numbers = {name: j for j, name in enumerate(outputs)}
        # The numbers of requested outputs. Clients may request outputs in any order and number.
        self.indices = lru_cache(100)(lambda names: tuple([numbers[name] for name in names]))
        self.arena = Arena()

    def pack(self, work: Work) -> Packed:
        """A batch with its inputs in shared memory."""
        names, requests = work.wanted, work.requests
        wanted = [self.indices(names[0])] if names.count(names[0]) == len(names) else [*map(self.indices, names)]
        are_plain = not any(map(any, map(request_facts, requests)))  # as in nearly all batches
        packed = _make_packed(([], [], [], [], [], wanted, None if are_plain else [*map(_facts, requests)]))
        copies: list[_Copy] = []
        in_place: list[tuple[Lease, int, int]] = []
        for i, is_bytes, is_ragged in self._specs:
            column = work.inputs[i]
            packed.copied.append(0)
            packed.taken.append(0)
            if is_ragged and len(column) > 1:
                packed.columns.append([None] * len(column))
                copies += [(i, m, [one.array]) for m, one in enumerate(column) if one is not None]
                continue
            block = column.block
            if block is None and column.lacks_some:  # no member has it: all have the same inputs
                packed.columns.append(None)
                continue
            place: ColumnPlace = None
            if is_bytes:
                if isinstance(block, EncodedBytes):
                    place = self._pass_in_place(_as_uint8(block.data), block.shape, packed, in_place)
            elif block is not None and block.base is not None:
                place = self._pass_in_place(block, block.shape, packed, in_place)
            packed.columns.append(place)
            if place is None:
                copies.append((i, -1, column.pieces))
            else:
                packed.taken[i] = place[2]
        if copies:
            self._write(packed, copies)
        return packed

    def spill(self, message: bytes, packed: Packed) -> tuple[int, int, int]:
        """Write a message that is too long for a datagram into shared memory. Returns its segment, its offset and its
        length.
        """
        lease = self.arena.lease(len(message))
        lease.view()[:] = np.frombuffer(message, np.uint8)
        packed.held.append(lease)
        packed.segments.append(lease.segment)
        return lease.segment.number, lease.offset, len(message)

    def _pass_in_place(
        self, block: Array, shape: tuple[int, ...], packed: Packed, in_place: list[tuple[Lease, int, int]]
    ) -> ColumnPlace:
        """Pass a column of this shape without a copy, if its rows are contiguous in memory that the model's process may
        read: record that memory in `packed` and `in_place`, and return its place. Returns None if it must be copied.
        """
        nbytes = block.nbytes
        found = locate(block)
        if found is None:
            return None
        lease, offset = found
        if not nbytes:
            return 0, 0, 0, shape
        if len(self._specs) > 1:
            # One tensor may feed two inputs: a model that writes into one must not change the other.
            if any(other is lease and start < offset + nbytes and offset < end for other, start, end in in_place):
                return None
            in_place.append((lease, offset, offset + nbytes))
        packed.held.append(block)
        packed.segments.append(lease.segment)
        return lease.segment.number, offset, nbytes, shape

    def _write(self, packed: Packed, copies: Sequence[_Copy]) -> None:
        """Copy these arrays into one block."""
        size = 0
        pieces = []
        for i, _, arrays in copies:
            shape: tuple[int, ...] = arrays[0].shape
            if len(arrays) > 1:
                shape = (sum([len(array) for array in arrays]), *shape[1:])
            if self._specs[i][1]:
                encoded = []
                for array in arrays:
                    if isinstance(array, EncodedBytes):
                        encoded.append(_as_uint8(array.data))
                    else:
                        encoded.append(_as_uint8(raw.encode_bytes(array)))
                arrays = encoded
            nbytes = arrays[0].nbytes if len(arrays) == 1 else sum([array.nbytes for array in arrays])
            start = aligned(size) if size else 0
            pieces.append((start, nbytes, shape, arrays))
            size = start + nbytes
        lease = self.arena.lease(size)
        segment, offset = lease.segment, lease.offset
        packed.held.append(lease)
        packed.segments.append(segment)
        for (i, m, _), (start, nbytes, shape, arrays) in zip(copies, pieces, strict=True):
            place = (segment.number, offset + start, nbytes, shape)
            if m < 0:
                packed.columns[i] = place
            else:
                packed.columns[i][m] = place
            packed.copied[i] += nbytes
            packed.taken[i] += nbytes
            segment.write(offset + start, arrays)


class OutputReader:
    """Reads the outputs of one model's batches."""

    def __init__(self, model: str, specs: Sequence[TensorSpec], *, batches: bool) -> None:
        self.model = model
        self.names = frozenset(spec.name for spec in specs)
        self._specs = specs
        self._batches = batches
        self._free = {spec.name for spec in specs if set(spec.dims) == {-1}}  # outputs whose dims may all vary

    def read(
        self, words: Sequence[int], at: int, block: Lease | None, rows: Sequence[int], unlike: Collection[str] = ()
    ) -> tuple[list[Members], Sequence[int]]:
        """The outputs that `words` describe from `at` on, and the bytes of each. `block` contains them, of members with
        `rows`, or of one with ANY_ROWS. `unlike`: the outputs that the process has reported to differ from the
        configuration. Raises Garbled.
        """
        memory = _NO_MEMORY if block is None else block
        columns: list[Members] = []
        placed: list[int] = []
        try:
            for spec in self._specs:
                kind = words[at]
                at += 1
                if kind == messages.TOGETHER:
                    offset, nbytes, absent = words[at], words[at + 1], words[at + 2]
                    placed.append(nbytes)
                    shape_at = at + 3 + absent
                    at = shape_at + 1 + words[shape_at]
                    array = self.array(spec, offset, nbytes, tuple(words[shape_at + 1 : at]), memory, unlike)
                    if absent:
                        column = self._with_gaps(spec, array, rows, frozenset(words[shape_at - absent : shape_at]))
                    else:
                        column = self._members(array, rows, spec)
                elif kind == messages.APART:
                    column, nbytes, at = self._apart(spec, words, at, memory, rows, unlike)
                    placed.append(nbytes)
                elif kind == messages.NOTHING:
                    column = [None] * len(rows)
                    placed.append(0)
                else:
                    raise Garbled(f"output '{spec.name}' has an unknown form: {kind}")
                columns.append(column)
        except IndexError:
            raise Garbled("the message ends within an output") from None
        except ValueError as error:  # a shape that numpy does not support
            raise Garbled(str(error)) from None
        if at != len(words):
            raise Garbled(f"the message has {len(words) - at} words too many")
        return columns, placed

    def read_stage(self, stage: Stage, block: Lease | None, rows: Sequence[int]) -> list[Members]:
        """The outputs of a stage of a route. Raises Garbled."""
        memory = _NO_MEMORY if block is None else block
        columns: list[Members] = []
        try:
            for spec, (offset, nbytes, shape) in zip(self._specs, stage.outputs, strict=True):
                if shape:
                    columns.append(self._members(self.array(spec, offset, nbytes, shape, memory), rows, spec))
                else:
                    columns.append([None] * len(rows))
        except ValueError as error:
            raise Garbled(str(error)) from None
        return columns

    def _with_gaps(self, spec: TensorSpec, array: Array, rows: Sequence[int], absent: frozenset[int]) -> Members:
        """The members' tensors of an output that some members do not have."""
        present = [n for m, n in enumerate(rows) if m not in absent]
        following = iter(self._members(array, present, spec))
        return [None if m in absent else next(following) for m in range(len(rows))]

    def _members(self, array: Array, rows: Sequence[int], spec: TensorSpec) -> Members:
        """The members' tensors of an output that is one array."""
        if not self._batches and len(rows) == 1:
            return [Tensor(array)]
        if rows[0] == ANY_ROWS:
            return [with_rows(array) if self._batches else Tensor(array)]
        if self._batches and sum(rows) != len(array):
            raise Garbled(f"output '{spec.name}' has {len(array)} rows, its members have {sum(rows)}")
        return [Tensor(array, 0, rows[0])] if len(rows) == 1 else [*scatter(array, rows)]

    def _apart(
        self,
        spec: TensorSpec,
        words: Sequence[int],
        at: int,
        memory: Array,
        rows: Sequence[int],
        unlike: Collection[str],
    ) -> tuple[Members, int, int]:
        tensors: list[Tensor | None] = []
        total = 0
        for n in rows:
            form = words[at]
            at += 1
            if not form:
                tensors.append(None)
                continue
            offset, nbytes, dimensions = words[at], words[at + 1], words[at + 2]
            at += 3
            own = spec
            if form > 1:
                if spec.name not in unlike or form - 1 not in BY_NUMBER:
                    raise Garbled(f"output '{spec.name}' has an unknown form: {form}")
                own = replace(spec, dtype=BY_NUMBER[form - 1])
            array = self.array(own, offset, nbytes, tuple(words[at : at + dimensions]), memory, unlike)
            at += dimensions
            if self._batches and array.shape[:1] != (n,) and n != ANY_ROWS and spec.name not in unlike:
                raise Garbled(f"output '{spec.name}' of shape {[*array.shape]} for a member of {n} rows")
            tensors.append(with_rows(array) if self._batches else Tensor(array))
            total += nbytes
        return tensors, total, at

    def array(
        self,
        spec: TensorSpec,
        offset: int,
        nbytes: int,
        shape: tuple[int, ...],
        memory: Array,
        unlike: Collection[str] = (),
    ) -> Array:
        """The tensor that is at `offset` of a block. Raises Garbled."""
        is_free = spec.name in self._free and len(shape) == len(spec.dims) + self._batches
        if not (is_free or fits(shape[1:] if self._batches else shape, spec.dims) or spec.name in unlike):
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
        if count * 4 > len(encoded):  # checked before memory is allocated for them
            raise Garbled(f"output '{spec.name}' of shape {[*shape]} is said to have {len(encoded)} bytes")
        if len(encoded) > raw.ENCODED_BYTES_MIN:
            late: Array = EncodedBytes.of(encoded.data, spec.name, self.model, shape, is_output=True)
            return late
        try:
            flat = raw.decode_bytes(encoded.data, count, name=spec.name, model=self.model)
        except Invalid as error:
            raise Garbled(str(error)) from None
        return flat.reshape(shape)


def _facts(request: Request) -> tuple[Any, ...]:
    """The facts with parameters that a message can hold: a caller in Python may pass numpy numbers."""
    *facts, parameters = request_facts(request)
    if parameters:
        parameters = {name: one.item() if isinstance(one, np.generic) else one for name, one in parameters.items()}
    return *facts, parameters
