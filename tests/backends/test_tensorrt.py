"""TensorRT plans on a fake TensorRT: profiles, the order of calls, and invalid plans, configurations and batches."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.backends.base import DeviceWork, OnDevice, Results, Work
from flowserve.backends.tensorrt.backend import Profile, TensorRtBackend, choose
from flowserve.backends.tensorrt.library import build_plan, tensorrt_library
from flowserve.cli.main import main
from flowserve.cli.option_values import profile
from flowserve.config.types import BatchInput, BatchOutput, InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, Invalid, ModelFailed, Unsupported
from flowserve.memory.column import Column
from flowserve.memory.device_tensor import DeviceTensor
from flowserve.memory.devices import Devices, devices, using
from flowserve.memory.stream import ON_DEVICE
from flowserve.memory.tensor import Tensor
from flowserve.values import PINNED_MEMORY, Array, DType, Request, gpu_memory
from tests.support.backends import Repository, config_of, spec, values
from tests.support.fake_device import FakeMachine
from tests.support.fake_tensorrt import FakePlan, FakeTensorRt, Shape
from tests.support.onnx_files import onnx_model, onnx_node, onnx_value

DOUBLE = FakePlan(
    inputs={"X": ("FLOAT", (-1, 4))},
    outputs={"Y": ("FLOAT", (-1, 4))},
    profiles=[{"X": ((1, 4), (2, 4), (4, 4))}, {"X": ((1, 4), (16, 4), (16, 4))}],
    compute=lambda given: {"Y": given["X"] * 2},
    shapes=lambda shapes: {"Y": shapes["X"]},
)
# The first element is the number of rows; the model has no batching.
SOME = FakePlan(
    inputs={"X": ("FLOAT", (4,))},
    outputs={"Y": ("FLOAT", (-1,)), "N": ("INT32", (1,))},
    profiles=[{"X": ((4,), (4,), (4,))}],
    compute=lambda given: {
        "Y": given["X"][given["X"] > 0],
        "N": np.array([(given["X"] > 0).sum()], np.int32),
    },
    shapes=lambda shapes: {"Y": (-1,), "N": (1,)},
)
RAGGED = FakePlan(
    inputs={"X": ("FLOAT", (-1,)), "COUNTS": ("FLOAT", (-1,))},
    outputs={"Y": ("FLOAT", (-1,)), "S": ("FLOAT", (-1, 1))},
    profiles=[{"X": ((1,), (8,), (64,)), "COUNTS": ((1,), (4,), (8,))}],
    compute=lambda given: {
        "Y": given["X"] + 1,
        "S": np.add.reduceat(given["X"], [0, *given["COUNTS"][:-1].astype(int)])[:, None],
    },
    shapes=lambda shapes: {"Y": shapes["X"], "S": (*shapes["COUNTS"], 1)},
)
PLANS = {b"double": DOUBLE, b"some": SOME, b"ragged": RAGGED}
ON_GPU = InstanceGroup("m", "KIND_GPU", 1, (0,))


@dataclass
class Opened:
    library: FakeTensorRt
    config: ModelConfig
    instance: Any

    def run(self, *rows: Array, **fields: Any) -> Results:
        """One batch; each array is a member."""
        batches = self.config.max_batch_size > 0
        return self.give([Tensor(a, 0, len(a)) if batches else Tensor(a) for a in rows], **fields)

    def give(self, members: Sequence[Tensor | None], wanted: tuple[str, ...] = (), **fields: Any) -> Results:
        names = wanted or tuple(one.name for one in self.config.outputs)
        counts = [t.shape[0] if self.config.max_batch_size and t is not None else 1 for t in members]
        column = Column.of([*members], counts)
        kind = DeviceWork if fields else Work
        work = kind([column], counts, [Request({})] * len(members), [names] * len(members), **fields)
        results: Results = self.instance.run(work, lambda: 0)
        return results


Open = Callable[..., Opened]


def configuration(**fields: Any) -> ModelConfig:
    groups = fields.pop("instance_groups", (ON_GPU,))
    given = {"inputs": [spec("X")], "outputs": [spec("Y")], "max_batch_size": 16, **fields}
    return config_of("tensorrt", instance_groups=groups, **given)


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    machine = FakeMachine(2)
    with using(Devices(machine.devices)):
        yield machine


@pytest.fixture
def plan(repository: Repository, machine: FakeMachine) -> Iterator[Open]:
    """`plan(b"double", config)` opens an instance; at the end the device memory must be free."""
    open_instances: list[tuple[Any, Any]] = []

    def start(content: bytes, config: ModelConfig, gpu: int = 0) -> Opened:
        repository.write("m", "1/model.plan", content)
        library = FakeTensorRt(machine, PLANS)
        model = TensorRtBackend(lambda: library).load(config, repository.files(), {})
        instance = model.instance("m_0", replace(config.instance_groups[0], gpus=(gpu,)))
        instance.open()
        open_instances.append((instance, model))
        return Opened(library, config, instance)

    yield start
    for instance, model in open_instances:
        instance.close()
        model.close()


def four(*values: float) -> Array:
    return np.array([[value] * 4 for value in values], np.float32)


def test_a_batch_is_one_execution_and_members_get_their_rows(plan: Open, machine: FakeMachine) -> None:
    opened = plan(b"double", configuration())
    results = opened.run(four(1), four(2, 3))
    assert values(results) == [four(2).tolist(), four(4, 6).tolist()]
    assert machine.copies == {(PINNED_MEMORY, gpu_memory(0)): 1, (gpu_memory(0), PINNED_MEMORY): 1}
    assert opened.library.calls == ["profile 0", "execute"]


def test_the_profile_follows_the_batch_and_is_set_only_when_it_changes(plan: Open) -> None:
    opened = plan(b"double", configuration())
    for count in (1, 3, 4, 5, 16, 2):
        assert values(opened.run(four(*range(count)))) == [(four(*range(count)) * 2).tolist()]
    assert opened.library.calls == [
        *("profile 0", "execute", "execute", "execute"),
        *("profile 1", "execute", "execute"),
        *("profile 0", "execute"),
    ]


def test_a_group_uses_the_profiles_that_it_names(plan: Open) -> None:
    opened = plan(b"double", configuration(instance_groups=(replace(ON_GPU, profiles=(1,)),)))
    opened.run(four(1))
    assert opened.library.calls[0] == "profile 1"
    with pytest.raises(Invalid, match="has no optimisation profile 2; it has 2"):
        plan(b"double", configuration(instance_groups=(replace(ON_GPU, profiles=(2,)),)))


def test_a_batch_without_a_fitting_profile_fails_with_the_allowed_shapes(plan: Open) -> None:
    opened = plan(b"double", configuration(max_batch_size=32))
    with pytest.raises(Invalid) as caught:
        opened.run(four(*range(17)))
    assert str(caught.value) == (
        "no optimisation profile of model 'm' takes inputs 'X' [17,4]; it has profile 0: 'X' [1,4] to [4,4]; "
        "profile 1: 'X' [1,4] to [16,4]"
    )
    assert values(opened.run(four(1))) == [four(2).tolist()], "and it goes on"


def test_outputs_read_on_the_device_stay_there(plan: Open, machine: FakeMachine) -> None:
    opened = plan(b"double", configuration())
    assert isinstance(opened.instance, OnDevice)
    (first,) = opened.run(four(1), read_at=[[ON_DEVICE]]).outputs
    assert isinstance(first[0], DeviceTensor)
    before = dict(machine.copies)
    again = opened.give(first, read_at=[[ON_DEVICE]]).outputs[0]
    assert machine.copies == before, "nothing crosses between two steps on one device"
    assert values(opened.give(again)) == [four(8).tolist()]


def test_an_output_of_unknown_size_is_allocated_during_the_execution(plan: Open) -> None:
    outputs = [spec("Y", (-1,)), spec("N", (1,), DType.INT32)]
    opened = plan(b"some", configuration(max_batch_size=0, outputs=outputs))
    results = opened.run(np.array([3, -1, 2, 0], np.float32))
    assert values(results) == [[3.0, 2.0]]
    assert values(results, 1) == [[2]]
    assert values(opened.run(np.zeros(4, np.float32))) == [[]]
    only = opened.run(np.ones(4, np.float32), wanted=("N",))
    assert (values(only), values(only, 1)) == ([None], [[4]])


def test_ragged_inputs_are_concatenated_and_flat_outputs_split(plan: Open) -> None:
    config = configuration(
        inputs=[replace(spec("X", (-1,)), ragged=True)],
        outputs=[spec("Y", (-1,)), spec("S", (1,))],
        batch_inputs=(BatchInput("BATCH_ACCUMULATED_ELEMENT_COUNT", ("COUNTS",), DType.FP32, "X"),),
        batch_outputs=(BatchOutput(("Y",), "X"),),
    )
    opened = plan(b"ragged", config)
    assert not isinstance(opened.instance, OnDevice)
    results = opened.run(np.array([[1, 2, 3]], np.float32), np.array([[10]], np.float32))
    assert values(results) == [[[2.0, 3.0, 4.0]], [[11.0]]]
    assert values(results, 1) == [[[6.0]], [[10.0]]]
    without_rows = opened.run(np.zeros((0, 2), np.float32), np.array([[5]], np.float32))
    assert values(without_rows) == [[], [[6.0]]]


def test_instances_of_one_gpu_share_a_plan_and_each_gpu_has_its_own(
    repository: Repository, machine: FakeMachine
) -> None:
    repository.write("m", "1/model.plan", b"double")
    library = FakeTensorRt(machine, PLANS)
    groups = (replace(ON_GPU, gpus=(0, 1), count=2),)
    model = TensorRtBackend(lambda: library).load(configuration(instance_groups=groups), repository.files(), {})
    instances = [model.instance("m", replace(ON_GPU, gpus=(gpu,))) for gpu in (0, 0, 1, 1)]
    for instance in instances:
        instance.open()
    assert sorted(engine.number for engine in library.engines) == [0, 1]
    for instance in instances:
        instance.close()


def refused(repository: Repository, library: FakeTensorRt, config: ModelConfig, content: bytes) -> str:
    repository.write("m", "1/model.plan", content)
    with pytest.raises(FlowserveError) as caught:
        TensorRtBackend(lambda: library).load(config, repository.files(), {})
    return str(caught.value)


def test_a_plan_for_another_gpu_or_version_is_refused(repository: Repository, machine: FakeMachine) -> None:
    library = FakeTensorRt(machine, {b"elsewhere": replace(DOUBLE, gpus=(1,))})
    told = refused(repository, library, configuration(), b"elsewhere")
    assert "failed to load 'm': m/1/model.plan cannot be opened by TensorRT 10.13 on gpu0: a plan is for" in told
    assert "cannot be opened" in refused(repository, library, configuration(), b"no plan at all")


def test_a_configuration_that_disagrees_with_the_plan_is_refused(repository: Repository, machine: FakeMachine) -> None:
    library = FakeTensorRt(machine, PLANS)
    wrong = configuration(inputs=[spec("X", (5,), DType.INT32)], outputs=[spec("Z")])
    told = refused(repository, library, wrong, b"double")
    assert "the model expects data type TYPE_FP32 (m/1/model.plan) but the model configuration specifies" in told
    assert "unexpected inference output 'Z', allowed outputs are: Y" in told
    shapes = replace(DOUBLE, host_tensors=frozenset({"X"}))
    assert "tensor 'X' is a shape tensor, which is not supported yet" in refused(
        repository, FakeTensorRt(machine, {b"s": shapes}), configuration(), b"s"
    )


def test_without_a_gpu_a_plan_is_refused_with_the_reason(repository: Repository) -> None:
    config = configuration(instance_groups=(InstanceGroup("m", "KIND_CPU"),))
    with using(Devices((), "this machine has no GPU")):
        library = FakeTensorRt(FakeMachine(), PLANS)
        told = refused(repository, library, config, b"double")
    assert told == "failed to load 'm': TensorRT plans run on GPUs only: this machine has no GPU"


def test_a_plan_on_the_cpu_is_refused_with_the_possible_causes(repository: Repository, machine: FakeMachine) -> None:
    config = configuration(instance_groups=(InstanceGroup("m", "KIND_CPU"),))
    told = refused(repository, FakeTensorRt(machine, PLANS), config, b"double")
    assert told.endswith("run on GPUs only: write kind: KIND_GPU, or leave `kind` out, and start without --gpu=off")


def test_missing_fields_are_completed_from_the_plan(repository: Repository, machine: FakeMachine) -> None:
    repository.write("m", "1/model.plan", b"double")
    library = FakeTensorRt(machine, PLANS)
    silent = config_of("tensorrt")
    found = TensorRtBackend(lambda: library).complete(silent, repository.files())
    assert found.inputs is not None
    assert [(one.name, one.dtype, one.dims) for one in found.inputs] == [("X", DType.FP32, (4,))]
    assert (found.max_batch_size, found.dynamic_batching) == (16, True)


def test_a_whole_configuration_does_not_open_the_plan(repository: Repository, machine: FakeMachine) -> None:
    repository.write("m", "1/model.plan", b"double")
    library = FakeTensorRt(machine, PLANS)
    assert TensorRtBackend(lambda: library).complete(configuration(), repository.files()).inputs is None
    assert library.engines == []


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("set_input_shape", "set_input_shape of 'X'"),
        ("set_tensor_address", "set_tensor_address of 'X'"),
        ("execute_async_v3", "execute_async_v3"),
    ],
)
def test_a_failed_call_fails_the_batch_by_name_and_frees_its_memory(
    plan: Open, machine: FakeMachine, call: str, said: str
) -> None:
    opened = plan(b"double", configuration())
    opened.run(four(1))
    lent = _lent(machine)
    context = opened.instance._context
    setattr(context, call, lambda *_: False)
    with pytest.raises(ModelFailed, match=f"model 'm' failed: TensorRT: {said} failed; the log says why"):
        opened.run(four(1))
    delattr(context, call)
    assert values(opened.run(four(3))) == [four(6).tolist()]
    assert _lent(machine) == lent


def _lent(machine: FakeMachine) -> int:
    return devices()[0].pool.statistics().lent_bytes


def test_without_device_memory_the_batch_fails_and_names_the_tensor(repository: Repository) -> None:
    machine = FakeMachine(1, memory_bytes=64)
    with using(Devices(machine.devices)):
        repository.write("m", "1/model.plan", b"double")
        library = FakeTensorRt(machine, PLANS)
        config = configuration()
        instance = TensorRtBackend(lambda: library).load(config, repository.files(), {}).instance("m", ON_GPU)
        instance.open()
        with pytest.raises(ModelFailed, match="room for input 'X' on gpu0 failed"):
            Opened(library, config, instance).run(four(1))
        instance.close()


def test_the_error_without_tensorrt_names_the_command_that_installs_it() -> None:
    if "tensorrt" in sys.modules:
        pytest.skip("TensorRT is installed")
    with pytest.raises(Unsupported, match=r"TensorRT cannot be used here \(No module named 'tensorrt'\): pip install"):
        tensorrt_library()
    code = "import flowserve.backends.tensorrt.backend, sys; print({'tensorrt', 'cupy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


# ------------------------------------------------------------------------------------------------------------- building


class Builder:
    """The part of TensorRT's module that building uses, with a network of inputs X [-1,4] and Z [2]. Records calls."""

    version = "10.13"
    logger = object()

    def __init__(
        self, errors: tuple[str, ...] = (), plan: bytes | None = b"plan", flags: tuple[str, ...] = ("FP16",)
    ) -> None:
        self.calls: list[str] = []
        self.errors = errors
        self.plan = plan
        self.trt = SimpleNamespace(
            Builder=lambda logger: self,
            OnnxParser=lambda network, logger: SimpleNamespace(
                parse=lambda onnx: not errors,
                num_errors=len(errors),
                get_error=lambda index: SimpleNamespace(desc=lambda: errors[index]),
            ),
            BuilderFlag=SimpleNamespace(**{flag: flag for flag in flags}),
            MemoryPoolType=SimpleNamespace(WORKSPACE="workspace"),
        )

    def create_network(self, flags: int) -> Any:
        inputs = [SimpleNamespace(name="X", shape=(-1, 4)), SimpleNamespace(name="Z", shape=(2,))]
        return SimpleNamespace(num_inputs=2, get_input=inputs.__getitem__)

    def create_builder_config(self) -> Any:
        return SimpleNamespace(
            set_memory_pool_limit=lambda pool, nbytes: self.calls.append(f"{pool} {nbytes}"),
            set_flag=lambda flag: self.calls.append(f"flag {flag}"),
            add_optimization_profile=lambda profile: len(self.calls),
        )

    def create_optimization_profile(self) -> Any:
        return SimpleNamespace(set_shape=lambda *shape: self.calls.append(str(shape)))

    def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
        self.calls.append("build")
        return self.plan


def test_a_plan_is_built_with_the_requested_profiles() -> None:
    library = Builder()
    ranges = [profile("X:1x4:8x4:16x4"), profile("X:1x4:1x4:1x4")]
    assert build_plan(library, b"onnx", ranges, half=True, workspace_bytes=7) == b"plan"
    assert library.calls == [
        "workspace 7",
        "flag FP16",
        "('X', (1, 4), (8, 4), (16, 4))",
        "('X', (1, 4), (1, 4), (1, 4))",
        "build",
    ]


def test_a_failed_build_reports_the_reason() -> None:
    whole = [profile("X:1x4:8x4:16x4")]
    with pytest.raises(Invalid, match="cannot read the ONNX file: no such operator; and another"):
        build_plan(Builder(errors=("no such operator", "and another")), b"", whole)
    with pytest.raises(Invalid, match=r"input 'X' has shape \[-1,4\]: say between which shapes with --profile X:MIN"):
        build_plan(Builder(), b"", [])
    with pytest.raises(Invalid, match="the ONNX file has no input 'Q', it has X, Z"):
        build_plan(Builder(), b"", [profile("X:1x4:8x4:16x4,Q:1:1:1")])
    with pytest.raises(Invalid, match="could not build a plan; the log says why"):
        build_plan(Builder(plan=None), b"", whole)
    with pytest.raises(Unsupported, match="takes types as the ONNX file has them"):
        build_plan(Builder(flags=()), b"", whole, half=True)


@pytest.mark.parametrize("text", ["X", "X:1x4:8x4", "X:1x4:8:16x4", "X:4:2:8", ":1:1:1", "X:a:b:c"])
def test_an_invalid_range_of_shapes_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        profile(text)


def test_the_command_reports_missing_tensorrt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "tensorrt" in sys.modules:
        pytest.skip("TensorRT is installed")
    assert main(["build-plan", str(tmp_path / "net.onnx"), "-o", str(tmp_path / "model.plan")]) == 1
    assert "TensorRT cannot be used here (No module named 'tensorrt'): pip install" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["build-plan", "net.onnx"])


@pytest.mark.gpu
def test_on_hardware_a_plan_is_built_and_served(repository: Repository) -> None:
    pytest.importorskip("tensorrt")
    x, y = (onnx_value(name, DType.FP32, ("N", 4)) for name in "XY")
    library = tensorrt_library()
    with library.on_device(0):
        plan = build_plan(library, onnx_model([onnx_node("Neg", ["X"], ["Y"])], [x], [y]), [profile("X:1x4:2x4:8x4")])
    repository.write("m", "1/model.plan", plan)
    config = configuration(max_batch_size=8)
    model = TensorRtBackend().load(config, repository.files(), {})
    instance = model.instance("m_0", ON_GPU)
    instance.open()
    assert values(Opened(FakeTensorRt(FakeMachine(), {}), config, instance).run(four(1), four(2, 3))) == [
        four(-1).tolist(),
        four(-2, -3).tolist(),
    ]
    instance.close()
    model.close()


# ------------------------------------------------------------------------------------------------------------- profiles


def test_the_nearest_allowed_profile_is_chosen_and_the_first_of_equals() -> None:
    def of(index: int, low: int, best: int, high: int) -> Profile:
        return Profile(index, {"X": ((low, 2), (best, 2), (high, 2))})

    profiles = [of(0, 1, 8, 16), of(1, 1, 2, 4), of(2, 1, 8, 8)]
    assert [choose(profiles, {"X": (rows, 2)}, "m").index for rows in (1, 4, 5, 8, 9)] == [1, 1, 0, 0, 0]


sizes = st.integers(1, 20)
ranges_of = (
    st.tuples(sizes, sizes, sizes)
    .map(sorted)
    .map(lambda low_best_high: {"X": tuple((size,) for size in low_best_high)})
)


@given(st.lists(ranges_of, min_size=1, max_size=4), sizes)
def test_a_batch_gets_a_profile_exactly_if_one_allows_it(ranges: list[Mapping[str, Any]], rows: int) -> None:
    found = [Profile(index, one) for index, one in enumerate(ranges)]
    shape: Mapping[str, Shape] = {"X": (rows,)}
    fitting = [one for one in found if one.ranges["X"][0] <= (rows,) <= one.ranges["X"][2]]
    if not fitting:
        with pytest.raises(Invalid):
            choose(found, shape, "m")
        return
    chosen = choose(found, shape, "m")
    assert chosen in fitting
    assert all(chosen.distance(shape) <= other.distance(shape) for other in fitting)
