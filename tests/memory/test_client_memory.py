"""Clients' shared memory: which objects may be opened, the checks before each access, and when a region is closed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from flowserve.errors import Invalid, NotFound, Unsupported
from flowserve.memory import client_memory
from flowserve.memory.client_memory import DIRECTORY, DISABLED, ClientMemory, Portion

MakeObject = Callable[[int], str]

pytestmark = pytest.mark.skipif(not Path(DIRECTORY).is_dir(), reason="no system shared memory here")


@pytest.fixture
def make_object() -> Iterator[MakeObject]:
    """Creates a shared memory object of some size and returns its key. Removed after the test."""
    made: list[Path] = []

    def make(size: int) -> str:
        path = Path(DIRECTORY) / f"flowserve_test_{secrets.token_hex(8)}"
        made.append(path)
        path.write_bytes(bytes(range(256)) * (size // 256) + bytes(range(size % 256)))
        return f"/{path.name}"

    yield make
    for path in made:
        path.unlink(missing_ok=True)


@pytest.fixture
def memory() -> ClientMemory:
    return ClientMemory(is_allowed=True)


def path_of(key: str) -> Path:
    return Path(DIRECTORY) / key.removeprefix("/")


def descriptors(key: str) -> int:
    """The number of this process's descriptors of the object."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            found += os.readlink(f"/proc/self/fd/{number}").removesuffix(" (deleted)") == str(path_of(key))
    return found


def test_a_registered_region_is_read_and_written_in_the_clients_memory(
    memory: ClientMemory, make_object: MakeObject
) -> None:
    key = make_object(64)
    memory.register("r", key, 16, 32)
    assert memory.status() == memory.status("r") == [{"name": "r", "key": key, "offset": 16, "byte_size": 32}]
    window = memory.window(Portion("r", 8, 4))
    assert window.read() == bytes([24, 25, 26, 27])
    window.store("OUT", b"abcd")
    assert path_of(key).read_bytes()[23:29] == b"\x17abcd\x1c"
    memory.unregister("r")
    assert memory.status() == []


def test_keys_are_accepted_with_and_without_a_slash(memory: ClientMemory, make_object: MakeObject) -> None:
    memory.register("r", make_object(8).removeprefix("/"), 0, 8)
    assert memory.window(Portion("r", 0, 2)).read() == b"\x00\x01"


@pytest.mark.fault("M1")
def test_registration_is_refused_unless_the_operator_allows_it(make_object: MakeObject) -> None:
    memory = ClientMemory()
    key = make_object(8)
    for call in (
        lambda: memory.register("r", key, 0, 8),
        lambda: memory.unregister("r"),
        memory.unregister,
        lambda: memory.window(Portion("r", 0, 8)),
    ):
        with pytest.raises(Unsupported, match="Client shared memory is disabled") as refused:
            call()
        assert str(refused.value) == DISABLED
    assert memory.status() == []
    assert descriptors(key) == 0


@pytest.mark.fault("M2")
def test_a_name_is_registered_once(memory: ClientMemory, make_object: MakeObject) -> None:
    key = make_object(8)
    memory.register("r", key, 0, 8)
    with pytest.raises(Invalid, match="shared memory region 'r' already in manager"):
        memory.register("r", key, 0, 8)
    memory.register("s", key, 0, 8)
    assert [row["name"] for row in memory.status()] == ["r", "s"]


@pytest.mark.fault("M3", "M5")
@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "///",
        ".",
        "..",
        "/..",
        "../../etc/passwd",
        "/../etc/passwd",
        "//x",
        "a/b",
        "nul\0byte",
        "\ud800",
        "x" * 300,
        "/none-here",
    ],
)
def test_only_objects_in_shared_memory_are_opened(memory: ClientMemory, key: str) -> None:
    with pytest.raises(Invalid, match="Unable to open shared memory region") as refused:
        memory.register("r", key, 0, 8)
    assert str(refused.value) == f"Unable to open shared memory region: '{key}'"
    assert memory.status() == []


@pytest.mark.fault("M5")
@pytest.mark.parametrize("slashes", ["", "/", "//", "///"])
def test_the_keys_of_triton_s_python_processes_are_reserved(memory: ClientMemory, slashes: str) -> None:
    with pytest.raises(Invalid, match="the prefix is reserved"):
        memory.register("r", f"{slashes}triton_python_backend_shm_region_1", 0, 8)


def test_links_folders_and_pipes_are_refused(memory: ClientMemory, make_object: MakeObject) -> None:
    for make in (lambda path: path.symlink_to("/etc/passwd"), Path.mkdir, os.mkfifo):
        key = make_object(0)
        path = path_of(key)
        path.unlink()
        make(path)
        try:
            with pytest.raises(Invalid, match="Unable to open shared memory region"):
                memory.register("r", key, 0, 8)
        finally:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.fault("M4")
@pytest.mark.parametrize(
    ("offset", "size"), [(0, 65), (1, 64), (64, 1), (64, 0), (0, 0), (2**40, 8), (0, 2**40), (0, 2**64 - 1)]
)
def test_a_region_lies_inside_its_object(memory: ClientMemory, make_object: MakeObject, offset: int, size: int) -> None:
    key = make_object(64)
    with pytest.raises(Invalid, match="failed to register shared memory region 'r': invalid args"):
        memory.register("r", key, offset, size)
    assert descriptors(key) == 0


@pytest.mark.fault("M6", "M7")
@pytest.mark.parametrize(
    ("offset", "size", "text"),
    [
        (64, 1, "Invalid offset for shared memory region: 'r'"),
        (64, 0, "Invalid offset for shared memory region: 'r'"),
        (2**64 - 64, 1, "Invalid offset for shared memory region: 'r'"),
        (0, 65, "Invalid offset + byte size for shared memory region: 'r'"),
        (63, 2, "Invalid offset + byte size for shared memory region: 'r'"),
        (32, 2**64 - 32, "Integer overflow"),
        (2**64 - 1, 2**64 - 1, "Integer overflow"),
    ],
)
def test_a_tensor_lies_inside_its_region(
    memory: ClientMemory, make_object: MakeObject, offset: int, size: int, text: str
) -> None:
    memory.register("r", make_object(256), 32, 64)  # the object itself goes on behind the region
    with pytest.raises(Invalid) as refused:
        memory.window(Portion("r", offset, size))
    assert str(refused.value).startswith(text)
    with pytest.raises(Invalid, match="Integer overflow"):
        memory.register("s", make_object(64), 32, 2**64 - 32)


def test_an_unknown_region_is_not_found_and_unregistering_it_is_no_error(memory: ClientMemory) -> None:
    for call in (lambda: memory.status("r"), lambda: memory.window(Portion("r", 0, 1))):
        with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
            call()
    memory.unregister("r")


@pytest.mark.fault("M10")
def test_a_region_stays_open_while_a_request_uses_it(memory: ClientMemory, make_object: MakeObject) -> None:
    key, other = make_object(8), make_object(8)
    memory.register("r", key, 0, 8)
    window = memory.window(Portion("r", 0, 4))
    memory.unregister()
    memory.register("r", other, 0, 8)
    window.store("OUT", b"late")
    assert path_of(key).read_bytes()[:4] == b"late"
    assert path_of(other).read_bytes()[:4] == bytes([0, 1, 2, 3])
    assert descriptors(key) == 1
    del window
    assert descriptors(key) == 0
    assert descriptors(other) == 1


@pytest.mark.fault("M11")
@pytest.mark.parametrize("left", [0, 3, 7])
def test_a_truncated_object_is_an_error_and_is_not_extended(
    memory: ClientMemory, make_object: MakeObject, left: int
) -> None:
    key = make_object(8)
    memory.register("r", key, 0, 8)
    window = memory.window(Portion("r", 0, 8))
    os.truncate(path_of(key), left)
    for use in (window.read, lambda: window.store("OUT", b"12345678")):
        with pytest.raises(Invalid, match="region 'r' is shorter than it was when it was registered"):
            use()
    assert path_of(key).stat().st_size == left


@pytest.mark.fault("M11")
def test_an_object_removed_by_its_owner_stays_usable(memory: ClientMemory, make_object: MakeObject) -> None:
    key = make_object(8)
    memory.register("r", key, 0, 8)
    path_of(key).unlink()
    window = memory.window(Portion("r", 4, 4))
    window.store("OUT", b"here")
    assert window.read() == b"here"


@pytest.mark.fault("M12")
def test_the_number_of_regions_is_limited(
    memory: ClientMemory, make_object: MakeObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client_memory.REGIONS_MAX < 10_000
    monkeypatch.setattr(client_memory, "REGIONS_MAX", 20)  # as many descriptors as a test may have
    key = make_object(8)
    for number in range(20):
        memory.register(str(number), key, 0, 8)
    with pytest.raises(Invalid, match="20 regions are registered, which is the most there may be"):
        memory.register("more", key, 0, 8)
    memory.unregister("7")
    memory.register("more", key, 0, 8)
    memory.unregister()
    assert descriptors(key) == 0
