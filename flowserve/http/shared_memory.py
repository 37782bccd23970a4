"""The shared memory extensions over HTTP: status, register, unregister.

Decided here: what the JSON of these calls may say, and that clients' CUDA memory is not served: nothing of it is ever
registered, so that its status is an empty list and unregistering does nothing. What a region is, decides
memory/client_memory.py.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowserve.errors import NotFound, Unsupported
from flowserve.http.documents import Handler, ReadBody, document, json_response
from flowserve.http.fields import missing, string_of, uint_of
from flowserve.memory.client_memory import ClientMemory

SYSTEM: Final = "/v2/systemsharedmemory"
CUDA: Final = "/v2/cudasharedmemory"


def shared_memory_routes(memory: ClientMemory, body: ReadBody) -> list[Route]:
    """Every endpoint of both extensions. `body` reads a request's body, and bounds it."""

    async def status(request: Request) -> Response:
        return json_response(memory.status(request.path_params.get("name", "")))

    async def register(request: Request) -> Response:
        asked = await document(request, body)
        if "byte_size" not in asked:
            raise missing("byte_size", "")
        key, offset, size = string_of(asked, "key"), uint_of(asked, "offset"), uint_of(asked, "byte_size")
        memory.register(request.path_params["name"], key, offset, size)
        return Response()

    async def unregister(request: Request) -> Response:
        memory.unregister(request.path_params.get("name", ""))
        return Response()

    async def cuda_status(request: Request) -> Response:
        name = request.path_params.get("name", "")
        if name:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'")
        return json_response([])

    async def cuda_register(request: Request) -> Response:
        memory.check_allowed()
        raise Unsupported("CUDA shared memory of clients is not supported; register system shared memory")

    async def cuda_unregister(request: Request) -> Response:
        memory.check_allowed()
        return Response()

    return [
        *_routes(SYSTEM, status, register, unregister),
        *_routes(CUDA, cuda_status, cuda_register, cuda_unregister),
    ]


def _routes(prefix: str, status: Handler, register: Handler, unregister: Handler) -> list[Route]:
    region = f"{prefix}/region/{{name}}"
    return [
        Route(f"{prefix}/status", status),
        Route(f"{region}/status", status),
        Route(f"{region}/register", register, methods=["POST"]),
        Route(f"{prefix}/unregister", unregister, methods=["POST"]),
        Route(f"{region}/unregister", unregister, methods=["POST"]),
    ]
