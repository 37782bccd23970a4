"""Models sent with a load call: valid names and paths, removal of the files."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import Invalid
from flowserve.repository.override import check_name, write_files


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of private folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_files_are_written_to_a_folder_accessible_to_this_user_only() -> None:
    files = write_files("m", {"1/model.onnx": b"one", "labels.txt": b"two", "1/more/x": b""})
    assert (files.path / "m/1/model.onnx").read_bytes() == b"one"
    assert (files.path / "m/labels.txt").read_bytes() == b"two"
    assert (files.path / "m/1/more/x").exists()
    assert files.path.stat().st_mode & 0o777 == 0o700


def test_files_are_removed_with_their_last_reference(private: Path) -> None:
    files = write_files("m", {"1/x": b""})
    other = files
    del files
    assert other.path.exists()
    del other
    gc.collect()
    assert not list(private.iterdir())


@pytest.mark.fault("L12")
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("../x", "'..' is not"),
        ("1/../../x", "'..' is not"),
        ("/../x", "'..' is not"),
        ("/", "empty"),
        ("", "empty"),
        ("1//x", "'' is not"),
        ("./x", "'.' is not"),
        ("1/", "'' is not"),
        ("1/" + "y" * 256, "longer than 255 bytes"),
        ("1/" + "ü" * 128, "longer than 255 bytes"),
        ("1/a\0b", "control characters"),
        ("1/a\nb", "control characters"),
        ("..\\x", "backslashes"),
    ],
)
def test_a_path_that_could_lead_elsewhere_is_refused_before_anything_is_written(
    private: Path, path: str, reason: str
) -> None:
    with pytest.raises(Invalid, match=reason):
        write_files("m", {"1/model.onnx": b"", path: b"x"})
    assert not list(private.iterdir())


def test_a_path_may_begin_with_a_slash_and_stays_in_the_models_folder(private: Path) -> None:
    files = write_files("m", {"/etc/x": b"1", "//1/model.py": b"2"})
    assert (files.path / "m" / "etc" / "x").read_bytes() == b"1"
    assert (files.path / "m" / "1" / "model.py").read_bytes() == b"2"


def test_a_file_where_another_path_needs_a_folder_is_refused(private: Path) -> None:
    with pytest.raises(Invalid, match="file override '1/x' cannot be written"):
        write_files("m", {"1": b"", "1/x": b""})
    gc.collect()
    assert not list(private.iterdir())


@given(st.text(max_size=20))
def test_property_no_path_writes_outside_the_folder(path: str) -> None:
    try:
        files = write_files("m", {path: b"x"})
    except Invalid:
        return
    written = [file for file in files.path.rglob("*") if file.is_file()]
    assert [file.resolve().is_relative_to(files.path.resolve() / "m") for file in written] == [True]


@pytest.mark.fault("L13")
@pytest.mark.parametrize("name", ["", " \n", "..", ".", "a/b", "a\\b", "a\0b", "a\r\nX: 1", "n" * 256, "\x1b[31m"])
def test_an_invalid_model_name_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="cannot be the name of a model"):
        check_name(name)


@pytest.mark.parametrize("name", ["m", "a.b", "..x", "ünïcode", "with space", "n" * 255])
def test_ordinary_names_are_accepted(name: str) -> None:
    assert check_name(name) == name


def test_without_a_temporary_folder_the_load_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(Invalid, match="no folder that file overrides can be written to: No such file or directory"):
        write_files("m", {"1/model.py": b""})
