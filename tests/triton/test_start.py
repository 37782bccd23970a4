"""How a server starts: options of launch scripts, several repositories, models that do not load, and configurations
that are not completed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from flowserve.testing.serve import DidNotServe
from tests.support.triton_like import free_port, like_triton

ECHO = """\
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]) for array in given]
"""
RAISES = ECHO + '\n    def initialize(self, args): raise RuntimeError("no tokenizer")\n'
# Completes a configuration with a batch size, a batcher and a second output.
AUTHOR = (
    ECHO
    + """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [2]})
        for name in ("Y", "Z"):
            config.add_output({"name": name, "data_type": "TYPE_FP32", "dims": [2]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        return config
"""
)
X = 'input { name: "X" data_type: TYPE_FP32 dims: 2 }\n'
Y = 'output { name: "Y" data_type: TYPE_FP32 dims: 2 }\n'
PYTHON = 'backend: "python"\n'
CONFIG = f"{PYTHON}max_batch_size: 4\n{X}{Y}instance_group {{ kind: KIND_CPU }}\n"
ON_THREAD = 'parameters { key: "execution" value: { string_value: "thread" } }\n'
INLINE = ON_THREAD.replace("thread", "inline")

pytestmark = pytest.mark.server


def ensemble(step: str) -> str:
    maps = 'input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }'
    steps = f'ensemble_scheduling {{ step {{ model_name: "{step}" model_version: -1 {maps} }} }}'
    return f'platform: "ensemble"\nmax_batch_size: 4\n{X}{Y}{steps}\n'


def write(repository: Path, name: str, config: str | None = CONFIG, code: str = ECHO, version: str = "1") -> None:
    (repository / name / version).mkdir(parents=True)
    if config is not None:
        (repository / name / "config.pbtxt").write_text(config)
    if code:
        (repository / name / version / "model.py").write_text(code)


@dataclass(frozen=True)
class Server:
    """Both front ends of one server."""

    url: str
    grpc: str

    def is_ready(self, protocol: str) -> bool:
        with self._client(protocol) as client:
            assert client.is_server_live()
            return bool(client.is_server_ready())

    def serves(self, protocol: str, name: str) -> bool:
        with self._client(protocol) as client:
            return bool(client.is_model_ready(name))

    def echoes(self, protocol: str, name: str) -> bool:
        module = triton_http if protocol == "http" else triton_grpc
        given = module.InferInput("X", [1, 2], "FP32")
        given.set_data_from_numpy(np.array([[1, 2]], np.float32))
        with self._client(protocol) as client:
            return bool(client.infer(name, [given]).as_numpy("Y").tolist() == [[1, 2]])

    def names(self, **asked: Any) -> set[str]:
        return {row["name"] for row in httpx.post(f"{self.url}/v2/repository/index", json=asked, verify=False).json()}

    def _client(self, protocol: str) -> Any:
        if protocol == "http":
            return triton_http.InferenceServerClient(self.url.removeprefix("http://"))
        return triton_grpc.InferenceServerClient(self.grpc)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, on_triton: bool) -> Iterator[Callable[..., Server]]:
    """`start(key, fill, "--option=value")`: the server of the repository that `fill` writes. The last two keys have
    theirs still running.
    """
    servers: dict[str, tuple[Server, ExitStack]] = {}

    def started(key: str, fill: Callable[[Path], object], *options: str) -> Server:
        if key not in servers:
            while len(servers) > 1:
                servers.pop(next(iter(servers)))[1].close()
            repository = tmp_path_factory.mktemp(key.replace("/", "_"))
            fill(repository)
            port, stack = free_port(), ExitStack()
            options = ("--allow-grpc=true", f"--grpc-port={port}", *options)
            url = stack.enter_context(like_triton(repository, *options, against_triton=on_triton))
            servers[key] = Server(url, f"127.0.0.1:{port}"), stack
        return servers[key][0]

    yield started
    for _, stack in servers.values():
        stack.close()


# Models that do not load

# What is wrong -> (the folders besides `good`, whether the server waits for them to be ready). Triton does not wait for
# a folder without a configuration that can be read, nor for an ensemble of such folders.
FAILS: dict[str, tuple[dict[str, tuple[str | None, str]], bool]] = {
    "unknown_field": ({"m": (CONFIG + "nonsense: 3\n", ECHO)}, False),
    "syntax_of_the_configuration": ({"m": (CONFIG + "}", ECHO)}, False),
    "no_backend": ({"m": (None, "")}, False),
    "name_of_another_folder": ({"m": (f'name: "other"\n{CONFIG}', ECHO)}, False),
    "unknown_step": ({"pipe": (ensemble("nothing"), "")}, False),
    "step_without_configuration": ({"m": (CONFIG + "nonsense: 3\n", ECHO), "pipe": (ensemble("m"), "")}, False),
    "raises": ({"m": (CONFIG, RAISES)}, True),
    "raises_on_a_thread": ({"m": (CONFIG + ON_THREAD, RAISES)}, True),
    "raises_inline": ({"m": (CONFIG + INLINE, RAISES)}, True),
    "step_that_raises": ({"m": (CONFIG, RAISES), "pipe": (ensemble("m"), "")}, True),
    "syntax_of_the_code": ({"m": (CONFIG, ECHO + "def (\n")}, True),
    "missing_module": ({"m": (CONFIG, "import no_such_module\n" + ECHO)}, True),
    "no_gpu": ({"m": (CONFIG.replace("KIND_CPU", "KIND_GPU"), ECHO)}, True),
    "negative_dims": ({"m": (CONFIG.replace("dims: 2", "dims: -3"), ECHO)}, True),
    "unknown_backend": ({"m": (CONFIG.replace("python", "pythn"), ECHO)}, True),
}
PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])


def fill(case: str) -> Callable[[Path], None]:
    def write_all(repository: Path) -> None:
        write(repository, "good")
        for name, (config, code) in FAILS[case][0].items():
            write(repository, name, config, code)

    return write_all


def fill_all(repository: Path) -> None:
    """Every case at once, each with folders of its own."""
    write(repository, "good")
    for case, (folders, _) in FAILS.items():
        for name, (config, code) in folders.items():
            own = config and config.replace('model_name: "m"', f'model_name: "{case}_m"')
            write(repository, f"{case}_{name}", own, code)


@PROTOCOLS
@pytest.mark.parametrize("case", FAILS)
def test_a_model_that_does_not_load_stops_no_other(start: Callable[..., Server], case: str, protocol: str) -> None:
    server = start(case, fill(case), "--exit-on-error=false")
    assert server.echoes(protocol, "good")
    assert server.names(ready=True) == {"good"}
    assert [name for name in FAILS[case][0] if server.serves(protocol, name)] == []
    assert server.is_ready(protocol) is not FAILS[case][1]


MODES = {
    "explicit": ("--model-control-mode=explicit", "--load-model=good", "--load-model=m"),
    "all": ("--model-control-mode=explicit", "--load-model=*"),
    "poll": ("--model-control-mode=poll",),
}


@PROTOCOLS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["unknown_field", "raises"])
def test_every_control_mode_goes_on_with_the_other_models(
    start: Callable[..., Server], case: str, mode: str, protocol: str
) -> None:
    server = start(f"{case}/{mode}", fill(case), "--exit-on-error=false", *MODES[mode])
    assert server.echoes(protocol, "good")
    assert not server.serves(protocol, "m")
    assert server.is_ready(protocol) is not FAILS[case][1]


@PROTOCOLS
@pytest.mark.parametrize("case", ["unknown_field", "raises", "step_that_raises"])
def test_readiness_that_is_not_strict_waits_for_no_model(
    start: Callable[..., Server], case: str, protocol: str
) -> None:
    server = start(f"{case}/lenient", fill(case), "--exit-on-error=false", "--strict-readiness=false")
    assert server.echoes(protocol, "good")
    assert server.is_ready(protocol)


@PROTOCOLS
def test_a_name_to_load_that_no_repository_has_is_not_in_the_index(start: Callable[..., Server], protocol: str) -> None:
    options = ("--exit-on-error=false", "--model-control-mode=explicit", "--load-model=good", "--load-model=nothing")
    server = start("unknown_name", lambda repository: write(repository, "good"), *options)
    assert server.echoes(protocol, "good")
    assert server.is_ready(protocol)
    assert server.names() == {"good"}


@PROTOCOLS
def test_the_step_of_an_ensemble_to_load_counts_as_well(start: Callable[..., Server], protocol: str) -> None:
    options = ("--exit-on-error=false", "--model-control-mode=explicit", "--load-model=pipe")
    server = start("explicit_step", fill("step_that_raises"), *options)
    assert not server.is_ready(protocol)
    assert server.names(ready=True) == set()


@pytest.mark.parametrize("case", ["unknown_field", "raises", "unknown_step", "step_that_raises"])
@pytest.mark.parametrize("options", [(), ("--strict-readiness=false",), MODES["poll"], MODES["all"]])
def test_an_error_at_start_ends_the_server_by_default(
    tmp_path: Path, on_triton: bool, case: str, options: tuple[str, ...]
) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    fill(case)(repository)
    server = like_triton(repository, *options, against_triton=on_triton)
    with pytest.raises((RuntimeError, DidNotServe)), server:
        pass


@pytest.mark.parametrize("case", FAILS)
def test_a_load_call_of_a_model_that_does_not_load_begins_with_tritons_text(
    start: Callable[..., Server], on_triton: bool, case: str
) -> None:
    server = start("explicit_all", fill_all, "--model-control-mode=explicit", "--load-model=good")
    folders, is_known = FAILS[case]
    for name in folders:
        path = f"v2/repository/models/{case}_{name}/load"
        reply = httpx.post(f"{server.url}/{path}", verify=False, timeout=60)
        assert reply.status_code in ((400, 500) if on_triton else (400,))  # a client's mistake is never a 500
        is_unread = not is_known and name == "m"
        begin = (
            f"failed to load '{case}_{name}', failed to poll from model repository"
            if is_unread
            else "load failed for model"
        )
        assert reply.json()["error"].startswith(begin)
    assert server.echoes("http", "good")
    assert server.is_ready("http") or on_triton


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_failed_load_is_repeated_as_often_as_the_option_says(tmp_path: Path, on_triton: bool, retries: int) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    count = tmp_path / "count"
    fails_twice = f"""
    def initialize(self, args):
        with open({str(count)!r}, "a+") as stream:
            stream.write("x")
            stream.seek(0)
            if len(stream.read()) <= 2:
                raise RuntimeError("not yet")
"""
    write(repository, "good")
    write(repository, "m", CONFIG, ECHO + fails_twice)
    options = ("--exit-on-error=false", f"--model-load-retry-count={retries}")
    with like_triton(repository, *options, against_triton=on_triton) as url:
        assert (httpx.get(f"{url}/v2/models/m/ready", verify=False).status_code == 200) is (retries == 2)
    assert len(count.read_text()) == retries + 1


# Several repositories


@PROTOCOLS
@pytest.mark.parametrize("option", ["--model-repository", "--model-store"])
def test_repositories_of_options_are_served_together(
    start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory, option: str, protocol: str
) -> None:
    folders = [tmp_path_factory.mktemp("more") for _ in range(2)]
    for number, folder in enumerate(folders):
        write(folder, f"more{number}")
    options = [f"{option}={folder}" for folder in folders]
    server = start(f"several/{option}", lambda repository: write(repository, "good"), *options)
    assert all(server.echoes(protocol, name) for name in ("good", "more0", "more1"))
    assert server.is_ready(protocol)


@PROTOCOLS
def test_a_name_in_two_repositories_is_not_served(
    start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory, protocol: str
) -> None:
    folder = tmp_path_factory.mktemp("twice")
    write(folder, "twice")

    def write_both(repository: Path) -> None:
        write(repository, "good")
        write(repository, "twice")

    server = start("twice", write_both, "--exit-on-error=false", f"--model-repository={folder}")
    assert server.echoes(protocol, "good")
    assert not server.serves(protocol, "twice")
    assert server.is_ready(protocol)


# Configurations that are not completed

# name: (config.pbtxt, whether it loads as it is)
WRITTEN: dict[str, tuple[str | None, bool]] = {
    "whole": (f"{PYTHON}max_batch_size: 4\n{X}{Y}", True),
    "whole_with_name": (f'name: "whole_with_name"\n{PYTHON}max_batch_size: 4\n{X}{Y}', True),
    "without_backend": (f"max_batch_size: 4\n{X}{Y}", True),
    "with_instances": (f"{PYTHON}max_batch_size: 4\n{X}{Y}instance_group {{ kind: KIND_CPU count: 2 }}", True),
    "with_batcher": (f"{PYTHON}max_batch_size: 4\n{X}{Y}dynamic_batching {{ }}", True),
    "without_batch_size": (f"{PYTHON}{X}{Y}", True),
    "without_input": (f"{PYTHON}max_batch_size: 4\n{Y}", True),
    "without_output": (f"{PYTHON}max_batch_size: 4\n{X}", True),
    "only_backend": (PYTHON, True),
    "without_data_type": (f'{PYTHON}input {{ name: "X" dims: 2 }}\n{Y}', False),
    "without_dims": (f'{PYTHON}input {{ name: "X" data_type: TYPE_FP32 }}\n{Y}', False),
    "without_configuration": (None, False),
}
STRICT = {"new": "--disable-auto-complete-config", "old": "--strict-model-config=true"}


def configuration(server: Server, protocol: str, name: str) -> dict[str, Any]:
    with server._client(protocol) as client:
        if protocol == "http":
            found: dict[str, Any] = client.get_model_config(name)
        else:
            found = client.get_model_config(name, as_json=True)["config"]
    return found


@PROTOCOLS
@pytest.mark.parametrize("option", STRICT)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_configuration_that_is_not_completed_is_the_written_one(
    start: Callable[..., Server], option: str, name: str, protocol: str
) -> None:
    def write_all(repository: Path) -> None:
        for one, (config, _) in WRITTEN.items():
            write(repository, one, config, AUTHOR)

    server = start(f"strict/{option}", write_all, "--exit-on-error=false", "--strict-readiness=false", STRICT[option])
    text, loads = WRITTEN[name]
    assert server.serves(protocol, name) is loads
    if not loads:
        return
    assert text is not None
    found = configuration(server, protocol, name)
    assert found.get("max_batch_size", 0) == (4 if "max_batch_size" in text else 0)
    assert [one["name"] for one in found.get("input", [])] == (["X"] if X in text else [])
    assert [one["name"] for one in found.get("output", [])] == (["Y"] if Y in text else [])
    assert ("dynamic_batching" in found) is ("dynamic_batching" in text)
    assert found["instance_group"][0]["count"] == (2 if "count" in text else 1)


@PROTOCOLS
@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "without_batch_size"])
def test_the_same_configurations_are_completed_by_default(
    start: Callable[..., Server], name: str, protocol: str
) -> None:
    def write_all(repository: Path) -> None:
        for one, (config, _) in WRITTEN.items():
            write(repository, one, config, AUTHOR)

    server = start("completed", write_all)
    found = configuration(server, protocol, name)
    assert found["max_batch_size"] == 8
    assert {one["name"] for one in found["output"]} == {"Y", "Z"}
    assert "dynamic_batching" in found


@PROTOCOLS
def test_a_load_call_brings_the_configuration_that_is_not_completed(
    start: Callable[..., Server], on_triton: bool, protocol: str
) -> None:
    options = ("--disable-auto-complete-config", "--model-control-mode=explicit")
    server = start("strict_load", lambda repository: write(repository, "m", None, AUTHOR), *options)
    reply = httpx.post(f"{server.url}/v2/repository/models/m/load", verify=False, timeout=60)
    assert reply.status_code == (500 if on_triton else 400)  # a client's mistake is never a 500
    assert "failed to load 'm', failed to poll from model repository" in reply.json()["error"]
    config = {
        "backend": "python",
        "max_batch_size": 2,
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
    }
    body = {"parameters": {"config": json.dumps(config)}}
    reply = httpx.post(f"{server.url}/v2/repository/models/m/load", json=body, verify=False, timeout=60)
    assert reply.status_code == 200
    assert server.echoes(protocol, "m")
    assert configuration(server, protocol, "m")["max_batch_size"] == 2
    httpx.post(f"{server.url}/v2/repository/models/m/unload", verify=False, timeout=60)


# Ensembles without a version folder


@PROTOCOLS
@pytest.mark.parametrize("mode", ["none", *MODES])
def test_an_ensemble_without_a_version_folder_is_version_1(
    start: Callable[..., Server], on_triton: bool, mode: str, protocol: str
) -> None:
    if on_triton:
        pytest.skip("Triton refuses it, though nothing need be in the folder, which git drops")

    def write_all(repository: Path) -> None:
        write(repository, "good")
        write(repository, "m", ensemble("good"), "")
        (repository / "m" / "1").rmdir()

    server = start(f"versionless/{mode}", write_all, *MODES.get(mode, ()))
    assert server.echoes(protocol, "m")
    assert server.is_ready(protocol)
    (row,) = [row for row in httpx.post(f"{server.url}/v2/repository/index", verify=False).json() if row["name"] == "m"]
    assert (row["version"], row["state"]) == ("1", "READY")


# Options of launch scripts


# Each is one start; options that exclude each other are in different ones.
LAUNCHES = {
    "usual": """
        --log-verbose=1 --log-info=false --log-warning=TRUE --id=server --model-control-mode=none
        --strict-model-config=false --exit-timeout-secs=30 --exit-on-error=True --allow-http=true --http-thread-count=16
        --http-header-forward-pattern=.* --allow-sagemaker=false --allow-vertex-ai=false
        --allow-gpu-metrics=false --allow-cpu-metrics=false --metrics-interval-ms=1000
        --metrics-config=summary_latencies=true --cache-config=local,size=1048576 --rate-limit=off
        --trace-config=level=OFF --trace-config=rate=100 --pinned-memory-pool-byte-size=67108864
        --cuda-memory-pool-byte-size=0:67108864 --buffer-manager-thread-count=4
    """,
    "explicit": """
        --log-verbose=true --model-control-mode=explicit --load-model=* --response-cache-byte-size=1048576
        --allow-metrics=false --metrics-port=8002 --model-load-thread-count=2 --model-load-retry-count=1
        --trace-file=PLACE/trace.json --trace-level=TIMESTAMPS --trace-rate=10 --trace-count=5
        --rate-limit=execution_count --rate-limit-resource=R1:4 --model-namespacing=false --reuse-http-port=false
        --backend-config=python,shm-default-byte-size=2097152
        --backend-config=onnxruntime,enable-global-threadpool=1
        --backend-config=tensorrt,coalesce-request-input=true --backend-config=default-max-batch-size=8
    """,
    "poll": """
        --model-control-mode=poll --repository-poll-secs=5 --model-config-name=other --repoagent-directory=PLACE
        --trace-file=PLACE/trace.json --trace-level=MAX --trace-log-frequency=5
        --grpc-infer-allocation-pool-size=16 --grpc-infer-response-compression-level=none
        --grpc-keepalive-time=10000 --grpc-keepalive-timeout=5000 --grpc-keepalive-permit-without-calls=1
        --grpc-http2-max-pings-without-data=0 --grpc-http2-min-recv-ping-interval-without-data=10000
    """,
    "devices": """
        --enable-peer-access=false --cuda-virtual-address-size=0:1048576 --min-supported-compute-capability=6.0
        --host-policy=gpu_0,numa-node=0 --host-policy=gpu_0,cpu-cores=0-1 --model-load-gpu-limit=0:0.8
    """,
}


@pytest.mark.parametrize("launch", [*LAUNCHES])
def test_options_of_launch_scripts_are_taken(tmp_path: Path, on_triton: bool, launch: str) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    write(repository, "good")
    words = LAUNCHES[launch].replace("PLACE", str(tmp_path)).split()
    with like_triton(repository, *words, against_triton=on_triton) as url:
        assert httpx.get(f"{url}/v2/models/good/ready", verify=False).status_code == 200
