"""What a build of the package contains: types, metadata, and the same bytes each time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from flowserve.version import __version__
from tests.support.packages import Kind, build, copy_source, unpacked_in_environment

EPOCH = {"SOURCE_DATE_EPOCH": "1700000000"}


@pytest.fixture(scope="module")
def source(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_source(root, tmp_path_factory.mktemp("source"))


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"flowserve-{__version__}.dist-info/METADATA").decode())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_two_builds_are_byte_identical(kind: Kind, root: Path, source: Path, tmp_path: Path) -> None:
    other = copy_source(root, tmp_path / "other")
    for path in other.rglob("*"):  # as another user's checkout at another time
        os.utime(path, (1_600_000_000, 1_600_000_000))
        path.chmod(0o700 if path.is_dir() else 0o600)
    first = build(source, tmp_path / "first", kind, EPOCH)
    second = build(other, tmp_path / "second", kind, EPOCH)
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_the_build_makes_the_stubs_of_generated_modules(root: Path, tmp_path: Path) -> None:
    source = copy_source(root, tmp_path / "source")
    stub = "flowserve/grpc/service_pb2.pyi"
    archive = build(source, tmp_path, "sdist")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert "class ModelInferRequest(" in (unpacked / stub).read_text()
    (unpacked / stub).write_text("# of the archive\n")
    with zipfile.ZipFile(build(unpacked, tmp_path / "wheel")) as wheel:
        assert wheel.read(stub) == b"# of the archive\n", "an archive is built without protoc"
    (source / stub).unlink()
    build(source, tmp_path / "editable", "editable")
    assert "class ModelInferRequest(" in (source / stub).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_a_type_checker_sees_the_types_of_an_installed_package(kind: Kind, source: Path, tmp_path: Path) -> None:
    python = unpacked_in_environment(build(source, tmp_path / "built", kind), tmp_path / "venv")
    program = tmp_path / "project/program.py"
    program.parent.mkdir()
    program.write_text("import flowserve\n\nreveal_type(flowserve.Graph('g').name)\nflowserve.Graph(1)\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--python-executable={python}", program.name],
        cwd=program.parent,
        env={name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert 'program.py:3: note: Revealed type is "str"' in done.stdout, done.stdout + done.stderr
    assert 'Argument 1 to "Graph" has incompatible type "int"' in done.stdout


def test_the_build_of_onnxruntime_is_chosen_when_the_package_is_built(source: Path, tmp_path: Path) -> None:
    def required(chosen: str = "") -> list[str]:
        environment = {"FLOWSERVE_ONNXRUNTIME": chosen} if chosen else {}
        found = _metadata(build(source, tmp_path, environment=environment)).get_all("Requires-Dist", [])
        return [re.split("[<>=;]", one)[0] for one in found if one.startswith("onnxruntime")]

    assert required() == ["onnxruntime-gpu", "onnxruntime"]  # each with the platforms that it is for
    assert required("gpu") == ["onnxruntime-gpu", "onnxruntime"]
    assert required("cpu") == ["onnxruntime"]
    with pytest.raises(AssertionError, match="FLOWSERVE_ONNXRUNTIME: expected gpu or cpu, got 'tpu'"):
        required("tpu")


def test_the_metadata_describe_the_package(source: Path, tmp_path: Path) -> None:
    metadata = _metadata(build(source, tmp_path))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    classifiers = metadata.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert "Programming Language :: Python :: 3.11" in classifiers
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Project-URL") is None  # no file knows the address
    assert metadata.get_payload() == (source / "README.md").read_text()


def test_the_package_has_the_links_of_the_repository_that_builds_it(source: Path, tmp_path: Path) -> None:
    address = {"FLOWSERVE_REPOSITORY_URL": "https://example.org/some/flowserve/"}
    expected = [
        "Source, https://example.org/some/flowserve",
        f"Documentation, https://example.org/some/flowserve/tree/v{__version__}/docs",
        f"Changelog, https://example.org/some/flowserve/blob/v{__version__}/docs/changelog.md",
        "Issues, https://example.org/some/flowserve/issues",
    ]
    assert _metadata(build(source, tmp_path, environment=address)).get_all("Project-URL") == expected
    archive = build(source, tmp_path, "sdist", environment=address)
    shutil.unpack_archive(archive, tmp_path, filter="data")
    wheel = build(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "wheel")
    assert _metadata(wheel).get_all("Project-URL") == expected  # of the archive, where the build has no address
    described = _metadata(wheel).get_payload()
    assert isinstance(described, str)
    release = f"https://example.org/some/flowserve/%s/v{__version__}/docs/"
    for kind, path in (("raw", "live-page-light.png"), ("blob", "tutorial.md"), ("tree", "decisions/")):
        assert f"]({release % kind}{path})" in described
    assert re.sub(r"https://example\.org/some/flowserve/(raw|blob|tree)/v[^/]+/", "", described) == (
        (source / "README.md").read_text()
    )
    outside_blocks = re.sub(r"^```.*?^```$", "", described, flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"\]\((?!https://|#)[^)]*\)", outside_blocks)
    with pytest.raises(AssertionError, match=r"FLOWSERVE_REPOSITORY_URL: expected https://\.\.\., got 'flowserve'"):
        build(source, tmp_path, environment={"FLOWSERVE_REPOSITORY_URL": "flowserve"})


def test_links_to_pages_and_code_that_looks_like_links_stay_as_they_are(source: Path, tmp_path: Path) -> None:
    copy = copy_source(source, tmp_path / "source")
    kept = "[a](https://example.com/b.md) [c](#d)\n\n```python\nf[0](x)\n```\n"
    (copy / "README.md").write_text(f"{kept}[e](f.md#g)\n")
    wheel = build(copy, tmp_path, environment={"FLOWSERVE_REPOSITORY_URL": "https://example.org/flowserve"})
    link = f"[e](https://example.org/flowserve/blob/v{__version__}/f.md#g)"
    assert _metadata(wheel).get_payload() == f"{kept}{link}\n"
