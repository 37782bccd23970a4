"""Repositories in stores, as the command line names them: `flowserve run s3://bucket/graphs`.

Decides which argument is a URL, where mirrors are on this machine, and which options they have. Does not know how a
store is accessed. Callers: `main`, `options`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from pathlib import Path
from typing import Final

from flowserve.cli.option_values import add_option, whole_number
from flowserve.errors import Invalid
from flowserve.repository.mirror.mirror import RepositoryMirror
from flowserve.repository.mirror.storage import StoreUrl, open_store, store_url

_OPTION: Final = re.compile(r"([a-z0-9]+):([A-Za-z_]\w*)=(.*)", re.DOTALL)


def repository(text: str) -> Path | StoreUrl:
    """The parser of a REPO argument: a folder, or a URL of a store. An empty one, usually a variable of a script that
    is not set, is not the working directory.
    """
    if not text:
        raise argparse.ArgumentTypeError("the name of a repository is empty")
    if "://" not in text:
        return Path(text)
    try:
        return store_url(text)
    except Invalid as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_store_options(group: argparse._ActionsContainer) -> None:
    """Those of all commands that take a URL as REPO."""
    text = "where the models of a repository in a store are kept on this machine; default %(default)s"
    add_option(group, "--repository-cache DIR", text, Path, _default_folder())
    text = "bytes that they may take; default: no limit"
    add_option(group, "--repository-cache-size BYTES", text, whole_number(1))
    text = "an option of a store's library, such as s3:endpoint_url=http://localhost:9000; may be repeated"
    add_option(group, "--storage-option KIND:NAME=VALUE", text, _storage_option, repeatable=True)
    text = "models of hf:// may have Python code, which runs on this machine"
    group.add_argument("--trust-remote-code", action="store_true", help=text)


def _default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowserve"


def _storage_option(text: str) -> tuple[str, str, str]:
    found = _OPTION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected KIND:NAME=VALUE, such as s3:endpoint_url=URL, got {text!r}")
    kind, name, value = found.groups()
    return kind, name, value


def open_mirrors(arguments: argparse.Namespace) -> tuple[RepositoryMirror, ...]:
    """Replace the URLs among `arguments.repositories` by the folders of their mirrors, which are not updated yet.
    Raises FlowserveError.
    """
    made: list[RepositoryMirror] = []
    places: list[Path] = []
    for one in arguments.repositories:
        if isinstance(one, StoreUrl):
            made.append(_mirror(one, arguments))
            places.append(made[-1].path)
        else:
            places.append(one)
    arguments.repositories = places
    kinds = {kind for kind, _, _ in arguments.storage_option}
    if unused := sorted(kinds - {mirror.name.partition("://")[0] for mirror in made}):
        raise Invalid(f"--storage-option {unused[0]}:…: no repository is {unused[0]}://")
    return tuple(made)


def _mirror(url: StoreUrl, arguments: argparse.Namespace) -> RepositoryMirror:
    options = {name: value for kind, name, value in arguments.storage_option if kind == url.kind}
    # Another address is another store.
    key = hashlib.sha256(repr((str(url), sorted(options.items()))).encode()).hexdigest()[:16]
    name = re.sub(r"\W+", "-", url.path)[:40]
    folder: Path = arguments.repository_cache / f"{url.kind}-{name}-{key}"
    storage = open_store(url, options)
    try:
        return RepositoryMirror(
            str(url),
            storage,
            folder.absolute(),
            limit_bytes=arguments.repository_cache_size,
            may_have_code=arguments.trust_remote_code or not url.is_foreign,
        )
    except OSError as error:
        raise Invalid(f"--repository-cache {arguments.repository_cache}: {error.strerror}") from None
