"""Property tests with whole simulated servers and real tensors: every array that a model or a caller sees is checked
when it is passed on and again when it is released.

The simulator (tests/support/sim.py) decides which requests arrive, leave, fail or are late, and which models raise
or omit outputs. Here its handles get rows of real blocks from a real pool, models gather and write as real backends do,
and returned buffers are filled again by their next user. A view that outlived its block, a write to memory that is
being read, or rows of a withdrawn request would all appear as wrong numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowserve.graph.regions import NO_SLOT
from flowserve.memory.assemble import gather
from flowserve.memory.pool import Pool
from flowserve.memory.tensor import Tensor
from flowserve.runtime.workers.base import writable_members
from flowserve.scheduling.affinity import NO_DEVICE
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.frame import Frame
from flowserve.values import Array
from tests.support.sim import RouteRun, Sim
from tests.support.strategies import Handle, SimModel, World, worlds

DEPTH = 1024  # numbers behind each unit of a handle's width: two rows are enough for a pooled buffer
GARBAGE = -1


class RowsHandle(Handle):
    """A handle that has its rows: every number in them is its content."""

    __slots__ = ("tensor",)
    tensor: Tensor


@dataclass
class Seen:
    """An array that is read from now until later. `contents` has the expected value of each row."""

    array: Array
    contents: list[int]
    is_written: bool = False

    def check(self) -> None:
        rows = self.array if self.array.ndim == 3 else self.array[None]
        assert len(rows) == len(self.contents), "rows of another request, or missing rows"
        for row, content in zip(rows, self.contents, strict=True):
            assert (row == content).all(), "the rows differ from the values that their producer wrote"


class CountingPool(Pool):
    """A pool that counts how often it lends a buffer again."""

    reused = 0

    def take(self, nbytes: int) -> Array:
        kept_bytes = self.kept_bytes
        array = super().take(nbytes)
        self.reused += self.kept_bytes < kept_bytes
        return array


class Assembling(Sim):
    """Pure models gather their batch, as onnxruntime models do; the others get their rows one request at a time and
    write into them if permitted, as Python models do.
    """

    def __init__(self, seed: int, world: World | None = None) -> None:
        self.pool = CountingPool()
        self.reading: dict[int, list[Seen]] = {}  # by batch
        self.answers: list[Seen] = []
        self.gathered = self.copied = self.written = 0
        super().__init__(seed, world)

    def _handle(
        self, content: int, width: int, start: int, stop: int, block: object, device: int = NO_DEVICE
    ) -> Handle:
        handle = RowsHandle(content, width, start, stop, block, device)
        if not isinstance(block, int):  # not an output: it came with a request, in its own memory
            shape = (width, DEPTH) if stop < 0 else (stop, width, DEPTH)
            handle.tensor = Tensor(np.full(shape, content), start, stop)
        self.handles.add(handle)
        return handle

    def _make(
        self, batch: Batch, model: SimModel, made: Mapping[tuple[int, int], Handle | None]
    ) -> list[list[Handle | None]] | None:
        seen: list[Seen] = []
        if not made:
            self.reading[id(batch)] = seen  # until it is back; what a later stage of a route reads is checked at once
        for i in range(len(model.inputs)):
            slots = [ticket.node.inputs[i] for ticket in batch.tickets]
            handles: list[Any] = [
                made[m, slot] if (m, slot) in made else ticket.tensors[slot] if slot != NO_SLOT else None
                for m, (ticket, slot) in enumerate(zip(batch.tickets, slots, strict=True))
            ]
            if handles[0] is None:
                assert not any(handles), "a batch of members with and without an input"
            elif model.is_pure:
                seen.append(self._gathered(handles))
            else:
                allowed = [False] * len(handles) if made else writable_members(batch.tickets, i)
                seen += [
                    Seen(handle.tensor.array, [handle.content] * _rows(handle), is_written)
                    for handle, is_written in zip(handles, allowed, strict=True)
                ]
        for one in seen:
            one.check()
        outputs = super()._make(batch, model, made)
        for column in outputs or ():
            self._write(column, batch.rows, lie_apart=not model.is_pure and self._random.random() < 0.5)
        return outputs

    def _gathered(self, handles: list[RowsHandle]) -> Seen:
        tensors = [handle.tensor for handle in handles]
        array, copied = gather(tensors, self.pool)
        are_neighbours = all(one.block is next_.block and one.stop == next_.start for one, next_ in pairwise(tensors))
        assert copied == (0 if are_neighbours else array.nbytes)
        self.gathered += 1
        self.copied += copied > 0
        contents = [handle.content for handle in handles for _ in range(_rows(handle))]
        return Seen(array, contents)

    def _write(self, column: list[Handle | None], rows: int, *, lie_apart: bool) -> None:
        """Give the handles of one output their rows: in one block or, as for large responses, each in its own."""
        handles = [handle for handle in column if isinstance(handle, RowsHandle)]
        if not handles:
            return
        width, is_batch = handles[0].width, handles[0].stop >= 0
        assert {handle.width for handle in handles} == {width}
        if lie_apart:
            for handle in handles:
                block = self._block((_rows(handle), width, DEPTH) if is_batch else (width, DEPTH))
                block[...] = handle.content
                handle.tensor = Tensor(block, 0, len(block)) if is_batch else Tensor(block)
            return
        block = self._block((rows, width, DEPTH) if is_batch else (width, DEPTH))
        for handle in handles:
            handle.tensor = Tensor(block, handle.start, handle.stop) if is_batch else Tensor(block)
            handle.tensor.array[...] = handle.content

    def _block(self, shape: tuple[int, ...]) -> Array:
        block = self.pool.take(8 * int(np.prod(shape))).view(np.int64).reshape(shape)
        block[...] = GARBAGE  # rows without an output must never be read
        return block

    def _over_with(self, run: RouteRun) -> None:
        self._release_inputs(run.batch)
        super()._over_with(run)

    def _return(self, batch: Batch, model: SimModel, outputs: list[list[Handle | None]] | None) -> None:
        self._release_inputs(batch)
        super()._return(batch, model, outputs)

    def _release_inputs(self, batch: Batch) -> None:
        for one in self.reading.pop(id(batch), ()):
            one.check()  # not written, and its memory not reused, while the model had it
            if one.is_written:
                one.array[...] = GARBAGE
                self.written += 1

    def _answered(self, frame: Frame) -> None:
        if frame.record.error is None:
            for slot in frame.plan.output_slots:
                handle = frame.tensors[slot] if slot != NO_SLOT else None
                if handle is not None:
                    self.answers.append(Seen(handle.tensor.array, [handle.content] * _rows(handle)))
        super()._answered(frame)

    def check_end(self) -> None:
        super().check_end()
        while self.answers:
            self.answers.pop().check()  # callers read late
        assert self.pool.lent_bytes == 0, "a buffer was never returned"


def _rows(handle: Handle) -> int:
    return 1 if handle.stop < 0 else handle.stop - handle.start


@settings(max_examples=60, deadline=None)
@given(world=worlds(), seed=st.integers(0, 1 << 16))
def test_every_array_holds_what_its_producer_wrote_for_as_long_as_it_is_read(world: World, seed: int) -> None:
    Assembling(seed, world).run()


def test_the_generated_worlds_exercise_copies_zero_copy_writes_and_reuse() -> None:
    """Guards the property test above against becoming trivial."""
    gathered = copied = written = reused = 0
    for seed in range(50):
        sim = Assembling(seed).run()
        gathered += sim.gathered
        copied += sim.copied
        written += sim.written
        reused += sim.pool.reused
    assert copied > 100
    assert gathered - copied > 100
    assert written > 100
    assert reused > 100
