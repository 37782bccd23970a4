"""The registry: built-in backends and those of other packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from flowserve.backends import registry
from flowserve.errors import Unsupported


class Third:
    """A third-party backend."""

    name = "third"
    default_filename = "model.third"


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two entry points as other packages declare them: one that works, one that does not."""
    entries = [
        EntryPoint("third", "third_module:Third", registry.GROUP),
        EntryPoint("broken", "no_such_module:Broken", registry.GROUP),
    ]
    module: Any = type(sys)("third_module")
    module.Third = Third
    monkeypatch.setitem(sys.modules, "third_module", module)
    monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in entries if e.group == group])
    for cached in (registry.find, registry.default_files):
        cached.cache_clear()
    yield
    for cached in (registry.find, registry.default_files):
        cached.cache_clear()


def test_built_in_backends_are_found_by_name() -> None:
    assert [registry.find(name).name for name in ("onnxruntime", "python")] == ["onnxruntime", "python"]
    assert registry.find("python") is registry.find("python")


def test_default_files_agree_with_the_backends() -> None:
    files = registry.default_files()
    assert (
        {name: registry.find(name).default_filename for name in files}
        == files
        == {
            "callable": "model.py",
            "fil": "xgboost.json",
            "onnxruntime": "model.onnx",
            "openvino": "model.xml",
            "python": "model.py",
            "pytorch": "model.pt",
            "tensorflow": "model.savedmodel",
            "tensorrt": "model.plan",
        }
    )


def test_an_unknown_backend_is_refused_with_the_list_of_backends() -> None:
    with pytest.raises(Unsupported) as caught:
        registry.find("dali")
    assert str(caught.value) == (
        "unable to find backend library for backend 'dali': flowserve has callable, fil, onnxruntime, openvino, "
        "python, pytorch, remote, tensorflow, tensorrt, vllm"
    )


@pytest.mark.usefixtures("third_party")
def test_a_package_adds_its_backend_by_an_entry_point() -> None:
    assert isinstance(registry.find("third"), Third)
    with pytest.raises(Unsupported, match=r"flowserve has broken, callable, fil, onnxruntime, .* third"):
        registry.find("unknown")


@pytest.mark.usefixtures("third_party")
def test_a_backend_that_cannot_be_imported_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Unsupported, match=r"backend 'broken' \(no_such_module:Broken\) cannot be loaded"):
        registry.find("broken")
    found = registry.default_files()
    assert found["third"] == "model.third"
    assert "onnxruntime" in found
    assert "broken" not in found
    assert "backend 'broken'" in caplog.text


def test_no_library_is_imported_before_it_is_needed() -> None:
    program = (
        "import sys; from flowserve.backends import registry; registry.default_files(); registry.find('python'); "
        "[registry.default_execution(name) for name in ('fil', 'openvino', 'pytorch', 'tensorflow')]; "
        "print({'onnxruntime', 'xgboost', 'lightgbm', 'treelite', 'openvino', 'torch', 'tensorflow'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_libraries_with_thread_pools_of_their_own_run_in_processes() -> None:
    places = {name: registry.default_execution(name) for name in registry.default_files()}
    assert {name for name, place in places.items() if place == "process"} == {"pytorch", "tensorflow"}
