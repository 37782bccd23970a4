"""Outputs of ONNX models in shared memory: equal to the others, and read by worker processes without a copy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from flowserve.backends.base import Results, Work
from flowserve.backends.onnx.instance import REUSED_BYTES_MAX, UNUSED_MAX, OnnxInstance
from flowserve.config.types import ModelConfig
from flowserve.errors import ModelFailed
from flowserve.memory.arena import Arena
from flowserve.memory.column import Column
from flowserve.memory.segment import PAGE, locate
from flowserve.memory.tensor import Tensor
from flowserve.runtime.ipc.tensors import InputPacker
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.values import Array, DType, Request
from tests.support.backends import Opened, Repository, config_of, open_instance, sample, spec, values
from tests.support.onnx_files import onnx_identity, onnx_model, onnx_node, onnx_value
from tests.support.shared_memory import check_arena

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")

Open = Callable[..., Opened]
FILE = "1/model.onnx"


def shared(opened: Opened) -> Opened:
    """The model with all outputs shared from now on, as in a graph where worker processes read them."""
    assert isinstance(opened.instance, OnnxInstance)
    for j in range(len(opened.config.outputs)):
        opened.instance.share(j)
    return opened


def arena(opened: Opened) -> Arena:
    assert isinstance(opened.instance, OnnxInstance)
    assert opened.instance._shared is not None, "no output can be placed"
    return opened.instance._shared.arena


def packed(config: ModelConfig, results: Results) -> list[int]:
    """The bytes of each output that are copied for a worker process that reads all of them."""
    rows = [1] * len(results.outputs[0])
    columns = [one if isinstance(one, Column) else Column.of([*one], rows) for one in results.outputs]
    work = Work(columns, rows, [Request({})] * len(rows), [()] * len(rows))
    return InputPacker(config.outputs, ()).pack(work).copied


def identity_config(
    inputs: Sequence[Any] = (spec("x"),), outputs: Sequence[Any] = (spec("y"),), max_batch_size: int = 8
) -> ModelConfig:
    return config_of("onnxruntime", max_batch_size=max_batch_size, inputs=inputs, outputs=outputs)


def two_outputs() -> bytes:
    """`y` is -x, `twice` is x concatenated with x."""
    nodes = [onnx_node("Neg", ["x"], ["y"]), onnx_node("Concat", ["x", "x"], ["twice"], axis=1)]
    outputs = [onnx_value("y", DType.FP32, ["N", "K"]), onnx_value("twice", DType.FP32, ["N", "M"])]
    return onnx_model(nodes, [onnx_value("x", DType.FP32, ["N", "K"])], outputs)


def array_of(results: Results, output: int = 0, member: int = 0) -> Array:
    tensor = results.outputs[output][member]
    assert tensor is not None
    return tensor.array


@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_shared_outputs_of_every_type_are_equal_and_fixed_sizes_are_not_copied_for_a_worker(
    repository: Repository, opened: Open, dtype: DType
) -> None:
    repository.write("m", FILE, onnx_identity(dtype))
    model = shared(opened(identity_config([spec("x", dtype=dtype)], [spec("y", dtype=dtype)])))
    one, two = sample(dtype), sample(dtype, 2)
    results = model.run({"x": one}, {"x": two})
    assert values(results) == [one.tolist(), two.tolist()]
    assert array_of(results).dtype == dtype.numpy
    is_placed = dtype not in (DType.BYTES, DType.BF16)
    assert (packed(model.config, results) == [0]) == is_placed
    assert (locate(array_of(results)) is not None) == is_placed
    if is_placed:
        assert not array_of(results).flags.writeable, "a reader in the server could write into what a process reads"


def test_an_output_that_is_an_input_too_is_returned_unchanged(repository: Repository, opened: Open) -> None:
    """onnxruntime returns the input, and does not write to the memory that the output was bound to."""
    value = onnx_value("x", DType.FP32, ["N", 4])
    repository.write(
        "m", FILE, onnx_model([onnx_node("Neg", ["x"], ["y"])], [value], [value, onnx_value("y", DType.FP32, ["N", 4])])
    )
    model = shared(opened(identity_config(outputs=[spec("x"), spec("y")])))
    for number in range(3):
        given = np.full((2, 4), number, np.float32)
        results = model.run({"x": given[:1]}, {"x": given[1:]})
        assert values(results, 0) == [[[number] * 4]] * 2
        assert values(results, 1) == [[[-number] * 4]] * 2
        assert packed(model.config, results)[1] == 0


def test_outputs_of_fixed_size_are_shared_beside_varying_and_text_outputs(repository: Repository, opened: Open) -> None:
    nodes = [
        onnx_node("Neg", ["x"], ["y"]),
        onnx_node("Concat", ["x", "x"], ["twice"], axis=1),
        onnx_node("Cast", ["whole"], ["text"], to=TensorProto.STRING),
        onnx_node("Cast", ["x"], ["whole"], to=TensorProto.INT64),
    ]
    outputs = [
        onnx_value("twice", DType.FP32, ["N", "M"]),
        onnx_value("y", DType.FP32, ["N", 4]),
        onnx_value("text", DType.BYTES, ["N", 4]),
    ]
    repository.write("m", FILE, onnx_model(nodes, [onnx_value("x", DType.FP32, ["N", 4])], outputs))
    specs = [spec("twice", (-1,)), spec("y"), spec("text", dtype=DType.BYTES)]
    model = shared(opened(identity_config(outputs=specs)))
    rows = [np.full((1, 4), number, np.float32) for number in (1, 2)]
    kept = []
    for _ in range(3):
        results = model.run(*({"x": row} for row in rows))
        kept.append(results)
        assert values(results, 0) == [[[1] * 8], [[2] * 8]]
        assert values(results, 1) == [[[-1] * 4], [[-2] * 4]]
        assert values(results, 2) == [[[b"1"] * 4], [[b"2"] * 4]]
        assert [locate(array_of(results, j)) is None for j in range(3)] == [True, False, True]
    assert all(values(results, 0) == [[[1] * 8], [[2] * 8]] for results in kept)
    only = model.run({"x": rows[0]}, wanted=("twice",))
    assert values(only, 0) == [[[1] * 8]]
    assert values(only, 1) == [None]


def test_a_shared_output_of_another_shape_fails_with_the_same_text(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, two_outputs())
    wrong = identity_config(outputs=[spec("y"), spec("twice", (9,))])
    said = []
    for model in (opened(wrong), shared(opened(wrong))):
        with pytest.raises(ModelFailed) as failed:
            model.run({"x": sample(DType.FP32)})
        said.append(str(failed.value))
        assert values(model.run({"x": sample(DType.FP32)}, wanted=("y",))) == [(-sample(DType.FP32)).tolist()]
    assert said[0] == said[1]
    assert "promises shape [1,9], the model answered [1,8]" in said[0]


def test_a_shared_output_with_another_row_count_fails_the_batch(repository: Repository, opened: Open) -> None:
    given, made = onnx_value("x", DType.FP32, ["N", 4]), onnx_value("y", DType.FP32, ["K", 4])
    repository.write("m", FILE, onnx_model([onnx_node("Concat", ["x", "x"], ["y"], axis=0)], [given], [made]))
    model = shared(opened(identity_config()))
    with pytest.raises(ModelFailed, match="the batch has 3 rows"):
        model.run({"x": sample(DType.FP32)}, {"x": sample(DType.FP32, 2)})


def test_tensors_without_rows_scalars_and_reshaped_outputs_are_served(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity())
    reshaped = identity_config([spec("x", (2, 2), reshape=(4,))], [spec("y", (2, 2), reshape=(4,))])
    model = shared(opened(reshaped))
    square = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    results = model.run({"x": square})
    assert values(results) == [square.tolist()]
    assert packed(reshaped, results) == [0]
    nothing = np.empty((0, 2, 2), np.float32)
    results = model.run({"x": nothing}, {"x": square}, {"x": nothing})
    assert [array_of(results, 0, m).shape for m in range(3)] == [(0, 2, 2), (2, 2, 2), (0, 2, 2)]
    assert values(model.run({"x": nothing})) == [[]]
    repository.write("m", FILE, onnx_identity(shape=()))
    model = shared(opened(identity_config([spec("x", (1,))], [spec("y", (1,))], max_batch_size=0)))
    assert values(model.run({"x": np.ones(1, np.float32)})) == [[1]]
    repository.write("m", FILE, onnx_identity(shape=(3, 4)))
    model = shared(opened(identity_config([spec("x", (3, 4))], [spec("y", (3, 4))], max_batch_size=0)))
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    results = model.run({"x": whole})
    assert values(results) == [whole.tolist()]
    assert packed(model.config, results) == [0]


@pytest.fixture
def images(repository: Repository, opened: Open) -> Opened:
    """Rows of 256 KiB to rows of the same size, and to an index among four; a row that begins with 9 or more fails."""
    nodes = [
        onnx_node("Neg", ["x"], ["y"]),
        onnx_node("Gather", ["x", "first"], ["number"], axis=1),
        onnx_node("Cast", ["number"], ["index"], to=TensorProto.INT64),
        onnx_node("Gather", ["table", "index"], ["z"]),
    ]
    constants = [
        helper.make_tensor("first", TensorProto.INT64, [1], [0]),
        helper.make_tensor("table", TensorProto.FLOAT, [9], [number * 10.0 for number in range(9)]),
    ]
    width = 65536
    given = [onnx_value("x", DType.FP32, ["N", width])]
    outputs = [onnx_value("y", DType.FP32, ["N", width]), onnx_value("z", DType.FP32, ["N", 1])]
    repository.write("m", FILE, onnx_model(nodes, given, outputs, constants))
    config = identity_config([spec("x", (width,))], [spec("y", (width,)), spec("z", (1,))])
    return shared(opened(config))


def test_members_that_run_separately_are_written_contiguously(images: Opened) -> None:
    ways = set()
    kept: list[tuple[int, Results]] = []
    for turn in range(10):
        members = [np.full((n, 65536), (turn + n) % 9, np.float32) for n in (1, 2, 1)]
        results = images.run(*({"x": member} for member in members))
        kept.append((turn, results))
        ways.add(sum(results.copied))
        assert len({id(tensor.block) for tensor in results.outputs[0] if tensor is not None}) == 1
        assert packed(images.config, results) == [0, 0]
    assert ways == {0, 4 * 65536 * 4}, "both ways were gone"
    for turn, results in kept:
        for m, n in enumerate((1, 2, 1)):
            assert (array_of(results, 0, m) == -((turn + n) % 9)).all()
            assert (array_of(results, 1, m) == (turn + n) % 9 * 10).all()


def test_if_one_of_them_fails_the_batch_fails_and_memory_is_returned(images: Opened) -> None:
    before = arena(images).lent_bytes
    for _ in range(10):
        with pytest.raises(ModelFailed, match="InvalidArgument in a batch of 3 requests"):
            images.run(*({"x": np.full((1, 65536), number, np.float32)} for number in (1, 9, 2)))
    gc.collect()
    assert arena(images).lent_bytes <= before + PAGE, "but for the page that an output keeps"
    check_arena(arena(images))


def test_an_output_is_shared_from_the_next_run_on(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, two_outputs())
    model = opened(identity_config(outputs=[spec("y"), spec("twice", (8,))]))
    instance = model.instance
    assert isinstance(instance, OnnxInstance)
    copied = [packed(model.config, model.run({"x": sample(DType.FP32)}))]
    for j in (1, 0, 1):
        instance.share(j)
        copied.append(packed(model.config, model.run({"x": sample(DType.FP32)})))
    assert copied == [[16, 32], [16, 0], [0, 0], [0, 0]]
    assert len(arena(model).segments) == 1


def test_memory_of_many_simultaneous_responses_returns_to_the_arena(repository: Repository, opened: Open) -> None:
    repository.write("m", FILE, onnx_identity())
    model = shared(opened(identity_config()))
    held = [model.run({"x": np.full((1, 4), number, np.float32)}) for number in range(100)]
    assert [values(one)[0][0][0] for one in held] == [*range(100)]
    assert arena(model).lent_bytes == 100 * PAGE
    held.clear()
    for _ in range(100):
        model.run({"x": sample(DType.FP32)})
    assert arena(model).lent_bytes <= (UNUSED_MAX + 1) * PAGE
    check_arena(arena(model))


STEPS = st.lists(
    st.tuples(st.sampled_from(["run", "run", "run", "fail", "drop", "slice"]), st.integers(0, 11)), max_size=60
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, width=st.sampled_from([4, 700, 5000]))
def test_property_a_shared_output_is_unchanged_while_it_is_read_and_then_its_memory_is_reused(
    steps: list[tuple[str, int]], width: int
) -> None:
    """Batches of many sizes; outputs that are held for any time, whole or in part."""
    with TemporaryDirectory() as folder:
        repository = Repository(Path(folder))
        repository.write("m", FILE, onnx_identity(shape=("N", width)))
        config = identity_config([spec("x", (width,))], [spec("y", (width,))], 16)
        model = shared(open_instance(repository, config))
        held: list[tuple[Any, float]] = []
        results: Results | None = None
        for number, (what, n) in enumerate(steps):
            if what == "run":
                results = model.run({"x": np.full((n, width), number, np.float32)})
                held.append((results.outputs[0][0], number))
            elif what == "fail":
                with pytest.raises(ModelFailed):
                    model.run({"x": np.full((n + 1, width + 1), number, np.float32)})
            elif what == "drop" and held:
                del held[n % len(held)]
            elif what == "slice" and held:
                one, content = held.pop(n % len(held))
                array = one.array if isinstance(one, Tensor) else one
                held.append((array[: (len(array) + 1) // 2], content))
            for one, content in held:
                array = one.array if isinstance(one, Tensor) else one
                assert (array == content).all()
        placed = arena(model)
        check_arena(placed)
        results = None
        del held[:]
        one = array = None
        kept = placed.lent_bytes
        for n in range(1, 12):
            model.run({"x": np.full((n, width), 7, np.float32)})
        assert placed.lent_bytes <= kept + 2 * REUSED_BYTES_MAX, "memory of other sizes was not returned"
        again = placed.lent_bytes
        for n in range(1, 12):
            model.run({"x": np.full((n, width), 7, np.float32)})
        assert placed.lent_bytes == again
        model.instance.close()
        model.model.close()
