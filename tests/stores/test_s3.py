"""A server whose repository is in S3 (a moto server): publishing, failures, and reloads under load. `tox -e stores`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowserve.testing.serve import DidNotServe, Served, serving

pytest.importorskip("moto", reason="needs s3fs and moto: tox -e stores")
pytest.importorskip("s3fs", reason="needs s3fs and moto: tox -e stores")
pytestmark = pytest.mark.server

CONFIG = """max_batch_size: 8 backend: "python" parameters { key: "execution" value { string_value: "thread" } }
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ] output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]"""
MODEL = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(one, "X").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array * 0 + {number})]) for array in arrays]
"""


class Store:
    """A moto server, which can be stopped and started again on its port; then it is empty."""

    def __init__(self) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("moto_server")), "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: opens(self.url))

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(30)

    def client(self) -> Any:
        import boto3  # type: ignore[import-not-found]

        return boto3.client("s3", endpoint_url=self.url, region_name="us-east-1")

    def publish(self, number: int, name: str = "m") -> None:
        client = self.client()
        client.put_object(Bucket="bucket", Key=f"models/{name}/config.pbtxt", Body=CONFIG.encode())
        client.put_object(Bucket="bucket", Key=f"models/{name}/1/model.py", Body=MODEL.format(number=number).encode())


def opens(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def wait_until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    made = Store()
    made.start()
    try:
        made.client().create_bucket(Bucket="bucket")
        yield made
    finally:
        made.stop()


def options(store: Store, folder: Path, *more: str) -> list[str]:
    return ["--storage-option", f"s3:endpoint_url={store.url}", "--repository-cache", str(folder), *more]


POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "1")


def ask(served: Served, name: str = "m") -> float:
    body = b'{"inputs": [{"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}'
    url = f"{served.base_url}/v2/models/{name}/infer"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as response:
        return float(response.read().split(b'"data":[')[1].split(b"]")[0])


def metrics(served: Served) -> str:
    with urllib.request.urlopen(f"{served.base_url}/metrics", timeout=30) as response:
        return str(response.read(), "utf-8")


URL: Any = "s3://bucket/models"


def test_a_bucket_is_served_polled_and_may_go_away(store: Store, tmp_path: Path) -> None:
    store.publish(1)
    with serving(URL, *options(store, tmp_path, *POLL)) as served:
        assert ask(served) == 1
        store.publish(2)
        wait_until(lambda: ask(served) == 2)
        store.publish(7, "other")
        store.client().put_object(Bucket="bucket", Key="models/half/config.pbtxt", Body=CONFIG.encode())  # half-written
        wait_until(lambda: "other" in metrics(served))
        assert 'flowserve_repository_reachable{repository="s3://bucket/models"} 1' in metrics(served)
        store.stop()
        wait_until(lambda: 'flowserve_repository_reachable{repository="s3://bucket/models"} 0' in metrics(served))
        assert (ask(served), ask(served, "other")) == (2, 7)
    with serving(URL, *options(store, tmp_path), "--exit-on-error", "false") as served:  # from what was fetched
        assert ask(served) == 2
    store.start()


def test_twenty_reloads_under_load_lose_nothing(store: Store, tmp_path: Path) -> None:
    store.publish(0)
    found: list[float] = []
    failures: list[Exception] = []
    is_over = threading.Event()
    with serving(URL, *options(store, tmp_path, *POLL)) as served:

        def load() -> None:
            while not is_over.is_set():
                try:
                    found.append(ask(served))
                except (OSError, urllib.error.HTTPError) as error:
                    failures.append(error)

        def is_last(number: int) -> bool:
            return bool(found) and found[-1] == number

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for number in range(1, 21):
                store.publish(number)
                wait_until(partial(is_last, number))
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    assert failures == []
    assert {0.0, 20.0} <= {*found}


@pytest.mark.parametrize(
    ("bucket", "more", "said"),
    [
        ("s3://missing/models", [], "there is no such bucket or folder"),
        (
            "s3://bucket/models",
            ["--storage-option", "s3:endpoint_url=http://127.0.0.1:1"],
            "its address cannot be reached",
        ),
        ("s3://bucket/models", ["--storage-option", "gs:project=x"], "no repository is gs://"),
    ],
)
def test_a_store_that_cannot_be_asked_at_the_start_is_named(
    store: Store, tmp_path: Path, bucket: Any, more: list[str], said: str
) -> None:
    with pytest.raises(DidNotServe) as caught, serving(bucket, *options(store, tmp_path), *more):
        pass
    assert said in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_the_command_check_reads_a_bucket(store: Store, tmp_path: Path) -> None:
    store.publish(1)
    store.client().put_object(Bucket="bucket", Key="models/wrong/config.pbtxt", Body=b"max_batch_size: -1")
    command = [sys.executable, "-m", "flowserve", "check", URL, *options(store, tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 1
    assert "wrong/config.pbtxt:1:" in done.stderr
    assert "'m'" not in done.stderr


def test_clients_load_models_of_a_store_one_by_one(store: Store, tmp_path: Path) -> None:
    store.publish(1)
    store.publish(5, "other")
    with serving(URL, *options(store, tmp_path, "--model-control-mode", "explicit")) as served:

        def load(name: str) -> str:
            request = urllib.request.Request(f"{served.base_url}/v2/repository/models/{name}/load", b"{}")
            try:
                with urllib.request.urlopen(request, timeout=60):
                    return ""
            except urllib.error.HTTPError as error:
                return error.read().decode()

        (models,) = tmp_path.glob("*/models")
        assert [*models.iterdir()] == []
        assert load("m") == ""
        assert ask(served) == 1
        assert [path.name for path in models.iterdir()] == ["m"]
        store.client().put_object(Bucket="bucket", Key="models/m/1/model.py", Body=b"no Python(")
        assert "is not valid Python" in load("m")
        assert ask(served) == 1
        store.stop()
        assert "the store of its repository cannot be asked just now" in load("other")
        store.start()
