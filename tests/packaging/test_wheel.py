"""The wheel in an environment that has nothing else, with each extra, from a package index: `tox -e wheel`.

An installation takes up to minutes and gigabytes, so these tests need the option `--wheel`. That the wheel serves at
all is tested without an index in tests/docs/test_tutorial.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import httpx
import pytest

from flowserve.testing.serve import serving, started
from tests.support.packages import build, copy_source

ROOT = Path(__file__).parent.parent.parent
with (ROOT / "pyproject.toml").open("rb") as file:
    EXTRAS = [*tomllib.load(file)["project"]["optional-dependencies"]]

NVIDIA = "wheel_stub"  # a package on the usual index that downloads the real one from NVIDIA's

# A command that needs the extra, run beside the folder `hello` that `flowserve new hello` makes.
USES = {
    "pictures": "flowserve graph hello hello -o hello.png",
    "completion": "flowserve completion bash",
    "grpc": "python -c 'import grpc'",
    "otel": "python -c 'import opentelemetry.exporter.otlp.proto.http.trace_exporter'",
    "examples": "python -c 'import tritonclient.http, tritonclient.grpc'",
    "docs": "mkdocs --version",
    "dev": "pytest --version",
}


@pytest.fixture(autouse=True)
def with_the_option(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--wheel"):
        pytest.skip("installs from a package index: needs --wheel")


@pytest.mark.slow
@pytest.mark.parametrize("build_of", ["gpu", "cpu"])
def test_the_wheel_serves_with_either_build_of_onnxruntime(build_of: str, tmp_path: Path) -> None:
    _install_and_serve(tmp_path, "", build_of)


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_wheel_serves_with_each_extra(extra: str, tmp_path: Path) -> None:
    _install_and_serve(tmp_path, extra, "cpu")


def _install_and_serve(folder: Path, extra: str, build_of: str) -> None:
    source = copy_source(ROOT, folder / "source")
    wheel = build(source, folder / "dist", environment={"FLOWSERVE_ONNXRUNTIME": build_of})
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    path = os.pathsep.join([str(folder / "venv/bin"), "/usr/bin", "/bin"])
    environment = {"PATH": path, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1200
        )
        if done.returncode and NVIDIA in done.stderr:
            pytest.skip("NVIDIA's own package index cannot be reached")
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    run("pip", "install", "--quiet", f"{wheel}[{extra}]" if extra else str(wheel))
    assert "No broken requirements" in run("pip", "check")
    found = run("python", "-c", "import flowserve; print(flowserve.__file__)")
    assert found.startswith(str(folder / "venv"))
    run("flowserve", "new", "hello")
    run("flowserve", "check", "hello")
    if extra in USES:
        run("sh", "-c", USES[extra])
    with serving(
        folder / "hello", environment=environment, start=partial(started, python=str(folder / "venv/bin/python"))
    ) as served:
        body = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["a good day"]}]}
        response = httpx.post(f"{served.base_url}/v2/models/hello/infer", json=body, verify=False)
        assert response.status_code == 200, response.text
        assert response.json()["outputs"]
