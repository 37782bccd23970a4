"""CUDA shared memory of clients, on fake GPUs: bounds, lifetimes, and handles that are opened once."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flowserve.errors import Invalid, NotFound, Unsupported
from flowserve.memory.client_memory import ClientMemory, Portion
from flowserve.memory.devices import Devices, using
from flowserve.values import HOST_MEMORY, gpu_memory
from tests.support.fake_device import FakeMachine

CONTENT = bytes(range(200))


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    machine = FakeMachine(2)
    with using(Devices(machine.devices)):
        yield machine


@pytest.fixture
def memory() -> ClientMemory:
    return ClientMemory(is_allowed=True)


def test_tensors_are_read_from_it_and_written_to_it(machine: FakeMachine, memory: ClientMemory) -> None:
    memory.register_cuda("r", machine.export(1, CONTENT), 1, 100)
    assert memory.status_cuda() == [{"name": "r", "device_id": 1, "byte_size": 100}]
    window = memory.window(Portion("r", 10, 5))
    assert bytes(window.read()) == CONTENT[10:15]
    window.store("OUT", b"xyz")
    assert bytes(memory.window(Portion("r", 9, 6)).read()) == bytes([9]) + b"xyz" + CONTENT[13:15]
    assert machine.copies == {(gpu_memory(1), HOST_MEMORY): 2, (HOST_MEMORY, gpu_memory(1)): 1}
    with pytest.raises(Invalid, match=r"output 'OUT' \(5 bytes\) should be at least 6 bytes to hold the results"):
        window.store("OUT", b"123456")
    assert bytes(memory.window(Portion("r", 0, 0)).read()) == b""


def test_accesses_and_registrations_behind_its_end_are_refused(machine: FakeMachine, memory: ClientMemory) -> None:
    handle = machine.export(0, CONTENT)
    for size in (0, 201, 2**64 - 1):
        with pytest.raises(Invalid, match=rf"invalid args: {size} bytes do not lie in an allocation of 200"):
            memory.register_cuda("r", handle, 0, size)
    memory.register_cuda("r", handle, 0, 200)
    with pytest.raises(Invalid, match="Invalid offset for shared memory region: 'r'"):
        memory.window(Portion("r", 200, 1))
    with pytest.raises(Invalid, match=r"Invalid offset \+ byte size for shared memory region: 'r'"):
        memory.window(Portion("r", 199, 2))


def test_an_invalid_handle_and_a_missing_gpu_are_refused(machine: FakeMachine, memory: ClientMemory) -> None:
    handle = machine.export(0, CONTENT)
    with pytest.raises(Invalid, match="a CUDA IPC handle has 64 bytes, this one 6"):
        memory.register_cuda("r", b"handle", 0, 8)
    with pytest.raises(Invalid, match="the handle cannot be opened: cudaErrorInvalidValue"):
        memory.register_cuda("r", b"\xff" * 64, 0, 8)
    with pytest.raises(Invalid, match="invalid args: there is no GPU 2 here"):
        memory.register_cuda("r", handle, 2, 8)
    with pytest.raises(Invalid, match="the handle cannot be opened"):
        memory.register_cuda("r", handle, 1, 8)
    assert memory.status_cuda() == []
    assert not machine.opened


def test_without_a_gpu_the_error_says_why(memory: ClientMemory) -> None:
    text = "failed to register CUDA shared memory region: 'r', GPUs not supported: no driver"
    with using(Devices((), "no driver")), pytest.raises(Invalid, match=text):
        memory.register_cuda("r", bytes(64), 0, 8)
    with pytest.raises(Unsupported, match="Client shared memory is disabled"):
        ClientMemory().register_cuda("r", bytes(64), 0, 8)


def test_a_handle_is_opened_once_and_closed_after_its_last_use(machine: FakeMachine, memory: ClientMemory) -> None:
    handle = machine.export(0, CONTENT)
    memory.register_cuda("a", handle, 0, 100)
    memory.register_cuda("b", handle, 0, 200)
    assert len(machine.opened) == 1
    window = memory.window(Portion("a", 0, 4))
    memory.unregister_cuda("a")
    memory.unregister_cuda()
    gc.collect()
    memory.unregister_cuda()
    assert len(machine.opened) == 1, "a request has it"
    assert bytes(window.read()) == CONTENT[:4]
    del window
    gc.collect()
    memory.unregister_cuda()
    assert not machine.opened
    memory.register_cuda("a", handle, 0, 100)
    assert len(machine.opened) == 1


def test_system_and_cuda_regions_share_names_and_have_separate_calls(
    machine: FakeMachine, memory: ClientMemory
) -> None:
    memory.register_cuda("r", machine.export(0, CONTENT), 0, 8)
    with pytest.raises(Invalid, match="shared memory region 'r' already in manager"):
        memory.register("r", "/key", 0, 8)
    with pytest.raises(NotFound, match="The region named 'r' is registered as CUDA shared memory, not system shared"):
        memory.status("r")
    with pytest.raises(NotFound, match="Unable to find cuda shared memory region: 'q'"):
        memory.status_cuda("q")
    memory.unregister("r")
    memory.unregister()
    assert memory.status() == []
    assert memory.status_cuda("r") == [{"name": "r", "device_id": 0, "byte_size": 8}]


OWNER = """
import sys
import cupy
pointer = cupy.cuda.runtime.malloc(200)
memory = cupy.cuda.UnownedMemory(pointer, 200, None)
array = cupy.ndarray((200,), "u1", cupy.cuda.MemoryPointer(memory, 0))
array[...] = cupy.arange(200, dtype="u1")
cupy.cuda.Device().synchronize()
print(cupy.cuda.runtime.ipcGetMemHandle(pointer).hex(), flush=True)
sys.stdin.readline()
print(bytes(array[:5].get()).hex(), flush=True)
"""


@pytest.mark.gpu
def test_on_hardware_memory_of_another_process_is_read_and_written(memory: ClientMemory) -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        handle = bytes.fromhex(owner.stdout.readline())
        with pytest.raises(Invalid, match="do not lie in an allocation"):
            memory.register_cuda("r", handle, 0, 1 << 40)
        memory.register_cuda("r", handle, 0, 200)
        window = memory.window(Portion("r", 1, 3))
        assert bytes(window.read()) == CONTENT[1:4]
        window.store("OUT", b"abc")
        told, _ = owner.communicate("go on\n", timeout=60)
        assert bytes.fromhex(told) == b"\x00abc\x04"
    memory.unregister_cuda()
