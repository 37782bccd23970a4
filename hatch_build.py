"""The dependencies of the package, with the build of onnxruntime that FLOWSERVE_ONNXRUNTIME chooses.

Decides that the choice is made when the package is built, and that an unknown one ends the build. The dependencies
themselves are in pyproject.toml. Called by hatchling.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "FLOWSERVE_ONNXRUNTIME"


class Dependencies(MetadataHookInterface):
    """Fills in `dependencies` of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        builds = self.config["onnxruntime"]
        chosen = os.environ.get(VARIABLE, "gpu")
        if chosen not in builds:
            sys.exit(f"{VARIABLE}: expected {' or '.join(builds)}, got {chosen!r}")
        metadata["dependencies"] = [*self.config["dependencies"], *builds[chosen]]
