"""What a build of the package makes: metadata that its environment decides, and the type stubs of generated modules.

Decides that FLOWSERVE_ONNXRUNTIME chooses the build of onnxruntime, and that an unknown one ends the build; and that
FLOWSERVE_REPOSITORY_URL, which the workflow `release` sets to the repository's own address, becomes the links of the
package, and those of its long description, README.md, whose links and pictures are relative: no file holds an address
that a move of the repository would make wrong. The dependencies themselves are in pyproject.toml.

The stubs `*_pb2.pyi` are written beside their modules, also for an editable install. A source archive contains them and
is built without protoc. `python hatch_build.py` writes them into a checkout that is not installed. Called by hatchling.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
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
PROTOC = "grpcio-tools==1.85.1"  # as in the extra `dev`
PROTOS = ("config/model_config.proto", "elsewhere/placement.proto", "grpc/service.proto", "grpc/health.proto")
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


class Stubs(BuildHookInterface):
    """Writes the type stubs of the modules that are generated from proto files."""

    @property
    def _is_archive(self) -> bool:
        return Path(self.root, "PKG-INFO").exists()

    def dependencies(self) -> list[str]:
        return [] if self._is_archive else [PROTOC]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._is_archive:
            write_stubs(Path(self.root, "flowserve"))


def write_stubs(package: Path) -> None:
    """protoc's stubs, with the type arguments that mypy --strict requires."""
    for proto in PROTOS:
        path = package / proto
        with tempfile.TemporaryDirectory() as out:
            protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{path.parent}", f"-I{package / 'config'}"]
            subprocess.run([*protoc, f"--pyi_out={out}", path.name], check=True)
            stub = Path(out, f"{path.stem}_pb2.pyi").read_text(encoding="utf-8")
        stub = stub.replace("_Mapping]", "_Mapping[str, object]]").replace("**kwargs)", "**kwargs: object)")
        stub = stub.replace("import model_config_pb2", "from flowserve.config import model_config_pb2")
        path.with_name(f"{path.stem}_pb2.pyi").write_text(stub, encoding="utf-8")


if __name__ == "__main__":
    write_stubs(Path(__file__).parent / "flowserve")
