"""Stateful models as clients see them: sequences, control inputs, and state that the server keeps between requests."""

from __future__ import annotations

import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from flowserve.testing.serve import DidNotServe, Served
from flowserve.values import DType
from tests.support.forked import serving
from tests.support.onnx_files import onnx_model, onnx_node, onnx_value

FOREVER = "max_sequence_idle_microseconds: 600000000"
STATE = 'state { input_name: "OLD" output_name: "NEW" data_type: TYPE_INT32 dims: [ %s ] %s }'
IN_OUT = """
max_batch_size: %d
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ %s ] } ]
instance_group [ { count: %d kind: KIND_CPU } ]
sequence_batching { %s }
"""
CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ 0, 1 ] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
# Responds with the whole batch: eight numbers per row, one row per slot.
TELLS = """
import numpy as np
import triton_python_backend_utils as pb_utils


def value(request, name):
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0])


class TritonPythonModel:
    def execute(self, requests):
        rows = [[value(one, name) for name in ("READY", "START", "END", "CORRID", "IN")] for one in requests]
        seen = np.full((1, 4, 5), -1, np.int32)
        seen[0, : len(rows)] = rows
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", seen)]) for _ in requests]
"""
# Keeps its sums itself; raises for 13, ends its process for 666, and for negative numbers waits for a release file.
SUMS = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0, 0])
        if number == 666:
            os._exit(3)
        if number == 13:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("thirteen is not for me"))
        if number < 0:
            open("RELEASE_FILE.busy", "w").close()
        while number < 0 and not os.path.exists("RELEASE_FILE"):
            time.sleep(0.002)
        which = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.sums[which] = 0
        self.sums[which] += number
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[self.sums[which]]], np.int32))])
"""


def adding_file(dims: Sequence[int | str] = ("N", 1)) -> bytes:
    """OUT = NEW = OLD + IN."""
    return onnx_model(
        [onnx_node("Add", ["IN", "OLD"], ["NEW"]), onnx_node("Identity", ["NEW"], ["OUT"])],
        [onnx_value("IN", DType.INT32, dims), onnx_value("OLD", DType.INT32, dims)],
        [onnx_value("OUT", DType.INT32, dims), onnx_value("NEW", DType.INT32, dims)],
    )


def doubling_file() -> bytes:
    return onnx_model(
        [onnx_node("Add", ["IN", "IN"], ["OUT"])],
        [onnx_value("IN", DType.INT32, ["N", 1])],
        [onnx_value("OUT", DType.INT32, ["N", 1])],
    )


def growing_file() -> bytes:
    """All inputs so far, with the newest appended: OUT = NEW = OLD, IN."""
    return onnx_model(
        [onnx_node("Concat", ["OLD", "IN"], ["NEW"], axis=1), onnx_node("Identity", ["NEW"], ["OUT"])],
        [onnx_value("IN", DType.INT32, ["N", 1]), onnx_value("OLD", DType.INT32, ["N", "M"])],
        [onnx_value("OUT", DType.INT32, ["N", "K"]), onnx_value("NEW", DType.INT32, ["N", "K"])],
    )


def looking_up_file() -> bytes:
    """Adds up entry IN of a table of five numbers; other indices fail."""
    return onnx_model(
        [
            onnx_node("Gather", ["table", "IN"], ["found"]),
            onnx_node("Add", ["OLD", "found"], ["NEW"]),
            onnx_node("Identity", ["NEW"], ["OUT"]),
        ],
        [onnx_value("IN", DType.INT32, ["N", 1]), onnx_value("OLD", DType.INT32, ["N", 1])],
        [onnx_value("OUT", DType.INT32, ["N", 1]), onnx_value("NEW", DType.INT32, ["N", 1])],
        [onnx.helper.make_tensor("table", onnx.TensorProto.INT32, [5], [0, 10, 20, 30, 40])],
    )


def reader_file() -> bytes:
    """OUT = OLD, START, END, READY, CORRID, the last four as lists with no dimension but the batch; NEW = IN."""
    axes = onnx.helper.make_tensor("axes", onnx.TensorProto.INT64, [1], [1])
    names = ("START", "END", "READY", "CORRID")
    nodes = [onnx_node("Identity", ["IN"], ["NEW"])]
    for name in names:
        nodes.append(onnx_node("Cast", [name], [f"{name}_cast"], to=onnx.TensorProto.INT32))
        nodes.append(onnx_node("Unsqueeze", [f"{name}_cast", "axes"], [f"{name}_row"]))
    nodes.append(onnx_node("Concat", ["OLD", *(f"{name}_row" for name in names)], ["OUT"], axis=1))
    types = (DType.FP32, DType.INT32, DType.BOOL, DType.INT32)
    return onnx_model(
        nodes,
        [
            onnx_value("IN", DType.INT32, ["N", 1]),
            onnx_value("OLD", DType.INT32, ["N", 1]),
            *(onnx_value(name, dtype, ["N"]) for name, dtype in zip(names, types, strict=True)),
        ],
        [onnx_value("OUT", DType.INT32, ["N", 5]), onnx_value("NEW", DType.INT32, ["N", 1])],
        [axes],
    )


READER = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 5, 7 ] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } }
"""
Add = Callable[..., Path]


def initial(content: str, dims: str = "1") -> str:
    return f'initial_state {{ name: "first" data_type: TYPE_INT32 dims: [ {dims} ] {content} }}'


@pytest.fixture(scope="module")
def release_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model `gated` waits until this file exists, and creates `release_file.busy` meanwhile."""
    return tmp_path_factory.mktemp("release_file") / "release_file"


@pytest.fixture(scope="module")
def states(
    tmp_path_factory: pytest.TempPathFactory, add_model: Add, make_ensemble: Callable[..., str], release_file: Path
) -> Iterator[Served]:
    """A server of models whose state the server keeps, and of some that keep it themselves."""
    folder = tmp_path_factory.mktemp("states")
    gathers = "direct { minimum_slot_utilization: 0.75 max_queue_delay_microseconds: 20000000 }"
    adding = {"1/model.onnx": adding_file()}
    plain, state = f"direct {{ }} {FOREVER}", STATE % ("1", "")
    warm_up = """model_warmup { name: "w" batch_size: 3
      inputs { key: "IN" value { data_type: TYPE_INT32 dims: [ 1 ] random_data: true } } }"""
    add_model(folder, "direct", IN_OUT % (4, "1", 1, f"{plain} {state}") + warm_up, adding)
    add_model(folder, "oldest", IN_OUT % (4, "1", 2, f"oldest {{ }} {FOREVER} {state}"), adding)
    alone = IN_OUT % (0, "1", 1, f"{plain} {state}")
    add_model(folder, "alone", alone, {"1/model.onnx": adding_file([1])})
    add_model(
        folder, "hasty", IN_OUT % (1, "1", 1, f"direct {{ }} max_sequence_idle_microseconds: 300000 {state}"), adding
    )
    from_ten = {**adding, "initial_state/ten": struct.pack("<i", 10)}
    ten = STATE % ("1", initial('data_file: "ten"'))
    add_model(folder, "from_ten", IN_OUT % (2, "1", 1, f"{plain} {ten}"), from_ten)
    growing = STATE % ("-1", initial("zero_data: true", "0"))
    add_model(folder, "growing", IN_OUT % (4, "-1", 1, f"{plain} {growing}"), {"1/model.onnx": growing_file()})
    reads = IN_OUT % (4, "5", 1, f"{plain} {READER} {state}")
    add_model(folder, "reader", reads, {"1/model.onnx": reader_file()})
    looks_up = IN_OUT % (4, "1", 1, f"{gathers} {FOREVER} {state}")
    add_model(folder, "looks_up", looks_up, {"1/model.onnx": looking_up_file()})
    seen = IN_OUT.replace("] } ]\ninstance", '] }, { name: "NEW" data_type: TYPE_INT32 dims: [ 1 ] } ]\ninstance')
    add_model(folder, "listed", seen % (4, "1", 1, f"{plain} {state}"), adding)
    add_model(folder, "widens", IN_OUT % (4, "-1", 1, f"{plain} {state}"), {"1/model.onnx": growing_file()})
    pairs = f"direct {{ minimum_slot_utilization: 0.5 max_queue_delay_microseconds: 20000000 }} {FOREVER} {CONTROLS}"
    for place in ("process", "thread"):
        there = f'parameters {{ key: "execution" value {{ string_value: "{place}" }} }}'
        add_model(folder, f"tells_{place}", IN_OUT % (4, "4, 5", 1, pairs) + there, {"1/model.py": TELLS})
    add_model(folder, "sums", IN_OUT % (2, "1", 2, f"oldest {{ }} {FOREVER}"), {"1/model.py": SUMS})
    slow = "direct { } max_sequence_idle_microseconds: 400000"
    add_model(
        folder, "gated", IN_OUT % (1, "1", 1, slow), {"1/model.py": SUMS.replace("RELEASE_FILE", str(release_file))}
    )
    add_model(folder, "double", "", {"1/model.onnx": doubling_file()})
    steps = [
        ("double", {"IN": "IN"}, {"OUT": "a"}),
        ("direct", {"IN": "a"}, {"OUT": "b"}),
        ("double", {"IN": "b"}, {"OUT": "OUT"}),
    ]
    add_model(folder, "pipe", make_ensemble(["IN"], ["OUT"], steps, 2, "data_type: TYPE_INT32 dims: [ 1 ]"))
    with serving(folder, "--exit-timeout-secs", "2") as served:  # some sequences are never ended
        yield served
        began = time.monotonic()
        assert served.stop(signal.SIGTERM) == 0
        assert time.monotonic() - began < 5, "open sequences kept the server past its exit timeout"


def ask(
    served: Served,
    model: str,
    number: int,
    sequence: int | str = 0,
    *,
    start: bool = False,
    end: bool = False,
    output: str = "OUT",
    rows: int = 1,
    **more: Any,
) -> Any:
    """One request; returns the row of its answer."""
    tensor = triton.InferInput("IN", [rows, 1], "INT32")
    tensor.set_data_from_numpy(np.full((rows, 1), number, np.int32))
    with triton.InferenceServerClient(served.address, network_timeout=60.0) as client:
        result = client.infer(model, [tensor], sequence_id=sequence, sequence_start=start, sequence_end=end, **more)
    return result.as_numpy(output)[0].tolist()


def refused(*arguments: Any, **options: Any) -> tuple[str | None, str]:
    """The status and the text of a refusal."""
    with pytest.raises(InferenceServerException) as caught:
        ask(*arguments, **options)
    return caught.value.status(), str(caught.value.message())


_THREADS = ThreadPoolExecutor(16)


class Later:
    """A request on a thread of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._future = _THREADS.submit(ask, *arguments, **options)

    def result(self) -> Any:
        return self._future.result(30)

    def outcome(self) -> Any:
        """Its answer, or the status and the text of its refusal."""
        try:
            return self.result()
        except InferenceServerException as error:
            return error.status(), error.message()


# ---------------------------------------------------------------------------------------- validation of sequences


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_the_state_of_a_sequence_is_isolated_from_others(states: Served, model: str) -> None:
    assert ask(states, model, 1, 11, start=True) == [1]
    assert ask(states, model, 100, 12, start=True) == [100]
    assert ask(states, model, 2, 11) == [3]
    assert ask(states, model, 200, 12) == [300]
    assert ask(states, model, 3, 11, end=True) == [6]
    assert ask(states, model, 300, 12, end=True) == [600]
    assert ask(states, model, 7, 11, start=True, end=True) == [7]


@pytest.mark.fault("Q1")
@pytest.mark.fault("Q5")
def test_a_first_request_without_start_is_refused_and_so_is_one_after_the_end(
    states: Served,
) -> None:
    text = (
        "inference request for sequence 404 to model 'direct' must specify the START flag on the first request of the "
        "sequence"
    )
    assert refused(states, "direct", 1, 404) == ("400", text)
    ask(states, "direct", 1, 404, start=True, end=True)
    assert refused(states, "direct", 1, 404) == ("400", text)


@pytest.mark.fault("Q2")
def test_a_request_without_a_correlation_id_is_refused(states: Served, wire_to: Any) -> None:
    wire = wire_to(states)
    before = wire.graph_statistics("direct")["failures"]
    status, text = refused(states, "direct", 1, 0, start=True)
    assert status == "400"
    assert text.startswith("inference request to model 'direct' must specify a non-zero or non-empty correlation ID")
    after = wire.graph_statistics("direct")["failures"]
    assert after == {**before, "OTHER": before["OTHER"] + 1}, "it did not fit the model"


@pytest.mark.fault("Q3")
def test_requests_of_sequences_have_one_row(states: Served) -> None:
    status, text = refused(states, "direct", 1, 31, start=True, rows=2)
    assert status == "400"
    assert text.startswith(
        "inference request to model 'direct' must specify batch-size 1 due to requirements of sequence batcher"
    )


@pytest.mark.fault("Q4")
def test_a_second_start_restarts_the_sequence(states: Served) -> None:
    assert ask(states, "direct", 5, 41, start=True) == [5]
    assert ask(states, "direct", 6, 41) == [11]
    assert ask(states, "direct", 7, 41, start=True) == [7]
    assert ask(states, "direct", 8, 41, end=True) == [15]


@pytest.mark.fault("Q7")
@pytest.mark.fault("Q6")
def test_an_unfinished_sequence_loses_its_slot_after_the_idle_time(
    states: Served,
) -> None:
    began = time.monotonic()
    assert ask(states, "hasty", 1, 1, start=True) == [1]
    waiting = [Later(states, "hasty", 2, 2, start=True, end=True), Later(states, "hasty", 3, 3, start=True, end=True)]
    assert [one.result() for one in waiting] == [[2], [3]]
    assert time.monotonic() - began >= 0.3
    status, text = refused(states, "hasty", 1, 1)
    assert (status, "must specify the START flag" in text) == ("400", True)
    assert text.endswith("it was idle for 0.3 s (max_sequence_idle_microseconds) and has ended")


def test_a_timeout_applies_in_the_backlog(states: Served) -> None:
    for sequence in range(1, 5):
        ask(states, "direct", 1, sequence, start=True)
    status, text = refused(states, "direct", 1, 5, start=True, timeout=100_000)
    assert status == "503"
    assert text.startswith("timeout of the corresponding sequence has been expired")
    for sequence in range(1, 5):
        ask(states, "direct", 1, sequence, end=True)


@pytest.mark.fault("Q11")
def test_integer_and_string_ids_are_distinct_and_limited(
    states: Served,
) -> None:
    assert ask(states, "oldest", 1, 5, start=True) == [1]
    assert ask(states, "oldest", 10, "5", start=True) == [10]
    assert ask(states, "oldest", 100, 2**64 - 1, start=True) == [100]
    assert ask(states, "oldest", 1, 5, end=True) == [2]
    assert ask(states, "oldest", 1, "5", end=True) == [11]
    assert ask(states, "oldest", 1, 2**64 - 1, end=True) == [101]
    assert refused(states, "oldest", 1, 2**64, start=True)[0] == "400"
    status, text = refused(states, "oldest", 1, "x" * 129, start=True)
    assert (status, "string correlation ID cannot be longer than 128 characters" in text) == ("400", True)
    status, text = refused(states, "reader", 1, "five", start=True)
    wanted = "sequence batching control 'CORRID' data-type is 'BYTES', but model 'reader' expects 'INT32'"
    assert (status, text) == ("400", wanted)


# ------------------------------------------------------------------------------------------------------------- state


def test_a_model_without_batches_keeps_state(states: Served) -> None:
    def asked(number: int, **flags: bool) -> list[int]:
        tensor = triton.InferInput("IN", [1], "INT32")
        tensor.set_data_from_numpy(np.array([number], np.int32))
        with triton.InferenceServerClient(states.address) as client:
            answered: list[int] = client.infer("alone", [tensor], sequence_id=1, **flags).as_numpy("OUT").tolist()
        return answered

    assert [asked(1, sequence_start=True), asked(2), asked(3, sequence_end=True)] == [[1], [3], [6]]


def test_a_sequence_begins_with_the_state_from_its_file(states: Served) -> None:
    assert ask(states, "from_ten", 1, 1, start=True) == [11]
    assert ask(states, "from_ten", 1, 1, end=True) == [12]


def test_state_may_grow_and_sequences_of_different_lengths_are_independent(
    states: Served,
) -> None:
    assert ask(states, "growing", 1, 1, start=True) == [1]
    assert ask(states, "growing", 2, 1) == [1, 2]
    both = [Later(states, "growing", 3, 1), Later(states, "growing", 7, 2, start=True)]
    assert [one.result() for one in both] == [[1, 2, 3], [7]]
    assert ask(states, "growing", 4, 1, end=True) == [1, 2, 3, 4]
    assert ask(states, "growing", 8, 2, end=True) == [7, 8]


def test_state_can_be_requested_only_if_it_is_listed_as_output(states: Served) -> None:
    wanted = [triton.InferRequestedOutput("NEW")]
    assert ask(states, "listed", 4, 1, start=True, end=True, output="NEW", outputs=wanted) == [4]
    status, text = refused(states, "direct", 4, 1, start=True, end=True, output="NEW", outputs=wanted)
    assert (status, "unexpected inference output 'NEW' for model 'direct'" in text) == ("400", True)
    only = [triton.InferRequestedOutput("OUT")]
    assert ask(states, "direct", 4, 1, start=True, outputs=only) == [4]
    assert ask(states, "direct", 4, 1, end=True, outputs=only) == [8]


def test_controls_and_state_are_not_in_the_model_metadata(states: Served) -> None:
    with triton.InferenceServerClient(states.address) as client:
        metadata = client.get_model_metadata("reader")
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["IN"]
    assert [tensor["name"] for tensor in metadata["outputs"]] == ["OUT"]


@pytest.mark.fault("Q10")
def test_a_request_refused_by_its_model_fails_and_its_sequence_continues(
    states: Served,
) -> None:
    def three(*numbers: int, **flags: bool) -> list[Any]:
        """One batch of three sequences."""
        asked = [Later(states, "looks_up", number, 1 + n, **flags) for n, number in enumerate(numbers)]
        return [one.outcome() for one in asked]

    assert three(1, 2, 3, start=True) == [[10], [20], [30]]
    good, bad, other = three(1, 99, 1)
    assert (good, other) == ([20], [40])
    assert bad[0] == "500"
    assert three(4, 4, 4, end=True) == [[60], [60], [80]]


@pytest.mark.fault("Q14")
def test_the_error_for_a_state_of_another_shape_names_the_state(states: Served) -> None:
    status, text = refused(states, "widens", 1, 1, start=True)
    assert status == "500"
    assert "output 'NEW': the configuration promises shape [1,1], the model answered [1,2]" in text


@pytest.mark.fault("Q13")
def test_an_invalid_initial_state_is_refused_with_its_path(tmp_path: Path, add_model: Add) -> None:
    state = STATE % ("1", initial('data_file: "ten"'))
    config = IN_OUT % (2, "1", 1, f"direct {{ }} {state}")
    expected = {
        "none": "cannot be read: No such file or directory",
        "short": "has 3 bytes, and the state needs 4",
        "long": "has 5 bytes, and the state needs 4",
    }
    for name, content in {"none": None, "short": b"123", "long": b"12345"}.items():
        files = {} if content is None else {"initial_state/ten": content}
        add_model(tmp_path, name, config, {"1/model.onnx": adding_file(), **files})
    with pytest.raises(DidNotServe) as caught, serving(tmp_path):
        pass
    for name, said in expected.items():
        assert f"initial state file '{name}/initial_state/ten' {said}" in caught.value.log


# ---------------------------------------------------------------------------------------------------------- controls


def test_control_tensors_describe_each_request_of_a_sequence(states: Served) -> None:
    """OLD, START, END, READY and the low half of the id."""
    assert ask(states, "reader", 3, 2**32 + 9, start=True) == [0, 7, 0, 1, 9]
    assert ask(states, "reader", 4, 2**32 + 9) == [3, 5, 0, 1, 9]
    assert ask(states, "reader", 5, 2**32 + 9, end=True) == [4, 5, 1, 1, 9]
    assert ask(states, "reader", 6, 2**32 - 1, start=True, end=True) == [0, 7, 1, 1, -1]


@pytest.mark.fault("Q15")
@pytest.mark.parametrize("place", ["process", "thread"])
def test_a_gap_between_slots_is_a_row_that_is_not_ready_and_holds_zeros(
    states: Served, wire_to: Any, place: str
) -> None:
    model = f"tells_{place}"
    for first in (1, 3):
        two = [Later(states, model, 10 * (first + n), first + n, start=True) for n in range(2)]
        for one in two:
            one.result()
    batches = [ask_both(states, model, (n, 0), (1 if n != 1 else 2, 0)) for n in range(2, 5)]
    # The slot of a sequence depends on the order of arrival; the empty slots do not.
    for seen in batches:
        ready = [row for row in seen if row[0] == 1]
        assert len(ready) == 2
        assert all(row in ([0, 0, 0, 0, 0], [-1] * 5) for row in seen if row[0] != 1)
    assert any([0, 0, 0, 0, 0] in seen for seen in batches)
    before = wire_to(states).statistics(model)
    assert before["inference_stats"]["success"]["count"] == 10  # padding rows belong to no request


def ask_both(served: Served, model: str, one: tuple[int, int], other: tuple[int, int]) -> Any:
    both = [Later(served, model, number, sequence) for sequence, number in (one, other)]
    first, second = [later.result() for later in both]
    assert first == second
    return first


# ------------------------------------------------------------------------------------- models that keep their own state


@pytest.mark.fault("Q8")
def test_concurrent_requests_of_one_sequence_run_one_at_a_time(
    states: Served,
) -> None:
    """The returned sums are those of some order, with each request in a batch of its own."""
    ask(states, "oldest", 0, 80, start=True)
    together = [Later(states, "oldest", 1, 80) for _ in range(8)]
    assert sorted(one.result()[0] for one in together) == [*range(1, 9)]
    ask(states, "oldest", 0, 80, end=True)


@pytest.mark.fault("Q12")
def test_sequences_of_a_dead_process_fail_and_can_be_started_again(
    states: Served,
) -> None:
    assert ask(states, "sums", 1, 1, start=True) == [1]  # each in an instance of its own
    assert ask(states, "sums", 1, 2, start=True) == [1]
    assert refused(states, "sums", 666, 1)[0] == "500"
    status, text = refused(states, "sums", 1, 1)
    assert status == "400"
    assert text.endswith("the instance of model 'sums' that had it has ended; begin again with START")
    assert ask(states, "sums", 5, 2, end=True) == [6]
    assert ask(states, "sums", 7, 1, start=True) == [7]
    assert refused(states, "sums", 13, 1) == ("500", "thirteen is not for me")
    assert ask(states, "sums", 1, 1, end=True) == [8]


@pytest.mark.fault("Q9")
def test_a_connection_closed_while_its_sequence_waits_ends_the_sequence_once(
    states: Served, release_file: Path, wire_to: Any
) -> None:
    wire = wire_to(states)
    before = wire.graph_statistics("gated")["failures"]
    assert before["CANCELED"] == 0
    holds = Later(states, "gated", -1, 1, start=True)
    wire.until(Path(f"{release_file}.busy").exists, "a batch runs")
    waits = Later(states, "gated", 5, 1)  # behind it, in the slot
    wire.until(lambda: wire.waiting("gated") == 1, "one waits in the slot")
    body = b'{"inputs":[{"name":"IN","shape":[1,1],"datatype":"INT32","data":[9]}],"parameters":{"sequence_id":%d%s}}'
    for sequence in (1, 2):  # one in the slot, one in the backlog
        cancelled = wire.connect()
        flags = b',"sequence_start":true' if sequence == 2 else b""
        count = wire.waiting("gated")
        cancelled.sendall(wire.request("POST", "/v2/models/gated/infer", body % (sequence, flags)))
        wire.until(lambda count=count: wire.waiting("gated") == count + 1, "the cancelled waits")
        cancelled.close()
        wire.until(lambda: wire.waiting("gated") == 0, "the queue is empty")
    with pytest.raises(InferenceServerException, match="a request of it was cancelled"):
        waits.result()
    assert wire.graph_statistics("gated")["failures"] == {**before, "CANCELED": 3}
    release_file.touch()
    assert holds.result() == [-1]
    assert ask(states, "gated", 3, 3, start=True) == [3]
    later = Later(states, "gated", 4, 4, start=True, end=True)  # in the backlog until 3 is idle for too long
    assert later.result() == [4]
    assert "must specify the START flag" in refused(states, "gated", 1, 1)[1]


def test_an_open_sequence_continues_on_its_generation_after_a_reload(
    tmp_path: Path, add_model: Add, wire_to: Any
) -> None:
    gone = tmp_path / "gone"
    code = (
        SUMS.rstrip()
        + f"""

    def finalize(self):
        with open({str(gone)!r}, "a") as file:
            file.write("x")
"""
    )
    config = IN_OUT % (2, "1", 1, f"oldest {{ }} {FOREVER}")
    folder = add_model(tmp_path / "models", "sums", config, {"1/model.py": code})
    with serving(tmp_path / "models", "--model-control-mode=explicit", "--load-model=*") as served:
        wire = wire_to(served)
        assert ask(served, "sums", 1, 1, start=True) == [1]
        assert ask(served, "sums", 5, 2, start=True) == [5]
        (folder / "config.pbtxt").write_text(config.replace("max_batch_size: 2", "max_batch_size: 3"))
        with triton.InferenceServerClient(served.address) as client:
            client.load_model("sums")
            assert client.get_model_config("sums")["max_batch_size"] == 3
            (folder / "config.pbtxt").write_text(config.replace("max_batch_size: 2", "max_batch_size: 4"))
            client.load_model("sums")  # a second reload: the slot between them is empty
        assert ask(served, "sums", 100, 3, start=True) == [100]
        assert ask(served, "sums", 2, 1) == [3]
        assert ask(served, "sums", 5, 2, end=True) == [10]
        wire.until(gone.exists, "the instance between is closed, since it is not used any more")
        assert ask(served, "sums", 100, 3) == [200]
        assert gone.read_text() == "x"
        assert ask(served, "sums", 3, 1, end=True) == [6]
        wire.until(lambda: gone.read_text() == "xx", "the first instance is closed when its last sequence has ended")
        assert ask(served, "sums", 100, 3, end=True) == [300]


@pytest.mark.fault("X1")
def test_open_sequences_continue_during_a_drain_and_new_ones_are_refused(
    tmp_path: Path, add_model: Add, wire_to: Any
) -> None:
    kept = f"oldest {{ }} {FOREVER} {STATE % ('1', '')}"
    add_model(tmp_path, "sums", IN_OUT % (2, "1", 1, kept), {"1/model.onnx": adding_file()})
    with serving(tmp_path) as served:
        assert ask(served, "sums", 1, 1, start=True) == [1]
        served.process.send_signal(signal.SIGTERM)
        with triton.InferenceServerClient(served.address) as client:
            wire_to(served).until(lambda: not client.is_server_ready(), "it is not ready any more")
        assert ask(served, "sums", 2, 1) == [3]
        status, text = refused(served, "sums", 5, 2, start=True)
        assert (status, text.startswith("Server is stopping")) == ("503", True)
        assert refused(served, "sums", 5, 1, start=True)[0] == "503"
        assert ask(served, "sums", 3, 1, end=True) == [6]
        assert served.process.wait(10) == 0


# -------------------------------------------------------------------------------------------------------- in a graph


def test_a_stateful_step_has_the_sequence_of_the_ensembles_request(states: Served) -> None:
    """The steps before and after it are models without sequences."""
    assert ask(states, "pipe", 1, 9, start=True) == [4]
    assert ask(states, "pipe", 2, 9) == [12]
    assert ask(states, "direct", 1, 9, end=True) == [7]  # the sequence belongs to the model, not to a client
    status, text = refused(states, "pipe", 1, 9)
    assert (status, "in ensemble 'pipe', inference request for sequence 9 to model 'direct'" in text) == ("400", True)
    assert refused(states, "pipe", 1)[0] == "400"
