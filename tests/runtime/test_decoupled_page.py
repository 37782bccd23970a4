"""The examples of docs/decoupled.md: its model is served over HTTP, and its configurations are accepted."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.forked import serving

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOOKUP = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        words = [pb_utils.get_input_tensor_by_name(request, "WORD").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("KNOWN", word == b"be")]) for word in words]
"""
PORTS = """
backend: "python" input [ { name: "WORD" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "KNOWN" data_type: TYPE_BOOL dims: [ 1 ] } ]
"""


@pytest.mark.server
def test_the_examples_of_the_decoupled_page_work(root: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall((root / "docs/decoupled.md").read_text())
    (model, ensemble), (code,) = ([text for kind, text in blocks if kind == one] for one in ("pbtxt", "python"))
    ((command, printed),) = [
        (text, following) for (kind, text), (_, following) in pairwise(blocks) if text.startswith("curl")
    ]
    for name, config, source in (("words", model, code), ("lookup", PORTS, LOOKUP), ("known", ensemble, "")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
        if source:
            (tmp_path / name / "1" / "model.py").write_text(source)
    with serving(tmp_path) as server:

        def run(text: str) -> str:
            text = text.replace("localhost:8000", server.address)
            return subprocess.run(text, shell=True, check=True, capture_output=True, text=True).stdout

        assert run(command) == printed + "\n"
        events = run(command.replace("words", "known")).split("\n\n")[:-1]
        assert [json.loads(event[6:])["KNOWN"] for event in events] == [False, True, False, False]
