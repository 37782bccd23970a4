"""`flowserve new`: writes a repository with a small, commented graph as a starting point.

Decides its contents: two Python models and the ensemble that joins them, a test, and a README with the next commands.
The files are plain text in this module; they are not checked when written.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Final

from flowserve.errors import Invalid

NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,60}")

COUNT_CONFIG: Final = """\
# Counts the letters of texts. docs/graph-files.md describes every option of this file.
backend: "python"

# Requests that wait are run as one batch of up to 32 rows. Dims leave the batch dimension out.
max_batch_size: 32
dynamic_batching { }

input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "COUNTS" data_type: TYPE_FP32 dims: [ 26 ] } ]
"""

COUNT_MODEL: Final = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        # One response for each request, in the same order. A request may hold several rows.
        responses = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[:, 0]  # of bytes
            counts = [[text.lower().count(bytes([letter])) for letter in range(97, 123)] for text in texts]
            tensor = pb_utils.Tensor("COUNTS", np.array(counts, np.float32).reshape(-1, 26))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""

JUDGE_CONFIG: Final = """\
# Decides from letter counts whether a text sings.
backend: "python"
max_batch_size: 32
dynamic_batching { }

# Two instances of the model run at the same time, each in its own process.
instance_group [ { count: 2 kind: KIND_CPU } ]

input [ { name: "COUNTS" data_type: TYPE_FP32 dims: [ 26 ] } ]
output [ { name: "WORD" data_type: TYPE_STRING dims: [ 1 ] } ]
"""

JUDGE_MODEL: Final = """\
import numpy as np
import triton_python_backend_utils as pb_utils

VOWELS = [0, 4, 8, 14, 20]


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            counts = pb_utils.get_input_tensor_by_name(request, "COUNTS").as_numpy()
            sings = counts[:, VOWELS].sum(1, keepdims=True) * 2 > counts.sum(1, keepdims=True)
            words = np.where(sings, b"sung", b"spoken").astype(object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("WORD", words)]))
        return responses
"""

GRAPH_CONFIG: Final = """\
# The graph: which models, and which tensors join them. It is served under the name of its folder, {name}.
platform: "ensemble"
max_batch_size: 32

# The inputs of requests, and the outputs of responses.
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "WORD" data_type: TYPE_STRING dims: [ 1 ] } ]

# key: the model's name of the tensor; value: this graph's name. Two steps that name the same tensor are joined.
ensemble_scheduling {
  step {
    model_name: "{name}_count"
    model_version: -1
    input_map { key: "TEXT" value: "TEXT" }
    output_map { key: "COUNTS" value: "letters" }
  }
  step {
    model_name: "{name}_judge"
    model_version: -1
    input_map { key: "COUNTS" value: "letters" }
    output_map { key: "WORD" value: "WORD" }
  }
}
"""

TEST_FILE: Final = """\
import numpy as np
from flowserve import Engine
from flowserve.testing import simulate
from pathlib import Path

HERE = Path(__file__).parent


def test_texts_with_many_vowels_sing():
    with Engine(HERE) as engine:
        answer = engine.infer("{name}", {"TEXT": np.array([["aria"], ["rhythm"]])})
    assert answer["WORD"].tolist() == [[b"sung"], [b"spoken"]]


def test_requests_that_wait_for_a_busy_step_run_as_one_batch():
    result = simulate(HERE, "{name}", arrivals=[0, 1, 2, 3], takes_ms=5)
    assert [batch.requests for batch in result.batches_of("{name}_count")] == [(0,), (1, 2, 3)]
"""

README_FILE: Final = """\
# {name}

    flowserve check .                        # every mistake, with its place
    flowserve graph . {name} -o {name}.svg   # the picture
    flowserve run .                          # serve it on http://127.0.0.1:8000
    flowserve infer localhost:8000 {name} --input TEXT=aria
    flowserve bench localhost:8000 {name} --concurrency 1:32
    python -m pytest .                       # test_{name}.py needs no server
"""

FILES: Final = {
    "{name}_count/config.pbtxt": COUNT_CONFIG,
    "{name}_count/1/model.py": COUNT_MODEL,
    "{name}_judge/config.pbtxt": JUDGE_CONFIG,
    "{name}_judge/1/model.py": JUDGE_MODEL,
    "{name}/config.pbtxt": GRAPH_CONFIG,
    "test_{name}.py": TEST_FILE,
    "README.md": README_FILE,
}


def execute(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the repository into a new folder. Raises Invalid."""
    path: Path = arguments.folder
    name = path.name
    if not NAME.fullmatch(name):
        raise Invalid(f"{name!r} cannot be the graph's name: small letters, digits and _, a letter first")
    try:
        path.mkdir(parents=True)
        for where, text in FILES.items():
            target = path / where.replace("{name}", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("{name}", name), encoding="utf-8")
        (path / name / "1").mkdir()
    except FileExistsError:
        raise Invalid(f"{path} exists already; nothing was written") from None
    except OSError as error:
        raise Invalid(f"{path} cannot be written: {error.strerror}") from None
    print(f"{path} is a repository of a graph called {name}; next: flowserve run {path}")
    return 0
