"""What a batch looks like to a model in another process.

Decided here: which inputs are handed on as they lie, and where all others are copied. A column whose members are
neighbours in one block of memory that the model's process may read costs nothing but its place in a message; anything
else is copied side by side, once, into the model's own arena. What lies in shared memory before it is copied is the
output of another process, or of a model whose outputs are put there for this one, and that it came here says that a
graph joins the two. So a process reads the arena of its own model and the outputs of the models before it, never the
inputs of others.

This file does not know sockets, nor when a batch runs.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowserve.backends.base import Work
from flowserve.backends.child.protocol import MARSHAL_VERSION, are_plain, request_facts
from flowserve.errors import Internal
from flowserve.memory import bytes_codec
from flowserve.memory.arena import Arena, aligned
from flowserve.memory.assemble import pieces
from flowserve.memory.segment import Lease, Segment, locate
from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.values import Array, DType, TensorSpec


class Packed:
    """A batch in shared memory: what the message says of it, and what must stay until the model is done.

    `segments` hold the inputs; `held` keeps their blocks alive. `copied[i]`: bytes of input i that were copied.
    """

    __slots__ = ("columns", "copied", "held", "segments")

    def __init__(self) -> None:
        self.columns: list[Any] = []
        self.copied: list[int] = []
        self.held: list[Any] = []
        self.segments: list[Segment] = []


class _Copy:
    """Arrays that will lie side by side at `start` of the batch's block, as the tensor that column `i` says."""

    __slots__ = ("arrays", "i", "m", "nbytes", "rows", "shape", "start")

    def __init__(self, i: int, m: int, arrays: list[Array], shape: tuple[int, ...], rows: Any) -> None:
        self.i = i
        self.m = m  # of which member, where the column is not one tensor; else -1
        self.arrays = arrays
        self.shape = shape
        self.rows = rows
        self.nbytes = arrays[0].nbytes if len(arrays) == 1 else sum([array.nbytes for array in arrays])
        self.start = 0


class InputPacker:
    """Packs the batches of one model version; its instances share it. Touched on the loop only."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = [(i, spec.dtype is DType.BYTES, spec.ragged) for i, spec in enumerate(specs)]
        self.nothing = [0] * len(specs)  # of each input so much is copied where it lies in one piece
        self.arena = Arena()

    def pack(self, inputs: Sequence[Sequence[Tensor | None]]) -> Packed:
        """The inputs of a batch: `inputs[i]` are its members' i-th."""
        packed = Packed()
        copies: list[_Copy] = []
        lying: list[tuple[Lease, int, int]] = []
        for i, is_bytes, is_ragged in self._specs:
            column: Sequence[Any] = inputs[i]
            packed.copied.append(0)
            if is_ragged and len(column) > 1:
                packed.columns.append([None] * len(column))
                copies += [_copy(i, m, [one], is_bytes) for m, one in enumerate(column) if one is not None]
                continue
            if column[0] is None:  # then no member has it: batches are of one kind
                packed.columns.append(None)
                continue
            lies = None if is_bytes else self._lying(column, packed, lying)
            packed.columns.append(lies)
            if lies is None:
                copies.append(_copy(i, -1, column, is_bytes))
        if copies:
            self._write(packed, copies)
        return packed

    def message(self, message: bytes, packed: Packed) -> tuple[int, int, int]:
        """Lay a message that is too long beside the batch it is about. Its segment, offset and length."""
        lease = self.arena.lease(len(message))
        lease.view()[:] = np.frombuffer(message, np.uint8)
        packed.held.append(lease)
        packed.segments.append(lease.segment)
        return lease.segment.number, lease.offset, len(message)

    def _lying(self, column: Sequence[Tensor], packed: Packed, lying: list[tuple[Lease, int, int]]) -> Any:
        """The column as it lies, where the model's process may read it there; else None."""
        first = column[0]
        block = first.block
        if block.base is None:
            return None
        stop = first.start
        for tensor in column:
            if tensor.block is not block or tensor.start != stop:
                return None
            stop = tensor.stop
        located = locate(block)
        if located is None:
            return None
        lease, offset = located
        shape: tuple[int, ...] = block.shape
        nbytes = block.nbytes
        if first.stop == WHOLE:
            rows = [shape[0]]
        else:
            rows = [tensor.stop - tensor.start for tensor in column]
            if stop - first.start != shape[0]:
                row = nbytes // shape[0]
                offset += first.start * row
                nbytes = (stop - first.start) * row
                shape = (stop - first.start, *shape[1:])
        if not nbytes:
            return 0, 0, 0, shape, rows
        if len(self._specs) > 1:
            # One tensor may feed two inputs: a model that writes into one must not change the other.
            if any(other is lease and start < offset + nbytes and offset < end for other, start, end in lying):
                return None
            lying.append((lease, offset, offset + nbytes))
        packed.held.append(block)
        packed.segments.append(lease.segment)
        return lease.segment.number, offset, nbytes, shape, rows

    def _write(self, packed: Packed, copies: Sequence[_Copy]) -> None:
        """All that is copied goes into one block."""
        size = 0
        for copy in copies:
            copy.start = aligned(size) if size else 0
            size = copy.start + copy.nbytes
        lease = self.arena.lease(size)
        segment, offset = lease.segment, lease.offset
        packed.held.append(lease)
        packed.segments.append(segment)
        for copy in copies:
            where = (segment.number, offset + copy.start, copy.nbytes, copy.shape)
            if copy.m < 0:
                packed.columns[copy.i] = (*where, copy.rows)
            else:
                packed.columns[copy.i][copy.m] = where
            packed.copied[copy.i] += copy.nbytes
            segment.write(offset + copy.start, copy.arrays)


def run_message(head: tuple[Any, ...], work: Work, relay: tuple[Any, ...] | None = None) -> bytes:
    """A `RUN` message: `head`, what the batch's requests say of themselves, and on to whom it is handed, if at all."""
    requests = None if are_plain(work.requests) else [_plain_facts(request_facts(one)) for one in work.requests]
    wanted: Any = work.wanted
    if wanted.count(wanted[0]) == len(wanted):
        wanted = wanted[0]
    try:
        message = (*head, requests, wanted)
        if relay is not None:
            message = (*message, None, relay)
        elif work.contexts is not None:
            message = (*message, work.contexts)
        return marshal.dumps(message, MARSHAL_VERSION)
    except ValueError:
        pass  # what is raised in here would hold these frames, and the batch, by its context
    raise Internal("a request holds a parameter that is no text, number or boolean")


def _plain_facts(facts: tuple[Any, ...]) -> tuple[Any, ...]:
    """With parameters as marshal takes them."""
    if not facts[-1]:
        return facts
    return *facts[:-1], {name: _plain_value(value) for name, value in facts[-1].items()}


def _plain_value(value: Any) -> Any:
    """A parameter's value. Somebody who calls from Python may give numpy's numbers, which marshal takes for bytes."""
    return value.item() if isinstance(value, np.generic) else value


def _copy(i: int, m: int, tensors: Sequence[Tensor], is_bytes: bool) -> _Copy:
    arrays = [tensors[0].array] if len(tensors) == 1 else pieces(tensors)
    shape: tuple[int, ...] = arrays[0].shape
    if len(arrays) > 1:
        shape = (sum([len(array) for array in arrays]), *shape[1:])
    rows: list[int] | None = None
    if m < 0:
        rows = [shape[0]] if len(tensors) == 1 else [tensor.shape[0] for tensor in tensors]
    if is_bytes:
        arrays = [np.frombuffer(b"".join(map(bytes_codec.encode, arrays)), np.uint8)]
    return _Copy(i, m, arrays, shape, rows)
