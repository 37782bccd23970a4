"""What a listing of a store means: which names are refused, which files are fetched again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.errors import Invalid
from flowserve.repository.mirror.listing import (
    RemoteFile,
    listing_from_json,
    listing_to_json,
    manifest,
    read_listing,
    state_of,
    unchanged,
)

names = st.sampled_from(["a", "b", "1", "model.py", "config.pbtxt", "..", ".", "", "x\\y", "n\n", "1/", "long" * 80])
paths = st.lists(names, min_size=1, max_size=4).map("/".join)
files = st.builds(RemoteFile, paths, st.integers(0, 3), st.sampled_from(["", "t1", "t2"]))


@given(st.lists(files, max_size=8))
def test_no_path_leads_out_of_its_model(found: list[RemoteFile]) -> None:
    listing = read_listing(found)
    assert not listing.models.keys() & listing.refused.keys()
    for own in listing.models.values():
        folders = {path.rstrip("/") for path in own if path.endswith("/")}
        for path in own:
            parts = path.rstrip("/").split("/")
            assert all(part not in ("", ".", "..") and "\\" not in part and part.isprintable() for part in parts)
            folders |= {"/".join(parts[:count]) for count in range(1, len(parts))}
        assert not folders & {path for path in own if not path.endswith("/")}


@given(st.lists(files, max_size=8), st.lists(files, max_size=8))
def test_two_states_have_one_name_only_if_no_file_differs(one: list[RemoteFile], other: list[RemoteFile]) -> None:
    for first in read_listing(one).models.values():
        assert listing_from_json(listing_to_json(first)) == first
        for second in read_listing(other).models.values():
            assert (state_of(first) == state_of(second)) == ({**first} == {**second} or _alike(first, second))
            same = unchanged(first, second)
            assert all(first[path] == second[path] and first[path].tag for path in same)


def _alike(first: dict[str, RemoteFile], second: dict[str, RemoteFile]) -> bool:
    """Whether two models, which may have different names, have the same files."""
    return {path: (file.size, file.tag) for path, file in first.items()} == {
        path: (file.size, file.tag) for path, file in second.items()
    }


def test_a_manifest_has_paths_within_the_folder() -> None:
    digest = "0" * 64
    assert manifest(f'{{"files": {{"1/model.onnx": {{"size": 3, "sha256": "{digest}"}}}}}}') == {
        "1/model.onnx": (3, digest)
    }
    outside = json.dumps({"files": {"../x": {"size": 3, "sha256": digest}}})
    for text in ("[]", outside, '{"files": {"x": {}}}', "no"):
        with pytest.raises(Invalid, match=r"manifest\.json"):
            manifest(text)
