"""Access to object stores: S3, Google Cloud Storage, Azure, Hugging Face, through fsspec.

Decides which kinds of URL there are and which package each needs, which field of a store's response is the tag of a
file, and whether the cause of a failure is the address, the credentials or the bucket. Credentials are the libraries'
own (environment, instance roles, their files) and never in a URL or option. Blocks; used on threads. Caller: `mirror`,
`cli`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from flowserve.errors import Invalid, Unavailable, Unsupported
from flowserve.repository.mirror.listing import RemoteFile

# Kind: fsspec's protocol, the package that it needs, the extra of flowserve that installs it, and whether its files
# count as written by others.
_KINDS: Final = {
    "s3": ("s3", "s3fs", "s3", False),
    "gs": ("gcs", "gcsfs", "gcs", False),
    "gcs": ("gcs", "gcsfs", "gcs", False),
    "az": ("abfs", "adlfs", "azure", False),
    "abfs": ("abfs", "adlfs", "azure", False),
    "as": ("abfs", "adlfs", "azure", False),
    "hf": ("hf", "huggingface_hub", "hf", True),
    "memory": ("memory", "fsspec", "s3", False),
}
_TAGS: Final = ("ETag", "etag", "e_tag", "blob_id", "md5Hash", "content_md5", "generation")
# Without a tag, the time of the last change.
_TIMES: Final = ("LastModified", "last_modified", "updated", "mtime", "created")


class Storage(Protocol):
    """A repository in a store. All methods block, may be called from several threads, and raise Unavailable."""

    def list(self, model: str = "") -> Sequence[RemoteFile]:
        """All files below the repository, or only those of a model."""

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Some bytes of a file."""


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A repository in a store, as the user names it. `is_foreign`: others may write there."""

    kind: str
    path: str

    def __str__(self) -> str:
        return f"{self.kind}://{self.path}"

    @property
    def is_foreign(self) -> bool:
        return _KINDS[self.kind][3]


def store_url(text: str) -> StoreUrl:
    """The parts of a URL. Raises Invalid for an unknown kind, or for parts that a URL may not have."""
    kind, _, path = text.partition("://")
    if kind not in _KINDS:
        known = ", ".join(f"{one}://" for one in _KINDS if one != "memory")  # in this process's memory, for tests
        raise Invalid(f"'{text}': a repository is a folder, or in a store: {known}")
    if urlsplit(text).password is not None:
        raise Invalid(f"a URL has no credentials; {kind}:// takes those of the environment")
    path = path.strip("/")
    if not path:
        raise Invalid(f"'{text}' names no bucket: {kind}://BUCKET/FOLDER")
    return StoreUrl(kind, path)


def open_store(url: StoreUrl, options: Mapping[str, str]) -> FsspecStorage:
    """`options`: those of this kind of store, by name; values that are JSON are parsed. Raises Unsupported with the
    command that installs the missing package, and Invalid for options that the library refuses.
    """
    protocol, package, extra, _ = _KINDS[url.kind]
    given = {name: _value(text) for name, text in options.items()}
    path = url.path
    if url.kind == "as":  # Triton's form: as://ACCOUNT/CONTAINER/FOLDER
        account, _, path = path.partition("/")
        given.setdefault("account_name", account)
    try:
        import fsspec  # type: ignore[import-untyped]  # it has no stubs

        system = fsspec.filesystem(protocol, **({} if protocol == "memory" else {"use_listings_cache": False}), **given)
    except ImportError:
        raise Unsupported(f"{url.kind}:// needs {package}: pip install 'flowserve[{extra}]'") from None
    except (TypeError, ValueError) as error:
        raise Invalid(f"{url}: --storage-option: {error}") from None
    return FsspecStorage(url, system, path)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class FsspecStorage:
    """A repository in a file system of fsspec. `path` is its path there, with the bucket."""

    def __init__(self, url: StoreUrl, system: Any, path: str) -> None:
        self._url = url
        self._system = system
        protocol = _KINDS[url.kind][0]
        self._root = system._strip_protocol(f"{protocol}://{path}").rstrip("/")

    def list(self, model: str = "") -> Sequence[RemoteFile]:
        root = f"{self._root}/{model}" if model else self._root
        try:
            self._system.invalidate_cache()
            found = self._system.find(root, withdirs=True, detail=True)
            if not found and not model:
                self._system.ls(root, detail=False)  # raises if the folder does not exist
        except FileNotFoundError:
            if model:
                return ()
            raise self._failure("there is no such bucket or folder") from None
        except Exception as error:
            raise self._failure_of(error) from None
        start = len(self._root) + 1
        files = []
        for path, about in found.items():
            is_folder = about.get("type") == "directory"
            relative = path[start:].strip("/") + ("/" if is_folder else "")
            if relative.strip("/"):
                files.append(RemoteFile(relative, 0 if is_folder else int(about.get("size") or 0), _tag(about)))
        return files

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        try:
            made: bytes = self._system.cat_file(f"{self._root}/{file.path}", start=start, end=stop)
            return made
        except Exception as error:
            raise self._failure_of(error) from None

    def _failure_of(self, error: Exception) -> Unavailable:
        kind, text = type(error).__name__, str(error) or type(error).__name__
        if isinstance(error, PermissionError) or "Credential" in kind or "Auth" in kind or "Token" in kind:
            return self._failure(f"its credentials are missing or refused: {text}")
        if isinstance(error, FileNotFoundError):
            return self._failure(f"a file or the bucket is not there: {text}")
        return self._failure(f"its address cannot be reached: {kind}: {text}")

    def _failure(self, why: str) -> Unavailable:
        return Unavailable(f"repository {self._url}: {why}")


def _tag(about: Mapping[str, Any]) -> str:
    for name in (*_TAGS, *_TIMES):
        if about.get(name):
            return f"{name} {about[name]}"
    return ""
