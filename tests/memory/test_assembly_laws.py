"""Whole simulated servers whose tensors are real: every array that a model or a caller sees is looked at, when it is
given and again when it is let go.

The world (flowserve/testing/sim.py) decides what arrives, leaves, fails, raises, is left out or comes late; here its
handles get rows of real blocks out of a real pool, models gather and write as real backends do, and buffers that come
home are filled again by whoever takes them next. A view that outlived its block, a writer beside a reader, or rows of
somebody who is no longer there would all show as wrong numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowserve.graph.plan import NO_SLOT
from flowserve.memory.assemble import gather
from flowserve.memory.pool import Pool
from flowserve.memory.tensor import Tensor
from flowserve.runtime.instance import _writable as may_write
from flowserve.scheduling.affinity import NOWHERE
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.relays import Relay
from flowserve.scheduling.router import Flow
from flowserve.testing.sim import Sim
from flowserve.testing.sim_world import Handle, SimModel, World
from flowserve.testing.strategies import worlds
from flowserve.values import Array

DEPTH = 1024  # numbers behind each unit of a handle's width: two rows are enough for a pooled buffer
GARBAGE = -1


class RowsHandle(Handle):
    """A handle that has its rows: every number in them is its content."""

    __slots__ = ("tensor",)
    tensor: Tensor


@dataclass
class Seen:
    """An array that somebody reads from now until later. `contents` has what each of its rows must hold."""

    array: Array
    contents: list[int]
    is_written: bool = False

    def check(self) -> None:
        rows = self.array if self.array.ndim == 3 else self.array[None]
        assert len(rows) == len(self.contents), "rows of somebody else, or rows that are missing"
        for row, content in zip(rows, self.contents, strict=True):
            assert (row == content).all(), "these rows are not, or no longer, what their producer wrote"


class Assembling(Sim):
    """Pure models gather their batch, as onnxruntime's do; the others are given their rows one by one and write into
    them where they may, as Python models do.
    """

    def __init__(self, seed: int, world: World | None = None) -> None:
        self.pool = Pool()
        self.reading: dict[int, list[Seen]] = {}  # by batch
        self.answers: list[Seen] = []
        self.gathered = self.copied = self.written = 0
        super().__init__(seed, world)

    def _relay(self, relay: Relay) -> bool:
        """Relays are of models in processes, whose memory is not this pool's."""
        return False

    def _goes_alone(self, flow: Flow) -> bool:
        """As relays do."""
        return False

    def _handle(self, content: int, width: int, start: int, stop: int, block: object, device: int = NOWHERE) -> Handle:
        handle = RowsHandle(content, width, start, stop, block, device)
        if not isinstance(block, int):  # not of a run: it came with a request, in memory of its own
            shape = (width, DEPTH) if stop < 0 else (stop, width, DEPTH)
            handle.tensor = Tensor(np.full(shape, content), start, stop)
        self.handles.add(handle)
        return handle

    def _compute(self, batch: Batch, model: SimModel) -> list[list[Handle | None]] | None:
        seen = self.reading[id(batch)] = []
        for i in range(len(model.inputs)):
            slots = [ticket.node.inputs[i] for ticket in batch.tickets]
            handles = [
                ticket.flow.tensors[slot] if slot != NO_SLOT else None
                for ticket, slot in zip(batch.tickets, slots, strict=True)
            ]
            if handles[0] is None:
                assert not any(handles), "a batch of members with and without an input"
            elif model.is_pure:
                seen.append(self._gathered(handles))
            else:
                allowed = may_write(batch.tickets, i)
                seen += [
                    Seen(handle.tensor.array, [handle.content] * _rows(handle), is_written)
                    for handle, is_written in zip(handles, allowed, strict=True)
                ]
        for one in seen:
            one.check()
        outputs = super()._compute(batch, model)
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
        """Give the handles of one output their rows: of one block, or, as large answers do, each in its own."""
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
        block[...] = GARBAGE  # rows that nobody answered for must never be read
        return block

    def _return(self, batch: Batch, model: SimModel, outputs: list[list[Handle | None]] | None) -> None:
        for one in self.reading.pop(id(batch)):
            one.check()  # nobody wrote into it, and its memory was nobody else's, while the model had it
            if one.is_written:
                one.array[...] = GARBAGE
                self.written += 1
        super()._return(batch, model, outputs)

    def _answered(self, flow: Flow) -> None:
        if flow.error is None:
            for slot in flow.plan.output_slots:
                handle = flow.tensors[slot] if slot != NO_SLOT else None
                if handle is not None:
                    self.answers.append(Seen(handle.tensor.array, [handle.content] * _rows(handle)))
        super()._answered(flow)

    def check_end(self) -> None:
        super().check_end()
        while self.answers:
            self.answers.pop().check()  # callers read late
        assert self.pool.statistics().lent_bytes == 0, "a buffer never came home"


def _rows(handle: Handle) -> int:
    return 1 if handle.stop < 0 else handle.stop - handle.start


@settings(max_examples=60, deadline=None)
@given(world=worlds(), seed=st.integers(0, 1 << 16))
def test_every_array_holds_what_its_producer_wrote_for_as_long_as_it_is_read(world: World, seed: int) -> None:
    Assembling(seed, world).run()


def test_the_worlds_copy_and_hand_on_write_and_reuse_memory() -> None:
    """So that the law above means something."""
    gathered = copied = written = reused = 0
    for seed in range(50):
        sim = Assembling(seed).run()
        gathered += sim.gathered
        copied += sim.copied
        written += sim.written
        reused += sim.pool.statistics().reused
    assert copied > 100
    assert gathered - copied > 100
    assert written > 100
    assert reused > 100
