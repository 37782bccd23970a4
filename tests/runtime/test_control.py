"""Loading and unloading inside the engine's own loop, in which a test controls the events between two steps."""

from __future__ import annotations

import gc
import re
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from flowserve.errors import Invalid, Unavailable
from flowserve.repository.override import Override
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import Control, ControlOptions, open_control
from flowserve.runtime.loading.registry import LoadEvent
from flowserve.values import Request

CONFIG = """
backend: "python"
parameters { key: "execution" value: { string_value: "thread" } }
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
MODEL = """
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER = Path({folder!r})


class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        out = pb_utils.Tensor("OUT", np.array([{answer}], np.float32))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""


def write(repository: Path, name: str, answer: float, initialize: str = "pass") -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    text = MODEL.format(folder=str(folder), initialize=initialize, answer=answer)
    (folder / "1/model.py").write_text(text)
    return folder


@asynccontextmanager
async def running(repository: Path, *load: str) -> AsyncIterator[tuple[Engine, Control]]:
    async with (
        open_engine(EngineOptions()) as engine,
        open_control(engine, [repository], ControlOptions("explicit", load)) as control,
    ):
        assert await control.start(lambda event: None) == {}
        yield engine, control


async def ask(engine: Engine, name: str) -> float:
    response = await engine.infer(engine.deployments.find(name), Request(inputs={"IN": np.zeros(1, np.float32)}))
    return float(response.outputs["OUT"][0])


async def test_each_load_and_unload_that_has_ended_is_a_change(tmp_path: Path) -> None:
    write(tmp_path, "m", 1.0)
    write(tmp_path, "broken", 1.0, "raise ValueError('broken')")
    changes: list[str] = []
    async with (
        open_engine(EngineOptions()) as engine,
        open_control(
            engine, [tmp_path], ControlOptions("explicit", ("m",)), lambda: changes.append("change")
        ) as control,
    ):
        assert await control.start(lambda event: None) == {}
        assert len(changes) == 1
        with pytest.raises(Invalid, match="broken"):
            await control.load("broken")
        assert len(changes) == 2
        await control.unload("m")
        await trio.testing.wait_all_tasks_blocked()
        assert len(changes) == 3


@pytest.mark.fault("C14")
async def test_a_model_whose_files_change_while_it_loads_is_loaded_from_a_consistent_state(tmp_path: Path) -> None:
    change = """
        if not (FOLDER / "2").exists():
            (FOLDER / "2").mkdir()
            (FOLDER / "2/model.py").write_text((FOLDER / "1/model.py").read_text().replace("[1.0]", "[2.0]"))
    """
    write(tmp_path, "m", 1.0, change.strip())
    async with running(tmp_path) as (engine, control):
        await control.load("m")
        assert engine.deployments.find("m").versions == [2]
        assert await ask(engine, "m") == 2


@pytest.mark.fault("C14")
async def test_a_model_whose_files_keep_changing_is_not_loaded(tmp_path: Path) -> None:
    grow = '(FOLDER / "seen").write_text("x" + ((FOLDER / "seen").read_text() if (FOLDER / "seen").exists() else ""))'
    write(tmp_path, "m", 1.0, grow)
    async with running(tmp_path) as (_, control):
        with pytest.raises(Invalid, match="its files kept changing while they were read"):
            await control.load("m")
        assert (tmp_path / "m/seen").read_text() == "xxx"
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("flowserve m")]


async def test_load_continues_after_its_caller_is_cancelled(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    write(
        tmp_path / "models", "m", 1.0, f"import time\n        while not Path({str(gate)!r}).exists(): time.sleep(0.01)"
    )
    async with running(tmp_path / "models") as (engine, control):
        with trio.move_on_after(0.1) as left:
            await control.load("m")
        assert left.cancelled_caught
        assert engine.deployments.entries["m"].state == "LOADING"
        gate.touch()
        await control.load("m")
        assert await ask(engine, "m") == 1


async def test_stopping_server_cancels_loads_with_an_error(tmp_path: Path) -> None:
    write(tmp_path / "models", "m", 1.0, "import time\n        time.sleep(1000)")
    said: list[str] = []
    async with running(tmp_path / "models") as (engine, control), trio.open_nursery() as nursery:

        async def load() -> None:
            with pytest.raises(Unavailable) as raised:
                await control.load("m")
            said.append(str(raised.value))

        nursery.start_soon(load)
        while "m" not in engine.deployments.entries:  # noqa: ASYNC110, it is read on a thread
            await trio.sleep(0.01)
        control.stop()
        with pytest.raises(Unavailable, match="Server is stopping"):
            await control.unload("m")
    assert [text[:19] for text in said] == ["Server is stopping,"]


@pytest.mark.parametrize("broken", [{"1/model.py": b"raise ValueError(1)"}, {"1/model.onnx": b"junk"}])
async def test_a_failed_load_removes_its_uploaded_files_without_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: dict[str, bytes]
) -> None:
    (tmp_path / "private").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "private"))
    config = '{"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}], "output": []}'
    (tmp_path / "models").mkdir()
    async with running(tmp_path / "models") as (_, control):
        gc.disable()
        try:
            for _ in range(3):
                with pytest.raises(Invalid, match=r"load failed for model 'm'|failed to load 'm'"):
                    await control.load("m", Override(config, broken))
            assert list((tmp_path / "private").iterdir()) == []
        finally:
            gc.enable()


AUTO = """
import time
from pathlib import Path


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        Path({asked!r}).touch()
        time.sleep(1000)
"""


def write_model_that_hangs_in_auto_complete(repository: Path, name: str) -> Path:
    """Returns the file that exists once `auto_complete_config` runs."""
    (repository / name / "1").mkdir(parents=True)
    asked = repository / f".{name} was asked"
    (repository / name / "1/model.py").write_text(AUTO.format(asked=str(asked)))
    return asked


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110, threads and processes set no event
            await trio.sleep(0.01)


@pytest.mark.fault("L15")
async def test_model_that_hangs_during_autocomplete_is_loading_in_the_index_and_can_be_unloaded(
    tmp_path: Path,
) -> None:
    write_model_that_hangs_in_auto_complete(tmp_path, "hangs")
    refused: list[str] = []
    async with running(tmp_path) as (engine, control), trio.open_nursery() as nursery:

        async def load() -> None:
            with pytest.raises(Invalid) as raised:
                await control.load("hangs")
            refused.append(str(raised.value))

        nursery.start_soon(load)
        await until(lambda: "hangs" in engine.deployments.entries)
        assert engine.deployments.index() == [{"name": "hangs", "state": "LOADING", "reason": ""}]
        with pytest.raises(Unavailable, match=r"'hangs' is not at ready state: it is being loaded$"):
            engine.deployments.find("hangs")
        with trio.fail_after(20):
            await control.unload("hangs")  # before or while it hangs
    assert "its process was killed: it was unloaded while it was loading" in refused[0]


@pytest.mark.fault("L15")
async def test_model_that_hangs_during_autocomplete_does_not_block_other_models_and_is_reloaded_on_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowserve.runtime.loading.loader.HANG_AFTER_S", 0.3)
    write(tmp_path, "good", 1.0)
    asked = write_model_that_hangs_in_auto_complete(tmp_path, "hangs")
    async with (
        open_engine(EngineOptions()) as engine,
        open_control(engine, [tmp_path], ControlOptions("poll", poll_s=0.1)) as control,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(control.start, lambda event: None)
        await until(lambda: asked.exists() and engine.deployments.entries["good"].state == "READY")
        assert engine.deployments.entries["hangs"].state == "LOADING"
        write(tmp_path, "hangs", 2.0)
        await until(lambda: engine.deployments.entries["hangs"].state == "READY")
        assert await ask(engine, "hangs") == 2


async def test_the_events_of_a_start_are_reported_in_order(tmp_path: Path) -> None:
    write(tmp_path, "good", 1.0)
    write(tmp_path, "bad", 1.0, "raise ValueError('no')")
    events: list[LoadEvent] = []
    async with (
        open_engine(EngineOptions()) as engine,
        open_control(engine, [tmp_path], ControlOptions()) as control,
    ):
        failed = await control.start(events.append)
        assert list(failed) == ["bad"]
        assert not engine.deployments.is_ready
    states = {name: [event.state for event in events if event.name == name] for name in ("good", "bad")}
    assert states == {"good": ["loading", "ready"], "bad": ["loading", "failed"]}


async def test_a_configuration_override_of_an_ensemble_needs_its_steps_in_a_repository(tmp_path: Path) -> None:
    write(tmp_path, "a", 1.0)
    write(tmp_path, "b", 2.0)
    (tmp_path / "e/1").mkdir(parents=True)
    text = """{{"platform": "ensemble", "input": [{{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}}],
        "output": [{{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}}],
        "ensemble_scheduling": {{"step": [{{"model_name": "{0}", "model_version": -1,
            "input_map": {{"IN": "IN"}}, "output_map": {{"OUT": "OUT"}}}}]}}}}"""
    async with running(tmp_path, "a") as (engine, control):
        (tmp_path / "e/config.pbtxt").write_text("")
        await control.load("e", Override(text.format("a")))
        assert await ask(engine, "e") == 1
        await control.load("e", Override(text.format("b")))
        assert await ask(engine, "e") == 2
        with pytest.raises(Invalid, match=re.escape("not available or ambiguous: c")):
            await control.load("e", Override(text.format("c")))
        assert await ask(engine, "e") == 2


async def test_requests_of_other_models_are_answered_during_a_reload(tmp_path: Path) -> None:
    write(tmp_path, "m", 1.0)
    write(tmp_path, "other", 5.0)
    async with running(tmp_path, "m", "other") as (engine, control), trio.open_nursery() as nursery:
        over = trio.Event()
        answers: list[float] = []

        async def keep_asking() -> None:
            while not over.is_set():
                answers.append(await ask(engine, "other"))

        nursery.start_soon(keep_asking)
        for number in range(2, 6):
            before = len(answers)
            write(tmp_path, "m", float(number), "import time\n        time.sleep(0.1)")
            await control.load("m")
            assert await ask(engine, "m") == number
            assert len(answers) > before
        over.set()
    assert set(answers) == {5.0}


async def test_registry_forgets_a_model_whose_folder_was_removed(tmp_path: Path) -> None:
    folder = write(tmp_path, "short_lived", 1.0)
    async with running(tmp_path, "short_lived") as (engine, control):
        shutil.rmtree(folder)
        for generation in await control._take_out("short_lived", dependents=False, is_gone=True):
            await generation.closed.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert "short_lived" not in engine.deployments.entries
        registry = control._registry
        assert (registry.known, registry.failed, registry.last) == ({}, {}, {})


async def test_the_load_time_is_that_of_the_current_generation(tmp_path: Path) -> None:
    write(tmp_path, "m", 1, "__import__('time').sleep(0.05)")
    async with running(tmp_path, "m") as (engine, control):
        loaded = engine.deployments.find("m").statistics
        assert loaded.load_s >= 0.05
        write(tmp_path, "m", 2)
        before = loaded.load_s
        await control.load("m")
        assert 0 < engine.deployments.find("m").statistics.load_s != before
