"""A restarted process instance runs the code it was loaded with, warmed up, even if the files have changed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import trio

from flowserve.errors import FlowserveError
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import ControlOptions, open_control
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.values import Request

CONFIG = """
backend: "python" max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "PID" data_type: TYPE_INT32 dims: [ 1 ] }
model_warmup {
  name: "zero" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }
}
"""
MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils
from .near import VALUE as near
import shared.deep


class TritonPythonModel:
    def initialize(self, args):
        self.runs = 0

    def execute(self, requests):
        import late  # as late as can be
        self.runs += 1
        value = FACTOR * (near + shared.deep.VALUE + late.VALUE) + self.runs
        told = {"OUT": value, "PID": os.getpid()}
        out = [pb_utils.Tensor(name, np.array([[number]], np.int32)) for name, number in told.items()]
        return [pb_utils.InferenceResponse(out) for _ in requests]
"""


def write(folder: Path, number: int) -> None:
    """Write a version 1 of which every file has `number`."""
    for name in ("1/near.py", "1/late.py", "shared/deep.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"VALUE = {number}\n")
    (folder / "shared" / "__init__.py").touch()
    (folder / "1" / "model.py").write_text(MODEL.replace("FACTOR", str(100 * number)))
    (folder / "config.pbtxt").write_text(CONFIG)


async def ask(engine: Engine) -> tuple[int, int]:
    """The response of a model, and its process id."""
    request = Request({"IN": np.zeros((1, 1), np.int32)}, stamp=engine.next_stamp())
    outputs = (await engine.infer(engine.deployments.find("m"), request)).outputs
    return int(outputs["OUT"].item()), int(outputs["PID"].item())


@pytest.mark.skipif(not SUPPORTED, reason="processes of their own need Linux 5.3")
async def test_an_instance_that_is_started_again_runs_the_code_it_was_loaded_with_and_its_warm_up(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "models" / "m"
    write(folder, 1)
    with trio.fail_after(60):
        async with (
            open_engine(EngineOptions()) as engine,
            open_control(engine, [tmp_path / "models"], ControlOptions("explicit", ("m",))) as control,
        ):
            assert await control.start(lambda event: None) == {}
            value, pid = await ask(engine)
            assert value == 100 * 3 + 2, "the second run: the first was the warm-up"
            write(folder, 2)
            (folder / "1" / "near.py").unlink()
            os.kill(pid, signal.SIGKILL)
            while True:
                try:
                    again, other = await ask(engine)
                    break
                except FlowserveError:  # it was sent before the end was detected
                    await trio.sleep(0.01)
            assert other != pid
            assert again == value
            write(folder, 2)
            await control.load("m")
            assert (await ask(engine))[0] == 200 * 6 + 2


@pytest.mark.skipif(not SUPPORTED, reason="processes of their own need Linux 5.3")
async def test_requests_waiting_for_a_restarting_instance_are_answered_during_drain(
    tmp_path: Path,
) -> None:
    write(tmp_path / "models" / "m", 1)
    async with (
        open_engine(EngineOptions()) as engine,
        open_control(engine, [tmp_path / "models"], ControlOptions()) as control,
    ):
        assert await control.start(lambda _: None) == {}
        answers: list[tuple[int, int]] = []

        async def wait() -> None:
            answers.append(await ask(engine))

        _, pid = await ask(engine)
        with trio.fail_after(20):
            os.kill(pid, signal.SIGKILL)
            while not engine.deployments.outage(engine.deployments.find("m")):  # noqa: ASYNC110 - no event to wait for
                await trio.sleep(0.005)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                while not engine.scheduler.in_flight:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                engine.refuse_new()
        assert [value for value, _ in answers] == [100 * 3 + 2], "after its warm-up"


@pytest.mark.fault("L15")
@pytest.mark.skipif(not SUPPORTED, reason="processes of their own need Linux 5.3")
async def test_a_model_that_hangs_during_load_is_loaded_again_when_its_files_change(tmp_path: Path) -> None:
    """Also at startup, which keeps waiting for it and fails no other model."""
    folder = tmp_path / "models" / "m"
    write(folder, 1)
    good = (folder / "1" / "model.py").read_text()
    (folder / "1" / "model.py").write_text(good + "\nimport time\ntime.sleep(600)\n")
    with trio.fail_after(60):
        async with (
            open_engine(EngineOptions()) as engine,
            open_control(engine, [tmp_path / "models"], ControlOptions("poll", poll_s=0.1)) as control,
        ):
            failed: list[dict[str, str]] = []

            async def start() -> None:
                failed.append(await control.start(lambda event: None))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(start)
                await trio.sleep(0.5)
                assert not failed
                (folder / "1" / "model.py").write_text(good)
            assert failed == [{}]
            assert (await ask(engine))[0] == 100 * 3 + 2
