"""Models with Python environments of their own, on a real server: where they run, sharing and cleanup.

The environments are made of this Python: each has numpy, by a link, and a package that no other has.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from flowserve import Engine
from flowserve.runtime.processes.children import SUPPORTED
from flowserve.temporary import UNPACKED
from flowserve.testing.serve import Served
from tests.support.forked import serving

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="models in processes need Linux")

WITHIN_S = 30.0  # a bound for a loaded machine, not the expected time

CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""

# Responds with its input, followed by the value of `expression`.
MODEL = """
import importlib.util, os, sys
import numpy as np
import triton_python_backend_utils as pb_utils
{imports}

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = request.inputs()[0].as_numpy()
        if given[0, 0] == b"crash":
            os._exit(3)
        words = str({expression}).encode()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[x[0] + words] for x in given], object))])
"""
TELLS = "(only_here.NAME, sys.prefix, os.getppid(), importlib.util.find_spec('trio') is None)"

CALLS = """
        called = pb_utils.InferenceRequest(model_name="own", requested_output_names=["OUT"], inputs=request.inputs())
        return called.exec()
"""

COMPLETES = """
    @staticmethod
    def auto_complete_config(config):
        for add in (config.add_input, config.add_output):
            name = "IN" if add == config.add_input else only_here.NAME
            add({"name": name, "data_type": "TYPE_FP32", "dims": [1]})
        return config
"""

# As in conda's builds of Python, which are for old C libraries.
LIKE_CONDA = "import os; del os.memfd_create, os.pidfd_open"  # one line, as in any .pth file
# As a script may do that was written for its own shell only.
SETS_ARGUMENTS = "[ $# = 0 ] || exit 1\nset -- of its own\n"


def make(folder: Path, name: str, *, has_numpy: bool = True, at_start: str = "") -> Path:
    """An environment whose package `only_here` has this NAME."""
    venv.create(folder, symlinks=True)
    packages = folder / f"lib/python3.{sys.version_info[1]}/site-packages"
    (packages / "only_here.py").write_text(f"NAME = {name!r}\n")
    (packages / "at_start.pth").write_text(at_start)  # not sitecustomize.py: Debian's Python has one of its own
    installed = Path(np.__file__).parent
    for one in ("numpy", "numpy.libs") if has_numpy else ():
        if (installed.parent / one).exists():
            (packages / one).symlink_to(installed.parent / one)
    return folder


def pack(folder: Path, archive: Path) -> None:
    """An archive of the folder's contents, as conda-pack writes it."""
    beside = archive.with_suffix(".new")
    with tarfile.open(beside, "w:gz", compresslevel=1) as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    beside.rename(archive)


def wants(environment: Path | str) -> str:
    return f'parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{environment}" }} }}\n'


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where environments are unpacked here."""
    return tmp_path_factory.mktemp("places")


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environments")
    make(folder / "plain", "plain", at_start=LIKE_CONDA)
    with (folder / "plain/bin/activate").open("a") as script:
        script.write(SETS_ARGUMENTS)
    make(folder / "packed", "packed")
    pack(folder / "packed", folder / "packed.tar.gz")
    return folder


@pytest.fixture(scope="module")
def repository(
    tmp_path_factory: pytest.TempPathFactory,
    environments: Path,
    add_model: Callable[..., Path],
    make_ensemble: Callable[..., str],
) -> Path:
    folder = tmp_path_factory.mktemp("models")

    def add(name: str, environment: Path | str = "", expression: str = TELLS, config: str = CONFIG) -> Path:
        model = MODEL.format(imports="import only_here" if environment else "", expression=expression)
        config += wants(environment) if environment else ""
        return add_model(folder, name, config, {"1/model.py": model})

    add("own", expression="(sys.prefix, importlib.util.find_spec('only_here') is None)")
    add("plain", environments / "plain")
    for name in ("packed", "packed_too"):
        add(name, environments / "packed.tar.gz")
    changing = add("changing", "$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    pack(environments / "packed", changing / "env.tar.gz")
    called = add("calls", environments / "plain") / "1/model.py"
    called.write_text(called.read_text().replace("        given =", f"{CALLS}        given ="))
    completed = add("completed", environments / "packed.tar.gz", config='backend: "python"\n') / "1/model.py"
    completed.write_text(completed.read_text() + COMPLETES)
    names = ["plain", "own", "packed"]
    steps = [
        (one, {"IN": "IN" if i == 0 else names[i - 1]}, {"OUT": one if i < 2 else "OUT"}) for i, one in enumerate(names)
    ]
    text = make_ensemble(["IN"], ["OUT"], steps, max_batch_size=8, spec="data_type: TYPE_STRING dims: [ 1 ]")
    add_model(folder, "chain", text)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, places: Path) -> Iterator[Served]:
    options = ("--model-control-mode", "explicit", "--load-model", "*")
    with serving(repository, *options, environment={"TMPDIR": str(places)}) as served:
        yield served


def ask(server: Served, name: str, given: str = "") -> str:
    body = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1, 1], "data": [given]}]}
    answer = httpx.post(f"{server.base_url}/v2/models/{name}/infer", json=body, timeout=WITHIN_S, verify=False)
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["outputs"][0]["data"][0]
    return said


def control(server: Served, name: str, what: str) -> httpx.Response:
    return httpx.post(f"{server.base_url}/v2/repository/models/{name}/{what}", timeout=WITHIN_S, verify=False)


def environment_of(server: Served, name: str) -> tuple[str, str, int, bool]:
    """Package, prefix, parent process, whether it is free of the server's packages."""
    found: tuple[str, str, int, bool] = eval(ask(server, name))
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def unpacked(places: Path) -> set[Path]:
    return {*places.glob(f"{UNPACKED}*")}


def test_each_model_runs_in_its_environment_without_packages_of_the_server(
    server: Served, environments: Path, places: Path
) -> None:
    name, prefix, _, is_free = environment_of(server, "plain")
    assert (name, prefix, is_free) == ("plain", str(environments / "plain"), True)
    name, prefix, _, is_free = environment_of(server, "packed")
    assert (name, Path(prefix).parent, is_free) == ("packed", places, True)
    assert eval(ask(server, "own")) == (sys.prefix, True)


def test_steps_of_an_ensemble_run_in_different_environments(server: Served, environments: Path) -> None:
    for _ in range(3):
        said = ask(server, "chain", "> ")
        assert said.index(str(environments / "plain")) < said.index(sys.prefix) < said.index("'packed'")


def test_models_with_the_same_archive_share_its_folder_and_forkserver(server: Served) -> None:
    assert environment_of(server, "packed")[1:3] == environment_of(server, "packed_too")[1:3]
    assert environment_of(server, "packed")[2] != environment_of(server, "plain")[2]


def test_a_model_in_an_environment_supports_bls_and_auto_completion(server: Served) -> None:
    assert eval(ask(server, "calls")) == (sys.prefix, True)
    metadata = httpx.get(f"{server.base_url}/v2/models/completed", verify=False).json()
    assert [one["name"] for one in metadata["outputs"]] == ["packed"]


def test_a_crashed_model_is_restarted_in_its_environment(server: Served) -> None:
    before = environment_of(server, "packed")
    body = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1, 1], "data": ["crash"]}]}
    answer = httpx.post(f"{server.base_url}/v2/models/packed/infer", json=body, timeout=WITHIN_S, verify=False)
    assert (answer.status_code, "ended with exit status 3" in answer.text) == (500, True)
    assert environment_of(server, "packed") == before


def test_a_changed_archive_is_unpacked_again_and_the_unused_one_is_removed(
    server: Served, repository: Path, places: Path, environments: Path, tmp_path: Path
) -> None:
    _, first, forkserver, _ = environment_of(server, "changing")
    pack(make(tmp_path / "newer", "newer"), repository / "changing/env.tar.gz")
    assert control(server, "changing", "load").status_code == 200
    name, second, _, _ = environment_of(server, "changing")
    assert (name, first == second) == ("newer", False)
    until(lambda: Path(first) not in unpacked(places) and not Path(f"/proc/{forkserver}").exists())
    assert control(server, "changing", "unload").status_code == 200
    until(lambda: Path(second) not in unpacked(places))
    assert Path(environment_of(server, "packed")[1]) in unpacked(places)


def broken_environments(folder: Path) -> Mapping[str, tuple[Path | str, str]]:
    """By name: a model's environment, and the expected error."""
    (folder / "folder.txt").write_text("no archive")
    (folder / "nothing").mkdir()
    with tarfile.open(folder / "outer.tar.gz", "w:gz") as tar:
        tar.add(make(folder / "inner", "inner"), "inner")
    (folder / "cut.tar.gz").write_bytes((folder / "outer.tar.gz").read_bytes()[:2000])
    make(folder / "no_numpy", "", has_numpy=False)
    make(folder / "other_numpy", "", has_numpy=False)
    (lib,) = folder.glob("other_numpy/lib/python3*/site-packages")
    (lib / "numpy.py").write_text("raise ImportError('\\n\\nREAD THIS!\\n\\nOriginal error was: no library\\n')")
    make(folder / "old", "", at_start="import sys; sys.version_info = (3, 9, 18)")
    (folder / "moved/bin").mkdir(parents=True)
    (folder / "moved/bin/python").symlink_to("/nowhere/python3.12")
    (folder / "ends/bin").mkdir(parents=True)
    (folder / "ends/bin/python").write_text("#!/bin/sh\necho it has no heart >&2; exit 3\n")
    (folder / "ends/bin/python").chmod(0o755)
    return {
        "missing": (folder / "none.tar.gz", "there is no such file or folder"),
        "beside": (
            "env.tar.gz",
            'there is no such file or folder (did you mean "$$TRITON_MODEL_DIRECTORY/env.tar.gz"?',
        ),
        "text": (folder / "folder.txt", "it is neither a folder nor a tar archive"),
        "nothing": (folder / "nothing", "there is no bin/python in it [R14]"),
        "outer": (folder / "outer.tar.gz", "there is no bin/python in it, but in inner/: it should be what is in that"),
        "moved": (folder / "moved", "its bin/python leads to /nowhere/python3.12, which is not there"),
        "cut": (folder / "cut.tar.gz", "it cannot be unpacked: "),
        "no_numpy": (
            folder / "no_numpy",
            "numpy, which every model needs, cannot be imported there: ModuleNotFoundErr",
        ),
        "other_numpy": (folder / "other_numpy", "be imported there: ImportError: Original error was: no library [R14]"),
        "old": (folder / "old", "it has Python 3.9, and models need 3.10 or newer"),
        "ends": (folder / "ends", "its Python does not start: it has no heart"),
        "bf16": (folder.parent / "bf16", "tensors of type TYPE_BF16 need the package ml_dtypes, which it has not"),
    }


def test_an_environment_error_is_reported_at_its_parameter_and_affects_no_other_model(
    server: Served, repository: Path, places: Path, tmp_path: Path, add_model: Callable[..., Path]
) -> None:
    (tmp_path / "broken").mkdir()
    make(tmp_path / "bf16", "")
    before = unpacked(places)
    for name, (environment, why) in broken_environments(tmp_path / "broken").items():
        config = CONFIG.replace("TYPE_STRING", "TYPE_BF16") if name == "bf16" else CONFIG
        model = MODEL.format(imports="", expression="1")
        folder = add_model(repository, f"no_{name}", config + wants(environment), {"1/model.py": model})
        (folder / "env.tar.gz").touch()
        answer = control(server, f"no_{name}", "load")
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (
            f"no_{name}/config.pbtxt:6:14: model 'no_{name}' cannot run in its environment '{environment}': " in error
        )
        assert why in error
    assert unpacked(places) == before
    assert environment_of(server, "plain")[0] == "plain"


def test_a_model_refused_after_completion_releases_its_environment(
    tmp_path: Path, environments: Path, add_model: Callable[..., Path]
) -> None:
    needs = 'instance_group [ { rate_limiter { resources [ { name: "R" count: 5 } ] } } ]\n'
    config = f'backend: "python"\n{needs}{wants(environments / "packed.tar.gz")}'
    model = MODEL.format(imports="import only_here", expression=TELLS) + COMPLETES
    add_model(tmp_path / "models", "m", config, {"1/model.py": model})
    (tmp_path / "places").mkdir()
    options = ("--model-control-mode", "explicit", "--rate-limit", "execution_count", "--rate-limit-resource", "R:2")
    with serving(tmp_path / "models", *options, environment={"TMPDIR": str(tmp_path / "places")}) as server:
        assert "Resource" in control(server, "m", "load").text
        until(lambda: not unpacked(tmp_path / "places"))


def test_an_environment_that_never_starts_is_given_up_with_its_model(
    server: Served, repository: Path, tmp_path: Path, add_model: Callable[..., Path]
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f"#!/bin/sh\nsleep 600 &\necho $! >{tmp_path}/began\nwait\n")
    (tmp_path / "bin/python").chmod(0o755)
    model = MODEL.format(imports="", expression="1")
    for name in ("hangs", "waits"):
        add_model(repository, name, CONFIG + wants(tmp_path), {"1/model.py": model})

    def is_unloaded(name: str, loading: Future[httpx.Response]) -> bool:
        return control(server, name, "unload").status_code == 200 and loading.done()

    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(control, server, "hangs", "load")
        until(lambda: (tmp_path / "began").exists() and (tmp_path / "began").read_text())
        waiting = pool.submit(control, server, "waits", "load")
        for name, ends in (("waits", waiting), ("hangs", loading)):  # an operation waits for the one before it
            until(partial(is_unloaded, name, ends))
            assert "it was unloaded while it was loading" in ends.result().text
    left = Path(f"/proc/{(tmp_path / 'began').read_text().strip()}/cmdline")
    until(lambda: not left.exists() or not left.read_bytes())  # it is empty for a zombie process


def test_environments_are_ignored_in_the_server_process_with_a_log_message(
    tmp_path: Path, add_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = MODEL.format(imports="", expression="sys.prefix")
    add_model(tmp_path, "m", CONFIG + wants("/nowhere"), {"1/model.py": model})
    with Engine(tmp_path, python_execution="thread") as engine:
        said = engine.infer("m", {"IN": np.array([[b""]], object)})["OUT"][0, 0]
    assert said.decode() == sys.prefix
    (text,) = [one for one in caplog.messages if "EXECUTION_ENV_PATH" in one]
    assert "is not used: model 'm' runs in the server's own Python environment (by execution \"thread\";" in text


def test_a_stopped_server_removes_its_unpacked_archives_and_those_of_a_killed_one(
    tmp_path: Path, environments: Path, add_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODEL.format(imports="import only_here", expression=TELLS)
    add_model(tmp_path / "models", "m", CONFIG + wants(environments / "packed.tar.gz"), {"1/model.py": model})
    places = tmp_path / "places"
    places.mkdir()
    with serving(tmp_path / "models", environment={"TMPDIR": str(places)}) as first:
        (left,) = unpacked(places)
        first.process.kill()
        first.process.wait()
    assert unpacked(places) == {left}
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    with Engine(tmp_path / "models"):
        (later,) = unpacked(places)
        assert later != left
    until(lambda: not unpacked(places))


def test_a_server_stopped_during_unpacking_removes_the_partial_archive(
    tmp_path: Path, environments: Path, add_model: Callable[..., Path]
) -> None:
    began, places = tmp_path / "began", tmp_path / "places"
    places.mkdir()
    made = make(tmp_path / "slow", "slow")
    (made / "bin/conda-unpack").write_text(f"import time; open({str(began)!r}, 'w').close(); time.sleep(600)")
    pack(made, tmp_path / "slow.tar.gz")
    model = MODEL.format(imports="", expression="1")
    for name in ("m", "n"):
        add_model(tmp_path / "models", name, CONFIG + wants(tmp_path / "slow.tar.gz"), {"1/model.py": model})
    options = ("--model-control-mode", "explicit")
    with (
        ThreadPoolExecutor(2) as pool,
        serving(tmp_path / "models", *options, environment={"TMPDIR": str(places)}) as served,
    ):
        loading = [pool.submit(control, served, name, "load") for name in ("m", "n")]
        until(began.exists)
        assert served.stop() == 0
        assert [one.result(WITHIN_S).status_code for one in loading] == [503, 503]
        assert served.log.count("unpacking") == 1
    assert not unpacked(places)
