"""The tensors of batches in a worker process: inputs, read where other processes wrote them, and outputs, written where
the server and the next model read them.

Decides how tensors in shared memory become arrays, and when their pages are reset. All memory is mapped privately: a
model may write to its inputs, and only the pages of its own process change. After the run the written pages are
discarded, since a block that is reused would show them. If the model keeps an input (a view of it is alive, as its
reference count shows), its pages stay, and the server is notified once the model has released it. A later tensor at the
same place is copied, bypassing those pages. An input of a few kilobytes is copied instead, which costs less than the
check of the page table after the run; the model owns the copy.

Decides how the members' outputs are written into one block of this process's own shared memory: contiguously, so that
the next model reads them as one array. This is the only copy of an output, whatever made it. A member without an output
leaves no gap. Strings are written in Triton's BYTES encoding.

It does not know how inputs are used, how outputs are computed, nor which process reads them. Called by shm.py;
the actor on another machine writes its outputs with `OutputWriter` too.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from sys import getrefcount
from typing import Any, NamedTuple

import numpy as np

from flowserve.backends.worker.messages import APART, NOTHING, TOGETHER
from flowserve.memory import raw
from flowserve.memory.arena import Arena, BlockAddress, aligned
from flowserve.memory.column import Column
from flowserve.memory.segment import PAGE, PageTable, Segment
from flowserve.memory.tensor import Tensor
from flowserve.values import BY_NUMPY, Array, DType, TensorSpec, fits

# A range of bytes: a segment, its first offset, and the offset behind its last.
Range = tuple[Segment, int, int]


@dataclass(slots=True, eq=False)
class Run:
    """The arrays of one batch over memory that other processes wrote, and the range of each. If the model keeps some
    after the run, `leases` are those, and `ended` those that it has released since; `ended` is a list because its
    append is atomic.
    """

    number: int
    arrays: list[Array] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)
    leases: list[weakref.ref[Array]] = field(init=False)
    ended: list[object] = field(init=False)


class InputReader:
    """Turns columns of a `RUN` message into tensors."""

    def __init__(
        self,
        model: str,
        specs: Sequence[TensorSpec],
        *,
        batches: bool,
        let_go: Callable[[], None],
        copied_max: int = raw.COPIED_BYTES_MAX,
    ) -> None:
        """`let_go` is called on any thread after `gone` has grown. Inputs of up to `copied_max` bytes are copied."""
        self._model = model
        self._copied_max = copied_max
        self._specs = specs
        self._is_free = [set(spec.dims) == {-1} for spec in specs]  # whether all dims may vary
        self._batches = batches
        self._segments: dict[int, Segment] = {}
        self._held: dict[int, Run] = {}  # by number: runs whose inputs the model keeps
        self._pages = PageTable()
        self._let_go = let_go
        self.gone: deque[int] = deque()  # numbers of runs whose inputs the model has released

    def attach(self, number: int, fd: int) -> None:
        """Attach memory for inputs. Takes ownership of `fd`."""
        if number in self._segments:  # both the server and another process may have sent it
            os.close(fd)
            return
        self._segments[number] = Segment.read_private(fd, number)

    def detach(self, numbers: Sequence[int]) -> None:
        """Detach segments, which hold no inputs any more."""
        for number in numbers:
            self._segments.pop(number, None)

    def segment(self, number: int) -> Segment | None:
        """The attached segment with that number."""
        return self._segments.get(number)

    def message(self, number: int, offset: int, nbytes: int) -> bytes:
        """A message in shared memory."""
        copy = np.empty(nbytes, np.uint8)
        self._segments[number].read_into(copy, offset)
        return copy.tobytes()

    def fit(self, columns: Sequence[Any]) -> bool:
        """Whether these columns, which another worker process has written, have the dims of the configuration."""
        for spec, is_free, column in zip(self._specs, self._is_free, columns, strict=True):
            if type(column) is not tuple:
                return False
            shape = column[3]
            if len(shape) != len(spec.dims) + self._batches:
                return False
            if not (is_free or fits(shape[1:] if self._batches else shape, spec.dims)):
                return False
        return True

    def take(self, run: Run, columns: Sequence[Any], rows: Sequence[int]) -> list[Column]:
        """`inputs[i]` of the batch, in the shapes of the configuration. `rows[m]`: those of member m."""
        inputs: list[Column] = []
        for spec, column in zip(self._specs, columns, strict=True):
            if column is None:
                inputs.append(Column.of([None] * len(rows), rows))
            elif type(column) is list:
                tensors = [None if one is None else self._whole(run, spec, *one) for one in column]
                inputs.append(Column.of(tensors, rows))
            else:
                array = self._array(run, spec, *column)
                inputs.append(Column(rows, array) if self._batches else Column.of([Tensor(array)], rows))
        return inputs

    def finish(self, run: Run) -> bool:
        """End a run, whose tensors the caller has dropped. Returns whether the model keeps some of them. If not, the
        caller calls `forget_writes` before it reads the next message.
        """
        for array in run.arrays:
            if getrefcount(array) > _ALONE:
                del array
                self._keep(run)
                return True
        run.arrays.clear()
        return False

    def _keep(self, run: Run) -> None:
        run.leases, run.ended = [], []
        # A thread of the model may release an input at this moment: the callbacks exist before the run is in `_held`.
        run.leases = [weakref.ref(array, partial(self._ended, run)) for array in run.arrays]
        self._held[run.number] = run
        run.arrays.clear()

    def _whole(self, run: Run, spec: TensorSpec, segment: int, offset: int, nbytes: int, shape: Any) -> Tensor:
        array = self._array(run, spec, segment, offset, nbytes, shape)
        return Tensor(array, 0, len(array)) if self._batches else Tensor(array)

    def _array(self, run: Run, spec: TensorSpec, number: int, offset: int, nbytes: int, shape: Any) -> Array:
        dtype = spec.dtype
        if not nbytes:
            return np.empty(shape, dtype.numpy)
        segment = self._segments[number]
        memory: Any = segment.map  # not a view of another array, so that the model's views have it as base
        start = offset
        if self._held and self._holder((segment, offset, offset + nbytes)):
            memory, start = np.empty(nbytes, np.uint8), 0
            segment.read_into(memory, offset)
        if dtype is DType.BYTES:
            encoded = memoryview(memory)[start : start + nbytes]
            return raw.decode_bytes(encoded, prod(shape), name=spec.name, model=self._model).reshape(shape)
        array = np.ndarray(shape, dtype.numpy, memory, start)
        if nbytes <= self._copied_max:
            return array.copy()
        if memory is segment.map:
            run.arrays.append(array)
            run.ranges.append((segment, offset, offset + nbytes))
        return array

    def _ended(self, run: Run, lease: object) -> None:
        """A lease has ended, on any thread."""
        run.ended.append(lease)
        # If two threads release the last leases, only the first continues.
        if len(run.ended) == len(run.leases) and self._held.pop(run.number, None) is not None:
            self.forget_writes(run)
            self.gone.append(run.number)
            self._let_go()

    def forget_writes(self, run: Run) -> None:
        """Discard the model's writes to the inputs of a run."""
        for piece in run.ranges:
            while self._held and (holder := self._holder(piece)):
                holder.ranges.append(piece)  # they share a page, which is reset when both have ended
                if holder.number in self._held:
                    break  # otherwise the holder ended at this moment, perhaps without this range
            else:
                if self._pages.is_written(*piece):
                    piece[0].forget_writes(piece[1], piece[2])

    def _holder(self, piece: Range) -> Run | None:
        """A run whose inputs the model keeps, on the pages of this range."""
        segment, start, stop = piece
        first, last = start - start % PAGE, -(-stop // PAGE) * PAGE
        for run in [*self._held.values()]:
            if any(where is segment and begin < last and first < end for where, begin, end in run.ranges):
                return run
        return None


def _holders(arrays: list[Array]) -> int:
    """The reference count of the first array, as `finish` reads it."""
    for array in arrays:
        return getrefcount(array)
    return 0


# That count if there is no other reference. Measured, because it differs between versions of Python.
_ALONE = _holders([np.empty(0)])


class Together(NamedTuple):
    """One output of all members but the `absent` ones, contiguous: its offset in the block, bytes, and shape."""

    start: int
    nbytes: int
    absent: Sequence[int]
    shape: tuple[int, ...]


# Faster than the constructor, which is a Python function.
_together: Callable[[tuple[int, int, Sequence[int], tuple[int, ...]]], Together] = partial(tuple.__new__, Together)
# One output: contiguous; or for each member None or (form, offset, bytes, shape), see DONE in messages.py; or of no
# member.
Output = Together | list[tuple[int, int, int, tuple[int, ...]] | None] | None


class Placed(NamedTuple):
    """The outputs of a batch in a block of `nbytes` bytes; segment and offset are 0 if there are none. `memory`: the
    segment, or the block of a frame.
    """

    segment: int
    offset: int
    nbytes: int
    outputs: Sequence[Output]
    memory: Any

    def words(self) -> list[int]:
        """The words of a message from `segment` on (messages.py)."""
        words = [self.segment, self.offset, self.nbytes]
        for output in self.outputs:
            if output is None:
                words.append(NOTHING)
            elif isinstance(output, Together):
                start, nbytes, absent, shape = output
                words += (TOGETHER, start, nbytes, len(absent), *absent, len(shape), *shape)
            else:
                words.append(APART)
                for one in output:
                    if one is None:
                        words.append(0)
                    else:
                        form, start, nbytes, shape = one
                        words += (form, start, nbytes, len(shape), *shape)
        return words


_placed: Callable[[tuple[int, int, int, Sequence[Output], Any]], Placed] = partial(tuple.__new__, Placed)


class OutputWriter:
    """The memory that this process writes for the server. `show` is called with each of its segments before the first
    use. `arena`: shared memory, or the block of a frame.
    """

    def __init__(self, specs: Sequence[TensorSpec], show: Callable[[Segment], None], arena: Any = None) -> None:
        self._specs = specs
        self._show = show
        self.arena: Arena = arena or Arena()
        self.give_back: Callable[[Sequence[BlockAddress]], None] = self.arena.give_back
        self._shown: dict[int, Segment] = {}

    def segment(self, number: int) -> Segment:
        """The segment with that number."""
        return self._shown[number]

    def message(self, message: bytes) -> list[int]:
        """Write a message that is too long for a datagram. Its segment, offset and length."""
        segment, offset = self.arena.take(len(message))
        if segment.number not in self._shown:
            self._shown[segment.number] = segment  # before: another thread may have to send it again
            self._show(segment)
        segment.memory[offset : offset + len(message)] = np.frombuffer(message, np.uint8)
        return [segment.number, offset, len(message)]

    def place(self, columns: Sequence[Sequence[Tensor | None]], rows: Sequence[int] | None) -> Placed:
        """Write `columns[j][m]`, output j of member m, into one block. `rows[m]` are the rows of member m; None if its
        outputs may have any: it is the only member then.
        """
        outputs: list[Output] = []
        writes: list[tuple[int, list[Array]]] = []
        size = 0
        for spec, column in zip(self._specs, columns, strict=True):
            absent: Sequence[int] = ()
            is_apart = False
            block = column.block if type(column) is Column else None
            if block is not None:
                arrays = [block]
            elif type(column) is Column and not column.lacks_some:
                arrays = column.arrays
            else:
                arrays = [tensor.array for tensor in column if tensor is not None]
                if not arrays:
                    outputs.append(None)
                    continue
                absent = [m for m, tensor in enumerate(column) if tensor is None]
                # Outputs of another data type, or of other rows than their members have, do not form one tensor.
                for array in arrays:
                    is_apart = is_apart or array.dtype != spec.dtype.numpy
                if rows is not None and not is_apart:
                    expected = [n for n, tensor in zip(rows, column, strict=True) if tensor is not None]
                    is_apart = any(array.shape[:1] != (n,) for n, array in zip(expected, arrays, strict=True))
            if is_apart:
                apart, size = _plan_apart(spec, column, size, writes)
                outputs.append(apart)
                continue
            shape = arrays[0].shape
            if len(arrays) > 1:
                shapes = [array.shape for array in arrays]
                if shapes.count(shape) == len(shapes):
                    shape = (shape[0] * len(shapes), *shape[1:])
                elif all(one[1:] == shape[1:] for one in shapes):
                    shape = (sum([one[0] for one in shapes]), *shape[1:])
                else:
                    apart, size = _plan_apart(spec, column, size, writes)
                    outputs.append(apart)
                    continue
            start = aligned(size) if size else 0
            if spec.dtype is DType.BYTES:
                arrays = _encoded(arrays)
            writes.append((start, arrays))
            nbytes = arrays[0].nbytes if len(arrays) == 1 else sum([array.nbytes for array in arrays])
            size = start + nbytes
            outputs.append(_together((start, nbytes, absent, shape)))
        if not size:
            return _placed((0, 0, 0, outputs, None))
        segment, offset = self.arena.take(size)
        if segment.number not in self._shown:
            self._shown[segment.number] = segment  # before: another thread may have to send it again
            self._show(segment)
        for start, arrays in writes:
            segment.write(offset + start, arrays)
        return _placed((segment.number, offset, size, outputs, segment))


def _plan_apart(
    spec: TensorSpec, column: Sequence[Tensor | None], size: int, writes: list[tuple[int, list[Array]]]
) -> tuple[Output, int]:
    """Plan an output of members that are not one tensor, in a block that has `size` bytes so far. Returns it, and the
    size of the block then.
    """
    output: list[tuple[int, int, int, tuple[int, ...]] | None] = []
    for tensor in column:
        if tensor is None:
            output.append(None)
            continue
        arrays = [tensor.array]
        shape, dtype = arrays[0].shape, arrays[0].dtype
        if dtype.hasobject:
            arrays = _encoded(arrays)
        start = aligned(size)
        writes.append((start, arrays))
        size = start + arrays[0].nbytes
        form = 1 if dtype == spec.dtype.numpy else 1 + BY_NUMPY[dtype].number
        output.append((form, start, arrays[0].nbytes, shape))
    return output, size


def _encoded(strings: list[Array]) -> list[Array]:
    """Arrays of strings, one after the other, as they are written."""
    return [np.frombuffer(b"".join(map(raw.encode_bytes, strings)), np.uint8)]
