"""Metadata of the package that the environment of its build decides.

Decides that FLOWSERVE_ONNXRUNTIME chooses the build of onnxruntime, and that an unknown one ends the build; and that
FLOWSERVE_REPOSITORY_URL, which the workflow `release` sets to the repository's own address, becomes the links of the
package: no file holds an address that a move of the repository would make wrong. The dependencies themselves are in
pyproject.toml. Called by hatchling.
"""

from __future__ import annotations

import os
import sys
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


class OfTheBuild(MetadataHookInterface):
    """Fills in `dependencies` and `urls` of the metadata."""

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
