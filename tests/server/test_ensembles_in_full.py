"""Ensembles over HTTP, beyond chains: optional and omitted tensors, different shapes, the location in errors, limits of
a whole graph, the response cache, concurrent branches.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowserve.testing.serve import Served
from flowserve.values import DType
from tests.support.forked import serving
from tests.support.onnx_files import onnx_identity

CACHE_BYTES = 4000
SOON_S = 0.35  # less than the 0.4 s for which models sleep for requests with ROW or BAD


def tensor(kind: str, name: str, dims: str = "4", more: str = "", dtype: str = "FP32") -> str:
    return f'{kind} {{ name: "{name}" data_type: TYPE_{dtype} dims: [ {dims} ] {more} }}\n'


def step(model: str, taken: Mapping[str, str], made: Mapping[str, str]) -> str:
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in taken.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in made.items()]
    return f'  step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}\n'


def graph(tensors: str, *steps: str, batch: int = 16, more: str = "") -> str:
    scheduling = f"ensemble_scheduling {{\n{''.join(steps)}}}\n"
    return f'platform: "ensemble"\nmax_batch_size: {batch}\n{tensors}{scheduling}{more}'


def parameters(**values: object) -> str:
    return "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}\n' for k, v in values.items())


BOTH = tensor("input", "IN") + tensor("output", "OUT")
IN, OUT = {"IN": "IN"}, {"OUT": "OUT"}
TWO = [step("echo", IN, {"OUT": "a"}), step("echo", {"IN": "a"}, OUT)]
CACHE = "response_cache { enable: true }\n"
# OUT is left out for some values of the first number.
OMITS = 'return answer(OUT=given("IN")) if given("IN")[0, 0] >= 0 else answer()'
BIAS = """
        bias = pb_utils.get_input_tensor_by_name(request, "BIAS")
        return answer(OUT=given("IN") + (100 if bias is None else bias.as_numpy()))
"""
SLEEPS = """
        began = time.monotonic()
        time.sleep(0.4)
        return answer(WHEN=np.array([[began, time.monotonic()]]))
"""
TELLS = """
        told = (request.request_id(), request.parameters(), str(request.correlation_id()))
        return answer(**{name: np.array([[text.encode()]], np.object_)
                         for name, text in zip(("ID", "PARAMETERS", "SEQUENCE"), told)})
"""
SAYS_TOO_MUCH = r"""
        said = [{"n": 2**64}, {"n": -(2**63) - 1}, {"n": "\ud800"}, {"\ud800": 1}, {"n": 2**64 - 1}]
        chosen = said[int(given("IN")[0, 0])]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given("IN"))], parameters=chosen)
"""
SLOW = 'time.sleep(0.4 if given("IN")[0, 3] == 4 else 0.1); return answer(OUT=given("IN"))'
REFUSES = 'return refuse("not mine") if given("IN")[0, 0] < 0 else answer(OUT=given("IN") + 1)'
SHAPES = 'return answer(OUT=np.array(given("IN").shape, np.int64)[None] if {batched} else np.array(given("IN").shape))'


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
    add_model: Callable[..., Path],
    make_python: Callable[[str], dict[str, str | bytes]],
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("full")

    def model(name: str, body: str, tensors: str = BOTH, batch: int = 16, more: str = "") -> None:
        add_model(folder, name, f"max_batch_size: {batch}\n{tensors}{more}", make_python(body))

    echo = 'return answer(OUT=given("IN"))'
    model("echo", echo)
    model("omits", OMITS)
    model("refuses", REFUSES)
    model("slow", SLOW)
    model("crowded", SLOW, more="dynamic_batching {"
          " default_queue_policy { max_queue_size: 1 } preferred_batch_size: [ 1 ] }\n")  # fmt: skip
    bias = tensor("input", "IN") + tensor("input", "BIAS", more="optional: true") + tensor("output", "OUT")
    model("bias", BIAS, bias)
    model("alone", echo, batch=0)
    model(
        "shape_of_whole",
        SHAPES.format(batched=False),
        tensor("input", "IN") + tensor("output", "OUT", "1", dtype="INT64"),
        0,
    )
    square = tensor("input", "IN", "2, 2") + tensor("output", "OUT", "2, 2")
    model("square", 'assert given("IN").shape == (1, 2, 2); return answer(OUT=given("IN").transpose(0, 2, 1))', square)
    reshapes = tensor("input", "IN", more="reshape { shape: [ 2, 2 ] }")
    reshapes += tensor("output", "OUT", more="reshape { shape: [ 2, 2 ] }")
    model(
        "reshapes",
        'assert given("IN").shape[1:] == (2, 2); return answer(OUT=given("IN").transpose(0, 2, 1))',
        reshapes,
    )

    def x_to_y(tensors: str) -> str:
        return tensors.replace('"IN"', '"x"').replace('"OUT"', '"y"')

    file = onnx_identity(DType.FP32, ("N", 2, 2))
    add_model(folder, "onnx_reshapes", f"max_batch_size: 16\n{x_to_y(reshapes)}", {"1/model.onnx": file})
    scalar = tensor("input", "IN", "1", "reshape { }") + tensor("output", "OUT", "1", "reshape { }")
    add_model(
        folder,
        "onnx_single",
        f"max_batch_size: 16\n{x_to_y(scalar)}",
        {"1/model.onnx": onnx_identity(DType.FP32, ("N",))},
    )
    when = tensor("input", "IN") + tensor("output", "WHEN", "2", dtype="FP64")
    model("left", SLEEPS, when)
    model("right", SLEEPS, when)
    # A different number at every run, small enough to be exact in FP32.
    counts = (
        'return refuse("no") if given("IN")[0, 0] < 0 else answer(OUT=given("IN") * 0 + time.monotonic_ns() % 2**24)'
    )
    model("counts", counts, more=CACHE)
    any_width = tensor("input", "IN", "-1") + tensor("output", "OUT", "-1")
    model("wide", echo, any_width, more=CACHE)
    says = 'pb_utils.InferenceResponse(answer(OUT=given("IN")).output_tensors(), parameters={"said": 1})'
    model("slow_cached", f"time.sleep(0.4); return {says}", more=CACHE)

    def ensemble(name: str, text: str) -> None:
        add_model(folder, name, text)

    optional = tensor("input", "IN") + tensor("input", "BIAS", more="optional: true") + tensor("output", "OUT")
    ensemble(
        "with_bias", graph(optional, step("echo", IN, {"OUT": "a"}), step("bias", {"IN": "a", "BIAS": "BIAS"}, OUT))
    )
    hopes = tensor("input", "IN") + tensor("input", "MORE", more="optional: true") + tensor("output", "OUT")
    hopes += tensor("output", "OTHER")
    ensemble("hopes", graph(hopes, step("echo", IN, OUT), step("echo", {"IN": "MORE"}, {"OUT": "OTHER"})))
    ensemble(
        "leaves_out",
        graph(BOTH + tensor("output", "OTHER"), step("omits", IN, OUT), step("echo", IN, {"OUT": "OTHER"})),
    )
    needs = [step("omits", IN, {"OUT": "a"}), step("echo", {"IN": "a"}, OUT)]
    ensemble("needs_it", graph(BOTH, *needs))
    fills = [step("omits", IN, {"OUT": "a"}), step("bias", {"IN": "IN", "BIAS": "a"}, OUT)]
    ensemble("fills_in", graph(BOTH, *fills))
    ensemble("refused_inside", graph(BOTH, step("echo", IN, {"OUT": "a"}), step("refuses", {"IN": "a"}, OUT)))
    ensemble("around", graph(BOTH, step("refused_inside", IN, OUT)))
    ensemble("crowd", graph(BOTH, step("echo", IN, {"OUT": "a"}), step("crowded", {"IN": "a"}, OUT)))
    fails = graph(BOTH + tensor("output", "SLOW"), step("slow", IN, {"OUT": "SLOW"}), step("refuses", IN, OUT))
    ensemble("fails_early", fails)
    # steps with and without batching: a leading 1 is removed before `alone`, and added after it
    mixed = [step("echo", IN, {"OUT": "a"}), step("alone", {"IN": "a"}, {"OUT": "b"}), step("echo", {"IN": "b"}, OUT)]
    ensemble("mixed", graph(BOTH, *mixed))
    ensemble("no_batch", graph(BOTH, *TWO, batch=0))
    shaped = tensor("input", "IN", more="reshape { shape: [ 2, 2 ] }")
    shaped += tensor("output", "OUT", more="reshape { shape: [ 2, 2 ] }")
    ensemble("reshaped", graph(shaped, step("square", IN, OUT)))
    ensemble("reshaped_inside", graph(BOTH, step("reshaped", IN, {"OUT": "a"}), step("echo", {"IN": "a"}, OUT)))
    both = (
        tensor("input", "IN")
        + tensor("output", "LEFT", "2", dtype="FP64")
        + tensor("output", "RIGHT", "2", dtype="FP64")
    )
    ensemble("side_by_side", graph(both, step("left", IN, {"WHEN": "LEFT"}), step("right", IN, {"WHEN": "RIGHT"})))
    slowly = [step("echo", IN, {"OUT": "a"}), step("slow", {"IN": "a"}, OUT)]
    ensemble("deadline", graph(BOTH, *slowly, more=parameters(deadline_ms=100)))
    ensemble("patient", graph(BOTH, *slowly, more=parameters(deadline_ms=60000)))
    ensemble("one_at_a_time", graph(BOTH, *slowly, more=parameters(max_requests=1)))
    ensemble("one_then_another", graph(BOTH, *slowly, more=parameters(max_requests=1, when_full="wait")))
    ensemble("few_bytes", graph(BOTH, *slowly, more=parameters(max_request_bytes=20)))
    says = """
        if given("IN")[0, 0] == 0:
            return answer(OUT=given("IN"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given("IN"))], parameters=
            {"note": "three", "share": 0.5, "sure": True})
"""
    model("says", says, more="dynamic_batching { }\n")
    model("says_too_much", SAYS_TOO_MUCH)
    ensemble("around_says", graph(BOTH, step("says", IN, OUT)))
    speaks = """
        said = '{"sequence_id": "seven", "sequence_end": true}' if given("IN")[0, 0] > 0 else '{"sequence_end": "yes"}'
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", given("IN"))], parameters=said)
"""
    model("speaks", speaks)
    model("flags", "return answer(OUT=np.array([[request.flags() & 1, request.flags() >> 1 & 1, 0, 0]], np.float32))")
    ensemble("ends", graph(BOTH, step("speaks", IN, {"OUT": "a"}), step("flags", {"IN": "a"}, OUT)))
    words = ("ID", "PARAMETERS", "SEQUENCE")
    told = tensor("input", "IN") + "".join(tensor("output", name, "1", dtype="STRING") for name in words)
    model("tells", TELLS, told)
    ensemble("tells_inside", graph(told, step("tells", IN, {name: name for name in words})))
    ensemble("cached", graph(BOTH, step("echo", IN, {"OUT": "a"}), step("refuses", {"IN": "a"}, OUT), more=CACHE))
    # Ensembles around models that have a cache. `adds` writes into its input, in the server's own memory.
    model("adds", 'row = given("IN"); row += 1; return answer(OUT=row)', more=parameters(execution="thread"))
    after = {name: step(name, {"IN": "a"}, {"OUT": "b"}) for name in ("counts", "slow_cached", "wide")}
    first, last = step("echo", IN, {"OUT": "a"}), step("adds", {"IN": "b"}, OUT)
    ensemble("around_counts", graph(BOTH, first, after["counts"], last))
    ensemble("cached_around_counts", graph(BOTH, first, after["counts"], last, more=CACHE))
    ensemble("around_slow_cached", graph(BOTH, first, after["slow_cached"], last))
    ensemble("twice_slow_cached", graph(BOTH, after["slow_cached"].replace('"a"', '"IN"'), step("slow_cached",
        IN, {"OUT": "c"}), step("bias", {"IN": "b", "BIAS": "c"}, OUT)))  # fmt: skip
    ensemble("around_wide", graph(any_width, step("wide", IN, {"OUT": "b"}), step("wide", {"IN": "b"}, OUT)))
    with serving(folder, "--cache-config", f"local,size={CACHE_BYTES}") as running:
        yield running


@pytest.fixture(scope="module")
def wire(served: Served, wire_to: Callable[[Served], Any]) -> Any:
    return wire_to(served)


def ask(wire: Any, model: str, **inputs: Sequence[float]) -> Any:
    tensors = [{"name": n, "shape": [1, len(v)], "datatype": "FP32", "data": v} for n, v in inputs.items()]
    return wire.post(f"/v2/models/{model}/infer", json.dumps({"inputs": tensors}).encode())


def ask_until_soon(question: Callable[[], Any]) -> Any:
    """The response, if it takes less time than the models that sleep. The request is repeated if the machine was too
    busy.
    """
    answers: list[Any] = []
    while not answers or (answers[-1].seconds >= SOON_S and len(answers) < 3):
        answers.append(question())
    assert answers[-1].seconds < SOON_S, f"a model that sleeps was waited for: {[one.seconds for one in answers]}"
    return answers[-1]


def outputs(answer: Any) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    return {one["name"]: one["data"] for one in answer.json["outputs"]}


ROW = [1.0, 2.0, 3.0, 4.0]
QUICK = [1.0, 2.0, 3.0, 5.0]
BAD = [-1.0, 2.0, 3.0, 4.0]

# --------------------------------------------------------------------------------------------- optional, and left out


def test_an_optional_input_of_an_ensemble_reaches_its_step_or_does_not(wire: Any) -> None:
    assert outputs(ask(wire, "with_bias", IN=ROW, BIAS=ROW)) == {"OUT": [2, 4, 6, 8]}
    assert outputs(ask(wire, "with_bias", IN=ROW)) == {"OUT": [101, 102, 103, 104]}


def test_a_missing_required_input_is_refused_before_any_step_runs(wire: Any) -> None:
    before = wire.statistics("echo")["inference_count"]
    answer = ask(wire, "hopes", IN=ROW)
    assert answer.status == 400
    assert answer.error.startswith("in ensemble 'hopes', expected 1 inputs but not all were given for model 'echo'.")
    assert "['IN'], to which 'MORE' is mapped" in answer.error
    assert "(step 'echo#2' at hopes/config.pbtxt:" in answer.error
    assert wire.statistics("echo")["inference_count"] == before
    only = wire.infer("hopes", [ROW], outputs=[{"name": "OUT"}])
    assert only.data == ROW, "an output that is not requested needs no inputs"


@pytest.mark.fault("E8")
def test_an_output_that_a_step_omits_is_omitted_from_the_response(wire: Any) -> None:
    assert outputs(ask(wire, "leaves_out", IN=BAD)) == {"OTHER": BAD}
    assert outputs(ask(wire, "leaves_out", IN=ROW)) == {"OUT": ROW, "OTHER": ROW}


@pytest.mark.fault("E8")
def test_a_step_runs_without_an_omitted_optional_input(wire: Any) -> None:
    assert outputs(ask(wire, "fills_in", IN=BAD)) == {"OUT": [x + 100 for x in BAD]}


@pytest.mark.fault("E8")
def test_a_step_without_a_required_input_is_refused_as_on_triton(wire: Any) -> None:
    answer = ask(wire, "needs_it", IN=BAD)
    assert answer.status == 400
    assert answer.error.startswith("in ensemble 'needs_it', expected 1 inputs but got 0 inputs for model 'echo'.")
    assert "missing required input(s) ['IN']. Please" in answer.error
    assert "Step 'omits' returned no output 'OUT' (step 'echo' at needs_it/config.pbtxt:" in answer.error
    assert outputs(ask(wire, "needs_it", IN=ROW)) == {"OUT": ROW}


# -------------------------------------------------------------------------------------------------------------- shapes


def test_a_batch_dimension_of_one_is_added_and_removed_between_batching_and_other_steps(wire: Any) -> None:
    assert outputs(ask(wire, "mixed", IN=ROW)) == {"OUT": ROW}
    shape = [{"name": "IN", "shape": [4], "datatype": "FP32", "data": ROW}]
    answer = wire.post("/v2/models/no_batch/infer", json.dumps({"inputs": shape}).encode())
    assert [one["shape"] for one in answer.json["outputs"]] == [[4]]
    assert outputs(answer) == {"OUT": ROW}


def test_a_request_of_two_rows_fails_at_a_step_without_batching(wire: Any) -> None:
    answer = wire.infer("mixed", [ROW, ROW])
    assert answer.status == 400
    assert answer.error.startswith("in ensemble 'mixed', unexpected shape for input 'IN' for model 'alone'. Expected")
    assert "Expected [4], got [2,4] (step 'alone' at mixed/config.pbtxt:7:3, inputs IN [2,4])" in answer.error


def test_a_reshape_adapts_an_onnx_model_to_its_clients(wire: Any) -> None:
    def shape_and_data(model: str, rows: Sequence[Sequence[float]]) -> tuple[list[int], list[float]]:
        body = wire.infer_request(model, rows).partition(b"\r\n\r\n")[2].replace(b'"IN"', b'"x"')
        (made,) = wire.post(f"/v2/models/{model}/infer", body).json["outputs"]
        return made["shape"], made["data"]

    assert shape_and_data("onnx_reshapes", [ROW, BAD]) == ([2, 4], ROW + BAD)
    assert shape_and_data("onnx_single", [[1.0], [2.0], [3.0]]) == ([3, 1], [1, 2, 3])


def test_a_reshape_is_seen_by_steps_and_never_by_clients(wire: Any) -> None:
    for name in ("reshapes", "reshaped", "reshaped_inside"):
        answer = ask(wire, name, IN=ROW)
        assert outputs(answer) == {"OUT": [1, 3, 2, 4]}, name
        assert answer.json["outputs"][0]["shape"] == [1, 4], name


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ["refused_inside", "around"])
def test_an_error_ends_with_its_graph_step_line_instance_and_shapes(wire: Any, name: str) -> None:
    answer = ask(wire, name, IN=BAD)
    node = "refused_inside/refuses" if name == "around" else "refuses"
    assert answer.error == (
        f"in ensemble '{name}', not mine (step '{node}' at refused_inside/config.pbtxt:7:3, "
        "instance refuses_0, inputs IN [1,4])"
    )


@pytest.mark.fault("E10")
def test_a_full_inner_queue_is_unavailable_with_the_name_of_the_step(wire: Any) -> None:
    answers = wire.together([wire.infer_request("crowd", [ROW]) for _ in range(8)])
    refused = [answer for answer in answers if answer.status != 200]
    assert refused
    for answer in refused:
        assert answer.status == 503
        assert "Exceeds maximum queue size" in answer.error
        assert "(step 'crowded' at crowd/config.pbtxt:7:3, inputs IN [1,4])" in answer.error
    assert outputs(ask(wire, "crowd", IN=QUICK)) == {"OUT": QUICK}
    assert wire.waiting("crowded") == 0


def test_the_first_failed_step_fails_the_request_without_delay(wire: Any) -> None:
    assert ask_until_soon(lambda: ask(wire, "fails_early", IN=BAD)).status == 500


@pytest.mark.fault("E13")
def test_eighty_concurrent_requests_to_ensembles_mix_no_tensors(wire: Any) -> None:
    makers: dict[str, Callable[[list[float]], dict[str, list[float]]]] = {
        "mixed": lambda row: {"OUT": row},
        "leaves_out": lambda row: {"OUT": row, "OTHER": row},
        "fails_early": lambda row: {"OUT": [x + 1 for x in row], "SLOW": row},
        "reshaped_inside": lambda row: {"OUT": [row[0], row[2], row[1], row[3]]},
    }
    names = [[*makers][number % 4] if number % 20 else "fails_early" for number in range(80)]
    names = [name if name != "fails_early" or number % 20 == 0 else "mixed" for number, name in enumerate(names)]
    rows = [[4.0 * number + column for column in range(4)] for number in range(80)]
    answers = wire.together([wire.infer_request(name, [row]) for name, row in zip(names, rows, strict=True)])
    assert [outputs(answer) for answer in answers] == [makers[name](row) for name, row in zip(names, rows, strict=True)]


# ------------------------------------------------------------------------------------------------- branches, departures


def test_branches_in_processes_overlap_in_time_and_an_unwanted_one_is_not_run(wire: Any) -> None:
    made = outputs(ask(wire, "side_by_side", IN=ROW))
    (left_began, left_ended), (right_began, right_ended) = made["LEFT"], made["RIGHT"]
    assert left_began < right_ended
    assert right_began < left_ended
    before = wire.statistics("right")["inference_count"]
    answer = wire.infer("side_by_side", [ROW], outputs=[{"name": "LEFT"}])
    assert [one["name"] for one in answer.json["outputs"]] == ["LEFT"]
    assert wire.statistics("right")["inference_count"] == before


@pytest.mark.fault("D12")
def test_a_closed_connection_removes_its_steps_from_every_queue(wire: Any) -> None:
    ran = wire.statistics("slow")["inference_count"]
    body = wire.infer_request("fails_early", [ROW])
    sockets: list[socket.socket] = [wire.connect() for _ in range(6)]
    for each in sockets:
        each.sendall(body)
    wire.until(lambda: wire.waiting("slow") >= 4, "steps wait")
    for each in sockets:
        each.close()
    wire.until(lambda: wire.waiting("slow") == 0, "they are withdrawn")
    assert outputs(ask(wire, "slow", IN=QUICK)) == {"OUT": QUICK}
    assert wire.statistics("slow")["inference_count"] <= ran + 3, "steps ran for closed connections"


# --------------------------------------------------------------------------------------------------------------- limits


def test_the_deadline_of_a_graph_covers_all_steps_and_the_error_names_the_current_one(wire: Any) -> None:
    answer = ask_until_soon(lambda: ask(wire, "deadline", IN=ROW))
    assert answer.status == 504
    assert answer.error.startswith("in ensemble 'deadline', Request timeout expired: its deadline passed after ")
    assert 100 <= int(answer.error.partition(" passed after ")[2].split()[0]) < SOON_S * 1000
    assert "it was in step 'slow' (step 'slow' at deadline/config.pbtxt:7:3, inputs IN [1,4])" in answer.error
    assert answer.seconds > 0.08
    assert outputs(ask(wire, "patient", IN=QUICK)) == {"OUT": QUICK}


def test_the_smaller_of_a_requests_timeout_and_its_deadline_applies(wire: Any) -> None:
    answer = ask_until_soon(lambda: wire.infer("patient", [ROW], parameters={"timeout": 50_000}))
    assert answer.status == 504
    assert "its deadline passed" in answer.error


def test_a_request_over_the_concurrency_limit_of_a_graph_is_refused(wire: Any) -> None:
    answers = wire.together([wire.infer_request("one_at_a_time", [ROW]) for _ in range(3)])
    assert sorted(answer.status for answer in answers) == [200, 503, 503]
    refused = next(answer for answer in answers if answer.status == 503)
    assert refused.error == "'one_at_a_time' is full: 1 requests are under way (max_requests 1); ask again later"
    assert outputs(ask(wire, "one_at_a_time", IN=QUICK)) == {"OUT": QUICK}


def test_requests_over_the_concurrency_limit_may_wait_for_admission(wire: Any) -> None:
    answers = wire.together([wire.infer_request("one_then_another", [QUICK]) for _ in range(3)])
    assert [answer.status for answer in answers] == [200] * 3
    assert sorted(answer.seconds for answer in answers)[2] > 0.28, "they ran beside each other"


def test_requests_over_the_byte_limit_of_a_graph_are_refused(wire: Any) -> None:
    answers = wire.together([wire.infer_request("few_bytes", [ROW]) for _ in range(2)])
    assert sorted(answer.status for answer in answers) == [200, 503]
    assert any("16 bytes of requests are under way (max_request_bytes 20)" in str(answer.body) for answer in answers)
    too_large = wire.infer("few_bytes", [ROW, ROW])
    assert too_large.status == 413
    assert "a request of 32 bytes can never be let in" in too_large.error


# ---------------------------------------------------------------------------------------------------------- parameters


def test_response_parameters_of_a_model_reach_the_client(wire: Any) -> None:
    assert ask(wire, "says", IN=ROW).json["parameters"] == {"note": "three", "share": 0.5, "sure": True}
    assert "parameters" not in ask(wire, "says", IN=[0.0, 0.0, 0.0, 0.0]).json
    pair = wire.together([wire.infer_request("says", [row]) for row in (ROW, [0.0] * 4)])
    assert ["parameters" in answer.json for answer in pair] == [True, False]


def test_a_response_parameter_that_cannot_be_encoded_is_an_error_of_the_model(wire: Any) -> None:
    for which in range(4):
        answer = wire.infer("says_too_much", [[which, 0, 0, 0]])
        assert answer.status == 500
        assert answer.error.startswith("model 'says_too_much': response parameter ")
    assert wire.infer("says_too_much", [[4, 0, 0, 0]]).json["parameters"] == {"n": 2**64 - 1}


def test_only_sequence_parameters_of_a_step_reach_the_client_of_an_ensemble(wire: Any) -> None:
    stateless = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
    assert ask(wire, "around_says", IN=ROW).json["parameters"] == stateless
    text = wire.infer("around_says", [ROW], parameters={"sequence_id": 7, "sequence_start": True})
    assert text.json["parameters"] == {"sequence_id": 7, "sequence_start": True, "sequence_end": False}
    assert text.body.count(b'"sequence_id"') == 1


def test_a_step_that_sets_sequence_parameters_clears_omitted_flags(wire: Any) -> None:
    given = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    answer = wire.infer("ends", [ROW], parameters=given)
    assert answer.json["parameters"] == {"sequence_id": "seven", "sequence_start": False, "sequence_end": True}
    assert outputs(answer) == {"OUT": [0.0, 1.0, 0.0, 0.0]}, "the next step saw them as well"


def test_an_invalid_sequence_parameter_is_an_error_of_its_step(wire: Any) -> None:
    answer = wire.infer("ends", [[-1.0, 0.0, 0.0, 0.0]])
    assert answer.status == 400
    assert answer.error.startswith(
        "in ensemble 'ends', expected parameter 'sequence_end' to be true or false, got 'yes'"
    )
    assert "(step 'speaks' at ends/config.pbtxt:" in answer.error


def test_steps_get_the_id_and_parameters_of_the_request(wire: Any) -> None:
    parameters = {"mode": "fast", "priority": 1, "sequence_id": 9}
    answer = wire.infer("tells_inside", [ROW], id="seven", parameters=parameters)
    assert outputs(answer) == {"ID": ["seven"], "PARAMETERS": ['{"mode": "fast"}'], "SEQUENCE": ["9"]}


# ------------------------------------------------------------------------------------------------------------- answers


def counted(wire: Any, model: str) -> tuple[int, int, int]:
    row = wire.statistics(model)
    stats = row["inference_stats"]
    return stats["cache_hit"]["count"], stats["cache_miss"]["count"], row["execution_count"]


def test_an_equal_request_is_answered_from_the_cache(wire: Any) -> None:
    row = [5.0, 5.0, 5.0, 5.0]
    first = outputs(ask(wire, "counts", IN=row))
    before = counted(wire, "counts")
    assert outputs(ask(wire, "counts", IN=row)) == first
    after = counted(wire, "counts")
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 0, 0]
    assert outputs(ask(wire, "counts", IN=[5.0, 5.0, 5.0, 6.0])) != first
    durations = {name: one["count"] for name, one in wire.statistics("counts")["inference_stats"].items()}
    assert durations["queue"] == durations["success"]
    assert durations["compute_infer"] == durations["success"] - durations["cache_hit"], "as on Triton"
    assert durations["compute_input"] == durations["compute_output"] == durations["compute_infer"]


def test_the_response_of_a_graph_is_cached_as_a_whole(wire: Any) -> None:
    ask(wire, "cached", IN=ROW)
    echo = wire.statistics("echo")["inference_count"]
    assert outputs(ask(wire, "cached", IN=ROW)) == {"OUT": [2, 3, 4, 5]}
    assert wire.statistics("echo")["inference_count"] == echo
    assert counted(wire, "cached")[0] >= 1


def test_sixteen_equal_concurrent_requests_run_once(wire: Any) -> None:
    before = counted(wire, "slow_cached")
    answers = wire.together([wire.infer_request("slow_cached", [ROW]) for _ in range(16)])
    answers.append(wire.infer("slow_cached", [ROW]))
    assert [answer.data for answer in answers] == [ROW] * 17
    assert [answer.json["parameters"] for answer in answers] == [{"said": 1}] * 17
    after = counted(wire, "slow_cached")
    assert [now - then for now, then in zip(after, before, strict=True)] == [16, 1, 1]


def test_requests_equal_to_a_cancelled_one_are_still_answered(wire: Any) -> None:
    row = [[7.0, 7.0, 7.0, 7.0]]
    body = wire.infer_request("slow_cached", row)
    leader = wire.connect()
    leader.sendall(body)
    before = counted(wire, "slow_cached")
    leaves = threading.Timer(0.15, leader.close)  # in the middle of the model's sleep
    leaves.start()
    answers = wire.together([wire.infer_request("slow_cached", row) for _ in range(2)])
    leaves.join()
    assert [answer.data for answer in answers] == [row[0]] * 2
    after = counted(wire, "slow_cached")
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 2]


@pytest.mark.fault("R13")
@pytest.mark.parametrize("model", ["counts", "cached"])
def test_an_error_is_not_cached(wire: Any, model: str) -> None:
    before = counted(wire, model)
    for _ in range(2):
        assert ask(wire, model, IN=[-3.0, 0.0, 0.0, 0.0]).status == 500
    assert counted(wire, model)[0] == before[0]


@pytest.mark.fault("R12")
def test_a_response_larger_than_the_cache_is_served_and_not_cached(wire: Any) -> None:
    wide = [float(i) for i in range(CACHE_BYTES // 4)]
    for _ in range(2):
        assert outputs(ask(wire, "wide", IN=wide)) == {"OUT": wide}
    assert counted(wire, "wide") == (0, 2, 2)


@pytest.mark.fault("R12")
def test_a_full_cache_drops_its_oldest_responses_and_all_requests_are_answered(wire: Any) -> None:
    rows = [[float(number)] * 250 for number in range(8)]  # there is room for two responses
    before = counted(wire, "wide")
    for row in (*rows, *rows, rows[-1]):
        assert outputs(ask(wire, "wide", IN=row)) == {"OUT": row}
    assert [now - then for now, then in zip(counted(wire, "wide"), before, strict=True)] == [1, 16, 16]


def grown(wire: Any, before: Mapping[str, tuple[int, int, int]]) -> dict[str, list[int]]:
    """How much hits, misses and executions have grown, by model."""
    after = {model: counted(wire, model) for model in before}
    return {model: [now - then for now, then in zip(after[model], before[model], strict=True)] for model in before}


def test_a_step_is_answered_from_the_cache_of_its_model(wire: Any) -> None:
    row = [21.0, 0.0, 0.0, 0.0]
    before = {model: counted(wire, model) for model in ("around_counts", "counts", "adds")}
    successes = wire.statistics("counts")["inference_stats"]["success"]["count"]
    first = outputs(ask(wire, "around_counts", IN=row))
    for _ in range(2):  # the model after it writes into its input
        assert outputs(ask(wire, "around_counts", IN=row)) == first
    assert grown(wire, before) == {"around_counts": [0, 0, 3], "counts": [2, 1, 1], "adds": [0, 0, 3]}
    durations = {name: one["count"] for name, one in wire.statistics("counts")["inference_stats"].items()}
    assert durations["success"] == durations["queue"] == successes + 3
    assert durations["compute_infer"] == durations["success"] - durations["cache_hit"]
    # A request of the model itself has the same entry.
    assert outputs(ask(wire, "counts", IN=row)) == {"OUT": [number - 1 for number in first["OUT"]]}
    assert grown(wire, before)["counts"] == [3, 1, 1]
    metrics = wire.get("/metrics").body.decode()
    hits = next(line for line in metrics.splitlines() if line.startswith('nv_cache_num_hits_per_model{model="counts"'))
    assert int(hits.split()[-1]) == counted(wire, "counts")[0]


def test_the_entry_of_an_ensemble_is_looked_up_before_those_of_its_steps(wire: Any) -> None:
    row = [22.0, 0.0, 0.0, 0.0]
    before = {model: counted(wire, model) for model in ("cached_around_counts", "counts", "echo")}
    first = outputs(ask(wire, "cached_around_counts", IN=row))
    assert outputs(ask(wire, "cached_around_counts", IN=row)) == first
    assert grown(wire, before) == {"cached_around_counts": [1, 1, 1], "counts": [0, 1, 1], "echo": [0, 0, 1]}


def test_sixteen_equal_concurrent_steps_run_once(wire: Any) -> None:
    row = [23.0, 0.0, 0.0, 0.0]
    before = {model: counted(wire, model) for model in ("around_slow_cached", "slow_cached")}
    answers = wire.together([wire.infer_request("around_slow_cached", [row]) for _ in range(16)])
    assert [answer.data for answer in answers] == [[24.0, 1.0, 1.0, 1.0]] * 16
    assert grown(wire, before) == {"around_slow_cached": [0, 0, 16], "slow_cached": [15, 1, 1]}


def test_two_equal_steps_of_one_request_run_once(wire: Any) -> None:
    before = {"slow_cached": counted(wire, "slow_cached")}
    assert outputs(ask(wire, "twice_slow_cached", IN=[24.0, 0.0, 0.0, 0.0])) == {"OUT": [48, 0, 0, 0]}
    assert grown(wire, before) == {"slow_cached": [1, 1, 1]}


def test_steps_equal_to_that_of_a_cancelled_request_are_still_answered(wire: Any) -> None:
    row = [[25.0, 0.0, 0.0, 0.0]]
    leader = wire.connect()
    leader.sendall(wire.infer_request("around_slow_cached", row))
    before = {"slow_cached": counted(wire, "slow_cached")}
    leaves = threading.Timer(0.15, leader.close)  # in the middle of the model's sleep
    leaves.start()
    answers = wire.together([wire.infer_request("around_slow_cached", row) for _ in range(2)])
    leaves.join()
    assert [answer.data for answer in answers] == [[26.0, 1.0, 1.0, 1.0]] * 2
    hits, misses, _ = grown(wire, before)["slow_cached"]
    assert (hits, misses) in ((1, 1), (1, 2)), "the cancelled step is counted if it ran to its end"


@pytest.mark.fault("R13")
def test_the_error_of_a_step_is_not_cached(wire: Any) -> None:
    before = {"counts": counted(wire, "counts")}
    answers = wire.together([wire.infer_request("around_counts", [[-3.0, 0.0, 0.0, 0.0]]) for _ in range(4)])
    assert [answer.status for answer in answers] == [500] * 4
    assert grown(wire, before)["counts"][0] == 0


@pytest.mark.fault("R12")
def test_the_result_of_a_step_larger_than_the_cache_is_used_and_not_cached(wire: Any) -> None:
    wide = [0.5 * i for i in range(CACHE_BYTES // 4)]
    before = {"wide": counted(wire, "wide")}
    assert outputs(ask(wire, "around_wide", IN=wide)) == {"OUT": wide}
    assert grown(wire, before) == {"wide": [0, 2, 2]}


def test_metrics_count_hits_and_misses_under_tritons_names(wire: Any) -> None:
    text = wire.get("/metrics").body.decode()
    for family in ("nv_cache_num_hits_per_model", "nv_cache_num_misses_per_model", "nv_cache_hit_duration_per_model"):
        assert f'{family}{{model="counts"' in text


def test_a_server_without_a_cache_logs_which_models_requested_one(
    served: Served,
    tmp_path: Path,
    add_model: Callable[..., Path],
    make_python: Callable[[str], dict[str, str | bytes]],
) -> None:
    echo = make_python('return answer(OUT=given("IN"))')
    add_model(tmp_path, "echo", f"max_batch_size: 16\n{BOTH}\n{CACHE}", echo)
    add_model(tmp_path, "twice", graph(BOTH, *TWO, more=CACHE))
    with serving(tmp_path) as forgetful:
        told = [line.split("] ", 1)[1] for line in forgetful.log.splitlines() if "response_cache" in line]
    why = "response_cache is not used: there is no cache"
    assert len(told) == 2
    for name, line in zip(("echo", "twice"), sorted(told), strict=True):
        assert line.startswith(f"{name}/config.pbtxt:")
        assert line.endswith(f"{why} (flowserve run --cache-config local,size=BYTES has one) [R15]")
    assert why not in served.log
