"""Auto-completion by a model's own code, in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from flowserve.config.types import Completion, ModelConfig
from flowserve.errors import FlowserveError, Invalid, ModelFailed
from flowserve.repository.layout import ModelFolder, find_models
from flowserve.runtime.engine.engine import open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.completion import Completer
from flowserve.runtime.processes.children import SUPPORTED
from tests.support.backends import Repository, config_of

MODEL = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
{body}
        return config
"""

COMPLETE = """
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": f"PID_{os.getpid()}", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
"""


async def ask(folder: Path, body: str, place: str = "process") -> Completion:
    repository = Repository(folder)
    repository.write("m", "1/model.py", MODEL.format(body=body))
    config: ModelConfig = config_of(json={"name": "m", "backend": "python"})
    (found,) = find_models([folder]).folders
    assert isinstance(found, ModelFolder)
    async with open_engine(EngineOptions()) as engine:
        completer = Completer(place, engine.loaded.processes)
        try:
            return await trio.to_thread.run_sync(completer, config, found, 1)
        except FlowserveError as error:
            failed = error
    raise failed  # outside of the engine's nursery, which wraps exceptions in a group


@pytest.mark.parametrize("place", ["process", "thread"] if SUPPORTED else ["thread"])
async def test_auto_completion_is_the_same_in_every_execution_place(tmp_path: Path, place: str) -> None:
    completed = await ask(tmp_path, COMPLETE, place)
    assert completed.inputs is not None
    assert completed.outputs is not None
    assert [spec.name for spec in completed.inputs] == ["IN"]
    assert (completed.max_batch_size, completed.dynamic_batching) == (8, True)
    is_here = completed.outputs[0].name == f"PID_{os.getpid()}"
    assert is_here == (place == "thread")


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("        os._exit(7)", "ended with exit status 7"),
        ("        os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("        raise KeyError('IN')", "auto_complete_config failed: KeyError: 'IN'"),
        ("        import helper_that_is_not_there", "No module named 'helper_that_is_not_there'"),
    ],
)
async def test_a_model_that_fails_in_auto_completion_affects_no_other(tmp_path: Path, body: str, why: str) -> None:
    with pytest.raises(ModelFailed, match=why):
        await ask(tmp_path, body)


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_an_auto_completion_result_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="ModelConfig object, it returned int"):
        await ask(tmp_path, "        return 3")


@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
async def test_a_configuration_longer_than_one_message_arrives_whole(tmp_path: Path) -> None:
    body = """
        for number in range(3000):
            config.add_input({"name": f"INPUT_{number}", "data_type": "TYPE_FP32", "dims": [-1]})
"""
    completed = await ask(tmp_path, body)
    assert completed.inputs is not None
    assert len(completed.inputs) == 3000
