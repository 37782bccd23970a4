"""What the server and its deployments say of themselves, in the words of the protocol.

Decided here: the fields of the metadata answers, and which extensions are named. HTTP and gRPC answer alike.
"""

from __future__ import annotations

from typing import Any, Final

from flowserve.runtime.deployment import Deployment
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
    """`version`: the one that was asked for, "" where none was; then all that are ready are named."""
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
