"""The module onnxruntime can come from several packages; exactly one of them must be installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.onnx_files import onnx_identity

PACKAGES = Path(sysconfig.get_path("purelib"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "models/net/1").mkdir(parents=True)
    (tmp_path / "models/net/1/model.onnx").write_bytes(onnx_identity())
    return tmp_path / "models"


def _checked(root: Path, repository: Path, *packages: Path) -> tuple[int, str]:
    """The status of `flowserve check`, and its errors, by an interpreter that finds these packages and no others."""
    path = os.pathsep.join(map(str, [*packages, root]))
    command = [sys.executable, "-S", "-m", "flowserve", "check", str(repository)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def _links(folder: Path, *but: str) -> Path:
    """All packages that are installed here, except those whose files begin like `but`."""
    folder.mkdir()
    for one in PACKAGES.iterdir():
        if not one.name.startswith(but):
            (folder / one.name).symlink_to(one)
    return folder


def _install(folder: Path, name: str, version: str, *requirements: str) -> None:
    """The files by which an installed package is known."""
    written = folder / f"{name.replace('-', '_')}-{version}.dist-info/METADATA"
    written.parent.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    written.write_text("\n".join([*lines, *(f"Requires-Dist: {one}" for one in requirements), ""]))


def test_two_builds_are_an_error_with_the_command_that_leaves_the_one_that_flowserve_was_installed_with(
    root: Path, repository: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    _install(site, "onnxruntime", "1.32.0")
    _install(site, "onnxruntime-gpu", "1.26.0")
    gpu, other = "onnxruntime-gpu==1.26.*; sys_platform == 'linux'", "onnxruntime>=1.20; sys_platform != 'linux'"
    _install(site, "flowserve", "1", "trio>=0.30", gpu, other)
    status, errors = _checked(root, repository, site, PACKAGES)
    assert status == 1
    (line,) = [line for line in errors.splitlines() if "error:" in line]
    assert "onnxruntime 1.32.0 and onnxruntime-gpu 1.26.0 are installed together" in line
    pip = f"{sys.executable} -m pip"
    assert (
        f"keep one: {pip} uninstall -y onnxruntime onnxruntime-gpu && {pip} install 'onnxruntime-gpu==1.26.*'" in line
    )
    assert "did you mean" not in errors


@pytest.mark.slow
def test_without_any_build_the_error_has_the_command_that_installs_it(
    root: Path, repository: Path, tmp_path: Path
) -> None:
    status, errors = _checked(root, repository, _links(tmp_path / "links", "onnxruntime"))
    assert status == 1
    assert f"onnxruntime, which is not installed: {sys.executable} -m pip install" in errors


@pytest.mark.slow
def test_a_build_that_belongs_to_no_package_is_used(root: Path, repository: Path, tmp_path: Path) -> None:
    assert _checked(root, repository, _links(tmp_path / "links", "onnxruntime_gpu-", "onnxruntime-")) == (0, "")
