"""The typical mistakes of docs/errors.md, made for real: each message is the one on the page, and names location, cause
and remedy.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flowserve.cli.main import main
from flowserve.testing.serve import Served, serving
from flowserve.values import DType
from tests.support.onnx_files import onnx_identity, onnx_model, onnx_node, onnx_value

MODEL = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            length = np.vectorize(len)(text).astype(np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("LENGTH", length)]))
        return responses
"""

LENGTH = """\
backend: "python"
max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output { name: "LENGTH" data_type: TYPE_FP32 dims: 1 }
"""

SCORE = """\
backend: "onnxruntime"
max_batch_size: 8
input { name: "features" data_type: TYPE_FP32 dims: 1 }
output { name: "scores" data_type: TYPE_FP32 dims: 1 }
"""

JUDGE = """\
platform: "ensemble"
max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output { name: "SCORE" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling {
  step {
    model_name: "length"
    model_version: -1
    input_map { key: "TEXT" value: "TEXT" }
    output_map { key: "LENGTH" value: "length" }
  }
  step {
    model_name: "score"
    model_version: -1
    input_map { key: "features" value: "length" }
    output_map { key: "scores" value: "SCORE" }
  }
}
"""


def score_file(batch: int | str = "N") -> bytes:
    tensors = [onnx_value(name, DType.FP32, [batch, 1]) for name in ("features", "scores")]
    return onnx_model([onnx_node("Identity", ["features"], ["scores"])], tensors[:1], tensors[1:])


def write_model(folder: Path, config: str, file: str, content: str | bytes) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / file).write_bytes(content.encode() if isinstance(content, str) else content)


def write_models(repository: Path) -> None:
    """A valid repository: a Python model, an ONNX model, and the ensemble of both."""
    write_model(repository / "length", LENGTH, "model.py", MODEL)
    write_model(repository / "score", SCORE, "model.onnx", score_file())
    write_model(repository / "judge", JUDGE, ".gitkeep", "")


MISTAKEN_MODELS = {
    "no_module": "import albumentations\n" + MODEL,
    "misnamed": MODEL.replace('request, "TEXT"', 'request, "TXT"'),
    "returns_none": MODEL.replace("        return responses\n", ""),
    "too_few": MODEL.replace("return responses", "return responses[:-1]"),
    "leaves_out": MODEL.replace('[pb_utils.Tensor("LENGTH", length)]', "[]"),
}


@dataclass
class Newcomer:
    """A user in a folder with a repository `models/`, and with a server of models of which some have mistakes."""

    server: Served
    read_output: Callable[[], str]

    def check(self, file: str, right: str, wrong: str) -> str:
        """What `flowserve check` says of a file of the repository in which `right` is replaced."""
        path = Path("models") / file
        text = path.read_text()
        assert right in text
        path.write_text(text.replace(right, wrong))
        return self.problems()

    def problems(self) -> str:
        assert main(["check", "models"]) == 1
        lines = self.read_output().splitlines()
        assert re.fullmatch(r"\d problems?; \d of \d deployments (are|is) valid", lines[-1])
        return "\n".join(line for line in lines[:-1] if not line.endswith("(above) [G3]"))

    def said(self, *command: str) -> str:
        """The standard error of a command that fails."""
        done = subprocess.run([sys.executable, "-m", "flowserve", *command], capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        return done.stderr.strip()

    def post(self, body: bytes, model: str = "length") -> tuple[int, str]:
        request = urllib.request.Request(f"{self.server.base_url}/v2/models/{model}/infer", data=body)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]

    def ask(self, model: str = "length", **changes: object) -> tuple[int, str]:
        tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["aria"], **changes}
        return self.post(json.dumps({"inputs": [tensor]}).encode(), model)

    def refused(self, status: int, answer: tuple[int, str]) -> str:
        assert answer[0] == status, answer
        return answer[1]

    def logged(self, model: str) -> str:
        """The last line about a model in the server's log, without level, time and indentation."""
        (*_, line) = [line for line in self.server.log.splitlines() if f"'{model}'" in line]
        return re.sub(r"^(?:[EWI]\d+ \S+ \S+)?\s*", "", line)


def check(file: str, right: str, wrong: str) -> Callable[[Newcomer], str]:
    return lambda newcomer: newcomer.check(file, right, wrong)


def no_version_folder(newcomer: Newcomer) -> str:
    Path("models/length/1/model.py").unlink()
    Path("models/length/1").rmdir()
    return newcomer.problems()


def beside_the_version(newcomer: Newcomer) -> str:
    Path("models/length/1/model.py").rename("models/length/model.py")
    return newcomer.problems()


def fixed_batch(newcomer: Newcomer) -> str:
    Path("models/score/1/model.onnx").write_bytes(score_file(1))
    return newcomer.problems()


def steps_disagree(newcomer: Newcomer) -> str:
    Path("models/score/1/model.onnx").write_bytes(onnx_identity(shape=("N", 4)))
    config = Path("models/score/config.pbtxt")
    names = {"dims: 1": "dims: 4", '"features"': '"x"', '"scores"': '"y"'}
    for old, new in names.items():
        config.write_text(config.read_text().replace(old, new))
    judge = Path("models/judge/config.pbtxt")
    judge.write_text(judge.read_text().replace('"features"', '"x"').replace('"scores"', '"y"'))
    return newcomer.check("judge/config.pbtxt", "TYPE_FP32 dims: 1", "TYPE_FP32 dims: 4")


def cycle(newcomer: Newcomer) -> str:
    Path("models/length/config.pbtxt").write_text(LENGTH.replace("TYPE_STRING", "TYPE_FP32"))
    judge = Path("models/judge/config.pbtxt")
    judge.write_text(judge.read_text().replace("TYPE_STRING", "TYPE_FP32"))
    return newcomer.check("judge/config.pbtxt", 'key: "TEXT" value: "TEXT"', 'key: "TEXT" value: "SCORE"')


def left_out(newcomer: Newcomer) -> str:
    assert newcomer.ask("leaves_out")[0] == 200
    return newcomer.logged("leaves_out")


PICTURE = (Path(__file__).parents[2] / "graphs/read_text/receipt.png").read_bytes()

# The parts of each message that are its location, its cause and its remedy.
MISTAKES: dict[str, tuple[Callable[[Newcomer], str], tuple[str, str, str]]] = {
    "A misspelled field": (
        check("length/config.pbtxt", "max_batch_size", "max_batchsize"),
        ("length/config.pbtxt:2:1", 'no field named "max_batchsize"', 'did you mean "max_batch_size"?'),
    ),
    "A data type without its prefix": (
        check("length/config.pbtxt", "TYPE_FP32", "FP32"),
        ("length/config.pbtxt:4:36", 'Unknown enumeration value of "FP32"', 'did you mean "TYPE_FP32"?'),
    ),
    "No version folder": (
        no_version_folder,
        ("length:", "at least one version must be available", "put the model's files into length/1/"),
    ),
    "The model's file beside the version folder": (
        beside_the_version,
        ("length/1/model.py:", "does not exist", "move length/model.py into length/1/"),
    ),
    "An unknown backend": (
        check("score/config.pbtxt", '"onnxruntime"', '"onnx"'),
        ("score/config.pbtxt:1:1", "unable to find backend library for backend 'onnx'", 'did you mean "onnxruntime"?'),
    ),
    "Another name than in the ONNX file": (
        check("score/config.pbtxt", '"features"', '"feature"'),
        ("score/config.pbtxt:3:9", "unexpected inference input 'feature'", 'did you mean "features"?'),
    ),
    "Another data type than in the ONNX file": (
        check("score/config.pbtxt", "TYPE_FP32 dims: 1 }\noutput", "TYPE_FP64 dims: 1 }\noutput"),
        ("score/config.pbtxt:3:26", "the model expects data type TYPE_FP32", "write data_type: TYPE_FP32"),
    ),
    "The batch dimension written in dims": (
        check("score/config.pbtxt", "dims: 1 }\noutput", "dims: [ -1, 1 ] }\noutput"),
        ("score/config.pbtxt:3:47", "the model expects 2 dimensions", "dims leave out the batch dimension"),
    ),
    "An ONNX file for one row only": (
        fixed_batch,
        ("score/config.pbtxt:3:47", "first dimension must be -1", "export with a dynamic first axis"),
    ),
    "A misspelled tensor of an ensemble": (
        check("judge/config.pbtxt", 'key: "features" value: "length"', 'key: "features" value: "lenght"'),
        ("judge/config.pbtxt:15:17", "no step writes 'lenght'", 'did you mean "length"?'),
    ),
    "A step without its model": (
        check("judge/config.pbtxt", 'model_name: "score"', 'model_name: "scores"'),
        ("judge/config.pbtxt:13:5", "models that are not available or ambiguous: scores", 'did you mean "score"?'),
    ),
    "Two steps that disagree about a shape": (
        steps_disagree,
        ("judge/config.pbtxt:15:17", "[-1,1] is inferred from model length", "put a step between them that converts"),
    ),
    "A cycle": (
        cycle,
        ("judge/config.pbtxt:9:17", "step 1 (model 'score') writes 'SCORE', which step 0", "break the circle"),
    ),
    "A class of another name": (
        check("length/1/model.py", "TritonPythonModel", "Length"),
        ("length/1/model.py:5:1", "no class TritonPythonModel", "call class Length TritonPythonModel"),
    ),
    "A syntax error": (
        check("length/1/model.py", "responses = []", "responses = ["),
        ("length/1/model.py:7:21", "is not valid Python", "'[' was never closed"),
    ),
    "A module that is not installed": (
        lambda newcomer: newcomer.logged("no_module"),
        ("no_module/1/model.py:1", "No module named 'albumentations'", "install it there"),
    ),
    "An input under another name": (
        lambda newcomer: newcomer.refused(500, newcomer.ask("misnamed")),
        ("misnamed/1/model.py:9", "no tensor of that name", "the model's inputs are 'TEXT'"),
    ),
    "No return": (
        lambda newcomer: newcomer.refused(500, newcomer.ask("returns_none")),
        ("model 'returns_none'", "its execute returned None", "does each branch of it return its responses?"),
    ),
    "A wrong number of responses": (
        lambda newcomer: newcomer.refused(500, newcomer.ask("too_few")),
        ("model 'too_few'", "InferenceResponse(s) size is:0", "execute must return one for each request"),
    ),
    "An output left out": (
        left_out,
        ("model 'leaves_out'", "left out output 'LENGTH'", "return it from the model"),
    ),
    "A mistyped option": (
        lambda newcomer: newcomer.said("run", "models", "--http-prot", "9000"),
        ("flowserve run:", "unknown option --http-prot", "did you mean --http-port?"),
    ),
    "A port in use": (
        lambda newcomer: newcomer.said("run", "models", "--http-port", str(newcomer.server.port)),
        ("127.0.0.1 port 8000", "address already in use", "choose another --http-port"),
    ),
    "A wrong shape": (
        lambda newcomer: newcomer.refused(400, newcomer.ask(shape=[1])),
        ("input 'TEXT' for model 'length'", "got [1]", "a batch dimension to be prepended to each input shape"),
    ),
    "A wrong datatype": (
        lambda newcomer: newcomer.refused(400, newcomer.ask(datatype="STRING")),
        ("for input 'TEXT'", "invalid datatype 'STRING'", "use one of"),
    ),
    "JSON that is not JSON": (
        lambda newcomer: newcomer.refused(400, newcomer.post(b"{'inputs': []}")),
        ("line 1 column 2", "unexpected character", "JSON has double quotes"),
    ),
    "A picture without its header": (
        lambda newcomer: newcomer.refused(400, newcomer.post(PICTURE)),
        ("line 1 column 1", "the body is a PNG image", "send a file as a form"),
    ),
}
ENTRY = re.compile(r"^\*\*(\d+)\. ([^*]+)\*\*.*?^```text\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("served") / "models"
    write_models(repository)
    for name, content in MISTAKEN_MODELS.items():
        write_model(repository / name, LENGTH, "model.py", content)
    with serving(repository, "--exit-on-error", "false") as served:
        yield served


@pytest.fixture
def newcomer(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Newcomer:
    write_models(tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    return Newcomer(server, lambda: capsys.readouterr().err)


@pytest.fixture(scope="module")
def page(root: Path) -> dict[str, str]:
    """The messages of the page, by the names of the mistakes, in order."""
    entries = ENTRY.findall((root / "docs/errors.md").read_text())
    assert [int(number) for number, _, _ in entries] == [*range(1, len(entries) + 1)]
    return {title: message for _, title, message in entries}


def test_the_repository_without_a_mistake_is_valid_and_serves(newcomer: Newcomer) -> None:
    assert main(["check", "models"]) == 0
    assert newcomer.ask("judge")[0] == 200


@pytest.mark.server
def test_the_page_has_the_mistakes_of_these_tests(page: dict[str, str]) -> None:
    assert list(page) == list(MISTAKES)
    assert len(page) == 26


@pytest.mark.server
@pytest.mark.parametrize("title", MISTAKES)
def test_a_mistake_gets_the_message_of_the_page_with_location_cause_and_remedy(
    title: str, newcomer: Newcomer, page: dict[str, str]
) -> None:
    make, parts = MISTAKES[title]
    message = make(newcomer)
    for real, shown in {
        f"port {newcomer.server.port}": "port 8000",
        sys.prefix: "/srv/.venv",
        f"Python {sys.version_info.major}.{sys.version_info.minor}:": "Python 3.11:",
    }.items():
        message = message.replace(real, shown)
    for part in parts:
        assert part in message
    assert message == page.get(title)
