"""Hostile clients and careless operators: shell injection, information in error messages, files that run code."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from flowserve.testing.serve import Served
from flowserve.values import DType
from tests.support.forked import serving
from tests.support.onnx_files import onnx_identity

SECRET = "the-secret-model"
RAISES = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("no such luck")
"""
PLAIN = """
max_batch_size: 0
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""


def meta(target: Path) -> list[str]:
    """Texts that have an effect in a shell or a string formatter."""
    return [
        f"$(touch {target})",
        f"`touch {target}`",
        f"a; touch {target}",
        f"a|touch {target}",
        "%s%s%n{0.__class__}",
        "${IFS}",
    ]


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


@pytest.fixture(scope="module")
def touched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that exists once any injected code has run."""
    return tmp_path_factory.mktemp("touched") / "touched"


@pytest.fixture(scope="module")
def hostile(
    tmp_path_factory: pytest.TempPathFactory,
    add_model: Callable[..., Path],
    make_python: Callable[..., Any],
    touched: Path,
) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("hostile")
    add_model(repository, SECRET, "", {"1/model.onnx": onnx_identity(DType.FP32, ("N", "M"))})
    add_model(repository, "raises", PLAIN, {"1/model.py": RAISES})
    name = meta(touched)[0].replace("/", "%")
    text = f'instance_group {{ name: "{name}" count: 1 }} parameters {{ key: "p" value {{ string_value: "{name}" }} }}'
    add_model(repository, "shell", PLAIN + text, make_python('return answer(OUT=given("IN"))'))
    # Files that a careless loader would open: pickles that run code, an archive that expands, arrays with objects in
    # them.
    model = add_model(repository, "luggage", "", {"1/model.onnx": onnx_identity(DType.FP32, ("N", "M"))})
    bomb = pickle.dumps(Bomb(touched))
    for file in ("weights.pkl", "model.pt", "model.pkl", "1/model.pt", "1/data.pkl"):
        (model / file).write_bytes(bomb)
    np.save(model / "1" / "objects.npy", np.array([Bomb(touched)], object), allow_pickle=True)
    with zipfile.ZipFile(model / "1" / "weights.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(10_000_000))
    touched.unlink(missing_ok=True)
    with serving(repository, "--allow-client-shm=true") as served:
        yield served


def ask(served: Served, path: str, asked: Any = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
    body = None if asked is None else json.dumps(asked).encode()
    request = urllib.request.Request(served.base_url + path, body, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def one(name: str = "IN", **fields: Any) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": "FP32", "shape": [1], "data": [1]}], **fields}


@pytest.mark.fault("Z2")
def test_shell_syntax_in_names_and_values_is_not_executed(hostile: Served, touched: Path) -> None:
    for word in meta(touched):
        there = quote(word, safe="")
        assert ask(hostile, f"/v2/models/{there}/infer", one())[0] == 404
        assert ask(hostile, f"/v2/models/{there}/config")[0] == 404
        assert ask(hostile, f"/v2/repository/models/{there}/load", {"parameters": {"config": word}})[0] in (404, 503)
        assert ask(hostile, f"/v2/systemsharedmemory/region/{there}/register", {"key": word, "byte_size": 8})[0] in (
            400,
            404,
        )
        status, text = ask(hostile, "/v2/models/shell/infer", one(id=word, parameters={"p": word}))
        assert (status, json.loads(text)["id"]) == (200, word)
        assert ask(hostile, "/v2/models/shell/infer", one(word))[0] == 400
    assert not touched.exists()


@pytest.mark.fault("Z5")
def test_responses_name_no_path_no_other_model_and_no_traceback(hostile: Served, tmp_path: Path) -> None:
    said = [
        ask(hostile, "/v2/models/nobody/infer", one()),
        ask(hostile, "/v2/models/raises/infer", one()),
        ask(hostile, "/v2/models/raises/infer", one("OTHER")),
        ask(hostile, "/v2/models/raises/infer", []),
        ask(hostile, "/v2/models/raises/versions/7/stats"),
        ask(hostile, "/v2/repository/models/nobody/load", {}),
        ask(hostile, "/v2/systemsharedmemory/region/r/register", {"key": "/flowserve_none", "byte_size": 8}),
        ask(hostile, "/v2/systemsharedmemory/region/r/status"),
        ask(hostile, "/nowhere"),
    ]
    for status, text in said:
        assert status >= 400
        assert SECRET not in text
        assert "Traceback" not in text
        assert not re.search(r"/(work|tmp|home|root|usr|dev/shm|proc)/", text), text
    status, text = said[1]
    assert (status, "no such luck" in text) == (500, True)


@pytest.mark.fault("Z8")
def test_no_file_of_a_repository_is_unpickled_or_unpacked(hostile: Served, touched: Path) -> None:
    assert ask(hostile, "/v2/models/luggage/ready")[0] == 200
    assert not touched.exists()
    pickle.loads(pickle.dumps(Bomb(touched)))  # checks the test itself: unpickling runs the code
    assert touched.exists()
    touched.unlink()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_is_enabled_by_options(tmp_path: Path, add_model: Callable[..., Path]) -> None:
    add_model(tmp_path / "models", "same", "", {"1/model.onnx": onnx_identity(DType.FP32, ("N", "M"))})
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *extra], cwd=tmp_path, check=True, capture_output=True)
    options = [f"--http-server-cert={tmp_path / 'cert.pem'}", f"--http-server-key={tmp_path / 'key.pem'}"]
    with serving(tmp_path / "models", *options) as served:
        assert served.base_url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        with urllib.request.urlopen(f"{served.base_url}/v2/models/same/ready", context=context, timeout=30) as answer:
            assert answer.status == 200
