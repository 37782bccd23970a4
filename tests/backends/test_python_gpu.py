"""Python models with tensors on a GPU (a fake one): inputs, outputs, and DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowserve.backends import registry
from flowserve.backends.base import DeviceWork, OnDevice, OutputNotes, Results
from flowserve.backends.python.pb_utils import triton_python_backend_utils as pb_utils
from flowserve.backends.python.pb_utils.inference import GpuTensor
from flowserve.config.types import InstanceGroup
from flowserve.errors import Invalid
from flowserve.memory import dlpack
from flowserve.memory.column import Column
from flowserve.memory.device_tensor import DeviceTensor, Mirror
from flowserve.memory.devices import Devices, devices, using
from flowserve.memory.dlpack import ForeignTensor, export_capsule, import_capsule
from flowserve.memory.stream import ON_DEVICE, ON_HOST, DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.values import HOST_MEMORY, Array, Request, gpu_memory
from tests.support.backends import Repository, config_of, open_instance, spec, values
from tests.support.fake_device import FakeMachine, move


class Offered:
    """An array of a GPU library."""

    def __init__(self, tensor: DeviceTensor) -> None:
        self.tensor = tensor
        self.streams: list[Any] = []  # given to __dlpack__

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.streams.append(stream)
        array = self.tensor.elements
        return export_capsule(ForeignTensor(array.address, array.dtype, array.shape, array.place.number, self.tensor))

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.tensor.place.number


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    """A machine with two GPUs, and a library `gpu` whose arrays are on the second."""
    machine = FakeMachine(2)
    with using(Devices(machine.devices)) as found:
        stream = DeviceStream(found[1])

        def asarray(array: Array) -> Offered:
            there = move(stream, Tensor(array, 0, len(array)), gpu_memory(1))
            assert isinstance(there, DeviceTensor)
            return Offered(there)

        sys.modules["gpu"] = SimpleNamespace(asarray=asarray)  # type: ignore[assignment]  # all that models use of it
        yield machine
        del sys.modules["gpu"]
        stream.close()


def on_gpu(array: Array) -> Offered:
    made: Offered = sys.modules["gpu"].asarray(array)
    return made


def test_a_gpu_tensor_reports_its_device_and_refuses_as_numpy(machine: FakeMachine) -> None:
    for offered in (on_gpu(np.ones((2, 3), np.float16)), on_gpu(np.ones((2, 3), np.float16)).__dlpack__()):
        tensor = pb_utils.Tensor.from_dlpack("x", offered)
        assert not tensor.is_cpu()
        assert (tensor.name(), tensor.shape(), tensor.triton_dtype()) == ("x", [2, 3], 10)
        assert tensor.__dlpack_device__() == (2, 1)
        with pytest.raises(pb_utils.TritonModelException) as caught:
            tensor.as_numpy()
        assert str(caught.value) == "Tensor is stored in GPU and cannot be converted to NumPy."
    assert not machine.copies[gpu_memory(1), HOST_MEMORY]


def test_a_dlpack_tensor_is_exported_by_the_object_it_came_from(machine: FakeMachine) -> None:
    source = on_gpu(np.arange(3.0))
    tensor = pb_utils.Tensor.from_dlpack("x", source)
    again = pb_utils.Tensor.from_dlpack("y", tensor.to_dlpack())
    assert isinstance(again, GpuTensor)
    assert again._there.address == source.tensor.elements.address
    tensor.__dlpack__(stream=77)
    assert source.streams[-1] == 77
    assert not machine.copies[gpu_memory(1), HOST_MEMORY]


def test_bfloat16_is_exported_and_imported_by_dlpack_in_host_memory() -> None:
    array = np.array([1.5, -2], pb_utils.triton_string_to_numpy("TYPE_BF16"))
    tensor = pb_utils.Tensor.from_dlpack("x", pb_utils.Tensor("y", array).to_dlpack())
    assert tensor.is_cpu()
    assert tensor.triton_dtype() == 14
    assert np.shares_memory(tensor.as_numpy(), array)


def test_a_tensor_that_is_not_contiguous_is_refused_as_on_triton() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="Only contiguous DLPack tensors"):
        pb_utils.Tensor.from_dlpack("x", np.zeros((3, 2)).T.__dlpack__())


MODEL = """
import gpu
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            on_gpu = pb_utils.Tensor.from_dlpack("y", gpu.asarray(x * 2))
            on_host = pb_utils.Tensor("z", x + 1)
            responses.append(pb_utils.InferenceResponse([on_gpu, on_host]))
        return responses
"""


@pytest.mark.parametrize("members", [1, 3])
def test_a_gpu_output_is_copied_to_the_host_once(repository: Repository, machine: FakeMachine, members: int) -> None:
    repository.write("m", "1/model.py", MODEL)
    config = config_of(inputs=[spec("x")], outputs=[spec("y"), spec("z")], max_batch_size=8)
    opened = open_instance(repository, config)
    rows = [np.full((1, 4), m, np.float32) for m in range(members)]
    results = opened.run(*[{"x": row} for row in rows])
    opened.instance.close()
    assert values(results) == [(row * 2).tolist() for row in rows]
    assert values(results, 1) == [(row + 1).tolist() for row in rows]
    assert machine.copies[gpu_memory(1), HOST_MEMORY] == members


def test_a_request_keeps_its_preferred_memory() -> None:
    wanted = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 1)
    asked = pb_utils.InferenceRequest(model_name="m", preferred_memory=wanted).preferred_memory()
    assert (asked.preferred_memory_type, asked.preferred_device_id) == (pb_utils.TRITONSERVER_MEMORY_GPU, 1)
    plain = pb_utils.InferenceRequest(model_name="m").preferred_memory()
    assert plain.preferred_memory_type == pb_utils.MemoryType.TRITONSERVER_MEMORY_CPU


# ---------------------------------------------------------------------------------- models that take tensors on a GPU

KEEPS = """
import gpu
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            places.append("host" if x.is_cpu() else f"gpu{x.__dlpack_device__()[1]}")
            array = x.as_numpy() if x.is_cpu() else gpu.asnumpy(x)
            answer = pb_utils.Tensor.from_dlpack("y", gpu.asarray(array + 1))
            responses.append(pb_utils.InferenceResponse([answer]))
        return responses
"""
ON_GPU1 = InstanceGroup("m", "KIND_GPU", 1, (1,))


@dataclass
class Device:
    instance: Any
    places: list[str]  # the devices of its inputs

    def run(self, *tensors: Tensor, read_at: int) -> Sequence[Tensor | None]:
        count = len(tensors)
        rows = [tensor.shape[0] for tensor in tensors]
        work = DeviceWork(
            [Column.of([*tensors], rows)],
            rows,
            [Request({})] * count,
            [("y",)] * count,
            [[True] * count],
            read_at=[[read_at] * count],
        )
        results: Results = self.instance.run(work, lambda: 0)
        assert not results.errors, results.errors
        return results.outputs[0]


@pytest.fixture
def keeping(repository: Repository, machine: FakeMachine) -> Iterator[Callable[..., Device]]:
    """`keeping()` opens a model on the second GPU that takes tensors there and returns x + 1 there."""
    opened: list[Any] = []

    def start(dims: tuple[int, ...] = (4,), **options: str) -> Device:
        places: list[str] = []
        sys.modules["gpu"].asnumpy = _asnumpy  # type: ignore[attr-defined]  # as above
        sys.modules["gpu"].places = places  # type: ignore[attr-defined]  # as above
        repository.write("m", "1/model.py", KEEPS.replace("places.append", "gpu.places.append"))
        parameters = {"execution": "thread", "FORCE_CPU_ONLY_INPUT_TENSORS": "no"}
        config = config_of(
            inputs=[spec("x")],
            outputs=[spec("y", dims)],
            max_batch_size=8,
            parameters=parameters,
            instance_groups=(ON_GPU1,),
        )
        model = registry.find("python").load(config, repository.files(), options)
        instance = model.instance("m_0", ON_GPU1)
        instance.open()
        opened.append(instance)
        return Device(instance, places)

    yield start
    for instance in opened:
        instance.close()


def _asnumpy(tensor: Any) -> Array:
    return import_capsule(tensor.__dlpack__()).on_host()


def test_a_tensor_stays_on_the_gpu_from_one_python_model_to_the_next(
    keeping: Callable[..., Device], machine: FakeMachine
) -> None:
    model = keeping()
    assert isinstance(model.instance, OnDevice)
    given = [Tensor(np.full((2, 4), m, np.float32), 0, 2) for m in range(2)]
    first = model.run(*given, read_at=ON_DEVICE)
    assert all(isinstance(one, DeviceTensor) for one in first)
    second = model.run(*(one for one in first if one is not None), read_at=ON_HOST)
    assert model.places == ["host", "host", "gpu1", "gpu1"]
    assert [one.array.tolist() for one in second if one is not None] == [
        np.full((2, 4), m + 2, np.float32).tolist() for m in range(2)
    ]


def test_an_output_read_on_host_and_device_is_on_both(keeping: Callable[..., Device]) -> None:
    (answer,) = keeping().run(Tensor(np.ones((1, 4), np.float32), 0, 1), read_at=ON_DEVICE | ON_HOST)
    assert isinstance(answer, Mirror)
    assert answer.array.tolist() == [[2.0] * 4]
    assert 1 in answer.copies


def test_a_failed_initialize_closes_the_stream(repository: Repository, machine: FakeMachine) -> None:
    repository.write("m", "1/model.py", "class TritonPythonModel:\n    pass\n")
    config = config_of(
        inputs=[spec("x")],
        outputs=[spec("y")],
        parameters={"execution": "thread", "FORCE_CPU_ONLY_INPUT_TENSORS": "no"},
        instance_groups=(ON_GPU1,),
    )
    instance = registry.find("python").load(config, repository.files(), {}).instance("m_0", ON_GPU1)
    before = [*machine.streams]
    with pytest.raises(Invalid, match="no method execute"):
        instance.open()
    opened = [stream for stream in machine.streams if stream not in before]
    assert [stream.is_closed for stream in opened] == [True]


TWICE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "x")
        echo = pb_utils.Tensor.from_dlpack("y", x.to_dlpack())
        return [pb_utils.InferenceResponse([echo] * TIMES)]
"""


@pytest.mark.parametrize("times", [1, 2])
def test_an_input_returned_as_output_keeps_its_memory_only_while_it_is_read(
    repository: Repository, machine: FakeMachine, times: int
) -> None:
    repository.write("m", "1/model.py", TWICE.replace("TIMES", str(times)))
    config = config_of(
        inputs=[spec("x")],
        outputs=[spec("y")],
        max_batch_size=8,
        parameters={"execution": "thread", "FORCE_CPU_ONLY_INPUT_TENSORS": "no"},
        instance_groups=(ON_GPU1,),
    )
    instance = registry.find("python").load(config, repository.files(), {}).instance("m_0", ON_GPU1)
    instance.open()
    work = DeviceWork(
        [Column.of([on_gpu(np.ones((1, 4), np.float32)).tensor], [1])],
        [1],
        [Request({})],
        [("y",)],
        [[True]],
        read_at=[[ON_DEVICE]],
    )
    results = instance.run(work, lambda: 0)
    if times == 1:
        assert isinstance(results.outputs[0][0], DeviceTensor)
    else:
        assert str(results.errors[0]) == "model 'm' answered output 'y' twice"
    del work, results
    instance.close()
    assert devices()[1].pool.statistics().lent_bytes == 0


def test_a_gpu_output_of_another_shape_is_passed_on_or_refused(keeping: Callable[..., Device]) -> None:
    work = DeviceWork(
        [Column.of([Tensor(np.ones((1, 4), np.float32), 0, 1)], [1])],
        [1],
        [Request({})],
        [("y",)],
        [[True]],
        read_at=[[ON_DEVICE]],
    )
    text = "the configuration promises shape [1,5], the model answered [1,4]; return that shape, or change dims"
    results = keeping((5,)).instance.run(work, lambda: 0)
    assert results.notes == OutputNotes(unlike={"y": f"{text}; it is passed on as it is (--strict-outputs refuses it)"})
    assert results.outputs[0][0].shape == (1, 4)
    del results
    results = keeping((5,), strict_outputs="true").instance.run(work, lambda: 0)
    assert str(results.errors[0]) == f"model 'm', output 'y': {text}"


@pytest.mark.parametrize("parameters", [{}, {"execution": "thread"}, {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}])
def test_without_the_parameter_tensors_are_in_host_memory(
    repository: Repository, machine: FakeMachine, parameters: dict[str, str]
) -> None:
    repository.write("m", "1/model.py", MODEL)
    config = config_of(inputs=[spec("x")], outputs=[spec("y")], parameters=parameters, instance_groups=(ON_GPU1,))
    instance = registry.find("python").load(config, repository.files(), {}).instance("m_0", ON_GPU1)
    assert not isinstance(instance, OnDevice)
