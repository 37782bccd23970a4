"""Model folders and version folders of a repository, on real folders."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowserve.config.types import VersionPolicy
from flowserve.errors import NotFound, Problems
from flowserve.repository.layout import (
    ModelFolder,
    find_models,
    scan,
    versions_to_serve,
    why_missing,
)

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Create folders in a repository; a path with a suffix becomes an empty file."""

    def create(*paths: str, repository: str = "models") -> Path:
        root = tmp_path / repository
        for path in paths:
            target = root / path
            if target.suffix:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            else:
                target.mkdir(parents=True, exist_ok=True)
        return root

    return create


def folder(*versions: int) -> ModelFolder:
    return ModelFolder("m", Path("models/m"), Path("models"), versions)


def test_models_are_ordered_by_name_and_versions_by_number(make: Make) -> None:
    root = make("b/10", "b/9", "a/1/model.onnx", "a/config.pbtxt")
    assert [(found.name, found.versions) for found in scan(root)] == [("a", (1,)), ("b", (9, 10))]


@pytest.mark.fault("L9")
def test_folders_that_are_not_versions_are_ignored_with_a_warning(make: Make) -> None:
    root = make("m/1", "m/abc", "m/04", "m/0", "m/-1", "m/3abc", "m/1_0", "m/\u0663", "m/99999999999999999999")
    (found,) = scan(root)
    assert found.versions == (1,)
    named = {warning.place and warning.place.file for warning in found.warnings}
    assert named == {"m/abc", "m/04", "m/0", "m/-1", "m/3abc", "m/1_0", "m/\u0663", "m/99999999999999999999"}


@pytest.mark.parametrize(
    "place", ["config.pbtx", "confg.pbtx", "Config.PBTXT", "config.pbtxt.txt", "model.pbtxt", "1/config.pbtxt"]
)
def test_a_configuration_with_another_name_or_place_is_reported(make: Make, place: str) -> None:
    (folder,) = scan(make(f"m/{place}", "m/1/model.onnx", "m/config.json", "m/config.py", "m/labels.txt"))
    told = [str(warning) for warning in folder.warnings]
    assert told == [f"m/{place}: not read: a model's configuration is m/config.pbtxt [R12]"]
    assert not scan(make("n/config.pbtxt", f"n/{place}", "n/1/model.onnx"))[-1].warnings


def test_a_folder_that_is_no_model_for_want_of_a_name_or_a_version_has_the_reason(make: Make) -> None:
    found = find_models([make("a/confg.pbtxt", "b/model.onnx", "b/labels.txt", "c/1/model.onnx")])
    assert [folder.name for folder in found.folders] == ["c"]
    skipped = "neither config.pbtxt nor a version folder in it; not a model, skipped"
    assert [str(warning) for warning in found.warnings] == [
        "a/confg.pbtxt: not read: a model's configuration is a/config.pbtxt [R12]",
        f"a: {skipped} [R4]",
        f"b: {skipped} (move b/model.onnx into b/1/) [R4]",
    ]


def test_known_folders_next_to_versions_are_skipped_silently(make: Make) -> None:
    root = make(
        "m/1", "m/warmup", "m/initial_state", "m/configs", "m/labels", "m/__pycache__", "m/.cache", "m/labels.txt"
    )
    (found,) = scan(root)
    assert found.warnings == ()


def test_hidden_folders_and_files_of_the_repository_are_no_models(make: Make) -> None:
    root = make("m/1", ".git/1", "__pycache__/1", "README.md")
    assert [found.name for found in scan(root)] == ["m"]


def test_a_folder_that_cannot_be_read_is_skipped_with_the_reason(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make("m/1", "locked/1")
    scandir = os.scandir

    def refusing(path: Path) -> Any:  # as for a user other than root
        if Path(path).name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found = find_models([root])
    assert [folder.name for folder in found.folders] == ["m"]
    (warning,) = found.warnings
    assert str(warning).startswith("locked: cannot be read: Permission denied (it is skipped; the user that flowserve")
    assert why_missing([root], "locked") == "its folder cannot be read: Permission denied"


def test_a_folder_without_configuration_and_versions_is_skipped_with_a_warning(make: Make) -> None:
    root = make("m/1", "notes/old")
    found = find_models([root])
    assert [folder.name for folder in found.folders] == ["m"]
    (warning,) = found.warnings
    assert str(warning) == "notes: neither config.pbtxt nor a version folder in it; not a model, skipped [R4]"


def test_a_folder_whose_name_is_no_utf8_is_skipped_with_a_warning_that_can_be_printed(make: Make) -> None:
    root = make("m/1", os.fsdecode(b"gr\xf6sse/1"), os.fsdecode(b"m/\xe4lter"))
    found = find_models([root])
    assert [folder.name for folder in found.folders] == ["m"]
    said = [str(warning) for warning in (*found.warnings, *found.folders[0].warnings)]
    assert said == [
        "gr\\xf6sse: a name that is not UTF-8; skipped [R10]",
        "m/\\xe4lter: not a version (a positive number without leading zeros); ignored [R7]",
    ]


def test_a_model_folder_given_as_repository_is_refused(make: Make) -> None:
    root = make("m/1", "m/config.pbtxt")
    with pytest.raises(Problems) as refused:
        find_models([root / "m"])
    assert str(refused.value).startswith(
        f"'{root / 'm'}' is the folder of one model; a repository is the folder that holds such folders (give '{root}')"
    )


def test_a_version_folder_given_as_repository_is_refused(make: Make) -> None:
    root = make("m/1", "m/config.pbtxt", "m/1/model.onnx")
    with pytest.raises(Problems) as refused:
        find_models([root / "m/1"])
    assert str(refused.value).startswith(f"'{root / 'm/1'}' is a version of one model")
    assert f"(give '{root}')" in str(refused.value)
    repository = make("7/net/1", "7/net/config.pbtxt")
    assert [folder.name for folder in find_models([repository / "7"]).folders] == ["net"]


@pytest.mark.fault("C10")
def test_circular_and_broken_links_are_harmless(make: Make) -> None:
    root = make("m/1")
    (root / "loop").symlink_to(root / "loop")
    (root / "gone").symlink_to(root / "nowhere")
    (root / "m" / "2").symlink_to(root / "m" / "2")
    (root / "m" / "up").symlink_to(root)
    found = find_models([root])
    assert [(folder.name, folder.versions) for folder in found.folders] == [("m", (1,))]
    assert [warning.place and warning.place.file for warning in found.warnings] == ["gone", "loop"]


def test_a_name_in_two_repositories_is_served_from_neither(make: Make) -> None:
    first, second = make("m/1", "a/1", repository="one"), make("m/1", "b/1", repository="two")
    found = find_models([first, second])
    assert [folder.name for folder in found.folders] == ["a", "b"]
    assert list(found.duplicates) == ["m"]
    text = str(found.duplicates["m"])
    assert text.startswith("model 'm' appears in two or more repositories: ")
    assert str(first) in text
    assert str(second) in text


def test_a_search_for_a_name_reads_only_that_folder(make: Make) -> None:
    first, second = make("m/1", "a/1", "notes/old", repository="one"), make("m/1", "b/1", repository="two")
    found = find_models([first, second], ["b", "m", "unknown"])
    assert [folder.name for folder in found.folders] == ["b"]
    assert list(found.duplicates) == ["m"]
    assert found.warnings == ()


def test_the_same_repository_given_twice_is_one(make: Make) -> None:
    root = make("m/1")
    assert [folder.name for folder in find_models([root, root]).folders] == ["m"]


def test_a_missing_repository_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        scan(tmp_path / "nowhere")


def test_a_file_given_as_repository_is_reported(make: Make) -> None:
    root = make("m/config.pbtxt")
    with pytest.raises(Problems, match="is a file; give the folder that holds the models' folders"):
        scan(root / "m" / "config.pbtxt")


@pytest.mark.fault("L10")
@pytest.mark.parametrize(
    ("policy", "served"),
    [
        (VersionPolicy(), (10,)),
        (VersionPolicy(latest=2), (9, 10)),
        (VersionPolicy(latest=9), (1, 9, 10)),
        (VersionPolicy(all=True), (1, 9, 10)),
        (VersionPolicy(specific=(1, 10)), (1, 10)),
        (VersionPolicy(specific=(10, 11)), (10,)),
    ],
)
def test_the_version_policy_selects_from_versions_on_disk(policy: VersionPolicy, served: tuple[int, ...]) -> None:
    assert versions_to_serve(folder(1, 9, 10), policy) == served


def test_a_policy_without_a_match_lists_the_available_versions() -> None:
    with pytest.raises(Problems) as caught:
        versions_to_serve(folder(1, 2), VersionPolicy(specific=(3,)))
    assert str(caught.value) == (
        "m: at least one version must be available under the version policy of model 'm' "
        "(the policy wants 3, and the folder has 1, 2) [R1]"
    )


def test_an_ensemble_without_a_version_folder_is_version_1() -> None:
    for policy in (VersionPolicy(), VersionPolicy(all=True), VersionPolicy(specific=(1, 2))):
        assert versions_to_serve(folder(), policy, is_ensemble=True) == (1,)
    with pytest.raises(Problems, match=r"version 1, and the policy wants 2: mkdir m/2"):
        versions_to_serve(folder(), VersionPolicy(specific=(2,)), is_ensemble=True)


def test_a_model_without_a_version_folder_gets_a_hint() -> None:
    with pytest.raises(Problems, match=r"put the model's files into m/1/"):
        versions_to_serve(folder(), VersionPolicy())
