"""`read_text`: six steps and a branch that joins again, by held-out pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from flowserve.testing.serve import Served

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def pictures(root: Path) -> dict[str, dict[str, Any]]:
    """File name -> what stands in it (text), and how far it is turned (orientation)."""
    answers: dict[str, dict[str, Any]] = json.loads((root / "graphs/read_text/pictures.json").read_text())
    return answers


@pytest.fixture(scope="module")
def files(root: Path, pictures: dict[str, dict[str, Any]]) -> dict[str, bytes]:
    return {name: (root / "graphs/read_text" / name).read_bytes() for name in pictures}


def _images(*files: bytes) -> list[triton.InferInput]:
    given = triton.InferInput("IMAGE", [len(files), 1], "BYTES")
    given.set_data_from_numpy(np.array([[file] for file in files], np.object_), binary_data=True)
    return [given]


def _read(answer: triton.InferResult, row: int = 0) -> dict[str, Any]:
    return {
        "text": answer.as_numpy("TEXT")[row, 0].decode(),
        "orientation": int(answer.as_numpy("ORIENTATION")[row, 0]),
    }


def test_every_picture_is_transcribed_exactly(
    client: triton.InferenceServerClient, pictures: dict[str, dict[str, Any]], files: dict[str, bytes]
) -> None:
    assert {name: _read(client.infer("read_text", _images(file))) for name, file in files.items()} == pictures


def test_concurrent_pictures_get_their_own_responses(
    client: triton.InferenceServerClient, pictures: dict[str, dict[str, Any]], files: dict[str, bytes]
) -> None:
    names = [*files] * 4
    waiting = [client.async_infer("read_text", _images(files[name])) for name in names]
    assert [_read(each.get_result()) for each in waiting] == [pictures[name] for name in names]


def test_pictures_in_one_request_are_transcribed_separately(
    client: triton.InferenceServerClient, pictures: dict[str, dict[str, Any]], files: dict[str, bytes]
) -> None:
    answer = client.infer("read_text", _images(*files.values()))
    assert [_read(answer, row) for row in range(len(files))] == [*pictures.values()]


def test_an_image_file_is_a_complete_request(
    served_graphs: Served, pictures: dict[str, dict[str, Any]], files: dict[str, bytes]
) -> None:
    answer = httpx.post(
        f"{served_graphs.base_url}/v2/models/read_text/infer",
        content=files["hello.png"],
        headers={"Inference-Header-Content-Length": "0"},
        timeout=60,
        verify=False,
    )
    assert answer.status_code == 200
    # TEXT is the last output: a shell can cut it off the end of the answer.
    assert answer.content.endswith(pictures["hello.png"]["text"].encode())


def test_an_empty_page_is_empty_text_with_full_confidence(
    client: triton.InferenceServerClient, files: dict[str, bytes]
) -> None:
    answer = client.infer("read_text", _images(files["empty.png"]))
    assert answer.as_numpy("TEXT").tolist() == [[b""]]
    assert answer.as_numpy("CONFIDENCE").tolist() == [[1.0]]


def test_the_characters_of_many_pictures_share_batches_and_a_picture_without_text_runs_none(
    client: triton.InferenceServerClient, files: dict[str, bytes]
) -> None:
    def counts() -> tuple[int, int]:
        (model,) = client.get_inference_statistics("read_text_recognise")["model_stats"]
        return int(model["inference_count"]), int(model["execution_count"])

    before = counts()
    client.infer("read_text", _images(files["empty.png"]))
    assert counts() == before
    one = client.infer("read_text", _images(files["hello.png"])).as_numpy("TEXT")[0, 0].decode()
    characters = len(one.replace(" ", "").replace("\n", ""))
    alone = counts()
    assert alone == (before[0] + characters, before[1] + 1)
    names = sorted(name for name in files if name.endswith(".png"))
    for waiting in [client.async_infer("read_text", _images(files[name])) for name in names]:
        waiting.get_result()
    rows, batches = counts()
    assert (rows - alone[0]) / (batches - alone[1]) > 32


@pytest.mark.fault("E9")
def test_only_the_requested_branch_runs(client: triton.InferenceServerClient, files: dict[str, bytes]) -> None:
    def inferences(model: str) -> int:
        return int(client.get_inference_statistics(model)["model_stats"][0]["inference_count"])

    before = inferences("read_text_orient"), inferences("read_text_recognise")
    asked = [triton.InferRequestedOutput("ORIENTATION")]
    answer = client.infer("read_text", _images(files["turned_90.png"]), outputs=asked)
    assert answer.as_numpy("ORIENTATION").tolist() == [[90]]
    assert (inferences("read_text_orient"), inferences("read_text_recognise")) == (before[0] + 1, before[1])


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        (b"", "IMAGE is not a picture file: its 0 bytes begin with b''"),
        (b"hello, this is text", "IMAGE is not a picture file: its 19 bytes begin with b'hello, t'"),
        (b"half", "IMAGE cannot be decoded"),
    ],
    ids=["empty", "text", "cut off"],
)
def test_a_file_that_is_no_image_fails_alone_with_a_reason(
    client: triton.InferenceServerClient,
    pictures: dict[str, dict[str, Any]],
    files: dict[str, bytes],
    file: bytes,
    complaint: str,
) -> None:
    bad = files["hello.png"][:1000] if file == b"half" else file
    waiting = [client.async_infer("read_text", _images(each)) for each in (files["hello.png"], bad, files["large.png"])]
    with pytest.raises(InferenceServerException) as raised:
        waiting[1].get_result()
    assert raised.value.status() == "400"
    assert complaint in raised.value.message()
    assert [_read(waiting[index].get_result()) for index in (0, 2)] == [pictures["hello.png"], pictures["large.png"]]
