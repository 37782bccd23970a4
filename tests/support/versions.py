"""Models with several versions that tests change while a server has them loaded, for flowserve and for Triton.

A model answers with a number that it drew in `initialize`, the count of its requests, its process and a tag of its
file. So an answer tells whether a version was loaded anew. Decides how the folder is changed: every change takes effect
in one step, so that no poll reads half of it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

MODEL = """\
import os
import random
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        {initialize}
        self.drawn = random.Random(os.urandom(8)).getrandbits(31)
        self.count = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            time.sleep(float(pb_utils.get_input_tensor_by_name(request, "X").as_numpy().flat[0]))
            self.count += 1
            told = np.array([self.drawn, self.count, os.getpid(), {tag}], np.int64).reshape({shape})
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", told)]))
        return responses
"""
CONFIG = """\
backend: "python"
max_batch_size: {batch}
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_INT64 dims: [ 4 ] }} ]
parameters {{ key: "execution" value: {{ string_value: "{execution}" }} }}
{more}
"""
ALL = "version_policy { all {} }"
FAILS = "raise RuntimeError('told to fail')"


@dataclass
class Folder:
    """The folder of one model."""

    path: Path
    execution: str = "process"
    batch: int = 0
    more: str = ""  # in its configuration, beside the version policy

    @property
    def name(self) -> str:
        return self.path.name

    def version(self, version: int, tag: int = 0, initialize: str = "pass") -> None:
        self.write(
            f"{version}/model.py",
            MODEL.format(tag=tag, initialize=initialize, shape="(1, 4)" if self.batch else "(4,)"),
        )

    def config(self, more: str = ALL) -> None:
        self.write("config.pbtxt", CONFIG.format(execution=self.execution, more=more, batch=self.batch))

    def write(self, path: str, text: str) -> None:
        """Replace a file in one step, so that no poll reads half of it."""
        target = self.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.parent / f".{self.name}.new"
        beside.write_text(text)
        beside.rename(target)

    def remove(self, path: str) -> None:
        """Remove a folder in one step."""
        away = self.path.parent / f".{self.name}.away"
        (self.path / path).rename(away)
        shutil.rmtree(away)


def both(*changes: Callable[[Folder], object]) -> Callable[[Folder], object]:
    return lambda folder: [change(folder) for change in changes]


def latest(count: int) -> str:
    return f"version_policy {{ latest {{ num_versions: {count} }} }}"


def specific(*versions: int) -> str:
    return f"version_policy {{ specific {{ versions: {list(versions)} }} }}"


class Server:
    """Asks one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=f"{url}/v2/", timeout=60, verify=False)

    def close(self) -> None:
        self._client.close()

    def ask(self, name: str, version: int = 0, *, rows: int = 0, sleep: float = 0.0, **parameters: Any) -> list[int]:
        """The number drawn, the count, the process and the tag; [status] of a failure."""
        path = f"models/{name}/versions/{version}/infer" if version else f"models/{name}/infer"
        shape = [rows, 1] if rows else [1]
        tensor = {"name": "X", "shape": shape, "datatype": "FP32", "data": [sleep]}
        reply = self._client.post(path, json={"inputs": [tensor], "parameters": parameters})
        return reply.json()["outputs"][0]["data"] if reply.status_code == 200 else [reply.status_code]

    def load(self, name: str, **parameters: str) -> str:
        """The error, "" for none."""
        reply = self._client.post(f"repository/models/{name}/load", json={"parameters": parameters})
        return str(reply.json()["error"]) if reply.content else ""

    def unload(self, name: str) -> None:
        assert self._client.post(f"repository/models/{name}/unload", json={}).status_code == 200

    def states(self, name: str) -> dict[str, str]:
        """The state of each version in the index."""
        rows = self._client.post("repository/index", json={}).json()
        return {row["version"]: row["state"] for row in rows if row["name"] == name and "version" in row}

    def reasons(self, name: str) -> dict[str, str]:
        """The reason of each version that has one in the index."""
        rows = self._client.post("repository/index", json={}).json()
        return {row["version"]: row["reason"] for row in rows if row["name"] == name and row.get("reason")}

    def counted(self, name: str, version: int) -> int:
        rows = self._client.get(f"models/{name}/versions/{version}/stats").json().get("model_stats", [])
        return int(rows[0]["inference_count"]) if rows else 0


def until(condition: Callable[[], bool], within_s: float = 30) -> None:
    too_late = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < too_late, "never"
        time.sleep(0.05)


def settle(server: Server, name: str) -> None:
    """Load it until a load changes nothing: Triton takes the `__pycache__` that a load leaves for a change."""
    before, now = [[-1]], [[0]]
    while before != now:
        assert server.load(name) == ""
        before, now = now, [server.ask(name, version, sleep=1e-4)[:1] for version in (1, 2)]
