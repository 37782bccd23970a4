"""Backends with their real libraries behind a real server: `tox -e backends`; skipped where a library is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import Served
from tests.support.forked import serving
from tests.support.library_models import X

pytestmark = [pytest.mark.slow, pytest.mark.server]

NEEDED = {
    "jax": ("jax",),
    "fil": ("xgboost", "lightgbm", "treelite", "sklearn"),
    "openvino": ("openvino",),
    "pytorch": ("torch",),
    "tensorflow": ("tensorflow",),
}


def needs(library: str) -> pytest.MarkDecorator:
    missing = [module for module in NEEDED[library] if find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: tox -e backends")


LIBRARIES = [pytest.param(library, marks=needs(library)) for library in NEEDED if library != "jax"]


@dataclass
class Running:
    """A server of one library's models, and what the library itself answers."""

    library: str
    repository: Path
    served: Served
    client: Any
    expected: Mapping[str, Any]

    def ask(self, model: str, arrays: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        inputs = []
        for name, array in arrays.items():
            kind = {"f": "FP32", "O": "BYTES"}[array.dtype.kind]
            inputs.append(triton.InferInput(name, array.shape, kind))
            inputs[-1].set_data_from_numpy(array)
        answer = self.client.infer(model, inputs, **options)
        return {one["name"]: answer.as_numpy(one["name"]) for one in answer.get_response()["outputs"]}


def write(library: str, folder: Path) -> Path:
    repository = folder / "models"
    repository.mkdir()
    command = [sys.executable, "-m", "tests.support.library_models", library, str(repository)]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2], timeout=240)
    return repository


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    repository = write(request.param, folder)
    with serving(repository) as served, np.load(folder / "expected.npz") as expected:
        client = triton.InferenceServerClient(served.address, network_timeout=60, connection_timeout=60)
        yield Running(request.param, repository, served, client, dict(expected))
        client.close()


def only(library: str) -> Callable[..., Any]:
    return pytest.mark.parametrize("running", [pytest.param(library, marks=needs(library))], indirect=True)


GIVEN = {
    "words": {"x": X, "text": np.full((4, 1), b"a", object)},
    "frozen": {"given": X},
    "script": {"INPUT__0": X, "y": X},
    "named": {"x": X},
    "exported": {"x": X, "y": X},
    "regressor": {"input__0": np.nan_to_num(X, nan=0.5)},
    "ov_onnx": {"x": X},
    "ov_xml": {"x": X},
}
OTHER_TENSORS = """
input { name: "unknown" data_type: TYPE_FP32 dims: [ 7 ] }
output { name: "none" data_type: TYPE_FP32 dims: [ 7 ] }
"""
FIRST = {"words": "y", "exported": "OUTPUT__0"}


@pytest.mark.parametrize("running", LIBRARIES, indirect=True)
def test_the_server_answers_what_the_library_answers(running: Running) -> None:
    assert running.expected
    for model, expected in running.expected.items():
        answer = running.ask(model, GIVEN.get(model, {"input__0": X}))
        name = FIRST.get(model, next(iter(answer)))
        np.testing.assert_allclose(answer[name], expected, rtol=1e-5, atol=1e-6, err_msg=model)


@pytest.mark.parametrize("running", LIBRARIES, indirect=True)
def test_requests_without_rows_get_outputs_without_rows(running: Running) -> None:
    for model in running.expected:
        if model == "regressor":  # without batching, no rows are no dimension
            continue
        arrays = {name: array[:0] for name, array in GIVEN.get(model, {"input__0": X}).items()}
        assert all(len(made) == 0 for made in running.ask(model, arrays).values()), model


@pytest.mark.parametrize("running", LIBRARIES, indirect=True)
def test_parameters_of_triton_without_effect_are_in_the_log_and_the_place_is_as_documented(running: Running) -> None:
    ignored = {
        "fil": "'algo'",
        "openvino": "'ENABLE_BATCH_PADDING'",
        "pytorch": "'ENABLE_WEIGHT_SHARING'",
    }
    if running.library in ignored:
        assert f"parameter {ignored[running.library]} is not used" in running.served.log
    if SUPPORTED:
        maps = Path(f"/proc/{running.served.pid}/maps").read_text()
        mapped = {"fil": "xgboost", "openvino": "openvino", "pytorch": "libtorch", "tensorflow": "libtensorflow"}
        assert (mapped[running.library] in maps) == (running.library in ("fil", "openvino"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_files_that_cannot_be_read_and_dims_that_differ_are_reported_by_the_check(library: str, tmp_path: Path) -> None:
    repository = write(library, tmp_path)
    broken = sorted(path for path in repository.iterdir() if path.name != "oldest_stateful_model")
    for number, model in enumerate(broken):
        (file,) = [one for one in (model / "1").iterdir() if one.suffix != ".bin"]
        if number % 2:
            if file.is_dir():
                shutil.rmtree(file)
                file.mkdir()
            else:
                file.write_bytes(b"nonsense")
        else:
            config = model / "config.pbtxt"
            kept = config.read_text().split(" input")[0]
            config.write_text(f"{kept} {'' if 'max_batch' in kept else 'max_batch_size: 4'} {OTHER_TENSORS}")
    done = subprocess.run(
        [sys.executable, "-m", "flowserve", "check", "--quiet", str(repository)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    for number, model in enumerate(broken):
        lines = [line for line in done.stderr.splitlines() if line.startswith(f"{model.name}/") and ": error: " in line]
        wanted = ["cannot run it"] if number % 2 else ["inference input 'unknown'", "inference output 'none'"]
        for part in wanted:
            assert any(part in line for line in lines), (model.name, part, lines)


@only("tensorflow")
def test_text_is_bytes_both_ways(running: Running) -> None:
    text = np.array([[b"a\xff\0"], [b""]], object)
    assert running.ask("words", {"x": X[:2], "text": text})["loud"].tolist() == [[b"A\xff\0"], [b""]]


@only("tensorflow")
@pytest.mark.skipif(not SUPPORTED, reason="processes are for Linux")
def test_instances_that_share_a_session_are_in_one_process_with_tensorflow(running: Running) -> None:
    """Four instances in processes; those two of `words` share a session."""

    def parent(pid: str) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return ""

    pids = [one.name for one in Path("/proc").iterdir() if one.name.isdecimal()]
    workers = [pid for pid in pids if parent(parent(pid)) == str(running.served.pid)]
    loaded = ["libtensorflow" in Path(f"/proc/{pid}/maps").read_text() for pid in workers]
    assert sorted(loaded) == [False, True, True, True]
    given = {"x": X, "text": np.full((4, 1), b"a", object)}
    with ThreadPoolExecutor(4) as pool:
        clients = [triton.InferenceServerClient(running.served.address) for _ in range(4)]
        askers = [replace(running, client=client) for client in clients]
        for answer in pool.map(lambda asker: asker.ask("words", given), askers):
            np.testing.assert_array_equal(answer["y"], X * 2)
    for client in clients:
        client.close()


@only("tensorflow")
@pytest.mark.skipif(not SUPPORTED, reason="sequences of a model in a process")
def test_the_configuration_of_the_guide_that_names_tensorflow_runs(running: Running) -> None:
    given = np.zeros((1, 100, 100), np.float32)
    seen = [
        running.ask("oldest_stateful_model", {"INPUT": given}, sequence_id=7, sequence_start=start, sequence_end=end)
        for start, end in ((True, False), (False, False), (False, True))
    ]
    assert [one["OUTPUT"][0, 0] for one in seen] == [107, 7, 1007]


@only("pytorch")
def test_an_error_of_the_model_is_its_last_line(running: Running) -> None:
    with pytest.raises(InferenceServerException) as caught:
        running.ask("script", {"INPUT__0": X, "y": X[:2]})
    assert "Traceback" not in str(caught.value)


@only("fil")
@pytest.mark.parametrize(("missing", "other"), [("xgboost", "xgb"), ("lightgbm", "lgb_three")])
def test_treelite_computes_the_files_of_libraries_that_are_not_installed(
    running: Running, missing: str, other: str, tmp_path: Path
) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import numpy as np; from flowserve import Engine; from tests.support.library_models import X\n"
        f"with Engine(sys.argv[1], load=[{other!r}]) as engine:\n"
        f"    np.save(sys.argv[2], engine.infer({other!r}, {{'input__0': X}})['output__0'])\n"
    )
    made = tmp_path / "made.npy"
    command = [sys.executable, "-c", code, str(running.repository), str(made)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True, timeout=60)
    np.testing.assert_allclose(np.load(made), running.expected[other], atol=1e-5)


@needs("jax")
def test_the_example_of_the_page_serves_a_function_of_jax(root: Path, tmp_path: Path) -> None:
    """The page's module in a package of its own, with the entry point as pip installs it."""
    page = (root / "docs/write-a-backend.md").read_text()
    (module, export), (entry,) = (
        re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL) for kind in ("python", "toml")
    )
    package, repository = tmp_path / "package", tmp_path / "models"
    installed = package / "flowserve_jax-1.dist-info"
    installed.mkdir(parents=True)
    (package / "flowserve_jax.py").write_text(module)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: flowserve-jax\nVersion: 1\n")
    name, _, value = entry.splitlines()[1].partition(" = ")
    (installed / "entry_points.txt").write_text(f"[flowserve.backends]\n{name} = {value.strip(chr(34))}\n")
    version = repository / "twice" / "1"
    version.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", export], check=True, cwd=version, capture_output=True, timeout=60)
    code = (
        "import sys; import numpy as np; from flowserve import Engine\n"
        "with Engine(sys.argv[1]) as engine:\n"
        "    print(engine.infer('twice', {'x': np.ones((3, 4), np.float32)})['y'].tolist(), 'jax' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(repository)]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=root, timeout=90)
    assert done.stdout.splitlines()[-1] == f"{[[2.0] * 4] * 3} {not SUPPORTED}"
