"""The Python environment named by EXECUTION_ENV_PATH. Errors of environments are tested in tests/server."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from flowserve.backends.python.source import code_in
from flowserve.config.types import ModelConfig
from flowserve.errors import Problems
from flowserve.repository.layout import find_models
from flowserve.repository.read import environment_of
from flowserve.runtime.loading.reading import read_apart
from tests.support.backends import config_of


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A model's folder with an archive and a link to it, and an environment next to the folder."""
    (tmp_path / "m").mkdir()
    with tarfile.open(tmp_path / "m/env.tar.gz", "w:gz"):
        pass
    (tmp_path / "m/latest.tar.gz").symlink_to("env.tar.gz")
    (tmp_path / "shared/bin").mkdir(parents=True)
    (tmp_path / "shared/bin/python3").touch()
    return tmp_path / "m"


def wanting(path: str, backend: str = "python") -> ModelConfig:
    return config_of(name="m", backend=backend, parameters={"EXECUTION_ENV_PATH": path})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("$$TRITON_MODEL_DIRECTORY/env.tar.gz", "m/env.tar.gz"),
        ("$$TRITON_MODEL_DIRECTORY/latest.tar.gz", "m/env.tar.gz"),
        ("$$TRITON_MODEL_DIRECTORY/../shared", "shared"),
        ("{}/shared", "shared"),
        ("shared", "shared"),
    ],
)
def test_an_environment_is_identified_by_its_path(
    home: Path, written: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home.parent)  # other paths are relative to the server's working directory
    assert environment_of(wanting(written.format(home.parent)), home) == home.parent / meant


def test_other_models_have_no_environment(home: Path) -> None:
    assert environment_of(wanting("/nowhere", "onnxruntime"), home) is None
    assert environment_of(wanting(""), home) is None


@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta/history"])
def test_an_environment_in_a_model_folder_is_neither_a_version_nor_code(home: Path, mark: str) -> None:
    (home / "1").mkdir()
    (home / "1/model.py").touch()
    for file in (mark, "lib/python3.12/site-packages/numpy/core.py"):
        (home / "env" / file).parent.mkdir(parents=True, exist_ok=True)
        (home / "env" / file).touch()
    (folder,) = [one for one in find_models([home.parent]).folders if one.name == "m"]
    assert (folder.versions, folder.warnings) == ((1,), ())
    assert [*code_in(home, home / "1")] == [str(home / "1/model.py")]


def test_a_pipe_is_not_read(home: Path) -> None:
    os.mkfifo(home / "pipe")
    with pytest.raises(Problems, match="neither a folder nor a tar archive"):
        environment_of(wanting("$$TRITON_MODEL_DIRECTORY/pipe"), home)


def test_a_missing_environment_is_reported_with_other_mistakes(tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.py").write_text("class TritonPythonMode: ...")
    (tmp_path / "m/config.pbtxt").write_text(
        'backend: "python"\nmax_batch_size: -1\n'
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env" } }\n'
    )
    failed = read_apart([tmp_path]).resolution.failed["m"]
    assert isinstance(failed, Problems)
    assert [(one.place and one.place.line, one.rule) for one in failed.problems] == [(1, "M92"), (2, "M8"), (3, "R14")]
