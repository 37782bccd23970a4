"""Triton's trace file: its objects, and when they are written to which file."""

from __future__ import annotations

import json
import logging
from itertools import count
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flowserve.errors import Invalid
from flowserve.graph.types import Graph, ModelKey, Node
from flowserve.observe.trace import BACKEND_OUTPUT, BUSY, QUEUE_INPUT, Execution, TensorSeen, Trace, TracedStep, Wait
from flowserve.observe.trace_file import TraceFile, as_objects
from flowserve.observe.trace_settings import TraceBudget, TraceChoice, TraceSampler

COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


def node(index: int, name: str, model: str, *path: str) -> Node:
    return Node(index, name, ModelKey(model, index + 1), (), (), 8, path)


def trace_of(*nodes: Node, name: str = "pipe", is_ensemble: bool = True, request_id: str = "") -> Trace:
    trace = Trace(1, Graph(name, 3, (), (), 8, nodes, (), is_ensemble=is_ensemble), request_id, 1, 100)
    for i, one in enumerate(nodes):
        begun = 100 + 100 * i
        ran = Execution(i + 1, one.model, f"{one.model.name}_0", 2, 4, begun + 20, [1])
        ran.ran(begun + 30, begun + 40, begun + 80, begun + 90)
        trace.steps.append(TracedStep(one, 1, begun, begun + 5, ran, [Wait(BUSY, begun, begun + 30)], begun + 90))
    trace.ended_ns = 100 + 100 * len(nodes)
    trace.marks = [("HTTP_RECV_START", 50), ("HTTP_RECV_END", 60), ("HTTP_SEND_START", 1000), ("HTTP_SEND_END", 1001)]
    return trace


def heads(objects: list[Any]) -> dict[int, Any]:
    return {one["id"]: one for one in objects if "model_name" in one}


def stamps(objects: list[Any], number: int) -> dict[str, int]:
    return {stamp["name"]: stamp["ns"] for one in objects if one["id"] == number for stamp in one.get("timestamps", ())}


def test_a_plain_model_is_one_trace() -> None:
    objects = [*as_objects(trace_of(node(0, "m", "m"), name="m", is_ensemble=False, request_id="r"), count(7))]
    head = heads(objects)[7]
    assert (head["model_name"], head["model_version"], head["request_id"]) == ("m", 3, "r")
    assert "parent_id" not in head
    assert head["flowserve"]["batch"] == {"id": 1, "rows": 4, "requests": 2, "instance": "m_0"}
    assert head["flowserve"]["waits"] == [{"reason": BUSY, "from_ns": 100, "ns": 30}]
    told = stamps(objects, 7)
    in_order = ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START", *COMPUTE]
    in_order += ["INFER_RESPONSE_COMPLETE", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"]
    assert sorted(told, key=lambda name: (told[name], in_order.index(name))) == in_order
    assert {one["id"] for one in objects} == {7}


def test_steps_are_child_traces_of_their_ensemble() -> None:
    nodes = (node(0, "first", "a"), node(1, "outer/in", "b", "nest"), node(2, "outer/deep/x", "c", "nest", "deeper"))
    objects = [*as_objects(trace_of(*nodes), count(1))]
    told = {number: (one["model_name"], one.get("parent_id")) for number, one in heads(objects).items()}
    assert told == {1: ("pipe", None), 2: ("a", 1), 3: ("nest", 1), 4: ("b", 3), 5: ("deeper", 3), 6: ("c", 5)}
    assert stamps(objects, 3) == {"REQUEST_START": 200, "QUEUE_START": 200, "REQUEST_END": 390}
    assert stamps(objects, 6) == {
        "REQUEST_START": 300,
        "QUEUE_START": 305,
        **dict(zip(COMPUTE, (330, 340, 380, 390), strict=True)),
        "REQUEST_END": 390,
    }
    assert not set(COMPUTE) & stamps(objects, 1).keys()


def test_a_bls_call_is_a_child_trace() -> None:
    trace = trace_of(node(0, "caller", "caller"))
    trace.steps[0].execution.calls.append(trace_of(node(0, "m", "m"), name="m", is_ensemble=False))
    told = {n: (one["model_name"], one.get("parent_id")) for n, one in heads([*as_objects(trace, count(1))]).items()}
    assert told == {1: ("pipe", None), 2: ("caller", 1), 3: ("m", 2)}


@pytest.mark.parametrize(
    ("array", "data", "dtype"),
    [
        (np.array([[0.1, -3.4e38]], np.float32), "0.1,-3.4e+38", "FP32"),
        (np.array([1.5, 1e30], ml_dtypes.bfloat16), "1.5,1.00026e+30", "BF16"),
        (np.array([1, -2], np.int64), "1,-2", "INT64"),
        (np.array([True, False]), "1,0", "BOOL"),
        (np.array([b"a,b", "ü".encode()], object), '"a,b","ü"', "BYTES"),
    ],
)
def test_tensors_are_written_as_text(array: Any, data: str, dtype: str) -> None:
    trace = trace_of(node(0, "m", "m"), is_ensemble=False)
    trace.tensors.append(TensorSeen(QUEUE_INPUT, "IN", dtype, array.shape, array))
    trace.steps[0].tensors.append(TensorSeen(BACKEND_OUTPUT, "OUT", dtype, array.shape, None))
    seen = [one for one in as_objects(trace, count(1)) if "tensor" in one]
    assert [one["activity"] for one in seen] == ["TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"]
    shape = ",".join(map(str, array.shape))
    assert seen[0]["tensor"] == {"name": "IN", "data": data, "shape": shape, "dtype": dtype}
    assert seen[1]["tensor"] == {"name": "OUT", "data": "", "shape": shape, "dtype": dtype}


def write(path: Path, choice: TraceChoice, requests: int, *, retire: bool = False) -> list[str]:
    """Trace that many requests, and return the files that exist then."""
    file = TraceFile(path)
    setting = TraceSampler(choice)
    for _ in range(requests):
        if setting.sample():
            file.put(setting, trace_of(node(0, "m", "m"), is_ensemble=False))
    if retire:
        file.retire(setting)
    file.close()
    return sorted(one.name for one in path.parent.iterdir())


def traces_in(path: Path) -> list[int]:
    return [*heads(json.loads(path.read_text()))]


def test_by_default_all_traces_go_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("what was here before, and longer than a little")
    assert write(path, TraceChoice(str(path), ("TIMESTAMPS",), 2), 7) == ["trace.json"]
    assert traces_in(path) == [1, 2, 3]


def test_log_frequency_writes_numbered_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    choice = TraceChoice(str(path), ("TIMESTAMPS",), 1, -1, 2)
    assert write(path, choice, 5) == ["trace.json.0", "trace.json.1", "trace.json.2"]
    assert [traces_in(tmp_path / f"trace.json.{i}") for i in range(3)] == [[1, 2], [3, 4], [5]]


def test_an_exhausted_count_is_written_at_once_and_others_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert write(path, TraceChoice(str(path), ("TIMESTAMPS",), 1, 3), 5) == ["trace.json.0"]
    assert traces_in(tmp_path / "trace.json.0") == [1, 2, 3]
    assert write(path, TraceChoice(str(path), ("TIMESTAMPS",), 1, 3), 2, retire=True) == ["trace.json", "trace.json.0"]
    assert traces_in(path) == [1, 2]


@pytest.mark.fault("W10")
@pytest.mark.parametrize(("count", "log_frequency"), [(-1, 0), (50, 0), (-1, 1), (-1, 7)])
def test_traces_of_clients_take_no_more_than_their_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int, log_frequency: int
) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    budget = TraceBudget(20_000)
    for _ in range(3):  # as if a client restarted the count
        setting = TraceSampler(TraceChoice(str(path), ("TIMESTAMPS",), 1, count, log_frequency), budget)
        for _ in range(50):
            if setting.sample():
                file.put(setting, trace_of(node(0, "m", "m"), is_ensemble=False))
        file.retire(setting)
    file.close()
    sizes = [one.stat().st_size for one in tmp_path.iterdir()]
    blocks = sum(4096 for one in tmp_path.iterdir() if one != path)
    assert 5_000 < sum(sizes) + blocks < 20_000 + 2 * 4096
    assert all(traces_in(one) for one in tmp_path.iterdir()), "every file is whole"
    (record,) = caplog.records
    assert "--trace-config triton,api-max-bytes=N" in record.getMessage()


def test_an_unwritable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be written: there is no folder"):
        TraceFile(tmp_path / "nowhere/trace.json").check()
    with pytest.raises(Invalid, match="cannot be written: it is a folder"):
        TraceFile(tmp_path).check()
    TraceFile(tmp_path / "trace.json").check()


def test_a_write_failure_is_logged_once_and_the_traces_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gone/trace.json"
    with caplog.at_level(logging.ERROR):
        write_to = TraceFile(path)
        setting = TraceSampler(TraceChoice(str(path), ("TIMESTAMPS",), 1))
        for _ in range(3):
            write_to.put(setting, trace_of(node(0, "m", "m"), is_ensemble=False))
        write_to.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"trace file '{path}' cannot be written: No such file or directory; traces are lost until it can be"
    ]
