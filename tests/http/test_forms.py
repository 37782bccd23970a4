"""Files in requests: multipart/form-data, base64 in JSON, and the error where a file is sent as it is."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from flowserve.testing.serve import Served
from tests.support.forked import serving

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
CONFIG = """
backend: "python"
max_batch_size: 4
input [
  { name: "FILE" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "N" data_type: TYPE_INT32 dims: [ 2 ] optional: true },
  { name: "X" data_type: TYPE_FP32 dims: [ -1 ] optional: true }
]
output [ { name: "SAW" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "execution" value { string_value: "inline" } }
"""
# One text for each row: the bytes of its file, and the other inputs.
MODEL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        files = tensors.pop("FILE")
        others = {name: array.tolist() for name, array in tensors.items()}
        rows = [json.dumps([len(file), file[:4].hex(), others]) for file in files[:, 0]]
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAW", np.array(rows, object)[:, None])])
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("forms") / "files"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(MODEL)
    with serving(folder.parent) as served:
        yield served


def post(served: Served, **options: Any) -> httpx.Response:
    return httpx.post(f"{served.base_url}/v2/models/files/infer", verify=False, timeout=30, **options)


def saw(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    return [json.loads(row) for row in output["data"]]


def test_a_file_is_an_element_and_other_parts_are_json(served: Served) -> None:
    files = {"FILE": ("photo.png", PNG, "image/png")}
    assert saw(post(served, files=files)) == [[len(PNG), "89504e47", {}]]
    found = saw(post(served, files=files, data={"N": "[1, 2]", "X": "[[0.5, 1.5]]"}))
    assert found == [[len(PNG), "89504e47", {"N": [[1, 2]], "X": [[0.5, 1.5]]}]]
    assert saw(post(served, files={**files, "X": ("x.bin", np.array([3, 4], np.float32).tobytes())}))[0][2] == {
        "X": [[3, 4]]
    }
    text = saw(post(served, files={"FILE": (None, "a text")}))
    assert text == [[6, b"a te".hex(), {}]]


def test_several_files_are_the_rows_of_a_batch(served: Served) -> None:
    files = [("FILE", (f"{n}.bin", bytes([n]) * n)) for n in (1, 2, 3)]
    assert saw(post(served, files=files)) == [[n, (bytes([n]) * n).hex(), {}] for n in (1, 2, 3)]


def test_a_large_file_is_decoded_on_a_thread(served: Served) -> None:
    large = PNG * 40_000  # 10 MB
    assert saw(post(served, files={"FILE": ("large.png", large)})) == [[len(large), "89504e47", {}]]


def test_base64_in_json_is_decoded(served: Served) -> None:
    def asked(data: Any, datatype: str = "BYTES", name: str = "FILE") -> dict[str, Any]:
        shape, parameters = [1, 1], {"content_type": "base64"}
        one = {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters, "data": data}
        return {"inputs": [one]}

    text = base64.b64encode(PNG).decode()
    assert saw(post(served, json=asked([[text]]))) == [[len(PNG), "89504e47", {}]]
    large = base64.b64encode(PNG * 10_000).decode()
    assert saw(post(served, json=asked([large]))) == [[len(PNG) * 10_000, "89504e47", {}]]
    for wrong in ("=====", "a*b=", text[:-1], "ü"):
        answer = post(served, json=asked([wrong]))
        assert (answer.status_code, "input 'FILE' holds a string that is not" in answer.text) == (400, True), wrong
    answer = post(served, json=asked([1.5], "FP32", "X"))
    assert answer.status_code == 400
    assert "base64, which is for BYTES and not for FP32 (input 'X')" in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (PNG, "a PNG image"),
        (b"\xff\xd8\xff\xe0" + bytes(100), "a JPEG image"),
        (b"RIFF\x00\x00\x00\x00WAVE", "a RIFF file"),
        (PNG * 4000, "a PNG image"),  # decoded on a thread
    ],
)
def test_a_file_as_the_whole_body_gets_an_error_with_the_ways_to_send_it(
    served: Served, body: bytes, kind: str
) -> None:
    answer = post(served, content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    for part in (kind, "curl -F INPUT=@FILE", "Inference-Header-Content-Length: 0", "base64"):
        assert part in error


BOUNDARY = "multipart/form-data; boundary=here"


def part(head: str, content: str = "x") -> str:
    return f"--here\r\n{head}\r\n\r\n{content}\r\n"


@pytest.mark.parametrize(
    ("content_type", "body", "error"),
    [
        ("multipart/form-data", "", "without a boundary"),
        (BOUNDARY, "no form", "the body is no multipart/form-data"),
        (BOUNDARY, part('Content-Disposition: form-data; name="FILE"'), "its last boundary is missing"),
        (BOUNDARY, part("Content-Disposition: form-data") + "--here--", "part 0 of the form has no name"),
        (BOUNDARY, part("Content-Type: text/plain") + "--here--", "part 0 of the form has no name"),
        (BOUNDARY, part('Content-Disposition: form-data; name="M"') + "--here--", "unexpected inference input 'M'"),
        (BOUNDARY, part(f"Content-Disposition: {'x' * 5000}") + "--here--", "Maximum header size exceeded"),
        (BOUNDARY, part('Content-Disposition: form-data; name="FILE"') * 1025 + "--here--", "more than 1024 parts"),
        (
            BOUNDARY,
            part('Content-Disposition: form-data; name="FILE"')
            + part('Content-Disposition: form-data; name="X"', "[1, oops]")
            + "--here--",
            "input 'X' of the form is no JSON",
        ),
        (
            BOUNDARY,
            part('Content-Disposition: form-data; name="FILE"')
            + part('Content-Disposition: form-data; name="N"', "[1, 2, 3]")
            + "--here--",
            "input 'N'",
        ),
        (
            BOUNDARY,
            part('Content-Disposition: form-data; name="FILE"')
            + part('Content-Disposition: form-data; name="N"', "[1, 2]") * 2
            + "--here--",
            "input 'N' is in 2 parts of the form",
        ),
        (
            BOUNDARY,
            part('Content-Disposition: form-data; name="FILE"')
            + part('Content-Disposition: form-data; name="X"; filename="x"', "123")
            + "--here--",
            "input 'X'",
        ),
    ],
)
def test_a_form_that_cannot_be_a_request_is_refused(served: Served, content_type: str, body: str, error: str) -> None:
    answer = post(served, content=body.encode(), headers={"Content-Type": content_type})
    assert (answer.status_code, error in answer.json()["error"]) == (400, True), answer.text


def test_a_compressed_form_is_expanded(served: Served) -> None:
    import gzip

    body = part('Content-Disposition: form-data; name="FILE"', "abcd") + "--here--\r\n"
    headers = {"Content-Type": BOUNDARY, "Content-Encoding": "gzip"}
    assert saw(post(served, content=gzip.compress(body.encode()), headers=headers)) == [[4, b"abcd".hex(), {}]]


def test_arbitrary_bytes_in_a_form_never_fail_the_server(served: Served, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    pieces: list[Callable[[], bytes]] = [
        lambda: b"--here\r\n",
        lambda: b'Content-Disposition: form-data; name="FILE"\r\n',
        lambda: b"\r\n",
        lambda: random.bytes(9),
        lambda: b"--here--",
        lambda: b"Content-Disposition: form-data; name*=utf-8''F\r\n",
    ]
    with httpx.Client(verify=False, timeout=30) as client:
        for _ in range(200):
            body = b"".join(pieces[random.integers(len(pieces))]() for _ in range(random.integers(1, 12)))
            url = f"{served.base_url}/v2/models/files/infer"
            answer = client.post(url, content=body, headers={"Content-Type": BOUNDARY})
            assert answer.status_code in (200, 400), (answer.text, body)
