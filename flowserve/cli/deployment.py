"""One deployment of a repository, for commands that run it in their own process.

Decides the messages for a name that is not there, and the form in which its inputs are described (as the server's
metadata). Callers: `bench`, `place`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowserve.config.suggest import did_you_mean
from flowserve.errors import NotFound
from flowserve.graph.types import Graph
from flowserve.runtime.loading.reading import Reading, read_repositories


def find_deployment(repository: Path, name: str) -> tuple[Reading, Graph]:
    """The whole repository, and the latest version of one deployment. Blocks. Raises FlowserveError."""
    reading = read_repositories([repository])
    if name in reading.resolution.failed:
        raise reading.resolution.failed[name]
    versions = reading.resolution.graphs.get(name)
    if not versions:
        known = reading.resolution.graphs
        hint = did_you_mean(name, known) or f"it has {', '.join(known)}"
        if not known:
            hint = "; ".join(warning.message for _, warning in reading.warnings) or "it is empty"
        raise NotFound(f"no deployment '{name}' in {repository} ({hint})")
    return reading, versions[max(versions)]


def described_inputs(graph: Graph) -> dict[str, list[dict[str, Any]]]:
    """The part of a deployment's metadata that is about its inputs."""
    batch = [-1] if graph.max_batch_size else []
    return {
        "inputs": [
            {"name": one.name, "datatype": one.dtype.wire, "shape": [*batch, *one.dims], "optional": one.optional}
            for one in graph.inputs
        ]
    }
