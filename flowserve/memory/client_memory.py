"""System shared memory of clients: regions they registered, tensors read from them and written to them.

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
from typing import Any, Final

from flowserve.errors import Invalid, NotFound, Unavailable, Unsupported

DIRECTORY: Final = "/dev/shm"
DISABLED: Final = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
REGIONS_MAX: Final = 4096  # each holds a file descriptor
RESERVED_PREFIX: Final = "triton_python_backend_shm_region_"
_UINT64_MAX: Final = 2**64 - 1
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class Portion:
    """What a request says about one tensor's place: `size` bytes from `offset` of the region of that name."""

    region: str
    offset: int
    size: int


class _Region:
    """One registered region. Its descriptor is closed when nobody has the object any more."""

    def __init__(self, name: str, key: str, offset: int, size: int, descriptor: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.size = size
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def check(self) -> None:
        """Raises `Invalid` where the object is not as long any more as it was registered."""
        if os.fstat(self.descriptor).st_size < self.offset + self.size:
            raise _shrunk(self.name)


class Window:
    """A portion of a region, held by the request that named it: unregistering the region does not take it away."""

    __slots__ = ("_offset", "_region", "size")

    def __init__(self, region: _Region, portion: Portion) -> None:
        self._region = region
        self._offset = region.offset + portion.offset
        self.size = portion.size

    def read(self) -> bytearray:
        """A copy of its bytes. Raises `Invalid` where the client made its object shorter meanwhile."""
        self._region.check()
        data = bytearray(self.size)
        view = memoryview(data)
        done = 0
        while done < self.size:
            got = os.preadv(self._region.descriptor, [view[done:]], self._offset + done)
            if not got:
                raise _shrunk(self._region.name)
            done += got
        return data

    def store(self, output: str, data: bytes | memoryview) -> None:
        """Write `data`, which is that of `output`, at its beginning. Raises `Invalid` where it is more than there is
        room for, and as `read` does.
        """
        if len(data) > self.size:
            raise Invalid(
                f"shared memory size specified with the request for output '{output}' ({self.size} bytes) should be at "
                f"least {len(data)} bytes to hold the results"
            )
        self._region.check()  # writing behind its end would make the object longer
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += os.pwrite(self._region.descriptor, view[done:], self._offset + done)


class ClientMemory:
    """The regions of all clients, by name. Touched from the loop's thread only."""

    def __init__(self, *, is_allowed: bool = False) -> None:
        self._is_allowed = is_allowed
        self._regions: dict[str, _Region] = {}

    def register(self, name: str, key: str, offset: int, size: int) -> None:
        """Open the shared memory object `key` and know `size` bytes from `offset` of it as `name`.

        Raises `Unsupported` where the operator does not allow it, `Invalid` for everything that is wrong with it,
        `Unavailable` where the system has no descriptor left.
        """
        self.check_allowed()
        if name in self._regions:
            raise Invalid(f"shared memory region '{name}' already in manager")
        if len(self._regions) >= REGIONS_MAX:
            raise Invalid(
                f"failed to register shared memory region '{name}': {REGIONS_MAX} regions are registered, which is the "
                "most there may be; unregister some"
            )
        if not name:
            raise Invalid("failed to register shared memory region '': invalid args (it needs a name)")
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
        self._regions[name] = _Region(name, key, offset, size, descriptor)

    def unregister(self, name: str = "") -> None:
        """Forget a region, all without a name. One that is not there is forgotten already."""
        self.check_allowed()
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """What is registered, in Triton's words. Raises NotFound for a name that is not."""
        regions = self._regions
        chosen = [self._region(name)] if name else [regions[one] for one in sorted(regions)]
        return [{"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.size} for one in chosen]

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

    def _region(self, name: str) -> _Region:
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
