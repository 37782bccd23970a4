"""One instance's stream: how its batches come onto the device, and what they leave there.

Decided here: every copy between memories, and every order that makes it right. An instance gathers its inputs, makes
room for its outputs, puts its work on the stream and delivers; it never waits for anybody itself. Inputs that another
stream made are waited for on the device. Each block that a batch touched gets the event after that batch, also where
the batch failed, and returns to its pool behind it. The host waits once, in `deliver`, and only where somebody on the
host reads an output.

A batch crosses to the device in one copy: its rows are laid side by side in pinned memory first. It crosses back in one
copy for each output, into pinned memory, where whoever reads it finds it. What stays on the device is handed on as it
lies. What is read in several places is copied to each of them once.

It does not know models, nor who reads what. Used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Final

import numpy as np

from flowserve.memory.assemble import pieces
from flowserve.memory.blocks import Block
from flowserve.memory.delivery import ON_DEVICE, Output
from flowserve.memory.device import Event
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.device_tensor import SHARED, DeviceArray, DeviceMirror, DeviceTensor, Mirror, runs
from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.values import HOST_MEMORY, Array, MemoryPlace

ALIGNMENT: Final = 256  # of what a device's libraries are given; rows in the middle of a block may lie otherwise


class DeviceStream:
    """A stream on the device of `memory`, and the blocks that its batch touches."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.place = memory.place
        self._device = memory.device
        self.handle = memory.device.stream()  # what work is put on
        self._touched: list[Block] = []
        self._made: list[DeviceArray] = []

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Around everything that one batch does: however it ends, what it touched is not used again too early."""
        try:
            yield
        finally:
            if self._touched:
                self._settle()

    def gather(self, tensors: Sequence[Tensor]) -> tuple[DeviceArray, int]:
        """All `tensors`' rows in order where the device reads them, and how many bytes were copied for it.

        The tensors agree in dtype (not BYTES) and in every dimension but the first, and there is at least one. Work
        that reads the array may be put on the stream at once. It lies on the device, at a multiple of ALIGNMENT, or on
        the host where there was no room.
        """
        parts, copied = self._parts(tensors)
        array = parts[0]
        is_as_it_should_be = not array.place.is_gpu or (array.place == self.place and array.address % ALIGNMENT == 0)
        if len(parts) > 1 or not is_as_it_should_be:
            array = self._side_by_side(parts)
            copied += array.nbytes
        else:
            self._read(array)
        return array, copied

    def empty(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """Room for an output of this batch, to be written by work on the stream; on the host if the device has none."""
        return self._new(self.memory.take(prod(shape) * dtype.itemsize, self.handle), dtype, shape)

    def adopt(self, owner: object, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """An output of this batch that somebody else allocated on the device; `owner` keeps it there."""
        return self._new(self.memory.pool.adopt(owner, address, prod(shape) * dtype.itemsize), dtype, shape)

    def deliver(
        self, arrays: Sequence[DeviceArray], rows: Sequence[int] | None, read_at: Sequence[Sequence[int]] | None = None
    ) -> list[list[Tensor]]:
        """The members' shares of each output: `rows[m]` rows each; None for one member without a batch dimension.

        `read_at[j][m]` says who reads output j of member m (ON_HOST, ON_DEVICE or both), None that everything is read
        on the host. What is read there has arrived when this returns.
        """
        outputs = [Output(array, rows, read_at[j] if read_at is not None else None) for j, array in enumerate(arrays)]
        landings = [
            [self._landing(output.array.rows(*run) if rows is not None else output.array) for run in output.runs]
            for output in outputs
        ]
        self._made += arrays
        event = self._settle()
        if any(landings):
            self._device.synchronize(event)
        return [
            output.members([self._host_array(array) for array in landed])
            for output, landed in zip(outputs, landings, strict=True)
        ]

    def brought(self, tensor: Tensor, place: MemoryPlace) -> Tensor:
        """See `Tensor.to`. `place` is the host or this stream's device: a tensor comes to a device by a stream of that
        one. Where the device has no room, it comes to the host.
        """
        if place.is_gpu and place != self.place:
            raise ValueError(f"a stream of {self.place} copies nothing to {place}")
        if tensor.place == place or not (place.is_gpu or tensor.place.is_gpu):
            return tensor
        rows = None if tensor.stop == WHOLE else [tensor.stop - tensor.start]
        with self.batch():
            if place.is_gpu:
                array, _ = self.gather([tensor])
                return self.deliver([array], rows, [[ON_DEVICE]])[0][0]
            assert isinstance(tensor, DeviceTensor)
            self._read(tensor.elements)
            return self.deliver([tensor.elements], rows)[0][0]

    def keep(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray | None:
        """Room on the device that outlives batches, for work on this stream only; None where there is none."""
        block = self.memory.pool.take(prod(shape) * dtype.itemsize, self.handle)
        return None if block is None else DeviceArray(block, dtype, shape)

    def copy(self, array: DeviceArray, to: DeviceArray) -> None:
        """Put a copy of an array of this batch on the stream, into room of as many bytes."""
        self._touch(array)
        self._touch(to)
        self._copy(to, array, array.place)

    def wait(self) -> None:
        """Until all that was put on the stream is done."""
        self._device.synchronize(self._device.record(self.handle))

    def close(self) -> None:
        """After the last batch; waits for what is still on the stream."""
        self.wait()
        self._device.close_stream(self.handle)

    # ------------------------------------------------------------------ towards the device

    def _parts(self, tensors: Sequence[Tensor]) -> tuple[list[DeviceArray], int]:
        """The tensors' rows as few arrays as they lie in, none of them on the host any more unless the device had no
        room; and the bytes that were brought here.
        """
        if any(isinstance(tensor, SHARED) for tensor in tensors):
            with self.memory.sharing:
                here, copied = self._brought_here(tensors)
        else:
            here, copied = self._brought_here(tensors)
        return runs(here), copied

    def _brought_here(self, tensors: Sequence[Tensor]) -> tuple[list[DeviceTensor], int]:
        found = [self._lying(tensor) for tensor in tensors]
        if None not in found:
            return found, 0  # type: ignore[return-value]  # none of them is None
        # What several read and another device computed comes from there, all else from the host.
        afar = [m for m, one in enumerate(found) if one is None and _somewhere(tensors[m]) is not None]
        near = [m for m, one in enumerate(found) if one is None and m not in afar]
        copied = 0
        if near:
            array = self._upload([tensors[m] for m in near])
            copied += self._hand_out(array, tensors, near, found)
        if afar:
            array = self._side_by_side(runs([_somewhere(tensors[m]) for m in afar]))  # type: ignore[misc]  # none is None
            self._made.append(array)
            copied += self._hand_out(array, tensors, afar, found)
        return found, copied  # type: ignore[return-value]  # none of them is None

    def _hand_out(
        self, array: DeviceArray, tensors: Sequence[Tensor], brought: Sequence[int], found: list[DeviceTensor | None]
    ) -> int:
        """`array` holds the rows of the tensors that were `brought`, one after the other."""
        stop = 0
        for m in brought:
            tensor = tensors[m]
            start, stop = stop, stop + (tensor.stop - tensor.start)
            copy = found[m] = DeviceTensor(array) if tensor.stop == WHOLE else DeviceTensor(array, start, stop)
            if isinstance(tensor, SHARED) and array.place.is_gpu:
                # Others may read it while this batch goes on, so it has an event of its own.
                array.ready = array.ready or self._device.record(self.handle)
                tensor.copies[self.place.number] = copy
        return array.nbytes

    def _lying(self, tensor: Tensor) -> DeviceTensor | None:
        if isinstance(tensor, DeviceTensor) and (tensor.place == self.place or not isinstance(tensor, DeviceMirror)):
            return tensor
        return tensor.copies.get(self.place.number) if isinstance(tensor, SHARED) else None

    def _upload(self, tensors: Sequence[Tensor]) -> DeviceArray:
        staged = self._staged(tensors)
        array = self._touch(DeviceArray(self.memory.take(staged.nbytes, self.handle), staged.dtype, staged.shape))
        if not array.place.is_gpu:
            return staged  # no room on the device: it reads it from here
        self._copy(array, staged, HOST_MEMORY)
        self._made.append(array)
        return array

    def _staged(self, tensors: Sequence[Tensor]) -> DeviceArray:
        """The rows side by side in host memory, pinned where there is room."""
        arrays = pieces(tensors)
        first = arrays[0]
        shape = first.shape if len(arrays) == 1 else (sum([len(array) for array in arrays]), *first.shape[1:])
        nbytes = sum([array.nbytes for array in arrays])
        staged = DeviceArray(self.memory.take_on_host(nbytes, None), first.dtype, shape)
        room = _typed(self._host_bytes(staged.block)[:nbytes], staged)
        if len(arrays) == 1:
            room[...] = first
        else:
            np.concatenate(arrays, out=room)
        return self._touch(staged)

    def _side_by_side(self, parts: Sequence[DeviceArray]) -> DeviceArray:
        first = parts[0]
        shape = first.shape if len(parts) == 1 else (sum([len(part) for part in parts]), *first.shape[1:])
        nbytes = sum([part.nbytes for part in parts])
        joined = self._touch(DeviceArray(self.memory.take(nbytes, self.handle), first.dtype, shape))
        start = 0
        for part in parts:
            self._read(part)
            self._copy(joined.rows(start, start + len(part)) if len(parts) > 1 else joined, part, part.place)
            start += len(part) if part.shape else 0
        return joined

    # ------------------------------------------------------------------ towards the host

    def _landing(self, array: DeviceArray) -> DeviceArray:
        """Where the host will read an output: a copy, unless it lies there already."""
        if not array.place.is_gpu:
            return array
        landing = self._touch(
            DeviceArray(self.memory.take_on_host(array.nbytes, self.handle), array.dtype, array.shape)
        )
        self._copy(landing, array, array.place)
        return landing

    def _host_array(self, array: DeviceArray) -> Array:
        """The elements as numpy sees them; the block stays out as long as any view of them lives."""
        raw = self._host_bytes(array.block)[array.offset : array.offset + array.nbytes]
        return _typed(np.asarray(_Lease(array.block, raw)), array)

    def _host_bytes(self, block: Block) -> Array:
        memory: Any = block.memory
        return memory.owner if block.place == HOST_MEMORY else self._device.host_view(memory)

    # ------------------------------------------------------------------ order

    def _copy(self, to: DeviceArray, source: DeviceArray, place: MemoryPlace) -> None:
        """The one call that copies between memories."""
        if not source.nbytes:  # where a member without rows lies may be behind the end of its block
            return
        self._device.copy(to.address, source.address, source.nbytes, self.handle)
        self.memory.ledger.record(place, to.place, source.nbytes)

    def _read(self, array: DeviceArray) -> None:
        ready = array.ready
        if ready is not None and ready.stream is not self.handle:
            self._device.wait(self.handle, ready)
        self._touched.append(array.block)

    def _touch(self, array: DeviceArray) -> DeviceArray:
        self._touched.append(array.block)
        return array

    def _new(self, block: Block, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        array = self._touch(DeviceArray(block, dtype, shape))
        self._made.append(array)
        return array

    def _settle(self) -> Event:
        """What was touched may be used again after this moment, and what was made may be read."""
        touched, self._touched = self._touched, []
        made, self._made = self._made, []
        event = self._device.record(self.handle)
        for block in touched:
            block.used(event)
        for array in made:
            array.ready = array.ready or event
        return event


class _Lease:
    """What every numpy view of a block stands on."""

    __slots__ = ("__array_interface__", "block")

    def __init__(self, block: Block, raw: Array) -> None:
        self.block = block
        self.__array_interface__ = raw.__array_interface__


def _somewhere(tensor: Tensor) -> DeviceTensor | None:
    """A tensor that several read, on the device where it was computed."""
    if isinstance(tensor, DeviceMirror):
        return tensor
    return tensor.original if isinstance(tensor, Mirror) else None


def _typed(raw: Array, like: DeviceArray) -> Array:
    return raw.view(like.dtype).reshape(like.shape)
