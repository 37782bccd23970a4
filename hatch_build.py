"""Metadata of the package that the environment of its build decides.

Decides that FLOWSERVE_ONNXRUNTIME chooses the build of onnxruntime, and that an unknown one ends the build; and that
FLOWSERVE_REPOSITORY_URL, which the workflow `release` sets to the repository's own address, becomes the links of the
package, and those of its long description, README.md, whose links and pictures are relative: no file holds an address
that a move of the repository would make wrong. The dependencies themselves are in pyproject.toml. Called by hatchling.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "FLOWSERVE_ONNXRUNTIME"
REPOSITORY = "FLOWSERVE_REPOSITORY_URL"
LINKS = {
    "Source": "",
    "Documentation": "/tree/v{version}/docs",
    "Changelog": "/blob/v{version}/docs/changelog.md",
    "Issues": "/issues",
}
README = "README.md"
# A fenced block, which stays as it is; or a link or picture with its target, unless that is absolute or on the page.
LINK = re.compile(r"^```.*?^```$|(!?)(\[[^\[\]]*\])\((?![a-z]+:|#|/)([^()\s]+)\)", re.DOTALL | re.MULTILINE)


def absolute(text: str, repository: str, version: str) -> str:
    """Markdown with the files of its relative links in the repository, as they are in the release."""

    def of(match: re.Match[str]) -> str:
        is_picture, label, path = match.groups()
        if path is None:
            return match.group()
        kind = "raw" if is_picture else "tree" if path.endswith("/") else "blob"
        return f"{is_picture}{label}({repository}/{kind}/v{version}/{path})"

    return LINK.sub(of, text)


class BuildMetadata(MetadataHookInterface):
    """Fills in `dependencies`, `urls` and `readme` of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        builds = self.config["onnxruntime"]
        chosen = os.environ.get(VARIABLE, "gpu")
        if chosen not in builds:
            sys.exit(f"{VARIABLE}: expected {' or '.join(builds)}, got {chosen!r}")
        metadata["dependencies"] = [*self.config["dependencies"], *builds[chosen]]
        repository = os.environ.get(REPOSITORY, "").rstrip("/")
        if repository and not repository.startswith("https://"):
            sys.exit(f"{REPOSITORY}: expected https://..., got {repository!r}")
        version = metadata["version"]
        links = {name: f"{repository}{path.format(version=version)}" for name, path in LINKS.items()}
        metadata["urls"] = links if repository else {}
        text = Path(self.root, README).read_text(encoding="utf-8")
        text = absolute(text, repository, version) if repository else text
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
