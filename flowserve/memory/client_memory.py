"""Shared memory of clients, the system's and CUDA's: regions they registered, tensors read from and written to them.

Decided here: which names a region may have, what may be opened under /dev/shm, what is checked before each use, and how
long a region lives: it is forgotten when it is unregistered, and closed when the last request that named it is over.

Tensors are copied through the file (`preadv`, `pwrite`), not through a mapping. A client may truncate its object at any
moment, and touching a page behind its end ends the whole server by a signal; a read that comes up short is an error of
one request. It is also what keeps a client from changing a tensor after it was checked. That this is the system's
shared memory and the calls are Triton's, clients see; HTTP is not known here.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from flowserve.errors import AlreadyExists, Invalid, NotFound, Unavailable, Unsupported
from flowserve.memory.client_cuda import CudaHandles, CudaRegion

DIRECTORY: Final = "/dev/shm"
DISABLED: Final = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
REGIONS_MAX: Final = 4096  # each holds a file descriptor
RESERVED_PREFIX: Final = "triton_python_backend_shm_region_"
_UINT64_MAX: Final = 2**64 - 1
R = TypeVar("R", bound="Region | CudaRegion")
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class Portion:
    """What a request says about one tensor's place: `size` bytes from `offset` of the region of that name."""

    region: str
    offset: int
    size: int


class Region:
    """One registered region. Its descriptor is closed when nobody has the object any more."""

    def __init__(self, name: str, key: str, offset: int, size: int, descriptor: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.size = size
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def read(self, offset: int, size: int) -> bytearray:
        """A copy of some bytes. Raises `Invalid` where the client made its object shorter meanwhile."""
        self.check()
        data = bytearray(size)
        view = memoryview(data)
        done = 0
        while done < size:
            got = os.preadv(self.descriptor, [view[done:]], offset + done)
            if not got:
                raise _shrunk(self.name)
            done += got
        return data

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Raises as `read` does."""
        self.check()  # writing behind its end would make the object longer
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.pwrite(self.descriptor, view[done:], offset + done)

    def check(self) -> None:
        """Raises `Invalid` where the object is not as long any more as it was registered."""
        if os.fstat(self.descriptor).st_size < self.offset + self.size:
            raise _shrunk(self.name)


class Window:
    """A portion of a region, held by the request that named it: unregistering the region does not take it away."""

    __slots__ = ("_offset", "_region", "size")

    def __init__(self, region: Region | CudaRegion, portion: Portion) -> None:
        self._region = region
        self._offset = region.offset + portion.offset
        self.size = portion.size

    def read(self) -> bytearray:
        """A copy of its bytes. Raises `Invalid` where the client made its object shorter meanwhile."""
        return self._region.read(self._offset, self.size)

    def store(self, output: str, data: bytes | memoryview) -> None:
        """Write `data`, which is that of `output`, at its beginning. Raises `Invalid` where it is more than there is
        room for, and as `read` does.
        """
        if len(data) > self.size:
            raise Invalid(
                f"shared memory size specified with the request for output '{output}' ({self.size} bytes) should be at "
                f"least {len(data)} bytes to hold the results"
            )
        self._region.write(self._offset, data)


class ClientMemory:
    """The regions of all clients, by name. Touched from the loop's thread only."""

    def __init__(self, *, is_allowed: bool = False) -> None:
        self._is_allowed = is_allowed
        self._regions: dict[str, Region | CudaRegion] = {}
        self._handles = CudaHandles()

    def register(self, name: str, key: str, offset: int, size: int) -> None:
        """Open the shared memory object `key` and know `size` bytes from `offset` of it as `name`.

        Raises `Unsupported` where the operator does not allow it, `Invalid` for everything that is wrong with it,
        `Unavailable` where the system has no descriptor left.
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
        """Open a CUDA IPC handle on a GPU and know the first `size` bytes of its memory as `name`. Raises as
        `register` does.
        """
        self._check_name(name)
        self._regions[name] = self._handles.region(name, handle, device, size)

    def unregister(self, name: str = "") -> None:
        """Forget a region of the system's, all of them without a name. One that is not there is forgotten already."""
        self._forget(name, Region)

    def unregister_cuda(self, name: str = "") -> None:
        """The same of CUDA's."""
        self._forget(name, CudaRegion)
        self._handles.close_what_is_over()

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """What is registered of the system's, in Triton's words. Raises NotFound for a name that is not."""
        return [
            {"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.size}
            for one in self._chosen(name, Region)
        ]

    def status_cuda(self, name: str = "") -> list[dict[str, Any]]:
        """The same of CUDA's."""
        return [
            {"name": one.name, "device_id": one.device, "byte_size": one.size} for one in self._chosen(name, CudaRegion)
        ]

    def window(self, portion: Portion) -> Window:
        """The place a request names. Raises `NotFound`, and `Invalid` where it does not lie in its region."""
        self.check_allowed()
        region = self._region(portion.region)
        end = portion.offset + portion.size
        if end > _UINT64_MAX:
            raise Invalid(f"Integer overflow: offset + byte size for shared memory region: '{region.name}'")
        if portion.offset >= region.size:
            raise Invalid(f"Invalid offset for shared memory region: '{region.name}' ({region.size} bytes)")
        if end > region.size:
            raise Invalid(f"Invalid offset + byte size for shared memory region: '{region.name}' ({region.size} bytes)")
        return Window(region, portion)

    def windows(self, portions: Mapping[str, Portion]) -> dict[str, Window]:
        """Those of several tensors, by the tensors' names."""
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
        """The regions of a kind, by name; or the one of that name."""
        if not name:
            return [one for _, one in sorted(self._regions.items()) if isinstance(one, kind)]
        region = self._regions.get(name)
        words = ("CUDA", "system") if kind is Region else ("system", "CUDA")
        if region is None:
            system = kind is Region
            raise NotFound(f"Unable to find {'' if system else 'cuda '}shared memory region: '{name}'")
        if not isinstance(region, kind):
            text = f"The region named '{name}' is registered as {words[0]} shared memory, not {words[1]} shared memory"
            raise NotFound(text)
        return [region]

    def _region(self, name: str) -> Region | CudaRegion:
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        return region

    def check_allowed(self) -> None:
        """Raises `Unsupported` where the operator does not allow clients' memory."""
        if not self._is_allowed:
            raise Unsupported(DISABLED)


def _open(key: str) -> int:
    """A descriptor of the object. The directory has no others: a name with a slash in it leads elsewhere."""
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
