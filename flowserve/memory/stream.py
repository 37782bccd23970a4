"""One instance's stream: transfer of its batches to the device and of its outputs back.

Decides every copy between host and device memory, and the ordering that makes it correct. An instance gathers its
inputs, allocates its outputs, adds its work to the stream and delivers; it never synchronises itself. The device waits
for inputs computed on another stream. Each block that a batch touched gets the event after that batch, also if the
batch failed, and can be reused after it. The host waits once, in `deliver`, and only if an output is read on the host.

A batch is uploaded in one copy per input: its rows are first staged contiguously in pinned memory. An output is
downloaded into pinned memory in one copy per contiguous run of rows that are read on the host. Outputs that stay on the
device are passed on without a copy. A tensor read in several memories is copied to each of them once.

Does not know models or the readers of an output. Callers: GPU backends. Used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from math import prod
from typing import Any, Final

import numpy as np

from flowserve.memory.assemble import pieces
from flowserve.memory.device import Event
from flowserve.memory.device_memory import Block, DeviceMemory
from flowserve.memory.device_tensor import SHARED, DeviceArray, DeviceMirror, DeviceTensor, Mirror, runs
from flowserve.memory.recipe import parts_of
from flowserve.memory.tensor import WHOLE, Tensor
from flowserve.values import HOST_MEMORY, Array, MemoryPlace

ALIGNMENT: Final = 256  # of arrays passed to a device's libraries; rows in the middle of a block may be less aligned
# Where an output of a member is read: bit flags.
ON_HOST: Final = 1
ON_DEVICE: Final = 2


class DeviceStream:
    """A stream on the device of `memory`, and the blocks that its current batch touches."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.place = memory.place
        self._device = memory.device
        self.handle = memory.device.stream()  # the device's stream, to which work is added
        self._touched: list[Block] = []
        self._made: list[DeviceArray] = []

    @contextmanager
    def batch(self) -> Iterator[None]:
        """The context of one batch: however it ends, the blocks it touched are not reused too early."""
        try:
            yield
        finally:
            if self._touched:
                self._settle()

    def gather(self, tensors: Sequence[Tensor]) -> tuple[DeviceArray, int]:
        """All `tensors`' rows in order in one array that the device can read, and how many bytes were copied for it.

        There is at least one tensor; all agree in dtype (not BYTES) and in every dimension but the first. Work that
        reads the array may be added to the stream at once. The array is on the device, at a multiple of ALIGNMENT, or
        on the host if the device had no room.
        """
        parts, copied = self._parts(tensors)
        array = parts[0]
        is_usable = not array.place.is_gpu or (array.place == self.place and array.address % ALIGNMENT == 0)
        if len(parts) > 1 or not is_usable:
            array = self._concatenate(parts)
            copied += array.nbytes
        else:
            self._read(array)
        return array, copied

    def empty(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """Memory for an output of this batch, written by work on the stream, on the host if the device is full."""
        return self._new(self.memory.take(prod(shape) * dtype.itemsize, self.handle), dtype, shape)

    def adopt(self, owner: object, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray:
        """An output of this batch in device memory of another library; `owner` keeps it alive."""
        return self._new(self.memory.pool.adopt(owner, address, prod(shape) * dtype.itemsize), dtype, shape)

    def deliver(
        self, arrays: Sequence[DeviceArray], rows: Sequence[int] | None, read_at: Sequence[Sequence[int]] | None = None
    ) -> list[list[Tensor]]:
        """The members' tensors of each output: `rows[m]` rows each; `rows` None for one member without a batch
        dimension.

        `read_at[j][m]` states where output j of member m is read (ON_HOST, ON_DEVICE or both); None: everything is read
        on the host. Data read on the host has arrived when this returns.
        """
        outputs = [_Output(array, rows, read_at[j] if read_at is not None else None) for j, array in enumerate(arrays)]
        staged = [
            [self._staged_copy(output.array.rows(*run) if rows is not None else output.array) for run in output.runs]
            for output in outputs
        ]
        self._made += arrays
        event = self._settle()
        if any(staged):
            self._device.synchronize(event)
        return [
            output.members([self._host_array(array) for array in arrays])
            for output, arrays in zip(outputs, staged, strict=True)
        ]

    def keep(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> DeviceArray | None:
        """Device memory that outlives batches, for work on this stream only; None if there is no room."""
        block = self.memory.pool.take(prod(shape) * dtype.itemsize, self.handle)
        return None if block is None else DeviceArray(block, dtype, shape)

    def copy(self, array: DeviceArray, to: DeviceArray) -> None:
        """Copy an array of this batch on the stream, into an array of equal size."""
        self._touch(array)
        self._touch(to)
        self._copy(to, array, array.place)

    def wait(self) -> None:
        """Block until all work on the stream is complete."""
        self._device.synchronize(self._device.record(self.handle))

    def close(self) -> None:
        """Close the stream after the last batch; waits for its remaining work."""
        self.wait()
        self._device.close_stream(self.handle)

    # ------------------------------------------------------------------ host to device

    def _parts(self, tensors: Sequence[Tensor]) -> tuple[list[DeviceArray], int]:
        """The tensors' rows as one array per group of neighbours, all of them on the device if it had room; and the
        number of bytes uploaded.
        """
        tensors = parts_of(tensors)
        is_shared = any(isinstance(tensor, SHARED) for tensor in tensors)
        with self.memory.sharing if is_shared else nullcontext():
            here, copied = self._upload_missing(tensors)
        return runs(here), copied

    def _upload_missing(self, tensors: Sequence[Tensor]) -> tuple[list[DeviceTensor], int]:
        found = [self._present(tensor) for tensor in tensors]
        if None not in found:
            return found, 0  # type: ignore[return-value]  # none of them is None
        # A shared tensor that another device computed is copied from that device, any other from the host.
        remote = [m for m, one in enumerate(found) if one is None and _computed_on_device(tensors[m]) is not None]
        local = [m for m, one in enumerate(found) if one is None and m not in remote]
        copied = 0
        if local:
            array = self._upload([tensors[m] for m in local])
            copied += self._record_copies(array, tensors, local, found)
        if remote:
            array = self._concatenate(runs([_computed_on_device(tensors[m]) for m in remote]))  # type: ignore[misc]  # none is None
            self._made.append(array)
            copied += self._record_copies(array, tensors, remote, found)
        return found, copied  # type: ignore[return-value]  # none of them is None

    def _record_copies(
        self, array: DeviceArray, tensors: Sequence[Tensor], copied: Sequence[int], found: list[DeviceTensor | None]
    ) -> int:
        """Put the copies into `found`: `array` holds the rows of the tensors numbered in `copied`, in order. Returns
        the bytes of `array`.
        """
        stop = 0
        for m in copied:
            tensor = tensors[m]
            start, stop = stop, stop + (tensor.stop - tensor.start)
            copy = found[m] = DeviceTensor(array) if tensor.stop == WHOLE else DeviceTensor(array, start, stop)
            if isinstance(tensor, SHARED) and array.place.is_gpu:
                # Other streams may read it before this batch ends, so it needs an event of its own.
                array.ready = array.ready or self._device.record(self.handle)
                tensor.copies[self.place.number] = copy
        return array.nbytes

    def _present(self, tensor: Tensor) -> DeviceTensor | None:
        """The tensor, or its copy, on a device; None if it has to be copied to this one."""
        if isinstance(tensor, DeviceTensor) and (tensor.place == self.place or not isinstance(tensor, DeviceMirror)):
            return tensor
        return tensor.copies.get(self.place.number) if isinstance(tensor, SHARED) else None

    def _upload(self, tensors: Sequence[Tensor]) -> DeviceArray:
        staged = self._staged(tensors)
        array = self._touch(DeviceArray(self.memory.take(staged.nbytes, self.handle), staged.dtype, staged.shape))
        if not array.place.is_gpu:
            return staged  # no room on the device: it reads the staged rows
        self._copy(array, staged, HOST_MEMORY)
        self._made.append(array)
        return array

    def _staged(self, tensors: Sequence[Tensor]) -> DeviceArray:
        """The rows contiguously in host memory, pinned if there is room."""
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

    def _concatenate(self, parts: Sequence[DeviceArray]) -> DeviceArray:
        """The parts' rows in order in one new array on the device."""
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

    # ------------------------------------------------------------------ device to host

    def _staged_copy(self, array: DeviceArray) -> DeviceArray:
        """An output in host memory: a copy, unless it is there already."""
        if not array.place.is_gpu:
            return array
        block = self.memory.take_on_host(array.nbytes, self.handle)
        staged = self._touch(DeviceArray(block, array.dtype, array.shape))
        self._copy(staged, array, array.place)
        return staged

    def _host_array(self, array: DeviceArray) -> Array:
        """The elements as a numpy array; the block stays in use as long as any view of it is alive."""
        raw = self._host_bytes(array.block)[array.offset : array.offset + array.nbytes]
        return _typed(np.asarray(_Lease(array.block, raw)), array)

    def _host_bytes(self, block: Block) -> Array:
        memory: Any = block.memory
        return memory.owner if block.place == HOST_MEMORY else self._device.host_view(memory)

    # ------------------------------------------------------------------ ordering

    def _copy(self, to: DeviceArray, source: DeviceArray, place: MemoryPlace) -> None:
        """The one call that copies between memories."""
        if not source.nbytes:  # the address of a member without rows may be behind the end of its block
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
        """Record an event: touched blocks may be reused after it, and new arrays are ready at it."""
        touched, self._touched = self._touched, []
        made, self._made = self._made, []
        event = self._device.record(self.handle)
        for block in touched:
            block.used(event)
        for array in made:
            array.ready = array.ready or event
        return event


class _Output:
    """One output of a batch. `runs` are the ranges of rows (start, stop) that are read on the host; neighbouring
    members' rows are one range and are copied together.
    """

    def __init__(self, array: DeviceArray, rows: Sequence[int] | None, read_at: Sequence[int] | None) -> None:
        self.array = array
        self._rows = rows
        stops = [*accumulate(rows)] if rows is not None else []
        self._bounds = [*zip([0, *stops], stops, strict=False)]
        self._read_at = read_at if read_at is not None and array.place.is_gpu else [ON_HOST] * max(len(stops), 1)
        self.runs = self._host_runs()

    def members(self, on_host: Sequence[Array]) -> list[Tensor]:
        """The members' tensors, each in the memories where it is read. `on_host` are the host copies of `runs`."""
        if self._rows is None:
            host = Tensor(on_host[0]) if on_host else None
            return [self._member(host, DeviceTensor(self.array), 0)]
        tensors: list[Tensor] = []
        run = 0
        for m, (start, stop) in enumerate(self._bounds):
            while run < len(self.runs) and self.runs[run][1] < stop:
                run += 1
            host = None
            if self._read_at[m] & ON_HOST:
                first = self.runs[run][0]
                host = Tensor(on_host[run], start - first, stop - first)
            tensors.append(self._member(host, DeviceTensor(self.array, start, stop), m))
        return tensors

    def _member(self, host: Tensor | None, copy: DeviceTensor, m: int) -> Tensor:
        if host is None:
            return copy
        return Mirror(host, copy) if self._read_at[m] & ON_DEVICE else host

    def _host_runs(self) -> list[tuple[int, int]]:
        if self._rows is None:
            return [(0, 0)] if self._read_at[0] & ON_HOST else []
        runs: list[tuple[int, int]] = []
        for m, (start, stop) in enumerate(self._bounds):
            if not self._read_at[m] & ON_HOST:
                continue
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return runs


class _Lease:
    """The base object of every numpy view of a block."""

    __slots__ = ("__array_interface__", "block")

    def __init__(self, block: Block, raw: Array) -> None:
        self.block = block
        self.__array_interface__ = raw.__array_interface__


def _computed_on_device(tensor: Tensor) -> DeviceTensor | None:
    """A tensor with several readers, on the device that computed it; None if that is no device."""
    if isinstance(tensor, DeviceMirror):
        return tensor
    return tensor.original if isinstance(tensor, Mirror) else None


def _typed(raw: Array, like: DeviceArray) -> Array:
    return raw.view(like.dtype).reshape(like.shape)
