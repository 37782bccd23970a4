"""A page of the server as one document: its markup, style and scripts together, and the policy that allows only these.

Decides the headers of every page, and that no other script can run in one. Callers: `routes`, `api_docs`.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from gzip import decompress
from hashlib import sha256
from importlib.resources import files
from typing import Final

ASSETS: Final = files("flowserve.http.page") / "assets"


@dataclass(frozen=True, slots=True)
class Page:
    """The bytes of a page, and the headers that belong to it."""

    content: bytes
    headers: Mapping[str, str]


def asset(name: str) -> str:
    """The text of an asset; a name that ends in .gz is that of a compressed one."""
    data = (ASSETS / name).read_bytes()
    return (decompress(data) if name.endswith(".gz") else data).decode()


def compose(markup: str, styles: Sequence[str], scripts: Sequence[str], marks: Mapping[str, str]) -> Page:
    """A page from the text of its parts. `marks` are replaced in the markup first."""
    style, script = "\n".join(styles), "\n".join(scripts)
    for mark, part in {**marks, "/*STYLE*/": style, "/*SCRIPT*/": script}.items():
        markup = markup.replace(mark, part, 1)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; connect-src 'self';"
        " img-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Page(markup.encode(), headers)


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
