"""Warm-up samples, and how an instance is warmed up. A real engine over functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.config.types import (
    ModelConfig,
    SequenceBatching,
    SequenceControl,
    SequenceState,
    SourceMap,
    WarmupInput,
    WarmupSample,
)
from flowserve.errors import Invalid, ModelFailed
from flowserve.memory.column import scatter
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.warmup import read_samples, warm_up
from flowserve.runtime.workers.local import LocalWorker
from flowserve.runtime.workers.state import SequenceAdapter
from flowserve.values import Array, DType, TensorSpec
from tests.support.engine import FunctionInstance, add_function

SPEC = TensorSpec("IN", DType.FP32, (4,))


def config(*samples: WarmupSample, max_batch_size: int = 4) -> ModelConfig:
    outputs = (TensorSpec("OUT", DType.FP32, (4,)),)
    return ModelConfig("m", "functions", "", max_batch_size, (SPEC,), outputs, SourceMap("m"), warmup=samples)


def sample(given: WarmupInput, name: str = "s", batch_size: int = 1, count: int = 1) -> WarmupSample:
    return WarmupSample(name, batch_size, count, {"IN": given})


def held(given: WarmupInput, folder: Path = Path(), max_batch_size: int = 4) -> Array:
    ((_, tensors),) = read_samples(config(sample(given), max_batch_size=max_batch_size), folder)
    return tensors["IN"]


# -------------------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("dtype", DType)
def test_zeros_are_zeros_of_every_type_with_a_batch_dimension_of_one(dtype: DType) -> None:
    array = held(WarmupInput(dtype, (2, 3)))
    assert (array.dtype, array.shape) == (dtype.numpy, (1, 2, 3))
    assert all(element == (b"" if dtype is DType.BYTES else 0) for element in array.ravel().tolist())


@pytest.mark.parametrize("dtype", DType)
def test_random_values_are_within_bounds_and_the_same_at_every_start(dtype: DType) -> None:
    given = WarmupInput(dtype, (1000,), is_random=True)
    array = held(given)
    assert (array.dtype, array.shape) == (dtype.numpy, (1, 1000))
    assert (array == held(given)).all()
    if dtype is DType.BYTES:
        assert set(array.ravel().tolist()) == {b""}
    else:
        assert 0 <= array.min() < array.max() <= (127 if dtype.numpy.kind in "iu" else 1)


def test_a_model_without_batching_gets_no_batch_dimension() -> None:
    assert held(WarmupInput(DType.FP32, (2, 3)), max_batch_size=0).shape == (2, 3)


def test_a_file_holds_the_tensor_row_by_row(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "numbers").write_bytes(np.arange(9, dtype="<f4").tobytes())
    (tmp_path / "warmup" / "words").write_bytes(b"\x02\0\0\0hi\0\0\0\0")
    array = held(WarmupInput(DType.FP32, (2, 4), file="numbers"), tmp_path)
    assert array.tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert held(WarmupInput(DType.BYTES, (2,), file="words"), tmp_path).tolist() == [[b"hi", b""]]


def test_a_missing_or_too_short_file_is_named_relative_to_the_repository(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "warmup").mkdir(parents=True)
    (folder / "warmup" / "short").write_bytes(b"1234567")
    with pytest.raises(Invalid) as caught:
        held(WarmupInput(DType.FP32, (2,), file="short"), folder)
    assert str(caught.value) == (
        "warmup sample 's' of model 'm': input 'IN' needs 8 bytes, and file 'm/warmup/short' has 7"
    )
    (folder / "warmup" / "words").write_bytes(b"\x02\0\0\0hi")
    with pytest.raises(Invalid, match="'s' of model 'm': file 'm/warmup/words': expected 2 string elements"):
        held(WarmupInput(DType.BYTES, (2,), file="words"), folder)
    with pytest.raises(Invalid, match="file 'm/warmup/none' of input 'IN' cannot be read: No such file or directory"):
        held(WarmupInput(DType.FP32, (2,), file="none"), folder)


def test_a_sample_of_no_rows_is_not_run() -> None:
    assert read_samples(config(sample(WarmupInput(DType.FP32, (4,)), batch_size=0)), Path()) == []


# --------------------------------------------------------------------------------------------------------- running them


def instance_of(engine: Engine, instance: FunctionInstance, *, inline: bool) -> LocalWorker:
    worker = LocalWorker("m_0", "m", instance, 1, engine.clock, always_inline=inline)
    worker.open(engine.context)
    return worker


ZEROS = sample(WarmupInput(DType.FP32, (4,)), "zeros", batch_size=3, count=2)
RANDOM = sample(WarmupInput(DType.FP32, (4,), is_random=True), "random")


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "thread"])
@pytest.mark.parametrize("options", [EngineOptions(), EngineOptions(rate_limit=())], ids=["free", "limited"])
async def test_each_sample_runs_in_batches_of_its_size_in_the_order_of_the_file(
    inline: bool, options: EngineOptions
) -> None:
    async with open_engine(options) as engine:
        add_function(engine, "busy", [lambda array: array])
        instance = FunctionInstance(lambda array: array)
        worker = instance_of(engine, instance, inline=inline)
        model = config(ZEROS, RANDOM)
        await warm_up(engine, worker, model, 1, read_samples(model, Path()))
        assert instance.batches == [[1, 1, 1], [1, 1, 1], [1]]
        assert engine.scheduler.in_flight == 0
        engine.scheduler.check()
        assert [statistics.name for statistics, _ in engine.deployments.counters()] == ["busy"]
        await trio.to_thread.run_sync(worker.close)


async def test_a_sample_that_fails_is_named_and_those_after_it_do_not_run(caplog: pytest.LogCaptureFixture) -> None:
    def fail(array: Array) -> Array:
        raise ValueError("cold")

    async with open_engine(EngineOptions()) as engine:
        instance = FunctionInstance(fail)
        worker = instance_of(engine, instance, inline=False)
        model = config(ZEROS, RANDOM)
        with pytest.raises(ModelFailed, match=r"^failed to run warmup sample 'zeros': .*ValueError in a batch of 3"):
            await warm_up(engine, worker, model, 1, read_samples(model, Path()))
        assert instance.batches == [[1, 1, 1]]
        assert engine.scheduler.in_flight == 0
        await trio.to_thread.run_sync(worker.close)
    assert caplog.text.count("ValueError: cold") == 1


async def test_a_sample_that_does_not_fit_the_model_is_refused_as_a_request_would_be() -> None:
    async with open_engine(EngineOptions()) as engine:
        instance = FunctionInstance(lambda array: array)
        worker = instance_of(engine, instance, inline=True)
        model = config(replace(ZEROS, inputs={}))
        with pytest.raises(Invalid, match=r"^failed to run warmup sample 'zeros': .*expected 1 inputs"):
            await warm_up(engine, worker, model, 1, read_samples(model, Path()))
        assert instance.batches == []
        await trio.to_thread.run_sync(worker.close)


class Watching(FunctionInstance):
    """Responds with zeros and records the first row of every input."""

    def __init__(self) -> None:
        super().__init__(lambda array: array)
        self.given: list[list[object]] = []

    def run(self, work: Work, clock: ClockNs) -> Results:
        self.batches.append(list(work.rows))
        self.given.append([column[0].array.ravel().tolist() for column in work.inputs if column[0] is not None])
        blocks = [np.zeros((len(work.rows), 4), np.float32), np.zeros((len(work.rows), 2), np.int32)]
        return Results([[*scatter(block, work.rows)] for block in blocks])


SEQUENCE = SequenceBatching(
    1,
    is_direct=True,
    controls=(
        SequenceControl("START", "START", DType.INT32),
        SequenceControl("END", "END", DType.FP32, -1, 1),
        SequenceControl("READY", "READY", DType.BOOL),
        SequenceControl("ID", "CORRID", DType.UINT64),
    ),
    states=(SequenceState("STATE", "KEPT", DType.INT32, (2,)),),
)
ZERO, ONE = b"\0\0\0\0", b"\1\0\0\0"


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, ([1], [1], [True], [1], [0, 0])),
        ({"START": (DType.INT32, ZERO), "ID": (DType.UINT64, ONE * 2)}, ([0], [1], [True], [2**32 + 1], [0, 0])),
        ({"END": (DType.FP32, ZERO), "READY": (DType.BOOL, b"\0")}, ([1], [-1], [True], [1], [0, 0])),
        ({"STATE": (DType.INT32, ONE * 2)}, ([0], [1], [True], [1], [1, 1])),
    ],
    ids=["nothing", "its beginning and id", "its end", "previous results"],
)
async def test_a_warmup_sample_can_set_sequence_controls(
    given: dict[str, tuple[DType, bytes]], seen: tuple[list[object], ...], tmp_path: Path
) -> None:
    (tmp_path / "warmup").mkdir()
    inputs = {"IN": WarmupInput(DType.FP32, (4,))}
    for name, (dtype, content) in given.items():
        (tmp_path / "warmup" / name).write_bytes(content)
        inputs[name] = WarmupInput(dtype, (len(content) // dtype.itemsize,), file=name)
    model = replace(config(WarmupSample("s", 2, 1, inputs)), sequence=SEQUENCE)
    async with open_engine(EngineOptions()) as engine:
        instance = Watching()
        state = SequenceAdapter(model, tmp_path)
        worker = LocalWorker("m_0", "m", instance, 2, engine.clock, state=state, always_inline=True)
        worker.open(engine.context)
        await warm_up(engine, worker, model, 1, read_samples(model, tmp_path))
        assert (instance.batches, instance.given) == ([[1, 1]], [[[0.0] * 4, *seen]])
        await trio.to_thread.run_sync(worker.close)


async def test_a_cancelled_load_leaves_its_warmup_running_harmlessly(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_engine(EngineOptions(rate_limit=())) as engine:
        instance = FunctionInstance(lambda array: array)
        worker = instance_of(engine, instance, inline=True)
        model = config(replace(ZEROS, count=1))
        with trio.CancelScope() as loading:
            loading.cancel()
            await warm_up(engine, worker, model, 1, read_samples(model, Path()))
        await trio.sleep(1)
        assert instance.batches in ([], [[1, 1, 1]])  # it may have begun before it was given up
        assert engine.scheduler.in_flight == 0
        await trio.to_thread.run_sync(worker.close)
