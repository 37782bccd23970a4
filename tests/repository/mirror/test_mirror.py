"""The folder of a repository in a store: complete states only, what is fetched again, and stores that fail."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowserve.errors import Invalid, Unavailable, Unsupported
from flowserve.repository.mirror import mirror as mirrors
from flowserve.repository.mirror.listing import RemoteFile
from flowserve.repository.mirror.mirror import RepositoryMirror
from flowserve.repository.mirror.storage import FsspecStorage, open_store, store_url


class Store:
    """A store in memory that counts what is read, and calls `before` each time with "list" or the path."""

    def __init__(self, **files: str) -> None:
        self.files = {name.replace("__", "/"): text.encode() for name, text in files.items()}
        self.read_paths: list[str] = []
        self.before: Callable[[str], None] = lambda what: None

    def list(self, model: str = "") -> Sequence[RemoteFile]:
        self.before("list")
        return [
            RemoteFile(path, len(data), hashlib.md5(data).hexdigest())
            for path, data in self.files.items()
            if not model or path.startswith(f"{model}/")
        ]

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        self.before(file.path)
        self.read_paths.append(file.path)
        return self.files[file.path][start:stop]


def texts(mirror: RepositoryMirror) -> dict[str, str]:
    """The files of the models in force."""
    found = {}
    for home, _, names in os.walk(mirror.path, followlinks=True):
        for name in names:
            path = Path(home, name)
            found[path.relative_to(mirror.path).as_posix()] = path.read_text()
    return found


def made(store: Store, folder: Path, **options: Any) -> RepositoryMirror:
    return RepositoryMirror("s3://b/models", store, folder, **options)


def test_models_are_those_of_the_store_and_only_what_changed_is_fetched(tmp_path: Path) -> None:
    store = Store(a__config="A", a__1__model="weights", b__config="B", readme="no model's")
    mirror = made(store, tmp_path)
    mirror.update()
    assert texts(mirror) == {"a/config": "A", "a/1/model": "weights", "b/config": "B"}
    store.read_paths.clear()
    mirror.update()
    assert store.read_paths == []
    store.files["a/config"] = b"A2"
    del store.files["b/config"]
    mirror.update()
    assert store.read_paths == ["a/config"]
    assert texts(mirror) == {"a/config": "A2", "a/1/model": "weights"}
    again = made(store, tmp_path)  # after a restart
    again.update()
    assert store.read_paths == ["a/config"]


def test_only_what_is_wanted_is_fetched(tmp_path: Path) -> None:
    store = Store(a__config="A", b__config="B")
    mirror = made(store, tmp_path)
    mirror.update(is_listed_only=True)
    assert (mirror.names, texts(mirror)) == ({"a", "b"}, {})
    mirror.update(["b"])
    assert texts(mirror) == {"b/config": "B"}
    mirror.update(["c"])
    assert texts(mirror) == {"b/config": "B"}


def test_a_model_that_changes_while_it_is_fetched_is_never_a_mixture(tmp_path: Path) -> None:
    store = Store(a__1__x="x1", a__1__y="y1")
    mirror = made(store, tmp_path)
    mirror.update()
    store.files |= {"a/1/x": b"x2", "a/1/y": b"y2"}
    count = 2

    def change(path: str) -> None:
        nonlocal count
        if path != "list" and count < 5:
            count += 1
            store.files |= {"a/1/x": f"x{count}".encode(), "a/1/y": f"y{count}".encode()}
        seen = texts(mirror)
        assert seen["a/1/x"][1:] == seen["a/1/y"][1:]

    store.before = change
    mirror.update()
    store.before = lambda what: None
    assert texts(mirror)["a/1/x"][1:] == texts(mirror)["a/1/y"][1:]
    mirror.update()
    assert texts(mirror) == {"a/1/x": "x5", "a/1/y": "y5"}


def test_a_fetch_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "_CHUNK", 10)
    store = Store(a__1__small="s", a__1__large="0123456789" * 5)
    mirror = made(store, tmp_path)
    parts = 0

    def fail(path: str) -> None:
        nonlocal parts
        parts += path.endswith("large")
        if parts == 4:
            raise Unavailable("cut off")

    store.before = fail
    mirror.update()
    assert "cut off" in str(mirror.problems["a"])
    assert texts(mirror) == {}
    store.before = lambda what: None
    store.read_paths.clear()
    mirror.update()
    assert store.read_paths.count("a/1/large") == 2  # the last 20 of 50 bytes
    assert texts(mirror) == {"a/1/small": "s", "a/1/large": "0123456789" * 5}
    assert mirror.problems == {}


def test_what_is_here_serves_on_while_the_store_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(a__config="A")
    mirror = made(store, tmp_path)

    def away(what: str) -> None:
        raise Unavailable("repository s3://b/models: its address cannot be reached")

    store.before = away
    with pytest.raises(Unavailable, match="its address cannot be reached"):
        mirror.update()
    store.before = lambda what: None
    mirror.update()
    store.before = away
    caplog.clear()
    for _ in range(3):
        mirror.update()
    assert texts(mirror) == {"a/config": "A"}
    assert "cannot be reached" in mirror.outage
    assert len(caplog.records) == 1
    store.before = lambda what: None
    mirror.update()
    assert mirror.outage == ""


def test_a_model_is_complete_when_its_manifest_says_so(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
    listed = {"files": {"1/model": {"size": 7, "sha256": digest}}}
    store = Store(a__manifest_json="", a__1__model="weig")
    store.files["a/manifest.json"] = json.dumps(listed).encode()
    del store.files["a/manifest_json"]
    mirror = made(store, tmp_path)
    mirror.update()
    assert "1/model is not what manifest.json promises" in str(mirror.problems["a"])
    store.files["a/1/model"] = b"weights"
    mirror.update()
    assert texts(mirror)["a/1/model"] == "weights"


def test_models_of_others_have_no_code_without_consent(tmp_path: Path) -> None:
    store = Store(a__config="A", b__config="B")
    store.files["a/1/model.py"] = b"import os"
    mirror = made(store, tmp_path / "1", may_have_code=False)
    mirror.update()
    assert texts(mirror) == {"b/config": "B"}
    assert "--trust-remote-code" in str(mirror.problems["a"])


def test_names_that_are_no_paths_are_refused(tmp_path: Path) -> None:
    store = Store(a__config="A")
    store.files["b/../../x"] = b"out"
    mirror = made(store, tmp_path)
    mirror.update()
    assert texts(mirror) == {"a/config": "A"}
    assert "leads out of its folder" in str(mirror.problems["b"])


def test_old_generations_make_room_and_the_limit_is_kept(tmp_path: Path) -> None:
    store = Store(a__1__x="1" * 1000)
    mirror = made(store, tmp_path, limit_bytes=3500)
    for number in range(2, 9):
        mirror.update()
        store.files["a/1/x"] = str(number).encode() * 1000
    mirror.update()
    assert texts(mirror)["a/1/x"][0] == "8"
    held = sum(path.stat().st_size for path in (tmp_path / "generations").rglob("x"))
    assert held <= 3500
    store.files["b/1/x"] = b"b" * 4000
    mirror.update()
    assert "--repository-cache-size" in str(mirror.problems["b"])


def test_a_url_names_a_kind_of_store_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, said in (
        ("ftp://a/b", "a repository is a folder, or in a store: s3://"),
        ("s3://", "names no bucket"),
        ("s3://key:secret@bucket/models", "a URL has no credentials"),
    ):
        with pytest.raises(Invalid, match=said):
            store_url(text)
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(Unsupported, match=r"pip install 'flowserve\[s3\]'"):
        open_store(store_url("s3://bucket/models"), {})


def test_a_store_of_fsspec_is_listed_and_read() -> None:
    fsspec = pytest.importorskip("fsspec", reason="flowserve[s3] is not installed")
    system = fsspec.filesystem("memory")
    system.pipe_file("/listed/models/a/1/model.onnx", b"0123456789")
    storage = open_store(store_url("memory://listed/models"), {})
    files = {file.path: file for file in storage.list()}
    assert files["a/1/model.onnx"].size == 10
    assert files["a/1/model.onnx"].tag
    assert storage.read(files["a/1/model.onnx"], 2, 5) == b"234"
    assert not storage.list("b")
    with pytest.raises(Unavailable, match="there is no such bucket or folder"):
        open_store(store_url("memory://missing"), {}).list()


class NoCredentialsError(Exception):
    """As that of the library of S3."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError("Access Denied"), "its credentials are missing or refused: Access Denied"),
        (NoCredentialsError("Unable to locate credentials"), "its credentials are missing or refused: Unable"),
        (FileNotFoundError("bucket"), "there is no such bucket or folder"),
        (ConnectionError("refused"), "its address cannot be reached: ConnectionError: refused"),
        (TimeoutError(), "its address cannot be reached: TimeoutError: TimeoutError"),
    ],
)
def test_a_failure_says_whether_address_credentials_or_bucket_are_wrong(error: Exception, said: str) -> None:
    class System:
        _strip_protocol = staticmethod(str)

        def invalidate_cache(self) -> None:
            raise error

        def cat_file(self, path: str, start: int, end: int) -> bytes:
            raise error

    storage = FsspecStorage(store_url("s3://bucket/models"), System(), "bucket/models")
    with pytest.raises(Unavailable, match=f"repository s3://bucket/models: {said}"):
        storage.list()
    with pytest.raises(Unavailable, match="repository s3://bucket/models: "):
        storage.read(RemoteFile("m/config.pbtxt", 1), 0, 1)


@pytest.mark.parametrize(
    ("url", "root", "account"),
    [
        ("as://account/container/models", "container/models", "account"),
        ("az://container/models", "container/models", None),
        ("abfs://container@account.dfs.core.windows.net/models", "container@account.dfs.core.windows.net/models", None),
    ],
)
def test_urls_of_azure_have_the_account_where_their_form_has_it(
    monkeypatch: pytest.MonkeyPatch, url: str, root: str, account: str | None
) -> None:
    fsspec = pytest.importorskip("fsspec", reason="flowserve[azure] is not installed")
    asked: list[Any] = []

    class System:
        @staticmethod
        def _strip_protocol(path: str) -> str:
            return path.removeprefix("abfs://")

        def invalidate_cache(self) -> None: ...
        def find(self, path: str, **_: Any) -> dict[str, Any]:
            asked.append(path)
            return {f"{path}/m/config.pbtxt": {"type": "file", "size": 1, "etag": "e"}}

    def filesystem(protocol: str, **options: Any) -> System:
        asked.append((protocol, options.get("account_name")))
        return System()

    monkeypatch.setattr(fsspec, "filesystem", filesystem)
    assert [file.path for file in open_store(store_url(url), {}).list()] == ["m/config.pbtxt"]
    assert asked == [("abfs", account), root]


def test_an_interrupted_fetch_goes_on_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "_CHUNK", 100)
    store = Store(a__1__x="1" * 1000)
    mirror = made(store, tmp_path, limit_bytes=1100)
    reads = 0

    def fail(path: str) -> None:
        nonlocal reads
        reads += path != "list"
        if path != "list" and reads == 9:
            raise Unavailable("cut off")

    store.before = fail
    mirror.update()
    assert "cut off" in str(mirror.problems["a"])
    mirror.update()
    assert texts(mirror) == {"a/1/x": "1" * 1000}
