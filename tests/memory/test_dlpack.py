"""Tensors between libraries: what capsules say, how long what they show lives, and the way from a GPU to the host."""

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
from flowserve.memory.dlpack import Foreign, capsule_of, described
from flowserve.memory.landing import landed
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.testing.fake_device import FakeMachine
from flowserve.values import HOST_MEMORY, Array, DType, gpu_memory

NUMBERS = [dtype for dtype in DType if dtype is not DType.BYTES]


class Speaker:
    """Whatever speaks DLPack with this capsule."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0


def raise_while_it_goes(capsules: list[Any]) -> None:
    held = capsules.pop()
    assert held is not None
    raise ZeroDivisionError  # and with this frame the capsule goes


def shown(array: Array) -> Foreign:
    return Foreign(array.ctypes.data, array.dtype, array.shape, -1, array)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_type_goes_through_a_capsule_and_back_in_the_same_memory(dtype: DType) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype.numpy)
    back = described(capsule_of(shown(array)))
    assert (back.dtype, back.shape, back.device) == (dtype.numpy, (2, 3), -1)
    assert (back.on_host() == array).all()
    assert back.on_host().ctypes.data == array.ctypes.data


def test_numpy_takes_what_is_offered_and_lets_go_of_it() -> None:
    class Kept(np.ndarray[Any, Any]):
        """numpy's own arrays cannot be watched."""

    array = np.arange(4.0).view(Kept)
    gone = weakref.ref(array)
    taken = np.from_dlpack(Speaker(capsule_of(Foreign(array.ctypes.data, array.dtype, array.shape, -1, array))))
    del array
    assert taken.tolist() == [0, 1, 2, 3]
    assert gone() is not None
    del taken
    gc.collect()
    assert gone() is None


def test_what_nobody_takes_is_let_go_of_with_its_capsule() -> None:
    class Owner:
        """Whoever the memory belongs to."""

    array, owner = np.zeros(3), Owner()
    gone = weakref.ref(owner)
    tensor = Foreign(array.ctypes.data, array.dtype, array.shape, 1, owner)
    capsules = [capsule_of(tensor)]
    assert described(capsules[0]).device == 1
    del owner, tensor
    gc.collect()
    assert gone() is not None
    with pytest.raises(ZeroDivisionError):
        raise_while_it_goes(capsules)
    gc.collect()
    assert gone() is None


def test_what_was_described_lives_as_long_as_somebody_holds_it() -> None:
    array = described(np.arange(5).__dlpack__()).on_host()
    gc.collect()
    assert array.tolist() == [0, 1, 2, 3, 4]


def test_a_capsule_is_in_one_pair_of_hands_at_a_time() -> None:
    capsule = capsule_of(shown(np.arange(4.0)))
    ours = described(capsule)
    with pytest.raises(ValueError, match="incorrect name"):
        np.from_dlpack(Speaker(capsule))  # who would free it once it is done
    with pytest.raises(Invalid, match="somebody has taken its tensor already"):
        described(capsule)
    array = ours.on_host()
    del ours
    with pytest.raises(Invalid, match="somebody has taken its tensor already"):
        described(capsule)
    assert array.tolist() == [0, 1, 2, 3]
    del array
    assert np.from_dlpack(Speaker(capsule)).tolist() == [0, 1, 2, 3]


def test_what_tensors_are_not_is_refused() -> None:
    square = np.zeros((2, 2))
    with pytest.raises(Invalid, match="DLPack tensor is not contiguous"):
        described(np.zeros((2, 3)).T.__dlpack__())
    with pytest.raises(Invalid, match="DLPack type 5 of 64 bits and 1 lanes"):
        described(square.astype(np.complex64).__dlpack__())
    with pytest.raises(Invalid, match="no DLPack capsule, or somebody has taken its tensor"):
        described("text")
    capsule = capsule_of(shown(square))
    np.from_dlpack(Speaker(capsule))
    with pytest.raises(Invalid, match="somebody has taken its tensor already"):
        described(capsule)


def test_a_tensor_comes_from_a_gpu_in_one_copy_that_waits_for_whoever_made_it() -> None:
    machine = FakeMachine(2)
    with using(Devices(machine.devices)) as found:
        stream = DeviceStream(found[1])
        there = Tensor(np.arange(8, dtype=np.float32).reshape(2, 4), 0, 2).to(gpu_memory(1), stream)
        assert isinstance(there, DeviceTensor)
        array = there.elements
        copies = machine.copies[gpu_memory(1), HOST_MEMORY]
        home = landed(described(capsule_of(Foreign(array.address, array.dtype, array.shape, 1, there))))
        assert home.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert machine.copies[gpu_memory(1), HOST_MEMORY] == copies + 1
        assert found.ledger.entries()[gpu_memory(1), HOST_MEMORY][1] == 32
        stream.close()


def test_a_gpu_that_this_process_has_not_is_named() -> None:
    with using(Devices((), "no driver")), pytest.raises(Unsupported, match="no driver"):
        landed(Foreign(4096, np.dtype("f4"), (1,), 0, None))
