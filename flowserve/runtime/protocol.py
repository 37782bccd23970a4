"""Code that the front ends `http` and `grpc` share: request parameters, restricted APIs, metadata.

Decides how many inputs, outputs and parameters a request may have, and how many elements its tensors may have if each
element costs the server an object or a number in text; which names parameters may have (the protocol uses some and
reserves others), that a pattern of headers to forward is searched in a header's name, that reserved names are compared
without regard to case, and that a request's own parameter takes precedence over a header; which groups of calls may
require a key, the syntax of the operator's option, that keys are compared in constant time, and when errors must not
reveal the names of models; the fields of metadata responses and the list of extensions. Each protocol decides which
group a call belongs to, and how it rejects one. Does not know how a protocol encodes its messages, nor sockets.
Callers: `http`, `grpc` and `cli`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from flowserve.errors import Invalid
from flowserve.memory.raw import BYTES_ELEMENTS_MAX
from flowserve.observe.combined import STATISTICS
from flowserve.runtime.engine.deployments import Deployment
from flowserve.runtime.engine.engine import Engine
from flowserve.values import Request, TensorSpec
from flowserve.version import __version__

RESERVED_PREFIX: Final = "triton_"
KNOWN_PARAMETERS: Final = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority", "timeout"})
BINARY_OUTPUT: Final = "binary_data_output"  # in HTTP only
ITEMS_MAX: Final = 1024  # inputs, outputs, parameters: far more than any model has, few enough to be cheap
JSON_ELEMENTS_MAX: Final = 1 << 24  # as many of four characters fit into 64 MiB of JSON
_KEPT_NAMES: Final = 1024
GROUPS: Final = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
INDEX: Final = "model-repository"  # the group that lists the models
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


@dataclass(frozen=True, slots=True)
class ElementLimits:
    """`bytes_elements`: of all BYTES inputs of one request. `json_elements`: of all inputs that are sent as JSON, and
    of all outputs that are requested as JSON.
    """

    bytes_elements: int = BYTES_ELEMENTS_MAX
    json_elements: int = JSON_ELEMENTS_MAX


# ---------------------------------------------------------------------------------------------- request parameters


def reserved(key: str) -> Invalid:
    """The error for a parameter whose name begins with the reserved prefix."""
    return Invalid(
        f"parameter keys starting with '{RESERVED_PREFIX}' are reserved for Triton usage and should not be specified "
        f"(found '{key}')"
    )


class Forwarding:
    """Adds headers to the parameters of a request. `option`: the operator's option, for error messages."""

    def __init__(self, pattern: re.Pattern[str], option: str) -> None:
        self._option = option
        # Clients send few distinct names.
        self._is_forwarded: Callable[[str], bool] = lru_cache(_KEPT_NAMES)(
            lambda name: pattern.search(name) is not None
        )

    def add(self, request: Request, headers: Iterable[tuple[str, str]]) -> None:
        """Add the matching headers to the request's parameters. Raises Invalid for a header with a reserved name."""
        forwarded: dict[str, str] = {}
        for name, value in headers:
            if self._is_forwarded(name):
                lower = name.lower()
                if lower in KNOWN_PARAMETERS or lower == BINARY_OUTPUT or lower.startswith(RESERVED_PREFIX):
                    raise Invalid(
                        f"the header '{name}' cannot be forwarded: as a parameter this name is reserved "
                        f"({self._option})"
                    )
                forwarded[name] = value
        if forwarded:
            request.parameters = {**forwarded, **request.parameters}


# ---------------------------------------------------------------------------------------------- restricted APIs


@dataclass(frozen=True, slots=True)
class Restriction:
    """The key of `groups`: the header `name` (lower-case) with exactly `value`."""

    groups: tuple[str, ...]
    name: str
    value: str

    def is_opened_by(self, given: bytes) -> bool:
        return hmac.compare_digest(given, self.value.encode("utf-8"))


def parse_restriction(text: str) -> Restriction:
    """`GROUP[,GROUP...]:HEADER=VALUE`. Raises `Invalid` for other forms."""
    listed, colon, pair = text.partition(":")
    name, equals, value = pair.partition("=")
    if not (colon and equals and name.strip() and value):
        raise Invalid("expected GROUP[,GROUP...]:HEADER=VALUE")
    groups = tuple(one.strip() for one in listed.split(","))
    for group in groups:
        if group not in GROUPS:
            raise Invalid(f"unknown restricted api '{group}'; use {', '.join(GROUPS)}")
    if not (name.isascii() and value.isprintable()):
        raise Invalid("a header's name is ASCII and its value printable")
    return Restriction(groups, name.strip().lower(), value)


def hides_names(restrictions: Iterable[Restriction]) -> bool:
    """Whether the names and errors of models require a key."""
    return INDEX in by_group(restrictions)


def by_group(restrictions: Iterable[Restriction]) -> dict[str, Restriction]:
    """The restriction of each restricted group."""
    return {group: restriction for restriction in restrictions for group in restriction.groups}


# ---------------------------------------------------------------------------------------------- metadata


def server_metadata(name: str) -> dict[str, Any]:
    return {"name": name, "version": __version__, "extensions": EXTENSIONS}


def statistics_of(engine: Engine, kind: str, name: str = "", version: str = "") -> list[dict[str, Any]]:
    """This server's rows, for one name, one version or everything: of the statistics extension (`kind` STATISTICS), or
    of flowserve's own statistics (GRAPHS). Raises Invalid for unknown names.
    """
    deployments = engine.deployments
    return (deployments.statistics if kind == STATISTICS else deployments.graph_statistics)(name, version)


def by_version(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Rows of statistics by NAME/VERSION."""
    return {f"{row['name']}/{row['version']}": row for row in rows}


async def statistics_of_all(engine: Engine, kind: str, name: str, version: str) -> list[dict[str, Any]]:
    """As `statistics_of`, over all servers behind the port."""
    rows = statistics_of(engine, kind, name, version)
    if engine.group is None:
        return rows
    whole = await engine.group.report(kind)
    return [whole.get(key, row) for key, row in by_version(rows).items()]


def model_metadata(deployment: Deployment, version: str = "") -> dict[str, Any]:
    """`version`: the requested version; "" lists all ready versions."""
    batch = [-1] if deployment.graph.max_batch_size else []
    return {
        "name": deployment.name,
        "versions": [version] if version else [str(one) for one in deployment.versions],
        "platform": deployment.platform,
        "inputs": [_tensor(spec, batch) for spec in deployment.inputs.values()],
        "outputs": [_tensor(spec, batch) for spec in deployment.config.listed_outputs or deployment.outputs.values()],
    }


def _tensor(spec: TensorSpec, batch: list[int]) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.dtype.wire, "shape": [*batch, *spec.dims]}
