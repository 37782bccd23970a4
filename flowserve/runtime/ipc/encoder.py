"""The encoding of a batch for a worker process: the places of its inputs, and the facts about its requests.

Decides which inputs are passed by reference, and where all others are copied. A column whose members are
neighbours in one block of memory that the process may read costs nothing but its place in a message; all others are
copied contiguously, once, into the arena of the process's own model. A tensor that is in shared memory already is
the output of another worker process, or of a model whose outputs are placed there for this one: a graph joins the two.
So a process reads the arena of its own model and the outputs of the models before it, never the inputs of others.

Does not know sockets, nor when a batch runs. Called by channel.py's users, on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowserve.backends.base import Work
from flowserve.backends.worker.protocol import are_plain, request_facts
from flowserve.backends.worker.run_message import ColumnPlace, News, RunMessage
from flowserve.memory import bytes_codec
from flowserve.memory.arena import Arena, aligned
from flowserve.memory.column import Column
from flowserve.memory.segment import Lease, Segment, locate
from flowserve.values import Array, DType, TensorSpec


class Packed:
    """A batch in shared memory: the places of its inputs, and the memory to keep until the model is done with them.

    `segments` hold the inputs; `held` keeps their blocks alive. `taken[i]`: bytes of input i, of which `copied[i]` were
    copied.
    """

    __slots__ = ("columns", "copied", "held", "segments", "taken")

    def __init__(self) -> None:
        self.columns: list[ColumnPlace] = []
        self.copied: list[int] = []
        self.taken: list[int] = []
        self.held: list[Any] = []
        self.segments: list[Segment] = []


# Arrays that will be contiguous in the batch's block: of which input, of which member (-1: of all), the arrays, their
# shape as one tensor, and bytes.
_Copy = tuple[int, int, list[Array], tuple[int, ...], int]


class InputPacker:
    """Packs the batches of one model version; its instances share it. Touched on the event loop only.

    `outputs` are the names of the model's outputs, in order.
    """

    def __init__(self, specs: Sequence[TensorSpec], outputs: Sequence[str]) -> None:
        self._specs = [(i, spec.dtype is DType.BYTES, spec.ragged) for i, spec in enumerate(specs)]
        self._output = {name: j for j, name in enumerate(outputs)}
        self._wanted: dict[tuple[str, ...], list[int]] = {}
        self.arena = Arena()

    def pack(self, inputs: Sequence[Column]) -> Packed:
        """The inputs of a batch in shared memory."""
        packed = Packed()
        copies: list[_Copy] = []
        in_place: list[tuple[Lease, int, int]] = []
        for i, is_bytes, is_ragged in self._specs:
            column = inputs[i]
            packed.copied.append(0)
            packed.taken.append(0)
            if is_ragged and len(column) > 1:
                packed.columns.append([None] * len(column))
                copies += [_copy(i, m, [one.array], is_bytes) for m, one in enumerate(column) if one is not None]
                continue
            block = column.block
            if block is None and column.lacks_some:  # then no member has it: the members of a batch are of one kind
                packed.columns.append(None)
                continue
            may_stay = not is_bytes and block is not None and block.base is not None
            place = self._place_of(block, packed, in_place) if may_stay else None  # type: ignore[arg-type]
            packed.columns.append(place)
            if place is None:
                copies.append(_copy(i, -1, [block] if block is not None else column.arrays, is_bytes))
            else:
                packed.taken[i] = place[2]
        if copies:
            self._write(packed, copies)
        return packed

    def message(self, number: int, work: Work, packed: Packed, news: News) -> RunMessage:
        """The message of a batch. Raises Internal if a fact about its requests cannot be encoded."""
        facts = None if are_plain(work.requests) else [_plain_facts(request_facts(one)) for one in work.requests]
        wanted = work.wanted
        if wanted.count(wanted[0]) == len(wanted):
            asked = [self._wanted.get(wanted[0]) or self.indices(wanted[0])]
        else:
            asked = [self.indices(names) for names in wanted]
        contexts = () if work.contexts is None else [[*work.contexts]]
        return RunMessage(number, work.rows, packed.columns, asked, news, facts, contexts)

    def indices(self, names: tuple[str, ...]) -> list[int]:
        """The numbers of these outputs."""
        found = self._wanted.get(names)
        if found is None:
            if len(self._wanted) > 100:
                self._wanted.clear()  # clients choose outputs in any order and number
            found = self._wanted[names] = [self._output[name] for name in names]
        return found

    def spill(self, message: bytes, packed: Packed) -> tuple[int, int, int]:
        """Write a message that is too long for a datagram beside its batch. Its segment, offset and length."""
        lease = self.arena.lease(len(message))
        lease.view()[:] = np.frombuffer(message, np.uint8)
        packed.held.append(lease)
        packed.segments.append(lease.segment)
        return lease.segment.number, lease.offset, len(message)

    def _place_of(self, block: Array, packed: Packed, in_place: list[tuple[Lease, int, int]]) -> ColumnPlace:
        """Where the rows of a column are, if the model's process may read them there; else None."""
        nbytes = block.nbytes
        shape: tuple[int, ...] = block.shape
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
        """All that is copied goes into one block."""
        size = 0
        starts = []
        for *_, nbytes in copies:
            start = aligned(size) if size else 0
            starts.append(start)
            size = start + nbytes
        lease = self.arena.lease(size)
        segment, offset = lease.segment, lease.offset
        packed.held.append(lease)
        packed.segments.append(segment)
        for start, (i, m, arrays, shape, nbytes) in zip(starts, copies, strict=True):
            place = (segment.number, offset + start, nbytes, shape)
            if m < 0:
                packed.columns[i] = place
            else:
                packed.columns[i][m] = place
            packed.copied[i] += nbytes
            packed.taken[i] += nbytes
            segment.write(offset + start, arrays)


def _plain_facts(facts: tuple[Any, ...]) -> tuple[Any, ...]:
    """With parameters as a message takes them."""
    if not facts[-1]:
        return facts
    return *facts[:-1], {name: _plain_value(value) for name, value in facts[-1].items()}


def _plain_value(value: Any) -> Any:
    """A parameter's value. A caller from Python may give numpy's numbers."""
    return value.item() if isinstance(value, np.generic) else value


def _copy(i: int, m: int, arrays: list[Array], is_bytes: bool) -> _Copy:
    shape: tuple[int, ...] = arrays[0].shape
    if len(arrays) > 1:
        shape = (sum([len(array) for array in arrays]), *shape[1:])
    if is_bytes:
        arrays = [np.frombuffer(b"".join(map(bytes_codec.encode, arrays)), np.uint8)]
    return i, m, arrays, shape, arrays[0].nbytes if len(arrays) == 1 else sum([array.nbytes for array in arrays])
