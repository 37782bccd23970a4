"""The embedded engine, under trio and from blocking code."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from flowserve import Engine, Graph, Problems, model
from flowserve.errors import Invalid, NotFound, Unavailable, Unsupported
from tests.support.held import HeldModel
from tests.support.onnx_files import onnx_identity

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)

WRITES_INTO_ITS_INPUT = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            array *= 2
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]))
        return answers
"""

CONFIG = """\
backend: "{backend}"
max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }} ]
"""


@model({"X": "FP32[4]"}, {"Y": "FP32[4]"}, max_batch_size=8, execution="inline")
def double(x: Any) -> Any:
    return x * 2


@model({"X": "FP32[4]"}, {"Y": "FP32[4]"}, max_batch_size=8)
def same(x: Any) -> Any:
    return x


@model({"TEXT": "BYTES[1]"}, {"LOUD": "BYTES[1]"}, max_batch_size=8)
def louder(texts: Any) -> Any:
    return np.array([[text.upper()] for text in texts[:, 0]], np.object_)


def one_step(part: Any, name: str, port_in: str = "X", port_out: str = "Y", tensor: str = "FP32[4]") -> Graph:
    graph = Graph(name)
    graph.output(port_out, part(graph.input(port_in, tensor)))
    return graph


def write_python_model(folder: Path, name: str = "twice") -> Path:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(CONFIG.format(backend="python"))
    (folder / name / "1" / "model.py").write_text(WRITES_INTO_ITS_INPUT)
    return folder


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(one_step(double, "doubled"), one_step(same, "passed")) as engine:
        yield engine


async def test_infer_takes_and_returns_arrays_under_trio() -> None:
    async with Engine(one_step(double, "doubled")) as engine:
        answer = await engine.infer("doubled", {"X": ROWS})
        np.testing.assert_array_equal(answer["Y"], ROWS * 2)


async def test_requests_of_several_tasks_run_as_one_batch() -> None:
    async with Engine(one_step(double, "doubled")) as engine, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(engine.infer, "doubled", {"X": ROWS[:1]})
        await trio.testing.wait_all_tasks_blocked()
        [row] = engine.statistics("double")
        assert (row["inference_count"], row["execution_count"]) == (4, 1)


async def test_tasks_that_ask_again_at_once_stay_one_batch() -> None:
    async with Engine(one_step(double, "doubled")) as engine:

        async def ask() -> None:
            for _ in range(10):
                await engine.infer("doubled", {"X": ROWS[:1]})

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
        [row] = engine.statistics("double")
        assert (row["inference_count"], row["execution_count"]) == (40, 10)


async def test_an_exception_of_the_block_propagates_unchanged() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Engine(one_step(double, "doubled")):
            raise KeyError("mine")


@pytest.mark.parametrize("wrong", [{"sequence_id": [1]}, {"priority": "1"}, {"timeout_us": "5"}])
async def test_an_option_of_the_wrong_type_is_refused_without_side_effects(wrong: dict[str, Any]) -> None:
    async with Engine(one_step(double, "doubled")) as engine:
        with pytest.raises(Invalid, match=f"{next(iter(wrong))} .* whole number"):
            await engine.infer("doubled", {"X": ROWS}, **wrong)
        np.testing.assert_array_equal((await engine.infer("doubled", {"X": ROWS}, priority=1))["Y"], ROWS * 2)


async def test_a_cancelled_caller_leaves_the_engine_consistent() -> None:
    async with Engine(one_step(same, "passed")) as engine:
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.infer("passed", {"X": ROWS})
        np.testing.assert_array_equal((await engine.infer("passed", {"X": ROWS}))["Y"], ROWS)


async def test_an_engine_whose_whole_block_is_cancelled_closes() -> None:
    with trio.move_on_after(0.05) as scope:
        async with Engine(one_step(double, "doubled")) as engine:
            await engine.infer("doubled", {"X": ROWS})
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_the_processes_of_a_cancelled_engine_are_ended(tmp_path: Path) -> None:
    write_python_model(tmp_path)
    model_file = tmp_path / "twice" / "1" / "model.py"
    model_file.write_text(
        model_file.read_text().replace("array *= 2", "array[:] = os.getpid()").replace("import", "import os\nimport", 1)
    )
    pids: list[int] = []
    with trio.CancelScope() as scope:
        async with Engine(tmp_path) as engine:
            pids.append(int((await engine.infer("twice", {"X": ROWS}))["Y"][0, 0]))
            scope.cancel()
            await trio.sleep_forever()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_an_engine_may_be_opened_again() -> None:
    engine = Engine(one_step(double, "doubled"))
    for _ in range(2):
        with engine as opened:
            np.testing.assert_array_equal(opened.infer("doubled", {"X": ROWS})["Y"], ROWS * 2)


def test_infer_takes_and_returns_arrays_in_blocking_code(engine: Engine) -> None:
    np.testing.assert_array_equal(engine.infer("doubled", {"X": ROWS})["Y"], ROWS * 2)


def test_several_threads_may_call_at_the_same_time(engine: Engine) -> None:
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        answers[number] = engine.infer("passed", {"X": ROWS + number})["Y"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        np.testing.assert_array_equal(answers[number], ROWS + number)


def test_a_blocking_call_on_the_event_loop_is_refused(engine: Engine) -> None:
    @model({"X": "FP32[4]"}, {"Y": "FP32[4]"}, max_batch_size=8, execution="inline")
    def asks_its_own_engine(x: Any) -> Any:
        return inner.infer("asks", {"X": x})["Y"]

    with Engine(one_step(asks_its_own_engine, "asks")) as inner:
        with pytest.raises(Exception, match="called on an event loop, which would wait for itself"):
            inner.infer("asks", {"X": ROWS})

    async def on_a_loop_of_its_own() -> None:
        engine.infer("doubled", {"X": ROWS})

    with pytest.raises(Unsupported, match=r"async with flowserve\.Engine"):
        trio.run(on_a_loop_of_its_own)


def test_a_closed_engine_raises(engine: Engine) -> None:
    engine.close()
    engine.close()
    with pytest.raises(Unavailable, match="the engine is closed"):
        engine.infer("doubled", {"X": ROWS})


def test_callers_that_wait_while_it_closes_get_an_error() -> None:
    held = HeldModel()

    errors: list[Exception] = []

    def ask(engine: Engine) -> None:
        try:
            engine.infer("queued", {"X": ROWS[:1]})
        except Exception as error:
            errors.append(error)

    with Engine(one_step(held.part, "queued"), exit_timeout_s=0.05) as engine:
        threads = [threading.Thread(target=ask, args=(engine,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert held.entered.wait(30)
    held.go_on.set()
    for thread in threads:
        thread.join(30)
    assert [type(error) for error in errors] == [Unavailable] * 3


def test_ctrl_c_withdraws_the_request_of_a_blocked_caller() -> None:
    held = HeldModel()

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with Engine(one_step(held.part, "queued")) as engine:
            first = threading.Thread(target=engine.infer, args=("queued", {"X": ROWS[:1]}))
            first.start()
            assert held.entered.wait(30)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                engine.infer("queued", {"X": ROWS[:1]})
            held.go_on.set()
            first.join(30)
            np.testing.assert_array_equal(engine.infer("queued", {"X": ROWS[:1]})["Y"], ROWS[:1])
            (statistics,) = engine.statistics("queued")
            assert statistics["inference_stats"]["success"]["count"] == 2
            assert statistics["inference_stats"]["fail"]["count"] == 1
    finally:
        signal.signal(signal.SIGALRM, before)


def test_text_may_be_str_or_bytes() -> None:
    with Engine(one_step(louder, "loud", "TEXT", "LOUD", "BYTES[1]")) as engine:
        for texts in (np.array([["été"]]), np.array([["été"]], object), np.array([["été".encode()]], object)):
            assert engine.infer("loud", {"TEXT": texts})["LOUD"].tolist() == [["été".encode().upper()]]
        with pytest.raises(Invalid, match="input 'TEXT' has a int in it"):
            engine.infer("loud", {"TEXT": np.array([[1]], object)})


def test_nested_lists_become_arrays_of_the_inputs_data_type(engine: Engine) -> None:
    answer = engine.infer("doubled", {"X": [[1, 2.5, 3, 4]]})["Y"]
    assert (answer.dtype, answer.tolist()) == (np.float32, [[2, 5, 6, 8]])
    with Engine(one_step(louder, "loud", "TEXT", "LOUD", "BYTES[1]")) as texts:
        assert texts.infer("loud", {"TEXT": [["a"], [b"b"]]})["LOUD"].tolist() == [[b"A"], [b"B"]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "input 'X' is a float; give a numpy array, or lists"),
        ([["1", "2", "3", "4"]], "input 'X' is FP32, and the list has <U1 in it"),
        ([[1, 2, 3], [4]], "input 'X': the lists are no array of FP32: .*inhomogeneous"),
        ([[1, 2]], "expected .*\\[-1,4\\].* got \\[1,2\\]"),
        ({"a": 1}, "input 'X' is a dict"),
    ],
)
def test_a_value_that_is_no_array_is_refused_by_name(engine: Engine, value: Any, text: str) -> None:
    with pytest.raises(Invalid, match=text):
        engine.infer("doubled", {"X": value})


def test_lists_of_whole_numbers_must_be_whole_and_in_range() -> None:
    @model({"N": "UINT8[1]"}, {"M": "UINT8[1]"}, max_batch_size=8)
    def passed(n: Any) -> Any:
        return n

    with Engine(one_step(passed, "numbers", "N", "M", "UINT8[1]")) as engine:
        assert engine.infer("numbers", {"N": [[255]]})["M"].tolist() == [[255]]
        for wrong in ([[256]], [[-1]], [[1.5]], [[True]]):
            with pytest.raises(Invalid, match="input 'N'"):
                engine.infer("numbers", {"N": wrong})


def test_an_engine_that_is_not_open_says_how_to_open_it() -> None:
    with pytest.raises(Unavailable, match=r"not open: use `with flowserve\.Engine\(\.\.\.\) as engine:`"):
        Engine(one_step(double, "doubled")).infer("doubled", {"X": ROWS})
    assert "batch dimension" in (Engine.infer.__doc__ or "")


def test_arrays_in_any_memory_order_are_accepted(engine: Engine) -> None:
    rows = np.asfortranarray(ROWS)
    np.testing.assert_array_equal(engine.infer("doubled", {"X": rows})["Y"], ROWS * 2)
    np.testing.assert_array_equal(engine.infer("doubled", {"X": ROWS[::-1]})["Y"], ROWS[::-1] * 2)


def test_a_response_does_not_change_when_the_caller_changes_its_input(engine: Engine) -> None:
    mine = ROWS.copy()
    answer = engine.infer("passed", {"X": mine})["Y"]
    mine += 1
    np.testing.assert_array_equal(answer, ROWS)
    assert mine.flags.writeable


@pytest.mark.parametrize("execution", ["thread", "process"])
def test_a_model_that_writes_into_its_input_does_not_change_the_callers_array(tmp_path: Path, execution: Any) -> None:
    mine = ROWS.copy()
    with Engine(write_python_model(tmp_path), python_execution=execution) as engine:
        answer = engine.infer("twice", {"X": mine})["Y"]
    np.testing.assert_array_equal(mine, ROWS)
    gc.collect()
    np.testing.assert_array_equal(answer, ROWS * 2)  # it outlives the engine, and the process that wrote it


def test_a_model_that_changes_its_working_directory_still_finds_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the repository was given as a relative path, as in `flowserve run graphs/`."""
    write_python_model(tmp_path / "graphs")
    file = tmp_path / "graphs/twice/1/model.py"
    initialize = """
    def initialize(self, args):
        os.chdir("/")
        import beside

        for folder in (args["model_repository"] + "/1", pb_utils.get_model_dir(), os.path.dirname(__file__)):
            assert "model.py" in os.listdir(folder)

    def execute"""
    file.write_text("import os\n" + file.read_text().replace("\n    def execute", initialize))
    (file.parent / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with Engine("graphs", python_execution="process") as engine:
        np.testing.assert_array_equal(engine.infer("twice", {"X": ROWS})["Y"], ROWS * 2)


def test_the_output_of_an_onnx_file_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "net" / "1").mkdir(parents=True)
    (tmp_path / "net" / "1" / "model.onnx").write_bytes(onnx_identity())
    (tmp_path / "net" / "config.pbtxt").write_text(
        CONFIG.format(backend="onnxruntime").replace('"X"', '"x"').replace('"Y"', '"y"')
    )
    with Engine(tmp_path) as engine:
        answer = engine.infer("net", {"x": ROWS})["y"]
    np.testing.assert_array_equal(answer, ROWS)
    assert answer.flags.writeable


def test_outputs_can_be_selected_and_request_options_are_passed(engine: Engine) -> None:
    assert list(engine.infer("doubled", {"X": ROWS}, outputs=("Y",), version=1, priority=1, id="a")) == ["Y"]
    with pytest.raises(Invalid, match="unexpected inference output 'Z'"):
        engine.infer("doubled", {"X": ROWS}, outputs=("Z",))
    with pytest.raises(NotFound, match="version 7 is not found"):
        engine.infer("doubled", {"X": ROWS}, version=7)


def test_deployments_are_unloaded_and_loaded_again(engine: Engine) -> None:
    engine.unload("doubled")
    with pytest.raises(Unavailable, match="unloaded"):
        engine.infer("doubled", {"X": ROWS})
    states = {row["name"]: row["state"] for row in engine.index()}
    assert (states["doubled"], states["passed"]) == ("UNAVAILABLE", "READY")
    engine.load("doubled")
    np.testing.assert_array_equal(engine.infer("doubled", {"X": ROWS})["Y"], ROWS * 2)


def test_a_load_may_include_a_configuration_and_files_as_over_http(tmp_path: Path) -> None:
    write_python_model(tmp_path)
    with Engine(tmp_path, python_execution="thread") as engine:
        config = {
            "backend": "python",
            "max_batch_size": 1,
            "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [4]}],
            "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [4]}],
        }
        engine.load("twice", config=config)
        with pytest.raises(Invalid, match="batch-size must be <= 1"):
            engine.infer("twice", {"X": ROWS})
        thrice = WRITES_INTO_ITS_INPUT.replace("*= 2", "*= 3").encode()
        engine.load("new", config=json.dumps(config), files={"1/model.py": thrice})
        np.testing.assert_array_equal(engine.infer("new", {"X": ROWS[:1]})["Y"], ROWS[:1] * 3)
        engine.load("twice")
        np.testing.assert_array_equal(engine.infer("twice", {"X": ROWS})["Y"], ROWS * 2)
        with pytest.raises(Invalid, match=r"failed to load 'twice', .*\(did you mean \"max_batch_size\"\?\)"):
            engine.load("twice", config={"max_batch_sise": 3})
        with pytest.raises(Invalid, match="need the parameter 'config' beside them"):
            engine.load("twice", files={"1/model.py": thrice})
        np.testing.assert_array_equal(engine.infer("twice", {"X": ROWS})["Y"], ROWS * 2)


async def test_a_function_may_be_loaded_with_another_configuration_and_unloaded_with_its_graph() -> None:
    many = np.ones((9, 4), np.float32)
    graphs = one_step(double, "doubled"), one_step(same, "passed")
    with trio.fail_after(30):
        async with Engine(*graphs, load=["doubled", "passed"]) as engine:
            with pytest.raises(Invalid, match="batch-size must be <= 8"):
                await engine.infer("double", {"X": many})
            await engine.load("double", config={**double.config(), "max_batch_size": 16})
            np.testing.assert_array_equal((await engine.infer("double", {"X": many}))["Y"], many * 2)
            await engine.unload("passed", dependents=True)
            ready = [row["name"] for row in await engine.index() if row["state"] == "READY"]
            assert ready == ["double", "doubled"]


def test_only_what_is_named_is_loaded(tmp_path: Path) -> None:
    write_python_model(write_python_model(tmp_path), "other")
    with Engine(tmp_path, load=["twice"], python_execution="thread") as engine:
        assert [row["name"] for row in engine.statistics()] == ["twice"]


def test_opening_fails_with_every_reason(tmp_path: Path) -> None:
    write_python_model(write_python_model(tmp_path), "other")
    for name in ("twice", "other"):
        (tmp_path / name / "1" / "model.py").write_text("raise ValueError('no luck')")
    with pytest.raises(Invalid, match=r"(?s)2 of 2 models failed to load:.*other: .*no luck.*twice: .*no luck"):
        with Engine(tmp_path, python_execution="thread"):
            pass
    with pytest.raises(NotFound, match="does not exist"):
        with Engine(tmp_path / "nowhere"):
            pass
    with pytest.raises(Problems, match="must specify 'input_map' in step 0"):
        broken = Graph("broken")
        broken.input("X", "FP32[4]")
        broken.step(double, {}, {"Y": "Y"})
        broken.output("Y")
        with Engine(broken):
            pass
    with pytest.raises(Invalid, match="an engine of nothing"):
        Engine()


def test_inputs_without_their_names_are_refused(engine: Engine) -> None:
    asks: list[Callable[..., Any]] = [engine.infer, lambda *given: next(engine.stream(*given))]
    for ask in asks:
        with pytest.raises(Invalid, match=r"inputs are arrays by name, {'INPUT': array}, and not ndarray"):
            ask("doubled", ROWS)


def test_a_script_that_does_not_close_the_engine_exits(tmp_path: Path) -> None:
    write_python_model(tmp_path)
    script = "import sys; from flowserve import Engine; Engine(sys.argv[1]).__enter__(); print('end')"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "end\n")


COUNT = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(pb_utils.get_input_tensor_by_name(request, "TO").as_numpy()[0]):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

COUNT_CONFIG = """\
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "TO" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    (tmp_path / "count" / "1").mkdir(parents=True)
    (tmp_path / "count" / "config.pbtxt").write_text(COUNT_CONFIG)
    (tmp_path / "count" / "1" / "model.py").write_text(COUNT)
    return tmp_path


def to(number: int) -> dict[str, Any]:
    return {"TO": np.array([number], np.int32)}


def test_responses_of_one_request_arrive_as_they_are_sent(counting: Path) -> None:
    with Engine(counting, python_execution="thread") as engine:
        assert [int(answer["NUMBER"][0]) for answer in engine.stream("count", to(5))] == [0, 1, 2, 3, 4]
        assert list(engine.stream("count", to(0))) == []


def test_abandoning_an_iterator_cancels_the_request(counting: Path) -> None:
    with Engine(counting, python_execution="thread") as engine:
        for answer in engine.stream("count", to(2_000)):
            if answer["NUMBER"][0] == 3:
                break
        assert len(list(engine.stream("count", to(2)))) == 2  # its one instance is free again


def test_an_iterator_may_outlive_its_engine(counting: Path) -> None:
    with Engine(counting, python_execution="thread") as engine:
        answers = engine.stream("count", to(2_000))
        next(answers)
    # Leaving released the model, which was blocked in send(): its thread has ended and was not abandoned.
    assert not [thread.name for thread in threading.enumerate() if "count_0" in thread.name]
    with pytest.raises(Unavailable, match=r"the engine is closed|Server is stopping"):
        list(answers)
    answers.close()


async def test_leaving_the_block_of_a_stream_cancels_it(counting: Path) -> None:
    async with Engine(counting, python_execution="thread") as engine:
        async with engine.stream("count", to(2_000)) as answers:
            assert int((await anext(answers))["NUMBER"][0]) == 0
        async with engine.stream("count", to(2)) as answers:
            assert [int(answer["NUMBER"][0]) async for answer in answers] == [0, 1]


def test_a_request_with_one_response_is_a_stream_of_one(engine: Engine) -> None:
    [answer] = engine.stream("doubled", {"X": ROWS})
    np.testing.assert_array_equal(answer["Y"], ROWS * 2)
