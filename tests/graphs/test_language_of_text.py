"""`language_of_text`: a SavedModel with strings, whose instances share a session. Skipped without TensorFlow."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from flowserve.testing.serve import Served
from tests.support.forked import serving

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs tensorflow: tox -e backends"),
]

GRAPHS = Path(__file__).resolve().parents[2] / "graphs"
FOLDER = GRAPHS / ".tensorflow"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(FOLDER) as running:
        yield running


def ask(served: Served, texts: list[str]) -> Any:
    given = triton.InferInput("TEXT", [len(texts), 1], "BYTES")
    given.set_data_from_numpy(np.array([[text.encode()] for text in texts], object))
    client = triton.InferenceServerClient(served.address, network_timeout=60)
    with client:
        return client.infer("language_of_text", [given])


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that reads the sentences, of which the last of each language were not trained on."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("triton_python_backend_utils"))
    spec = importlib.util.spec_from_file_location("classify", GRAPHS / "detect_language_classify" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unseen_sentences_are_recognised(served: Served, data: ModuleType) -> None:
    unseen = [(line, name) for name, lines in data.sentences().items() for line in lines[-data.HELD_OUT :]]
    texts, languages = zip(*unseen, strict=True)
    found = [
        name for at in range(0, len(texts), 40) for name in ask(served, [*texts[at : at + 40]]).as_numpy("LANGUAGE")
    ]
    assert [name.decode() for (name,) in found] == [*languages]


@pytest.mark.parametrize("text", ["", "12345 ...", "\0", "a" * 100_000])
def test_any_text_has_an_answer(served: Served, text: str) -> None:
    answer = ask(served, [text])
    assert answer.as_numpy("LANGUAGE").shape == (1, 1)
    assert 0 < answer.as_numpy("PROBABILITY")[0, 0] <= 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_request_of_the_page_gets_its_answer(served: Served) -> None:
    blocks = re.findall(
        r"^```(\w+)\n(.*?)^```$", (FOLDER / "language_of_text" / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    ((command, printed),) = [(text, next_) for (kind, text), (_, next_) in pairwise(blocks) if kind == "sh"]
    command = command.replace("localhost:8000", served.address)
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == json.loads(printed)
