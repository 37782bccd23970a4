"""`flowserve infer`, `bench` and `new` from the command line."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trio

from flowserve.cli.bench import SweepTarget, Trial, Variant, recommended, sweep
from flowserve.cli.client import Address
from flowserve.cli.load import Measured
from flowserve.cli.main import main
from flowserve.cli.option_values import levels
from flowserve.cli.tensors import InferBody, generated_inputs, plain, read_answer, read_inputs
from flowserve.errors import Invalid
from flowserve.testing.serve import Served, serving
from flowserve.values import DType

TENSORS: dict[str, Any] = {
    "inputs": [
        {"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]},
        {"name": "X", "datatype": "FP32", "shape": [-1, 2]},
    ]
}


@pytest.fixture(scope="module")
def songs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home") / "songs"
    assert main(["new", str(folder)]) == 0
    return folder


WORDS = """\
import numpy as np
from flowserve import model

@model({"TEXT": "BYTES[1]", "TABLE": "FP32[-1,-1]?"}, {"WORD": "BYTES[1]", "LENGTHS": "INT32[-1,2]"}, decoupled=True)
def function(text, table):
    for word in text[0].split():
        if word == b"stop":
            raise ValueError("no more")
        yield np.array([word], object), np.full((2, 2), len(word), np.int32)
"""


TOTALS = """\
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        name, is_start = request.correlation_id(), request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        number = pb_utils.get_input_tensor_by_name(request, "NUMBER").as_numpy()
        if bool(is_start) == (name in self.totals):  # a sequence starts once, and ids are unique
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{name} begins in the middle"))
        total = self.totals[name] = self.totals.get(name, 0) + number
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            del self.totals[name]
        said = np.array([[json.dumps([len(self.totals), json.loads(request.parameters())])]], object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", total), pb_utils.Tensor("SAID", said)])
"""
TOTALS_CONFIG = """\
backend: "python"
max_batch_size: 8
input { name: "NUMBER" data_type: TYPE_INT32 dims: 1 }
output [ { name: "TOTAL" data_type: TYPE_INT32 dims: 1 }, { name: "SAID" data_type: TYPE_STRING dims: 1 } ]
sequence_batching {
  max_sequence_idle_microseconds: 30000000
  oldest { max_candidate_sequences: 2 }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
}
"""
ADDS_CONFIG = """\
platform: "ensemble"
max_batch_size: 1
input { name: "N" data_type: TYPE_INT32 dims: 1 }
output { name: "SUM" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling { step { model_name: "totals" model_version: -1
  input_map { key: "NUMBER" value: "N" } output_map { key: "TOTAL" value: "SUM" } } }
"""


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a decoupled model, and a sequence model, alone and in an ensemble."""
    others = tmp_path_factory.mktemp("others")
    for path, text in {
        "words/config.pbtxt": 'backend: "callable"\n',
        "words/1/model.py": WORDS,
        "totals/config.pbtxt": TOTALS_CONFIG,
        "totals/1/model.py": TOTALS,
        "adds/config.pbtxt": ADDS_CONFIG,
        "adds/1/empty": "",
    }.items():
        (others / path).parent.mkdir(parents=True, exist_ok=True)
        (others / path).write_text(text)
    return others


@pytest.fixture(scope="module")
def served(songs: Path, others: Path) -> Iterator[Served]:
    """The generated repository and `others`."""
    with serving(songs, str(others), "--python-execution", "thread") as server:
        yield server


def test_a_value_is_json_or_text_and_gets_a_missing_batch_dimension() -> None:
    found = read_inputs(["TEXT=good morning", "X=[1, 2.5]"], TENSORS)
    assert found["TEXT"].tolist() == [[b"good morning"]]
    np.testing.assert_array_equal(found["X"], np.array([[1, 2.5]], np.float32))
    assert read_inputs(['TEXT=[["a"],["b"]]', "X=[[1,2],[3,4]]"], TENSORS)["TEXT"].shape == (2, 1)


def test_files_hold_tensors_bytes_or_pictures(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    (tmp_path / "x.json").write_text("[[5, 6]]")
    (tmp_path / "text.txt").write_bytes(b"\xff\x00")
    given = [f"TEXT=@{tmp_path}/text.txt", f"X=@{tmp_path}/x.npy"]
    found = read_inputs(given, TENSORS)
    assert found["TEXT"].tolist() == [[b"\xff\x00"]]
    assert (found["X"].dtype, found["X"].shape) == (np.float32, (3, 2))
    assert read_inputs([given[0], f"X=@{tmp_path}/x.json"], TENSORS)["X"].tolist() == [[5, 6]]
    assert read_inputs(["TEXT=a", "X=[-Infinity, 1e38]"], TENSORS)["X"].tolist() == [[-np.inf, np.float32(1e38)]]
    from PIL import Image

    Image.new("RGB", (4, 3), (255, 0, 0)).save(tmp_path / "red.png")
    picture = {"inputs": [{"name": "IMAGE", "datatype": "UINT8", "shape": [-1, -1, 3]}]}
    image = read_inputs([f"IMAGE=@{tmp_path}/red.png"], picture)["IMAGE"]
    assert (image.shape, image[0, 0].tolist()) == ((3, 4, 3), [255, 0, 0])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["TEXT"], "expected NAME=VALUE"),
        (["TXET=a"], 'did you mean "TEXT"'),
        (["TEXT=a"], r"X=\.\.\. is missing; the model wants TEXT BYTES\[-1, 1\]"),
        (["TEXT=a", "X=[1,"], "is no JSON for a tensor of FP32"),
        (["TEXT=a", "X={}"], "it holds what is no number"),
        (["TEXT=a", "X=null"], "it holds what is no number"),
        (["TEXT=a", 'X=["1"]'], "it holds text"),
        (["TEXT=a", "X=[1, 1e400]"], "it holds 1e400, which is too large"),
        (["TEXT=a", "X=[1, -1e39]"], r"it holds -1e\+39, which is too large for it"),
        (["TEXT=a", "TEXT=b"], "--input TEXT: it is given twice"),
        (["TEXT=a", "X=@nowhere.npy"], "nowhere.npy cannot be read: No such file"),
        (["TEXT=a", "X=[[1],[2,3]]"], "is no JSON for a tensor of FP32: its lists are of different lengths"),
    ],
)
def test_an_invalid_input_names_the_expected_tensor(words: list[str], text: str) -> None:
    with pytest.raises(Invalid, match=text):
        read_inputs(words, TENSORS)


@pytest.mark.parametrize(
    ("dtype", "value", "text"),
    [
        ("INT8", "[1, 200]", r"it holds 200, and the least and most are \(-128, 127\)"),
        ("UINT64", "-1", "it holds -1"),
        ("INT32", "1.5", "it holds numbers with fractions"),
        ("BOOL", "[0, 2]", "it holds 2"),
        ("INT64", "[18446744073709551616]", "no number, or has more than 64 bits"),
    ],
)
def test_no_value_is_changed_silently(dtype: str, value: str, text: str, tmp_path: Path) -> None:
    wanted = {"inputs": [{"name": "N", "datatype": dtype, "shape": [-1]}]}
    with pytest.raises(Invalid, match=text):
        read_inputs([f"N={value}"], wanted)
    (tmp_path / "n.json").write_text(value)
    with pytest.raises(Invalid, match=rf"n\.json is no tensor of {dtype}: .*{text}"):
        read_inputs([f"N=@{tmp_path}/n.json"], wanted)


@pytest.mark.parametrize(("dtype", "value", "same"), [("FP16", "[1, 2]", [1, 2]), ("BOOL", "[1, 0]", [True, False])])
def test_a_value_of_another_type_is_accepted_if_it_is_unchanged(dtype: str, value: str, same: list[object]) -> None:
    wanted = {"inputs": [{"name": "N", "datatype": dtype, "shape": [-1]}]}
    assert read_inputs([f"N={value}"], wanted)["N"].tolist() == same


@pytest.mark.parametrize("dtype", list(DType))
def test_every_type_round_trips(dtype: DType) -> None:
    array = np.array([[b"a", b""]], np.object_) if dtype is DType.BYTES else np.array([[1, 0]]).astype(dtype.numpy)
    body, headers = InferBody({"T": array}, ["T"]).of()
    length = {"inference-header-content-length": headers["Inference-Header-Content-Length"]}
    header, arrays = read_answer(length, _as_answer(body, headers))
    assert header["model_name"] == "m"
    assert arrays["T"].dtype == array.dtype
    assert plain(arrays["T"]) == plain(array)


def _as_answer(body: bytes, headers: dict[str, str]) -> bytes:
    """The request's own tensors as a server's response, with the header padded to its old length."""
    length = int(headers["Inference-Header-Content-Length"])
    text = json.dumps({"model_name": "m", "outputs": json.loads(body[:length])["inputs"]}).encode()
    return text.ljust(length) + body[length:]


def test_optional_inputs_are_not_generated() -> None:
    text, number = TENSORS["inputs"]
    assert generated_inputs({"inputs": [text, {**number, "optional": True}]}).keys() == {"TEXT"}


def test_levels_double_or_are_listed() -> None:
    assert levels("1:32") == (1, 2, 4, 8, 16, 32)
    assert levels("3:10") == (3, 6, 10)
    assert levels("1,8") == (1, 8)
    for wrong in ("", "0", "8:1", "x", "1:2:3", "5000"):
        with pytest.raises(argparse.ArgumentTypeError):
            levels(wrong)


def test_a_server_is_named_by_url_or_by_host_and_port() -> None:
    assert Address.of("localhost:8000") == Address("localhost", 8000)
    assert Address.of("https://host/behind/") == Address("host", 443, True, "/behind")
    assert str(Address.of("[::1]:80")) == "http://[::1]:80"
    assert Address.of("host/ü").prefix == "/%C3%BC"
    for wrong in ("ftp://host", "host:port", "", "http://[::1", "local host:80"):
        with pytest.raises(Invalid, match="is no server's URL"):
            Address.of(wrong)


def test_the_simplest_of_equal_configurations_within_the_bound_is_recommended() -> None:
    def tried(instances: int, rate: float, p99: float) -> Trial:
        return Trial(Variant(instances, 0, 0), Measured(8, rate, 1, 1, p99, 0))

    rows = [tried(1, 100, 5), tried(2, 101, 6), tried(4, 200, 30)]
    assert recommended(rows, None) is rows[2]
    assert recommended(rows, 10) is rows[0]
    assert recommended(rows, 1) is None


@pytest.mark.server
def test_infer_prints_arrays_for_people_and_json_for_programs(
    served: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ask = ["infer", served.address, "songs", "--input", "TEXT=aria"]
    assert main(ask) == 0
    assert capsys.readouterr().out == "WORD  BYTES [1, 1]\n[[b'sung']]\n"
    assert main([*ask, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["outputs"] == [{"name": "WORD", "datatype": "BYTES", "shape": [1, 1], "data": [["sung"]]}]
    assert main([*ask, "--output", f"WORD={tmp_path}/word.txt"]) == 0
    assert (tmp_path / "word.txt").read_bytes() == b"sung"


@pytest.mark.server
def test_infer_prints_every_response_of_a_decoupled_model(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["infer", served.address, "words", "--input", "TEXT=to be"]
    assert main([*ask, "--output", "WORD"]) == 0
    assert capsys.readouterr().out == "WORD  BYTES [1]\n[b'to']\nWORD  BYTES [1]\n[b'be']\n"
    assert main([*ask, "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == {
        "model_name": "words",
        "model_version": "1",
        "outputs": [
            {"name": "WORD", "datatype": "BYTES", "shape": [1], "data": ["to"]},
            {"name": "LENGTHS", "datatype": "INT32", "shape": [2, 2], "data": [[2, 2], [2, 2]]},
        ],
    }
    assert second["outputs"][0]["data"] == ["be"]
    assert main(["infer", served.address, "words", "--input", "TEXT= "]) == 0
    assert capsys.readouterr().out == ""
    assert main(["infer", served.address, "words", "--input", "TEXT=to stop", "--output", "WORD"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "WORD  BYTES [1]\n[b'to']\n"
    assert "answered: model 'words' failed: ValueError: no more" in printed.err


@pytest.mark.server
def test_infer_sends_sequence_and_request_parameters(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    def total(number: int, *words: str) -> list[Any]:
        ask = ["infer", served.address, "totals", "--input", f"NUMBER={number}", "--json", *words]
        assert main(ask) == 0
        total, said = (output["data"][0][0] for output in json.loads(capsys.readouterr().out)["outputs"])
        return [total, json.loads(said)[1]]

    more = ["--parameter", "priority=1", "--parameter", "mood=good", "--parameter", "n=5", "--parameter", 'text="5"']
    assert total(1, "--sequence-id", "anna", "--sequence-start") == [1, {}]
    assert total(2, "--sequence-id", "anna", *more) == [3, {"mood": "good", "n": 5, "text": "5"}]
    assert total(3, "--sequence-id", "anna", "--sequence-end") == [6, {}]
    for text in ('"7"', "true", "1.5"):  # a value that is no integer is text
        assert total(7, "--sequence-id", text, "--sequence-start", "--sequence-end") == [7, {}]
    for words, told in [
        ((), "must specify a non-zero or non-empty correlation ID"),
        (("--sequence-id", "anna"), "must specify the START flag"),
        (("--sequence-id", "7", "--sequence-start"), "data-type is 'UINT64', but model 'totals' expects 'BYTES'"),
    ]:
        assert main(["infer", served.address, "totals", "--input", "NUMBER=1", *words]) == 1
        assert told in capsys.readouterr().err
    assert main(["infer", served.address, "words", "--input", "TEXT=a", "--parameter", "priority=1"]) == 1
    assert "priority: a model that answers many times is asked over generate_stream" in capsys.readouterr().err
    assert main(["infer", served.address, "words", "--input", "TEXT=a", "--parameter", "mood=good"]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sequence-start"], "--sequence-start and --sequence-end have no effect without --sequence-id"),
        (["--parameter", "priority"], "--parameter: expected NAME=VALUE, got 'priority'"),
    ],
)
def test_an_incomplete_request_parameter_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["infer", "localhost", "m", *words])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.server
def test_each_response_is_printed_on_arrival_and_a_closed_pipe_is_no_error(served: Served) -> None:
    text = "TEXT=" + "long " * 20_000
    command = [sys.executable, "-m", "flowserve", "infer", served.address, "words", "--input", text, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as infer:
        assert infer.stdout is not None
        assert json.loads(infer.stdout.readline())["outputs"][0]["data"] == ["long"]
        infer.stdout.close()
        assert infer.stderr is not None
        assert infer.stderr.read() == ""
        assert infer.wait(60) == 1


@pytest.mark.server
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["words", "--input", "TEXT=a", "--output", "WORD=file.txt"], "answers any number of times; only names"),
        (["words", "--input", "TEXT=a", "--output", "WORT"], "the model has no such output; it has WORD, LENGTHS"),
        (["words", "--input", "TEXT=a", "--input", "TABLE=[[1,2],[3,4]]"], "4 elements of [-1, -1] cannot be [2, 2]"),
        (["songs", "--input", "TXT=a"], "the model has no input 'TXT' (did you mean \"TEXT\"?)"),
        (["sings", "--input", "TEXT=a"], "answered 404"),
        (["songs", "--input", 'TEXT=[[["deep"]]]'], "answered 400"),
        (["songs", "--input", "TEXT=a", "--output", "WORT"], "answered 400"),
        (["songs", "--input", "TEXT=a", "--output", "WORD=/proc/x.npy"], "/proc/x.npy: it cannot be written: No such"),
    ],
)
def test_an_error_is_one_sentence_and_status_1(
    served: Served, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert main(["infer", served.address, *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("flowserve: ")
    assert text in printed.err


@pytest.mark.server
def test_a_server_that_speaks_no_tls_is_one_sentence(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", f"https://{served.address}", "songs"]) == 1
    assert "; does it speak HTTPS?" in capsys.readouterr().err


def test_a_missing_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "127.0.0.1:9", "songs"]) == 1
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"\0\0\x18\4\0\0\0\0\0\0\4\0@\0\0", "this does not speak HTTP; is it the gRPC port?"),  # HTTP/2's settings
        (b"HTTP/1.1 500 No\r\n\r\n\x1b[31mred\r\n", "answered 500: ?[31mred"),
    ],
)
def test_control_characters_of_another_server_do_not_reach_the_terminal(
    answer: bytes, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        speaker = threading.Thread(target=speak)
        speaker.start()
        assert main(["infer", f"127.0.0.1:{listener.getsockname()[1]}", "songs"]) == 1
        speaker.join()
    said = capsys.readouterr().err
    assert said.rstrip().endswith(told)
    assert said.replace("\n", "").isprintable()


@pytest.mark.server
def test_bench_measures_every_level_and_is_quiet_off_a_terminal(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", served.address, "songs", "--concurrency", "1,3", "--seconds", "0.2", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    rows = json.loads(printed.out)["levels"]
    assert [row["concurrency"] for row in rows] == [1, 3]
    for row in rows:
        assert row["requests_per_s"] > 0
        assert row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["failed"] == 0
    assert main(["bench", served.address, "songs", "--concurrency", "1", "--seconds", "0.2"]) == 0
    assert "requests/s" in capsys.readouterr().out


@pytest.mark.server
def test_bench_reports_why_no_request_succeeds(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--input", 'TEXT=[[["deep"]]]', "--concurrency", "1", "--seconds", "0.1"]
    assert main(["bench", served.address, "songs", *wrong]) == 1
    assert "the server answered 400: " in capsys.readouterr().err


@pytest.mark.server
def test_bench_of_a_decoupled_model_reports_response_times(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["bench", served.address, "words", "--concurrency", "1,2", "--seconds", "0.2", "--input"]
    assert main([*ask, "TEXT=to be or not", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["levels"]:
        assert row["failed"] == 0
        assert 3 < row["responses_per_s"] / row["requests_per_s"] < 5
        assert 0 < row["first_p50_ms"] <= row["first_p90_ms"] <= row["first_p99_ms"]
        # This does not hold for the 99th percentile: requests that are still open at the end have first responses too.
        assert row["first_p50_ms"] <= row["p50_ms"]
        assert 0 <= row["between_p50_ms"] <= row["between_p99_ms"]
    assert main([*ask, "TEXT=to be"]) == 0
    assert "responses/s" in capsys.readouterr().out


@pytest.mark.server
@pytest.mark.parametrize("model", ["totals", "adds"])
def test_bench_sends_complete_sequences_to_a_sequence_model(
    served: Served, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """More concurrent sequences than slots, so that some wait for others to end; none is left open."""
    ask = ["bench", served.address, model, "--concurrency", "1,4", "--seconds", "0.2"]
    assert main([*ask, "--sequence-length", "3", "--parameter", "mood=good", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["sequence_length"] == 3
    assert [row["failed"] for row in printed["levels"]] == [0, 0]
    assert all(row["requests_per_s"] > 0 for row in printed["levels"])
    assert main(ask) == 0
    assert "in sequences of 20 requests" in capsys.readouterr().out
    alone = ["--sequence-id", "alone", "--sequence-start", "--sequence-end"]
    assert main(["infer", served.address, "totals", "--input", "NUMBER=1", "--json", *alone]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][1]["data"] == [["[0, {}]"]]


@pytest.mark.server
def test_bench_has_no_sequences_for_a_decoupled_model(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", served.address, "words", "--sequence-length", "3"]) == 1
    assert "asked over generate_stream: there are no sequences there" in capsys.readouterr().err


@pytest.mark.server
def test_bench_reports_failed_streams_and_streams_longer_than_the_measurement(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["bench", served.address, "words", "--concurrency", "1", "--seconds", "0.1", "--json", "--input"]
    assert main([*ask, "TEXT=to stop"]) == 1
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)["levels"]
    assert (row["requests_per_s"], row["between_p50_ms"]) == (0, None)
    assert row["first_p50_ms"] > 0
    assert "the server answered: model 'words' failed: ValueError: no more" in printed.err
    assert main([*ask, "TEXT=" + "long " * 50_000]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["levels"][0]["responses_per_s"] > 0
    assert "no request ended within 0.1 s at 1 at a time" in printed.err


@pytest.mark.server
def test_ctrl_c_ends_a_measurement_without_a_traceback(served: Served) -> None:
    statistics = f"{served.base_url}/v2/models/songs_judge/stats"

    def asked() -> int:
        counted: int = httpx.get(statistics, verify=False).json()["model_stats"][0]["inference_count"]
        return counted

    before = asked()
    command = [sys.executable, "-m", "flowserve", "bench", served.address, "songs", "--seconds", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        while bench.poll() is None and asked() == before:
            pass
        bench.send_signal(signal.SIGINT)
        printed = bench.communicate(timeout=60)
    assert (bench.returncode, printed) == (130, ("", ""))


def test_a_variant_keeps_all_other_fields(songs: Path) -> None:
    configs = SweepTarget(songs, "songs").configs(Variant(3, 128, 500))
    assert configs.keys() == {"songs_count", "songs_judge"}
    judge = configs["songs_judge"]
    assert judge["instance_group"] == [{"count": 3, "kind": "KIND_CPU"}]
    assert judge["dynamic_batching"] == {"preferred_batch_size": [32], "max_queue_delay_microseconds": 500}
    assert judge["input"][0]["name"] == "COUNTS"


def test_a_sweep_tries_instances_batch_sizes_and_delays_simplest_first(songs: Path) -> None:
    variants = SweepTarget(songs, "songs_count").variants()
    assert [str(variant) for variant in variants[:2]] == [
        "1 instance, no dynamic batching",
        "2 instances, no dynamic batching",
    ]
    assert len(set(variants)) == 3 + 3 * 2 * 3


def test_a_sweep_reads_all_responses_of_a_decoupled_model(others: Path) -> None:
    subject = SweepTarget(others, "words")
    subject.variants = lambda: [Variant(1, 0, 0)]  # type: ignore[method-assign]  # one is enough here
    (tried,) = trio.run(sweep, subject, 2, 0.05, lambda *_: None)
    assert tried.measured.failed == 0
    assert tried.measured.requests_per_s > 0


def test_a_sweep_sends_sequences_to_a_sequence_model_and_varies_only_its_instances(others: Path) -> None:
    subject = SweepTarget(others, "totals")
    assert {variant.batch for variant in subject.variants()} == {0}
    subject.variants = lambda: [Variant(1, 0, 0)]  # type: ignore[method-assign]  # one is enough here
    (tried,) = trio.run(sweep, subject, 3, 0.05, lambda *_: None, 2)
    assert (tried.measured.failed, tried.measured.requests_per_s > 0) == (0, True)


def test_a_sequence_length_is_refused_for_a_model_without_sequences(
    others: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--sweep", str(others), "words", "--sequence-length", "3"]) == 1
    assert capsys.readouterr().err.startswith("flowserve: --sequence-length: 'words' has no sequences")


@pytest.mark.slow
def test_a_sweep_recommends_a_configuration_that_the_repository_can_have(
    songs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowserve.cli.bench.INSTANCES", (1, 2))
    monkeypatch.setattr("flowserve.cli.bench.DELAYS_US", (0,))
    assert (
        main(["bench", "--sweep", str(songs), "songs_count", "--concurrency", "4", "--seconds", "0.3", "--json"]) == 0
    )
    printed = capsys.readouterr()
    assert printed.err == ""
    found = json.loads(printed.out)
    assert len(found["tried"]) == 6
    assert found["recommended"]["instances"] in (1, 2)
    assert (songs / "songs_count" / "config.pbtxt").read_text().startswith("# Counts the letters")


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "songs"],
        ["bench", "a", "b", "c"],
        ["bench", "--sweep", "r", "u", "m"],
        ["bench", "u", "m", "--p99-ms", "1"],
    ],
)
def test_bench_names_missing_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("flowserve bench: ")


def test_a_new_repository_passes_its_own_test_and_is_not_overwritten(
    songs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(songs), str(songs)]
    done = subprocess.run(command, cwd=songs, capture_output=True, text=True, timeout=120, check=False)
    assert "2 passed" in done.stdout, done.stdout
    assert main(["new", str(songs)]) == 1
    assert capsys.readouterr().err == f"flowserve: {songs} exists already; nothing was written\n"
    assert main(["new", str(songs.parent / "Not a name")]) == 1
