"""Shared memory of clients, system and CUDA: registered regions, and the tensors read from and written to them.

Decides which names a region may have, what may be opened under /dev/shm, what is checked before each access, and the
lifetime of a region: it is unknown once unregistered, and closed when the last request that named it is finished.

Tensors are copied through the file (`preadv`, `pwrite`), not through a mapping. A client may truncate its object at any
time, and touching a mapped page behind its end kills the whole server by a signal, whereas a short read is an error of
one request. A copy also prevents a client from changing a tensor after it was checked.

CUDA memory is opened through CUDA IPC handles. A handle is opened once, however often it is registered, and closed when
its last region is unregistered and the last request that named one is finished. The last reference to a region may end
anywhere, also in the garbage collector, where the device must not be called, so closing is deferred to the next call. A
region is never larger than the handle's memory: an access behind its end breaks the device for the whole server.

Does not know HTTP or gRPC, its callers. Names and messages follow Triton's calls.
"""

from __future__ import annotations

import base64
import errno
import os
import stat
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from flowserve.errors import AlreadyExists, FlowserveError, Invalid, NotFound, Unavailable, Unsupported
from flowserve.memory.device import Allocation
from flowserve.memory.device_memory import DeviceMemory
from flowserve.memory.devices import devices
from flowserve.values import HOST_MEMORY, Array

DIRECTORY: Final = "/dev/shm"
DISABLED: Final = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
REGIONS_MAX: Final = 4096  # each holds a file descriptor
HANDLE_BYTES: Final = 64  # a cudaIpcMemHandle_t
RESERVED_PREFIX: Final = "triton_python_backend_shm_region_"
_UINT64_MAX: Final = 2**64 - 1
R = TypeVar("R", bound="Region | CudaRegion")
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class Portion:
    """The location of one tensor as a request states it: `size` bytes from `offset` of the region of that name."""

    region: str
    offset: int
    size: int


class Region:
    """One registered region. Its descriptor is closed when the object has no references left."""

    def __init__(self, name: str, key: str, offset: int, size: int, descriptor: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.size = size
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with bytes from `offset` on. Raises `Invalid` if the client has truncated its object."""
        self.check()
        size = len(view)
        done = 0
        while done < size:
            got = os.preadv(self.descriptor, [view[done:]], offset + done)
            if not got:
                raise _shrunk(self.name)
            done += got

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Raises as `read_into` does."""
        self.check()  # writing behind its end would extend the object
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.pwrite(self.descriptor, view[done:], offset + done)

    def check(self) -> None:
        """Raises `Invalid` if the object is shorter than when it was registered."""
        if os.fstat(self.descriptor).st_size < self.offset + self.size:
            raise _shrunk(self.name)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Opened:
    """The memory behind one open handle."""

    memory: DeviceMemory
    opened: Allocation


class CudaRegion:
    """One registered region; offsets are bytes from its start."""

    def __init__(self, name: str, device: int, size: int, opened: _Opened) -> None:
        self.name = name
        self.device = device
        self.size = size
        self.offset = 0  # a handle covers the whole allocation
        self._opened = opened

    def read_into(self, view: memoryview, offset: int) -> None:
        if len(view):
            memory, there = self._opened.memory, self._opened.opened.address + offset
            here = np.frombuffer(view, np.uint8).ctypes.data
            memory.copy_and_wait(memory.place, HOST_MEMORY, here, there, len(view))

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if len(data):
            memory, there = self._opened.memory, self._opened.opened.address + offset
            here = np.frombuffer(data, np.uint8)
            memory.copy_and_wait(HOST_MEMORY, memory.place, there, here.ctypes.data, here.nbytes)


class CudaHandles:
    """All open handles. Used from one thread only."""

    def __init__(self) -> None:
        self._open: weakref.WeakValueDictionary[tuple[int, bytes], _Opened] = weakref.WeakValueDictionary()
        self._over: deque[tuple[DeviceMemory, Allocation]] = deque()

    def region(self, name: str, handle: bytes, device: int, size: int) -> CudaRegion:
        """Open `handle` if necessary. Raises Invalid if the GPU does not exist, the handle cannot be opened, or its
        memory is smaller than `size` bytes.
        """
        self.close_unused()
        if not devices().count:
            raise Invalid(
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported: {devices().why_none}"
            )
        refused = f"failed to register CUDA shared memory region '{name}': invalid args"
        if len(handle) != HANDLE_BYTES:
            raise Invalid(f"{refused}: a CUDA IPC handle has {HANDLE_BYTES} bytes, this one {len(handle)}")
        try:
            memory = devices()[device]
        except FlowserveError as error:
            raise Invalid(f"{refused}: {error}") from None
        opened = self._open.get((device, handle))
        if opened is None:
            try:
                found = memory.device.open_handle(handle)
            except ValueError as error:
                raise Invalid(f"{refused}: the handle cannot be opened: {error}") from error
            opened = self._open[device, handle] = _Opened(memory, found)
            weakref.finalize(opened, self._over.append, (memory, found)).atexit = False
        there = opened.opened.nbytes
        if not 0 < size <= there:
            raise Invalid(f"{refused}: {size} bytes do not lie in an allocation of {there} bytes")
        return CudaRegion(name, device, size, opened)

    def close_unused(self) -> None:
        """Close the handles without a remaining reference."""
        while self._over:
            memory, opened = self._over.popleft()
            memory.device.close_handle(opened)


class RegionWindow:
    """A checked portion of a region, held by the request that named it; valid even after the region is unregistered."""

    __slots__ = ("_offset", "_region", "size")

    def __init__(self, region: Region | CudaRegion, portion: Portion) -> None:
        self._region = region
        self._offset = region.offset + portion.offset
        self.size = portion.size

    def read(self, into: Array | None = None) -> memoryview:
        """A copy of its bytes, written to `into` if that is given. May run on any thread. Raises `Invalid` if the
        client has truncated its object.
        """
        data = memoryview(bytearray(self.size)) if into is None else into.data
        self._region.read_into(data, self._offset)
        return data

    def store(self, output: str, data: bytes | memoryview) -> None:
        """Write `data`, the bytes of `output`, at its start. Raises `Invalid` if the window is too small, and as `read`
        does.
        """
        if len(data) > self.size:
            raise Invalid(
                f"shared memory size specified with the request for output '{output}' ({self.size} bytes) should be at "
                f"least {len(data)} bytes to hold the results"
            )
        self._region.write(self._offset, data)


class ClientMemory:
    """The regions of all clients, by name. Used from the event loop's thread only."""

    def __init__(self, *, is_allowed: bool = False) -> None:
        self._is_allowed = is_allowed
        self._regions: dict[str, Region | CudaRegion] = {}
        self._handles = CudaHandles()

    def register(self, name: str, key: str, offset: int, size: int) -> None:
        """Open the shared memory object `key` and register `size` bytes from `offset` of it as `name`.

        Raises `Unsupported` if the operator does not allow client memory, `AlreadyExists` for a name in use, `Invalid`
        for any other fault of the arguments, `Unavailable` if the system has no descriptor left.
        """
        self._check_name(name)
        refused = f"failed to register shared memory region '{name}': invalid args"
        if offset + size > _UINT64_MAX:
            raise Invalid(f"{refused}: Integer overflow: offset {offset} and byte size {size}")
        descriptor = _open(key)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise _cannot_open(key)
            if size == 0 or offset + size > found.st_size:
                raise Invalid(f"{refused}: {size} bytes from {offset} do not lie in an object of {found.st_size} bytes")
        except Invalid:
            os.close(descriptor)
            raise
        self._regions[name] = Region(name, key, offset, size, descriptor)

    def register_cuda(self, name: str, handle: bytes, device: int, size: int) -> None:
        """Open a CUDA IPC handle on GPU number `device` and register the first `size` bytes of its memory as `name`.
        Raises as `register` does.
        """
        self._check_name(name)
        self._regions[name] = self._handles.region(name, handle, device, size)

    def register_encoded(self, name: str, handle: str, device: int, size: int) -> None:
        """As `register_cuda`, with the handle as base64."""
        try:
            decoded = base64.b64decode(handle, validate=True)
        except ValueError as error:
            raise Invalid(f"Unable to parse 'raw_handle': 'b64' is no base64: {error}") from None
        self.register_cuda(name, decoded, device, size)

    def unregister(self, name: str = "") -> None:
        """Unregister a system region, or all of them if `name` is empty. An unknown name is not an error."""
        self._forget(name, Region)

    def unregister_cuda(self, name: str = "") -> None:
        """Unregister a CUDA region, or all of them if `name` is empty. An unknown name is not an error."""
        self._forget(name, CudaRegion)
        self._handles.close_unused()

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """The registered system regions with Triton's field names. Raises NotFound for an unknown name."""
        return [
            {"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.size}
            for one in self._chosen(name, Region)
        ]

    def status_cuda(self, name: str = "") -> list[dict[str, Any]]:
        """The registered CUDA regions with Triton's field names. Raises NotFound for an unknown name."""
        return [
            {"name": one.name, "device_id": one.device, "byte_size": one.size} for one in self._chosen(name, CudaRegion)
        ]

    def window(self, portion: Portion) -> RegionWindow:
        """The portion a request names, checked. Raises `NotFound`, and `Invalid` if it is not inside its region."""
        self.check_allowed()
        region = self._regions.get(portion.region)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{portion.region}'")
        end = portion.offset + portion.size
        if end > _UINT64_MAX:
            raise Invalid(f"Integer overflow: offset + byte size for shared memory region: '{region.name}'")
        if portion.offset >= region.size:
            raise Invalid(f"Invalid offset for shared memory region: '{region.name}' ({region.size} bytes)")
        if end > region.size:
            raise Invalid(f"Invalid offset + byte size for shared memory region: '{region.name}' ({region.size} bytes)")
        return RegionWindow(region, portion)

    def windows(self, portions: Mapping[str, Portion]) -> dict[str, RegionWindow]:
        """The windows of several tensors, by tensor name."""
        return {tensor: self.window(portion) for tensor, portion in portions.items()}

    def _check_name(self, name: str) -> None:
        self.check_allowed()
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if len(self._regions) >= REGIONS_MAX:
            raise Invalid(
                f"failed to register shared memory region '{name}': {REGIONS_MAX} regions are registered, which is the "
                "most there may be; unregister some"
            )
        if not name:
            raise Invalid("failed to register shared memory region '': invalid args (it needs a name)")

    def _forget(self, name: str, kind: type[Region | CudaRegion]) -> None:
        self.check_allowed()
        for one in [name] if name else [*self._regions]:
            if isinstance(self._regions.get(one), kind):
                del self._regions[one]

    def _chosen(self, name: str, kind: type[R]) -> list[R]:
        """The regions of a kind, ordered by name; or the one with that name."""
        if not name:
            return [one for _, one in sorted(self._regions.items()) if isinstance(one, kind)]
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find {'' if kind is Region else 'cuda '}shared memory region: '{name}'")
        if not isinstance(region, kind):
            own, other = ("system", "CUDA") if kind is Region else ("CUDA", "system")
            raise NotFound(f"The region named '{name}' is registered as {other} shared memory, not {own} shared memory")
        return [region]

    def check_allowed(self) -> None:
        """Raises `Unsupported` if the operator does not allow client memory."""
        if not self._is_allowed:
            raise Unsupported(DISABLED)


def _open(key: str) -> int:
    """A descriptor of the object. Names with a slash are refused: they would lead out of the directory."""
    name = key.removeprefix("/")
    if name.lstrip("/").startswith(RESERVED_PREFIX):
        raise Invalid(f"cannot register shared memory region with key '{key}': the prefix is reserved")
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise _cannot_open(key)
    try:
        return os.open(f"{DIRECTORY}/{name}", _FLAGS)
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise Unavailable(f"Unable to open shared memory region: '{key}': {error.strerror}") from None
        raise _cannot_open(key) from None


def _cannot_open(key: str) -> Invalid:
    return Invalid(f"Unable to open shared memory region: '{key}'")


def _shrunk(name: str) -> Invalid:
    return Invalid(f"shared memory region '{name}' is shorter than it was when it was registered")
