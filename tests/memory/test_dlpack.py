"""DLPack: contents of capsules, lifetime of the memory behind them, and the copy from a GPU to the host."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from flowserve.errors import Invalid, Unsupported
from flowserve.memory import dlpack
from flowserve.memory.device_tensor import DeviceTensor
from flowserve.memory.devices import Devices, using
from flowserve.memory.dlpack import ForeignTensor, export_capsule, import_capsule
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.values import HOST_MEMORY, Array, DType, gpu_memory
from tests.support.fake_device import FakeMachine, move

NUMBERS = [dtype for dtype in DType if dtype is not DType.BYTES]


class Speaker:
    """An object with DLPack's methods that returns this capsule."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0


def raise_while_the_capsule_is_finalised(capsules: list[Any]) -> None:
    held = capsules.pop()
    assert held is not None
    raise ZeroDivisionError  # the capsule is finalised with this frame


def shown(array: Array) -> ForeignTensor:
    return ForeignTensor(array.ctypes.data, array.dtype, array.shape, -1, array)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_type_round_trips_through_a_capsule_in_the_same_memory(dtype: DType) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype.numpy)
    back = import_capsule(export_capsule(shown(array)))
    assert (back.dtype, back.shape, back.device) == (dtype.numpy, (2, 3), -1)
    assert (back.on_host() == array).all()
    assert back.on_host().ctypes.data == array.ctypes.data


def test_numpy_consumes_a_capsule_and_releases_its_owner() -> None:
    class Kept(np.ndarray[Any, Any]):
        """numpy's own arrays have no weak references."""

    array = np.arange(4.0).view(Kept)
    gone = weakref.ref(array)
    taken = np.from_dlpack(
        Speaker(export_capsule(ForeignTensor(array.ctypes.data, array.dtype, array.shape, -1, array)))
    )
    del array
    assert taken.tolist() == [0, 1, 2, 3]
    assert gone() is not None
    del taken
    gc.collect()
    assert gone() is None


def test_an_unconsumed_capsule_releases_its_owner() -> None:
    class Owner:
        """The owner of the memory."""

    array, owner = np.zeros(3), Owner()
    gone = weakref.ref(owner)
    tensor = ForeignTensor(array.ctypes.data, array.dtype, array.shape, 1, owner)
    capsules = [export_capsule(tensor)]
    assert import_capsule(capsules[0]).device == 1
    del owner, tensor
    gc.collect()
    assert gone() is not None
    with pytest.raises(ZeroDivisionError):
        raise_while_the_capsule_is_finalised(capsules)
    gc.collect()
    assert gone() is None


def test_an_imported_tensor_stays_alive_while_it_is_referenced() -> None:
    array = import_capsule(np.arange(5).__dlpack__()).on_host()
    gc.collect()
    assert array.tolist() == [0, 1, 2, 3, 4]


def test_a_capsule_has_one_consumer_at_a_time() -> None:
    capsule = export_capsule(shown(np.arange(4.0)))
    ours = import_capsule(capsule)
    with pytest.raises(ValueError, match="incorrect name"):
        np.from_dlpack(Speaker(capsule))  # numpy would free the tensor when done
    with pytest.raises(Invalid, match="its tensor was consumed already"):
        import_capsule(capsule)
    array = ours.on_host()
    del ours
    with pytest.raises(Invalid, match="its tensor was consumed already"):
        import_capsule(capsule)
    assert array.tolist() == [0, 1, 2, 3]
    del array
    assert np.from_dlpack(Speaker(capsule)).tolist() == [0, 1, 2, 3]


def test_unsupported_dlpack_tensors_are_refused() -> None:
    square = np.zeros((2, 2))
    with pytest.raises(Invalid, match="DLPack tensor is not contiguous"):
        import_capsule(np.zeros((2, 3)).T.__dlpack__())
    with pytest.raises(Invalid, match="DLPack type 5 of 64 bits and 1 lanes"):
        import_capsule(square.astype(np.complex64).__dlpack__())
    with pytest.raises(Invalid, match="not a DLPack capsule, or its tensor was consumed already"):
        import_capsule("text")
    capsule = export_capsule(shown(square))
    np.from_dlpack(Speaker(capsule))
    with pytest.raises(Invalid, match="its tensor was consumed already"):
        import_capsule(capsule)


def test_a_gpu_tensor_is_copied_to_the_host_once_after_the_device_is_idle() -> None:
    machine = FakeMachine(2)
    with using(Devices(machine.devices)) as found:
        stream = DeviceStream(found[1])
        there = move(stream, Tensor(np.arange(8, dtype=np.float32).reshape(2, 4), 0, 2), gpu_memory(1))
        assert isinstance(there, DeviceTensor)
        array = there.elements
        copies = machine.copies[gpu_memory(1), HOST_MEMORY]
        capsule = export_capsule(ForeignTensor(array.address, array.dtype, array.shape, 1, there))
        on_host = import_capsule(capsule).on_host()
        assert on_host.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert machine.copies[gpu_memory(1), HOST_MEMORY] == copies + 1
        assert found.ledger.entries()[gpu_memory(1), HOST_MEMORY][1] == 32
        stream.close()


def test_a_tensor_on_an_unavailable_gpu_is_refused_with_the_reason() -> None:
    with using(Devices((), "no driver")), pytest.raises(Unsupported, match="no driver"):
        ForeignTensor(4096, np.dtype("f4"), (1,), 0, None).on_host()
