"""The template for backends of libraries: the same laws for each of them, on a library without a package."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowserve import Engine
from flowserve.backends import registry
from flowserve.backends.base import Remote, Work
from flowserve.backends.cores import cores_allowed
from flowserve.backends.library.backend import LibraryModel
from flowserve.backends.worker import sharing
from flowserve.config.types import BatchInput, BatchOutput, Completion, InstanceGroup, ModelConfig
from flowserve.errors import FlowserveError, Invalid, ModelFailed, Problems, Unsupported
from flowserve.memory import dlpack
from flowserve.memory.column import Column
from flowserve.memory.device_tensor import DeviceTensor
from flowserve.memory.devices import Devices, using
from flowserve.memory.stream import DeviceStream
from flowserve.memory.tensor import Tensor
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.values import HOST_MEMORY, Array, DType, Request, gpu_memory
from tests.support import fake_library
from tests.support.backends import Opened, Repository, config_of, spec, tensors, values
from tests.support.fake_device import FakeMachine, move
from tests.support.fake_library import fake_file

PLACES = ["thread", "process"] if SUPPORTED else ["thread"]
X = {"x": ("FP32", (-1, 4))}
Y = {"y": ("FP32", (-1, 4))}
DOUBLE = fake_file(X, Y, {"y": "x * 2"})
Open = Callable[..., Opened]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fake backends, as another package would add them."""
    module = "tests.support.fake_library"
    entries = [
        EntryPoint(name, f"{module}:{made}", registry.GROUP)
        for name, made in (("fake", "make_fake"), ("fake_process", "make_process"), ("missing", "make_missing"))
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    caches = (registry.find, registry.default_files, registry.default_execution)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture(params=["here", "as in a process"])
def served(request: pytest.FixtureRequest, repository: Repository) -> Iterator[Callable[..., Opened]]:
    """`served(file, **fields of the configuration)`: an open instance, made here or as a worker process makes it."""
    started: list[Opened] = []

    def start(file: str, **fields: Any) -> Opened:
        repository.write("m", "1/model.fake", file)
        config = config_of("fake", **{"inputs": [spec("x")], "outputs": [spec("y")], "max_batch_size": 8, **fields})
        model = registry.find("fake").load(config, repository.files(), {})
        assert isinstance(model, LibraryModel)
        group = InstanceGroup("m", "KIND_CPU")
        if request.param == "here":
            instance = model.instance("m_0", group)
        else:
            remote: Remote = pickle.loads(pickle.dumps(model.remote("m_0", group)))
            instance = remote.call()
        instance.open()
        started.append(Opened(config, model, instance))
        return started[-1]

    yield start
    for each in started:
        each.instance.close()
        each.model.close()


def rows(count: int, start: int = 0) -> Array:
    return np.arange(4 * start, 4 * (start + count), dtype=np.float32).reshape(count, 4)


# ---------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1), (2, 1, 4)])
def test_a_batch_equals_its_requests_one_by_one(served: Open, sizes: Sequence[int]) -> None:
    model = served(DOUBLE)
    requests = [{"x": rows(size, 10 * number)} for number, size in enumerate(sizes)]
    together = values(model.run(*requests))
    assert together == [values(model.run(request))[0] for request in requests]
    assert together == [(2 * request["x"]).tolist() for request in requests]


def test_a_contiguous_batch_is_neither_copied_before_nor_after(served: Open) -> None:
    results = served(DOUBLE).whole(rows(4))
    assert [*results.copied] == [0]
    assert len({id(tensor.block) for tensor in tensors(results.outputs[0])}) == 1


@pytest.mark.parametrize("sizes", [(0,), (0, 0), (0, 2), (2, 0, 1)])
def test_requests_without_rows_get_outputs_without_rows(served: Open, sizes: Sequence[int]) -> None:
    model = served(
        fake_file(X, {"y": ("FP32", (-1, -1))}, {"y": "x * 2 if len(x) else 1 / 0"}), outputs=[spec("y", (-1,))]
    )
    counts = [max(size, 1) for size in sizes]  # the runtime counts a request without rows as one
    column = Column.of([Tensor(rows(size), 0, size) for size in sizes], counts)
    requests = [Request({})] * len(sizes)
    results = model.instance.run(Work([column], counts, requests, [("y",)] * len(sizes)), time.perf_counter_ns)
    assert values(results) == [(2 * rows(size)).tolist() for size in sizes]


def test_only_wanted_outputs_are_computed(served: Open) -> None:
    file = fake_file(X, {**Y, "z": ("FP32", (-1, 4))}, {"y": "x * 2", "z": "1 / 0"})
    results = served(file, outputs=[spec("y"), spec("z")]).run({"x": rows(1)}, wanted=("y",))
    assert values(results) == [(2 * rows(1)).tolist()]
    assert results.outputs[1] == [None]


def test_an_optional_input_may_be_missing(served: Open) -> None:
    file = fake_file(
        {"x": ("FP32", (4,)), "bias": ("FP32", (4,), True)},
        {"y": ("FP32", (4,))},
        {"y": "x if bias is None else x + bias"},
    )
    inputs = [spec("x"), spec("bias", optional=True)]
    model = served(file, inputs=inputs, outputs=[spec("y")], max_batch_size=0)
    (x,) = rows(1)
    assert values(model.run({"x": x})) == [x.tolist()]
    assert values(model.run({"x": x, "bias": x})) == [(2 * x).tolist()]


def test_a_reshaped_tensor_has_the_shape_of_the_file(served: Open) -> None:
    file = fake_file({"x": ("FP32", (-1,))}, {"y": ("FP32", (-1,))}, {"y": "x * 2 if x.ndim == 1 else 1 / 0"})
    one = {"inputs": [spec("x", (1,), reshape=())], "outputs": [spec("y", (1,), reshape=())]}
    model = served(file, **one)
    assert values(model.run({"x": np.ones((2, 1), np.float32)})) == [[[2.0], [2.0]]]


def test_bytes_go_in_and_come_out_as_they_are(served: Open) -> None:
    file = fake_file({"t": ("BYTES", (-1, 1))}, {"u": ("BYTES", (-1, 1))}, {"u": "t + b'!'"})
    model = served(file, inputs=[spec("t", (1,), DType.BYTES)], outputs=[spec("u", (1,), DType.BYTES)])
    given = [np.array([[text]], object) for text in (b"\xff\0", b"")]
    assert values(model.run(*[{"t": one} for one in given])) == [[[b"\xff\0!"]], [[b"!"]]]


def test_ragged_inputs_are_one_list_and_flat_outputs_are_split(served: Open) -> None:
    file = fake_file(
        {"x": ("FP32", (-1,)), "counts": ("FP32", (-1,))},
        {"y": ("FP32", (-1,)), "seen": ("FP32", (-1,))},
        {"y": "x * 2", "seen": "counts"},
    )
    model = served(
        file,
        inputs=[spec("x", (-1,), ragged=True)],
        outputs=[spec("y", (-1,)), spec("seen", (1,), reshape=())],
        batch_inputs=(BatchInput("BATCH_ELEMENT_COUNT", ("counts",), DType.FP32, "x"),),
        batch_outputs=(BatchOutput(("y",), "x"),),
    )
    results = model.run(*[{"x": np.arange(length, dtype=np.float32)[None]} for length in (2, 0, 3)])
    assert values(results) == [[[0.0, 2.0]], [[]], [[0.0, 2.0, 4.0]]]
    assert values(results, 1) == [[[2.0]], [[0.0]], [[3.0]]]


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("x.astype(np.float64)", "the configuration promises FP32, the model answered float64"),
        ("x[:1]", "the batch has 2 rows, the model answered shape [1,4]"),
        ("x[:, :2]", "the configuration promises shape [2,4], the model answered [2,2]"),
        ("1 / 0", "model 'm' failed: Fake: ZeroDivisionError in a batch of 2 requests"),
    ],
)
def test_a_wrong_output_and_an_exception_fail_the_batch_with_their_reason(
    served: Open, expression: str, text: str
) -> None:
    model = served(fake_file(X, Y, {"y": expression}))
    with pytest.raises(ModelFailed) as caught:
        model.run({"x": rows(1)}, {"x": rows(1)})
    assert text in str(caught.value)
    if expression == "1 / 0":
        with pytest.raises(ModelFailed, match=r"^model 'm' failed: Fake: ZeroDivisionError: division by zero$"):
            model.run({"x": rows(1)})


class Exported:
    """A tensor of another library: it exports its memory by DLPack, and nothing else. `owner` has the memory."""

    def __init__(self, array: Any, owner: object = None, gpu: int = -1) -> None:
        address = array.ctypes.data if gpu < 0 else array.address
        self._tensor = dlpack.ForeignTensor(address, array.dtype, array.shape, gpu, owner or array)

    def __dlpack__(self, **_: Any) -> Any:
        return dlpack.export_capsule(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0) if self._tensor.device < 0 else (dlpack.CUDA, self._tensor.device)


def test_tensors_go_in_and_come_out_by_dlpack_without_a_copy(served: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_library, "EXPORTS", Exported)
    file = fake_file(X, {**Y, "same": ("FP32", (-1, 4))}, {"y": "x * 2", "same": "x"})
    model = served(file, outputs=[spec("y"), spec("same")])
    x = rows(4)
    x.flags.writeable = False  # as in the server
    results = model.whole(x)
    assert values(results) == (2 * x[:, None]).tolist()
    assert all(np.shares_memory(tensor.block, x) for tensor in tensors(results.outputs[1]))
    assert [*results.copied] == [0]


class Strided:
    """The same of an array in another order."""

    def __init__(self, array: Array) -> None:
        self._array = np.asfortranarray(array)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_an_output_in_another_order_comes_out_in_rows(served: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_library, "EXPORTS", Strided)
    results = served(DOUBLE).whole(rows(4))
    assert values(results) == (2 * rows(4)[:, None]).tolist()
    assert all(tensor.block.flags.c_contiguous for tensor in tensors(results.outputs[0]))


def test_bfloat16_comes_out_by_dlpack(served: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_library, "EXPORTS", Exported)
    file = fake_file(X, {"y": ("BF16", (-1, 4))}, {"y": "x.astype(bfloat16)"})
    model = served(file, outputs=[spec("y", dtype=DType.BF16)])
    (answer,) = tensors(model.run({"x": rows(1)}).outputs[0])
    assert answer.array.astype(np.float32).tolist() == rows(1).tolist()


def test_an_output_on_a_gpu_is_copied_to_the_host(served: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device is strict: only its own copies read its memory."""
    machine = FakeMachine(2)
    with using(Devices(machine.devices)) as found:
        stream = DeviceStream(found[1])

        def export(array: Array) -> Exported:
            there = move(stream, Tensor(array, 0, len(array)), gpu_memory(1))
            assert isinstance(there, DeviceTensor)
            return Exported(there.elements, there, 1)

        monkeypatch.setattr(fake_library, "EXPORTS", export)
        assert values(served(DOUBLE).run({"x": rows(2)})) == [(2 * rows(2)).tolist()]
        assert machine.copies[gpu_memory(1), HOST_MEMORY]
        stream.close()


@pytest.mark.parametrize(
    ("export", "text"),
    [
        (lambda array: array.tolist(), "it returned list where an array was expected"),
        (
            lambda array: Exported(array.astype(np.float64)),
            "the configuration promises FP32, the model answered float64",
        ),
    ],
)
def test_an_output_that_cannot_be_taken_over_fails_the_batch(
    served: Open, monkeypatch: pytest.MonkeyPatch, export: Any, text: str
) -> None:
    monkeypatch.setattr(fake_library, "EXPORTS", export)
    with pytest.raises(ModelFailed, match=text):
        served(DOUBLE).run({"x": rows(2)})


# ---------------------------------------------------------------------------------------------- load


def test_every_disagreement_is_reported_at_once_with_its_place(repository: Repository) -> None:
    repository.write("m", "1/model.fake", fake_file({**X, "t": ("INT32", (-1, 2))}, {**Y, "z": ("FP32", (-1, 3))}, {}))
    config = config_of(
        "fake",
        inputs=[spec("x", (5,)), spec("typo")],
        outputs=[spec("y", dtype=DType.FP64), spec("zz", (3,))],
        max_batch_size=8,
    )
    backend = registry.find("fake")
    for ask in (lambda: backend.load(config, repository.files(), {}), lambda: verify(config, repository)):
        with pytest.raises(Problems) as caught:
            ask()
        told = [problem.message for problem in caught.value.problems]
        for part in (
            "unexpected inference input 'typo'",
            "unexpected inference output 'zz'",
            "the configuration lacks t",
            "specifies shape [-1,5]",
            "expects data type TYPE_FP32",
        ):
            assert any(part in one for one in told), part
        assert all(problem.place and problem.rule == "M90" for problem in caught.value.problems)


def verify(config: ModelConfig, repository: Repository) -> None:
    backend: Any = registry.find("fake")
    backend.verify(config, repository.files())


def test_a_file_without_a_batch_dimension_is_refused_with_max_batch_size(repository: Repository) -> None:
    repository.write("m", "1/model.fake", fake_file({"x": ("FP32", (1, 4))}, {"y": ("FP32", (1, 4))}, {}))
    with pytest.raises(Problems, match="the first dimension must be -1; but shape expected by the model is"):
        verify(config_of("fake", inputs=[spec("x")], outputs=[spec("y")], max_batch_size=8), repository)


def test_an_empty_configuration_is_completed(repository: Repository) -> None:
    repository.write("m", "1/model.fake", DOUBLE)
    found = registry.find("fake").complete(config_of("fake"), repository.files())
    assert found == Completion((spec("x"),), (spec("y"),), 4, dynamic_batching=True)
    whole = config_of("fake", inputs=[spec("x")], outputs=[spec("y")])
    assert registry.find("fake").complete(whole, repository.files()) == Completion()


def test_a_corrupt_file_is_named_with_what_it_begins_with(repository: Repository) -> None:
    repository.write("m", "1/model.fake", "version https://git-lfs.github.com/spec/v1")
    with pytest.raises(
        Invalid, match=r"failed to load 'm' version 1: Fake cannot run it: JSONDecodeError.*git lfs pull"
    ):
        registry.find("fake").load(config_of("fake"), repository.files(), {})
    repository.write("m", "1/model.fake", "nonsense")
    with pytest.raises(Problems, match="8 bytes, which begin with b'nonsense'") as caught:
        verify(config_of("fake"), repository)
    assert str(caught.value.problems[0].place) == "m/1/model.fake"


def test_another_file_of_the_library_is_found_and_the_configuration_may_name_one(repository: Repository) -> None:
    repository.write("m", "1/model.other", DOUBLE)
    backend = registry.find("fake")
    assert backend.complete(config_of("fake"), repository.files()).inputs == (spec("x"),)
    with pytest.raises(Problems, match=r"file m/1/mine does not exist; folder m/1 holds model.other"):
        backend.complete(config_of("fake", default_model_filename="mine"), repository.files())


def test_a_missing_library_is_one_sentence_with_the_command(repository: Repository) -> None:
    repository.write("m", "1/model.fake", DOUBLE)
    backend: Any = registry.find("missing")
    for ask in (backend.complete, backend.verify, lambda config, files: backend.load(config, files, {})):
        with pytest.raises(Unsupported) as caught:
            ask(config_of("missing"), repository.files())
        assert str(caught.value).startswith("model.fake needs no_such_module_1 or no_such_module_2, which are not")
        assert str(caught.value).endswith(" -m pip install 'flowserve[fake]'")
        assert str(caught.value.place) == "m/1/model.fake"


def test_a_wrong_parameter_is_refused_and_one_without_effect_is_logged(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    repository.write("m", "1/model.fake", DOUBLE)
    fields: dict[str, Any] = {"inputs": [spec("x")], "outputs": [spec("y")], "max_batch_size": 8}
    with pytest.raises(Problems, match="'SEATS' of model 'm' must be a whole number from 1 on, found '0'"):
        verify(config_of("fake", parameters={"SEATS": "0"}, **fields), repository)
    with pytest.raises(Problems, match="'pure' of model 'm' must be true or false, found 'maybe'"):
        verify(config_of("fake", parameters={"pure": "maybe"}, **fields), repository)
    model = registry.find("fake").load(config_of("fake", parameters={"HINT": "1"}, **fields), repository.files(), {})
    assert caplog.messages == ["model 'm': parameter 'HINT' is not used: it is one"]
    assert model.is_pure
    impure = config_of("fake", parameters={"pure": "false"}, **fields)
    assert not registry.find("fake").load(impure, repository.files(), {}).is_pure


def test_the_operators_setting_counts_where_the_model_has_none(repository: Repository) -> None:
    repository.write("m", "1/model.fake", DOUBLE)
    fields: dict[str, Any] = {"inputs": [spec("x")], "outputs": [spec("y")], "max_batch_size": 8}
    backend = registry.find("fake")
    with pytest.raises(Problems, match="'SEATS' of model 'm' must be a whole number from 1 on, found '0'"):
        backend.load(config_of("fake", **fields), repository.files(), {"SEATS": "0"})
    backend.load(config_of("fake", parameters={"SEATS": "2"}, **fields), repository.files(), {"SEATS": "0"})


def test_the_instances_of_a_backend_share_the_cores(repository: Repository) -> None:
    repository.write("m", "1/model.fake", DOUBLE)
    config = config_of("fake", inputs=[spec("x")], outputs=[spec("y")], max_batch_size=8)
    for runs, expected in ((1, cores_allowed()), (1000, 1)):
        model: Any = registry.find("fake").load(config, repository.files(), {"runs_at_once": str(runs)})
        assert model._open()[1].threads == expected


# ---------------------------------------------------------------------------------------------- in an engine


def folder_of(path: Path, file: str, *fields: str, backend: str = "fake") -> Path:
    (path / "m" / "1").mkdir(parents=True)
    (path / "m" / "1" / "model.fake").write_text(file)
    (path / "m" / "config.pbtxt").write_text(f'backend: "{backend}"\n' + "\n".join(fields))
    return path


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


WAITING = "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 500000 }"
# Rows below zero are the bad ones.
FUSSY = fake_file(X, Y, {"y": "x * 2 if x.min() >= 0 else 1 / 0"})


def asked_together(engine: Engine, requests: Sequence[Array]) -> list[Any]:
    """The answers to requests of four threads: arrays, or errors."""
    from concurrent.futures import ThreadPoolExecutor

    def ask(x: Array) -> Any:
        try:
            return engine.infer("m", {"x": x})["y"].tolist()
        except FlowserveError as error:
            return error

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


@pytest.mark.parametrize("place", PLACES)
def test_one_bad_request_of_a_pure_model_does_not_fail_its_batch(tmp_path: Path, place: str) -> None:
    requests = [rows(1, number) for number in range(3)] + [-rows(1, 1)]
    with Engine(str(folder_of(tmp_path, FUSSY, WAITING, parameter("execution", place)))) as engine:
        answers = asked_together(engine, requests)
        assert answers[:3] == [(2 * one).tolist() for one in requests[:3]]
        assert "model 'm' failed: Fake: ZeroDivisionError" in str(answers[3])


def test_a_batch_of_a_model_that_is_not_pure_fails_as_a_whole(tmp_path: Path) -> None:
    requests = [rows(1, number) for number in range(3)] + [-rows(1, 1)]
    with Engine(str(folder_of(tmp_path, FUSSY, WAITING, parameter("pure", "false")))) as engine:
        assert all(isinstance(one, ModelFailed) for one in asked_together(engine, requests))


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
def test_a_library_of_processes_is_neither_completed_nor_run_in_the_server(tmp_path: Path) -> None:
    """The file has the process's number in its second output; nothing is configured."""
    file = fake_file(X, {"y": ("INT64", (-1, 1))}, {"y": "np.full((len(x), 1), os.getpid())"})
    with Engine(str(folder_of(tmp_path, file, backend="fake_process"))) as engine:
        answer = engine.infer("m", {"x": rows(2)})["y"]
    assert answer.shape == (2, 1)
    assert os.getpid() not in answer


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
def test_after_a_crash_the_batch_fails_and_the_next_process_serves(tmp_path: Path) -> None:
    file = fake_file(X, Y, {"y": "x * 2 if x.min() >= 0 else os._exit(3)"})
    with Engine(str(folder_of(tmp_path, file, backend="fake_process"))) as engine:
        with pytest.raises(FlowserveError, match="exit status 3"):
            engine.infer("m", {"x": -1 - rows(1)})
        end = time.monotonic() + 20
        while True:
            try:
                assert engine.infer("m", {"x": rows(1)})["y"].tolist() == (2 * rows(1)).tolist()
                return
            except FlowserveError:
                assert time.monotonic() < end, "no process came back"
                time.sleep(0.05)


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
def test_problems_that_a_process_finds_keep_their_places(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, DOUBLE, parameter("SEATS", "many"), backend="fake_process")
    with pytest.raises(FlowserveError, match=r"m/config\.pbtxt:2:1.*'SEATS' of model 'm' must be a whole number"):
        with Engine(str(folder)):
            pass


def test_a_disagreement_is_reported_where_the_instance_opens_in_a_process(tmp_path: Path) -> None:
    tensors_ = (
        'input { name: "x" data_type: TYPE_FP32 dims: [ 5 ] } output { name: "q" data_type: TYPE_FP32 dims: [ 4 ] }'
    )
    folder = folder_of(tmp_path, DOUBLE, f"max_batch_size: 8 {tensors_}", backend="fake_process")
    with pytest.raises(FlowserveError) as caught:
        with Engine(str(folder)):
            pass
    assert "specifies shape [-1,5]" in str(caught.value)
    assert "unexpected inference output 'q'" in str(caught.value)


# ---------------------------------------------------------------------------------------------- shared processes

WHERE = fake_file(
    X,
    {"y": ("FP32", (-1, 4)), "pid": ("INT64", (-1, 1)), "busy": ("FP64", (-1, 2))},
    {
        "y": "x * 2",
        "pid": "np.full((len(x), 1), os.getpid())",
        "busy": "(lambda since, _, until: np.full((len(x), 2), [since, until]))"
        "(time.monotonic(), time.sleep(0.05 if x.min() >= 0 else os._exit(3)), time.monotonic())",
    },
)


def shared_folder(path: Path, instances: int, shares: int) -> Path:
    group = f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]"
    return folder_of(path, WHERE, group, parameter("SHARES", str(shares)), backend="fake_process")


def pids(engine: Engine, count: int) -> set[int]:
    """The processes that answered so many requests at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(count) as pool:
        answers = [*pool.map(lambda number: engine.infer("m", {"x": rows(1, number)}), range(count))]
    for number, answer in enumerate(answers):
        assert answer["y"].tolist() == (2 * rows(1, number)).tolist()
    return {int(answer["pid"][0, 0]) for answer in answers}


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
@pytest.mark.parametrize(("instances", "shares", "processes"), [(3, 3, 1), (4, 2, 2), (2, 9, 1), (2, 1, 2)])
def test_instances_that_share_a_file_are_in_one_process(
    tmp_path: Path, instances: int, shares: int, processes: int
) -> None:
    with Engine(str(shared_folder(tmp_path, instances, shares))) as engine:
        assert len(pids(engine, 4 * instances)) == processes


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
def test_instances_of_one_process_run_at_the_same_time(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with Engine(str(shared_folder(tmp_path, 3, 3))) as engine, ThreadPoolExecutor(3) as pool:
        answers = [*pool.map(lambda number: engine.infer("m", {"x": rows(1, number)})["busy"][0], range(3))]
        assert max(since for since, _ in answers) < min(until for _, until in answers)


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
def test_after_a_crash_of_a_shared_process_all_its_instances_come_back_in_one(tmp_path: Path) -> None:
    with Engine(str(shared_folder(tmp_path, 3, 3))) as engine:
        (before,) = pids(engine, 6)
        with pytest.raises(FlowserveError, match="exit status"):
            engine.infer("m", {"x": -1 - rows(1)})
        end = time.monotonic() + 20
        while True:
            try:
                after = pids(engine, 6)
                break
            except FlowserveError:
                assert time.monotonic() < end, "no process came back"
                time.sleep(0.05)
        assert len(after) == 1
        assert before not in after


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
def test_a_hanging_run_in_a_shared_process_ends_it(tmp_path: Path) -> None:
    file = fake_file(
        X,
        {**Y, "pid": ("INT64", (-1, 1))},
        {"y": "x * 2 if x.min() >= 0 else time.sleep(600)", "pid": "np.full((len(x), 1), os.getpid())"},
    )
    group = "instance_group [ { count: 2 kind: KIND_CPU } ]"
    limits = parameter("SHARES", "2"), parameter("execution_timeout", "0.5")
    with Engine(str(folder_of(tmp_path, file, group, *limits, backend="fake_process"))) as engine:
        (before,) = pids(engine, 4)
        for _ in range(2):  # in the host and in the other one, in some order
            with pytest.raises(FlowserveError):
                engine.infer("m", {"x": -1 - rows(1)})
            end = time.monotonic() + 20
            after = {before}
            while before in after:
                assert time.monotonic() < end, "no other process came"
                time.sleep(0.05)
                with suppress(FlowserveError):
                    after = pids(engine, 4)
            (before,) = after


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
def test_the_error_of_a_shared_file_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    tensors_ = (
        'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }'
    )
    group = "max_batch_size: 8 instance_group [ { count: 3 kind: KIND_CPU } ]"
    file = fake_file(X, Y, {"y": "1 +"})
    folder = folder_of(tmp_path, file, tensors_, group, parameter("SHARES", "3"), backend="fake_process")
    with pytest.raises(FlowserveError, match="Fake cannot run it: SyntaxError"):
        with Engine(str(folder)):
            pass


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
def test_only_processes_that_know_the_secret_are_taken() -> None:
    secret = "a secret"
    listener = sharing.claim_host(secret)
    assert listener is not None
    assert sharing.claim_host(secret) is None
    served: list[bytes] = []

    def serve(socket_fd: int, arguments: bytes) -> None:
        os.close(socket_fd)
        served.append(arguments)

    def hand_over(arguments: bytes) -> bool:
        here, there = socket.socketpair()
        with here, there:
            return sharing.hand_over(os.dup(there.fileno()), arguments, secret)

    with listener:
        sharing.Host(listener, secret, serve).start()
        assert hand_over(b"job")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(sharing._address(secret))
            socket.send_fds(stranger, [struct.pack("<QQ", 3, 3) + b"keyjob"], [listener.fileno()])
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    assert served == [b"job"]
