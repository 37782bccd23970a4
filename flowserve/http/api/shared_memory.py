"""The shared memory extensions over HTTP: status, register, unregister.

Decides the JSON of these calls. memory/client_memory.py decides what a region is.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowserve.errors import Invalid
from flowserve.http.api.json_bodies import Handler, ReadBody, document, json_response
from flowserve.http.api.json_fields import missing, object_of, string_of, uint_of
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
        return json_response(memory.status_cuda(request.path_params.get("name", "")))

    async def cuda_register(request: Request) -> Response:
        memory.check_allowed()
        asked = await document(request, body)
        for key in ("byte_size", "raw_handle"):
            if key not in asked:
                raise missing(key, "")
        written = string_of(object_of(asked, "raw_handle"), "b64", "raw_handle")
        try:
            handle = b64decode(written, validate=True)
        except ValueError as error:
            raise Invalid(f"Unable to parse 'raw_handle': 'b64' is no base64: {error}") from None
        device, size = uint_of(asked, "device_id"), uint_of(asked, "byte_size")
        memory.register_cuda(request.path_params["name"], handle, device, size)
        return Response()

    async def cuda_unregister(request: Request) -> Response:
        memory.unregister_cuda(request.path_params.get("name", ""))
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
