"""ONNX models on a fake GPU: the real onnxruntime computes on the CPU, in the memory of a fake device that raises where
work is not ordered by streams. The options for a real GPU are tested in test_onnx_providers.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flowserve.backends import registry
from flowserve.backends.base import DeviceWork, OnDevice, Work
from flowserve.backends.onnx.backend import OnnxModel
from flowserve.backends.onnx.device import OnnxDeviceInstance
from flowserve.backends.onnx.instance import OnnxInstance
from flowserve.backends.onnx.session import asynchronous_run_options
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import Invalid, ModelFailed, Unsupported
from flowserve.memory.column import Column
from flowserve.memory.device_tensor import DeviceTensor
from flowserve.memory.devices import GPU_POOL_BYTES, Devices, devices, using
from flowserve.memory.stream import ON_DEVICE
from flowserve.memory.tensor import Tensor
from flowserve.values import HOST_MEMORY, PINNED_MEMORY, DType, Request, gpu_memory
from tests.support.backends import Repository, onnx_config, sample, spec
from tests.support.fake_device import FakeMachine, move
from tests.support.fake_onnx import OnFake, onnx_on
from tests.support.onnx_files import onnx_identity, onnx_model, onnx_node, onnx_value

FILE = "1/model.onnx"
GPU = (InstanceGroup("m", "KIND_GPU", gpus=(0,)),)
IN, OUT = (HOST_MEMORY, gpu_memory(0)), (gpu_memory(0), PINNED_MEMORY)


class Bench:
    """Instances of one model on a fake GPU."""

    def __init__(
        self, repository: Repository, config: ModelConfig, count: int = 1, gpu_bytes: int = GPU_POOL_BYTES
    ) -> None:
        self.machine = FakeMachine()
        self.devices = Devices(self.machine.devices, gpu_bytes=gpu_bytes)
        self.config = config
        loaded = registry.find("onnxruntime").load(replace(config, instance_groups=()), repository.files(), {})
        assert isinstance(loaded, OnnxModel)
        self.sessions: list[OnFake] = []
        self.instances = []
        for _ in range(count):
            instance = OnnxDeviceInstance(
                loaded.tensors, self.devices[0], lambda stream: self._session(loaded, stream), asynchronous_run_options
            )
            self.instances.append(instance)
            instance.open()

    def _session(self, loaded: OnnxModel, stream: int) -> OnFake:
        self.sessions.append(OnFake(loaded._open_session(), self.machine, stream))
        return self.sessions[-1]

    def run(
        self, columns: Sequence[Sequence[Tensor | None]], read_at: Sequence[Sequence[int]] | None = None, i: int = 0
    ) -> Sequence[Sequence[Tensor | None]]:
        first = next(tensor for tensor in columns[0] if tensor is not None)
        rows = [max(1, tensor.stop - tensor.start) for tensor in columns[0] if tensor is not None and first.stop >= 0]
        members = len(columns[0])
        work = DeviceWork(
            [Column.of([*column], rows or [1] * members) for column in columns],
            rows or [1] * members,
            [Request({})] * members,
            [tuple(one.name for one in self.config.outputs)] * members,
            read_at=read_at,
        )
        return self.instances[i].run(work, time.perf_counter_ns).outputs

    def copies(self) -> dict[object, int]:
        return {crossing: copies for crossing, (copies, _) in self.devices.ledger.entries().items()}


def batch(*arrays: Any) -> list[Tensor]:
    return [Tensor(array, 0, len(array)) for array in arrays]


def lists(column: Sequence[Tensor | None]) -> list[Any]:
    return [None if tensor is None else tensor.array.tolist() for tensor in column]


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BYTES], ids=str)
def test_every_data_type_is_served(repository: Repository, dtype: DType) -> None:
    repository.write("m", FILE, onnx_identity(dtype))
    bench = Bench(repository, onnx_config(inputs=[spec("x", dtype=dtype)], outputs=[spec("y", dtype=dtype)]))
    one, two = sample(dtype), sample(dtype, 2)
    made = bench.run([batch(one, two)])[0]
    assert lists(made) == [one.tolist(), two.tolist()]
    assert made[0] is not None
    assert made[0].array.dtype == dtype.numpy


def test_a_chain_copies_once_in_and_once_out_and_each_run_has_its_own_binding(
    repository: Repository,
) -> None:
    repository.write("m", FILE, _doubled())
    bench = Bench(repository, onnx_config(), count=2)
    arrays = [np.full((1, 4), value, np.float32) for value in range(8)]
    there = bench.run([batch(*arrays)], [[ON_DEVICE] * 8])[0]
    assert all(isinstance(tensor, DeviceTensor) for tensor in there)
    again = bench.run([batch(*arrays)], [[ON_DEVICE] * 8])[0]  # another buffer: the first is still read
    made = bench.run([there], i=1)[0]
    assert lists(made) == [[[value * 4] * 4] for value in range(8)]
    assert lists(bench.run([again], i=1)[0]) == lists(made)
    assert bench.copies() == {IN: 2, OUT: 2}
    assert bench.sessions[0].bindings == 2


def test_an_output_of_varying_shape_is_allocated_by_onnxruntime_and_adopted(repository: Repository) -> None:
    node = onnx_node("Identity", ["x"], ["y"])
    shape = ("N", "M")
    file = onnx_model([node], [onnx_value("x", DType.FP32, shape)], [onnx_value("y", DType.FP32, shape)])
    repository.write("m", FILE, file)
    bench = Bench(repository, onnx_config(inputs=[spec("x", (-1,))], outputs=[spec("y", (-1,))]))
    made = bench.run([batch(np.ones((2, 3), np.float32))], [[ON_DEVICE]])[0]
    tensor = made[0]
    assert isinstance(tensor, DeviceTensor)
    assert bench.devices[0].pool.statistics().adopted == 1
    assert move(bench.instances[0]._stream, tensor, HOST_MEMORY).array.tolist() == [[1, 1, 1], [1, 1, 1]]
    del made, tensor
    bench.instances[0].close()
    assert bench.devices[0].pool.statistics().adopted == 0


def test_reshapes_and_scalars_are_as_on_the_cpu(repository: Repository) -> None:
    node = onnx_node("Identity", ["x"], ["y"])
    repository.write(
        "m", FILE, onnx_model([node], [onnx_value("x", DType.FP32, ())], [onnx_value("y", DType.FP32, ())])
    )
    bench = Bench(repository, onnx_config(0, inputs=[spec("x", (1,))], outputs=[spec("y", (1,))]))
    assert lists(bench.run([[Tensor(np.array([3], np.float32))]])[0]) == [[3]]
    repository.write("m", FILE, onnx_identity(DType.FP32, ("N", 2, 2)))
    inputs, outputs = ([spec(name, (4,), reshape=(2, 2))] for name in "xy")
    bench = Bench(repository, onnx_config(inputs=inputs, outputs=outputs))
    assert lists(bench.run([batch(np.arange(4, dtype=np.float32)[None])])[0]) == [[[0, 1, 2, 3]]]


def test_a_member_without_rows_gets_no_rows(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity())
    bench = Bench(repository, onnx_config())
    made = bench.run([batch(np.zeros((0, 4), np.float32), np.ones((1, 4), np.float32))])[0]
    assert lists(made) == [[], [[1, 1, 1, 1]]]


def test_without_device_memory_it_runs_on_host_memory(repository: Repository) -> None:
    repository.write("m", FILE, _doubled())
    bench = Bench(repository, onnx_config(), gpu_bytes=0)
    made = bench.run([batch(np.ones((2, 4), np.float32))], [[ON_DEVICE]])[0]
    assert lists(made) == [[[2] * 4] * 2]
    assert not isinstance(made[0], DeviceTensor)


def test_a_failed_run_is_reported_and_frees_its_memory(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity(DType.FP32, ("N", 4)))
    bench = Bench(repository, onnx_config())
    with pytest.raises(ModelFailed, match=r"model 'm' failed: onnxruntime: .*invalid dimensions"):
        bench.run([batch(np.ones((2, 5), np.float32))])
    assert bench.devices[0].pool.statistics().lent_bytes == 0


def test_instances_of_a_gpu_group_are_on_its_gpu_and_strings_in_host_memory(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity(DType.BYTES))
    text = onnx_config(
        inputs=[spec("x", dtype=DType.BYTES)], outputs=[spec("y", dtype=DType.BYTES)], instance_groups=GPU
    )
    with using(Devices(FakeMachine(2).devices)):
        model = registry.find("onnxruntime").load(text, repository.files(), {})
        assert isinstance(model.instance("m_0", GPU[0]), OnnxInstance)
        repository.write("m", FILE, onnx_identity())
        model = registry.find("onnxruntime").load(onnx_config(instance_groups=GPU), repository.files(), {})
        instance = model.instance("m_0", replace(GPU[0], gpus=(1,)))
    assert isinstance(instance, OnDevice)
    assert instance.place == gpu_memory(1)
    assert not model.may_run_inline


def test_a_missing_gpu_fails_the_load(repository: Repository) -> None:
    repository.write("m", FILE, onnx_identity())
    with using(Devices((), "there is no GPU")):
        model = registry.find("onnxruntime").load(onnx_config(instance_groups=GPU), repository.files(), {})
        with pytest.raises(Unsupported, match="there is no GPU"):
            model.instance("m_0", GPU[0])


def test_a_session_that_falls_back_to_the_cpu_fails_the_load(
    repository: Repository, capfd: pytest.CaptureFixture[str]
) -> None:
    """The GPU is a fake, so onnxruntime has no CUDA. Without this check it would silently compute on the CPU."""
    if devices().count:
        pytest.skip("there is a GPU, on which onnxruntime does start")
    repository.write("m", FILE, onnx_identity())
    with using(Devices(FakeMachine().devices)):
        model = registry.find("onnxruntime").load(onnx_config(instance_groups=GPU), repository.files(), {})
        instance = model.instance("m_0", GPU[0])
        with pytest.raises(Invalid) as caught:
            instance.open()
    text = str(caught.value)
    assert text.startswith("failed to load 'm' version 1: m/1/model.onnx cannot run on the GPU: onnxruntime ")
    assert "started without CUDAExecutionProvider" in text
    assert "--gpu=off" in text or "install onnxruntime-gpu" in text
    assert "Failed to load" not in capfd.readouterr().out


def test_a_captured_run_uses_fixed_addresses_and_its_outputs_are_not_overwritten(repository: Repository) -> None:
    repository.write("m", FILE, _doubled())
    graphs = {"optimization": {"cuda": {"graphs": True, "graph_spec": [{"batch_size": 2}]}}}
    with onnx_on(FakeMachine()) as found:
        config = onnx_config(instance_groups=GPU, json=graphs)
        model = registry.find("onnxruntime").load(config, repository.files(), {})
        instance = model.instance("m_0", GPU[0])
        assert isinstance(instance, OnnxDeviceInstance)
        assert not instance.is_of_any_thread  # each thread would capture graphs of its own
        instance.open()

        def run(*values: float) -> Sequence[Tensor | None]:
            column: list[Tensor | None] = [*batch(*(np.full((1, 4), value, np.float32) for value in values))]
            members = len(values)
            read_at = [[ON_DEVICE] * members]
            work = DeviceWork(
                [Column.of([*column], [1] * members)],
                [1] * members,
                [Request({})] * members,
                [("y",)] * members,
                read_at=read_at,
            )
            return instance.run(work, time.perf_counter_ns).outputs[0]

        first, second, third = run(1, 2), run(3, 4), run(5, 6, 7)  # the size of the last is not captured
        outputs = (*first, *second, *third)
        home = [move(instance._stream, tensor, HOST_MEMORY) for tensor in outputs if tensor is not None]
        assert [tensor.array[0, 0] for tensor in home] == [2, 4, 6, 8, 10, 12, 14]
        session: OnFake = instance._session
        assert session.runs == ["2", "2", "-1"]
        assert session.addresses[0] == session.addresses[1] != session.addresses[2]
        del first, second, third, outputs, home
        instance.close()
        assert sum(pool.lent_bytes for pool in found.statistics().values()) == 0


def test_without_memory_for_a_graph_the_batch_runs_without_it(repository: Repository) -> None:
    repository.write("m", FILE, _doubled())
    graphs = {"optimization": {"cuda": {"graphs": True, "graph_spec": [{"batch_size": 1}]}}}
    with onnx_on(FakeMachine()) as found:
        found.limit(None, {0: 512})
        config = onnx_config(instance_groups=GPU, json=graphs)
        instance = registry.find("onnxruntime").load(config, repository.files(), {}).instance("m_0", GPU[0])
        instance.open()
        work = Work([Column.of([*batch(np.ones((1, 4), np.float32))], [1])], [1], [Request({})], [("y",)])
        assert lists(instance.run(work, time.perf_counter_ns).outputs[0]) == [[[2] * 4]]
        assert instance._session.runs == ["-1"]  # type: ignore[attr-defined]
        instance.close()


def _doubled() -> bytes:
    node = onnx_node("Add", ["x", "x"], ["y"])
    shape = ("N", 4)
    return onnx_model([node], [onnx_value("x", DType.FP32, shape)], [onnx_value("y", DType.FP32, shape)])


@pytest.mark.gpu
def test_on_hardware_a_chain_of_two_sessions_gives_what_the_cpu_gives(repository: Repository) -> None:
    repository.write("m", FILE, _doubled())
    model = registry.find("onnxruntime").load(onnx_config(instance_groups=GPU), repository.files(), {})
    first, second = (model.instance(f"m_{i}", GPU[0]) for i in range(2))
    arrays = [np.full((1, 4), value, np.float32) for value in range(8)]
    column: Sequence[Tensor | None] = batch(*arrays)
    for instance, read_at in ((first, [[ON_DEVICE] * 8]), (second, None)):
        instance.open()
        work = DeviceWork([Column.of([*column], [1] * 8)], [1] * 8, [Request({})] * 8, [("y",)] * 8, read_at=read_at)
        column = instance.run(work, time.perf_counter_ns).outputs[0]
    assert lists(column) == [[[value * 4] * 4] for value in range(8)]
    first.close()
    second.close()


@pytest.mark.gpu
def test_on_hardware_captured_graphs_give_what_runs_without_them_give(repository: Repository) -> None:
    repository.write("m", FILE, _doubled())
    graphs = {"optimization": {"cuda": {"graphs": True, "graph_spec": [{"batch_size": 2}]}}}
    model = registry.find("onnxruntime").load(onnx_config(instance_groups=GPU, json=graphs), repository.files(), {})
    instance = model.instance("m_0", GPU[0])
    instance.open()
    for first in range(4):
        for rows in (2, 3):  # the second is not captured
            arrays = [np.full((1, 4), first + i, np.float32) for i in range(rows)]
            column = Column.of([*batch(*arrays)], [1] * rows)
            work = DeviceWork([column], [1] * rows, [Request({})] * rows, [("y",)] * rows)
            found = lists(instance.run(work, time.perf_counter_ns).outputs[0])
            assert found == [[[2 * (first + i)] * 4] for i in range(rows)]
    instance.close()
