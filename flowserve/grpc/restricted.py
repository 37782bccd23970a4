"""Restricted calls: groups of calls that only answer to a header with the right value.

Decided here: which group a call belongs to, and what is said without the key. What a key is, runtime/restriction.py
decides. A call that is not restricted has none of this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from flowserve.errors import Forbidden
from flowserve.runtime.restriction import Restriction

Handler = Callable[[Any, Any], Awaitable[Any]]

GROUP: Final[Mapping[str, str]] = {
    "ServerLive": "health",
    "ServerReady": "health",
    "ModelReady": "health",
    "Check": "health",  # and Watch: of gRPC's own health service
    "Watch": "health",
    "ServerMetadata": "metadata",
    "ModelMetadata": "metadata",
    "ModelInfer": "inference",
    "ModelStreamInfer": "inference",
    "ModelConfig": "model-config",
    "ModelStatistics": "statistics",
    "RepositoryIndex": "model-repository",
    "RepositoryModelLoad": "model-repository",
    "RepositoryModelUnload": "model-repository",
    "SystemSharedMemoryStatus": "shared-memory",
    "SystemSharedMemoryRegister": "shared-memory",
    "SystemSharedMemoryUnregister": "shared-memory",
    "CudaSharedMemoryStatus": "shared-memory",
    "CudaSharedMemoryRegister": "shared-memory",
    "CudaSharedMemoryUnregister": "shared-memory",
    "TraceSetting": "trace",
    "LogSettings": "logging",
}


def guarded(call: str, handler: Handler, restrictions: Mapping[str, Restriction]) -> Handler:
    """`handler` itself where the call's group has no restriction, else one that wants its key first."""
    restriction = restrictions.get(GROUP[call])
    return handler if restriction is None else _with_key(handler, restriction)


def _with_key(handler: Handler, restriction: Restriction) -> Handler:
    async def keyed(request: Any, context: Any) -> Any:
        given = next((value for name, value in context.invocation_metadata() or () if name == restriction.name), b"")
        if not restriction.is_opened_by(given if isinstance(given, bytes) else given.encode()):
            raise Forbidden(f"This protocol is restricted, expecting header '{restriction.name}'")
        return await handler(request, context)

    return keyed
