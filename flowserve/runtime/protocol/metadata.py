"""Metadata of the server and of its deployments, in the terms of the protocol.

Decides the fields of metadata responses and the list of extensions, for HTTP and gRPC alike.
"""

from __future__ import annotations

from typing import Any, Final

from flowserve.runtime.engine.deployment import Deployment
from flowserve.values import TensorSpec
from flowserve.version import __version__

EXTENSIONS: Final = (
    "sequence",
    "schedule_policy",
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "binary_tensor_data",
    "classification",
    "parameters",
    "statistics",
    "system_shared_memory",
    "cuda_shared_memory",
    "trace",
    "logging",
)


def server_metadata() -> dict[str, Any]:
    return {"name": "flowserve", "version": __version__, "extensions": EXTENSIONS}


def model_metadata(deployment: Deployment, version: str = "") -> dict[str, Any]:
    """`version`: the requested version; "" lists all ready versions."""
    batch = [-1] if deployment.graph.max_batch_size else []
    return {
        "name": deployment.name,
        "versions": [version] if version else [str(one) for one in deployment.versions],
        "platform": deployment.platform,
        "inputs": [_tensor(spec, batch) for spec in deployment.inputs.values()],
        "outputs": [_tensor(spec, batch) for spec in deployment.outputs.values()],
    }


def _tensor(spec: TensorSpec, batch: list[int]) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.dtype.wire, "shape": [*batch, *spec.dims]}
