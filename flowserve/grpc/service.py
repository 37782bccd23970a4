"""The calls of GRPCInferenceService and of gRPC's health service, except for the inference itself.

Decides each call's response, which has the same contents as HTTP's, its restricted API group, and which headers are
forwarded as request parameters (a stream's headers apply to each of its requests). Runs in grpcio's loop, on the
engine's thread. Does not know how inference works (`inference`, `stream`). Caller: `server`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from flowserve.errors import Invalid, NotFound, Unavailable
from flowserve.grpc import service_pb2 as pb
from flowserve.grpc.decode import ReceivedMessage
from flowserve.grpc.forward import GrpcForwarder
from flowserve.grpc.health_pb2 import HealthCheckRequest, HealthCheckResponse
from flowserve.grpc.inference import EngineAccess, trace_context
from flowserve.grpc.stream import InferStream
from flowserve.observe.combined import STATISTICS
from flowserve.observe.settings import LogSettings
from flowserve.runtime.group import change
from flowserve.runtime.loading.control import Control
from flowserve.runtime.model_calls.server_requests import allowed, one_of_several, override, unload_dependents
from flowserve.runtime.protocol import Forwarding, model_metadata, server_metadata, statistics_of_all

Json = dict[str, Any]
SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"
HEALTH_POLL_S: Final = 0.25
ERROR_HEADER: Final = "triton_grpc_error"
_TRACE_LISTS: Final = frozenset({"trace_level"})


class Service:
    """`control` None: the engine was not loaded from a repository. `forwarding` None: no headers are forwarded."""

    def __init__(
        self, access: EngineAccess, control: Control | None, log: LogSettings, forwarding: Forwarding | None
    ) -> None:
        self._access = access
        self._engine, self._memory = access.engine, access.memory
        self._control = control
        self._log = log
        self._forwarding = forwarding
        group = access.engine.group
        self._forwarder = None if group is None else GrpcForwarder(access, group)

    # ------------------------------------------------------------------ inference

    async def infer(self, message: ReceivedMessage, context: Any) -> bytes:
        self._prepare(self._headers(context), message)
        if self._forwarder is not None:
            server = await self._forwarder.elsewhere(message, context)
            if server is not None:
                return await self._forwarder.infer(server, message, context)
        return b"".join(await self._access.infer(message, trace_context(context)))

    async def stream(self, context: Any, stopping: asyncio.Event) -> None:
        prepare = partial(self._prepare, self._headers(context))
        ends_on_error = dict(context.invocation_metadata() or ()).get(ERROR_HEADER) in ("true", "1")
        stream = InferStream(
            self._access, prepare, trace_context(context), self._forwarder, ends_on_error=ends_on_error
        )
        await stream.run(context, stopping)

    async def close(self) -> None:
        """Close the connections to other servers."""
        if self._forwarder is not None:
            await self._forwarder.close()

    def _headers(self, context: Any) -> list[tuple[str, str]]:
        """The headers of a call that may be forwarded. Those whose names end in -bin have bytes as values."""
        if self._forwarding is None:
            return []
        return [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]

    def _prepare(self, headers: list[tuple[str, str]], message: ReceivedMessage) -> None:
        """Add the forwarded headers to one of the call's messages. Raises Invalid, its own error too."""
        if message.error is not None:
            raise message.error
        if self._forwarding is not None:
            self._forwarding.add(message.request, headers)

    # ------------------------------------------------------------------ the calls of CALLS, with responses as JSON

    async def respond(self, name: str, request: Message) -> Message:
        """The response to one of CALLS."""
        method, _ = CALLS[name]
        response: Message = getattr(pb, f"{name}Response")()
        return ParseDict(await method(self, request) or {}, response)

    async def live(self, request: pb.ServerLiveRequest) -> Json:
        return {"live": self._engine.deployments.is_live}

    async def ready(self, request: pb.ServerReadyRequest) -> Json:
        return {"ready": self._engine.deployments.is_ready}

    async def model_ready(self, request: pb.ModelReadyRequest) -> Json:
        try:
            deployment = self._engine.deployments.find(request.name, request.version)
        except (NotFound, Unavailable):
            return {"ready": False}
        return {"ready": not await self._access.run_in_trio(lambda: self._engine.unready(deployment))}

    async def metadata(self, request: pb.ServerMetadataRequest) -> Json:
        return server_metadata(self._engine.options.server_name)

    async def model_metadata(self, request: pb.ModelMetadataRequest) -> Json:
        return model_metadata(self._engine.deployments.find(request.name, request.version), request.version)

    async def config(self, request: pb.ModelConfigRequest) -> Json:
        return {"config": self._engine.deployments.find(request.name, request.version).config.json}

    async def statistics(self, request: pb.ModelStatisticsRequest) -> Json:
        statistics = partial(statistics_of_all, self._engine, STATISTICS, request.name, request.version)
        if self._engine.group is None:
            return {"model_stats": await statistics()}
        return {"model_stats": await self._access.run_in_trio(statistics)}

    async def index(self, request: pb.RepositoryIndexRequest) -> Json:
        _refuse_repository(request.repository_name)
        control = self._control
        if control is None:
            return {"models": self._engine.deployments.index(ready_only=request.ready)}
        return {"models": await self._access.run_in_trio(lambda: control.index(ready_only=request.ready))}

    async def load(self, request: pb.RepositoryModelLoadRequest) -> None:
        _refuse_repository(request.repository_name)
        control, given = allowed(self._control), override(_values(request.parameters))
        await self._access.run_in_trio(lambda: control.load(request.model_name, given))

    async def unload(self, request: pb.RepositoryModelUnloadRequest) -> None:
        _refuse_repository(request.repository_name)
        control, dependents = allowed(self._control), unload_dependents(_values(request.parameters))
        await self._access.run_in_trio(lambda: control.unload(request.model_name, dependents=dependents))

    async def memory_status(self, request: pb.SystemSharedMemoryStatusRequest) -> Json:
        return {"regions": {row["name"]: row for row in self._memory.status(request.name)}}

    async def memory_register(self, request: pb.SystemSharedMemoryRegisterRequest) -> None:
        memory, asked = self._memory, (request.name, request.key, request.offset, request.byte_size)
        await self._change("register", memory.register, *asked, undo=partial(memory.unregister, request.name))

    async def memory_unregister(self, request: pb.SystemSharedMemoryUnregisterRequest) -> None:
        await self._change("unregister", self._memory.unregister, request.name)

    async def cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> Json:
        return {"regions": {row["name"]: row for row in self._memory.status_cuda(request.name)}}

    async def cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest) -> None:
        memory, handle = self._memory, base64.b64encode(request.raw_handle).decode()
        asked = request.name, handle, request.device_id, request.byte_size
        undo = partial(memory.unregister_cuda, request.name)
        await self._change("register_cuda", memory.register_encoded, *asked, undo=undo)

    async def cuda_unregister(self, request: pb.CudaSharedMemoryUnregisterRequest) -> None:
        await self._change("unregister_cuda", self._memory.unregister_cuda, request.name)

    async def trace(self, request: pb.TraceSettingRequest) -> Json:
        wanted = {key: _trace_value(key, list(value.value)) for key, value in request.settings.items()}
        if request.model_name and request.model_name not in self._engine.deployments.entries:
            raise Invalid(f"Request for unknown model : {request.model_name} has no trace settings")
        await self._change("trace", self._engine.traces.change, wanted, request.model_name)
        settings = self._engine.traces.as_json(request.model_name).items()
        return {"settings": {key: {"value": one if isinstance(one, list) else [one]} for key, one in settings}}

    async def log(self, request: pb.LogSettingsRequest) -> Json:
        await self._change("log", self._log.change, _values(request.settings))
        kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
        return {"settings": {key: {kinds[type(value)]: value} for key, value in self._log.as_json().items()}}

    async def _change(
        self, name: str, apply: Callable[..., object], *arguments: Any, undo: Callable[[], object] | None = None
    ) -> None:
        """Change a setting in all servers behind the port."""
        work = partial(change, self._engine.group, name, apply, *arguments, undo=undo)
        if self._engine.group is None:
            await work()
        else:
            await self._access.run_in_trio(work)

    # ------------------------------------------------------------------ gRPC's own health service, for probes

    async def check(self, request: HealthCheckRequest) -> HealthCheckResponse:
        if request.service not in ("", SERVICE):
            raise NotFound(f"unknown service '{request.service}'")
        return HealthCheckResponse(status=self._status())

    async def watch(self, request: HealthCheckRequest, context: Any, stopping: asyncio.Event) -> None:
        """Send the status and its changes until the client disconnects or the server is `stopping`."""
        sent: HealthCheckResponse.ServingStatus | None = None
        while True:
            status = HealthCheckResponse.SERVICE_UNKNOWN
            if request.service in ("", SERVICE):
                status = HealthCheckResponse.NOT_SERVING if stopping.is_set() else self._status()
            if status != sent:
                await context.write(HealthCheckResponse(status=status))
                sent = status
            if stopping.is_set():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_POLL_S):
                    await stopping.wait()

    def _status(self) -> HealthCheckResponse.ServingStatus:
        is_ready = self._engine.deployments.is_ready
        return HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING


def _refuse_repository(name: str) -> None:
    if name:
        raise one_of_several()


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a message's parameters; None for a parameter without a value."""
    chosen = {key: value.WhichOneof("parameter_choice") for key, value in parameters.items()}
    return {key: choice and getattr(parameters[key], choice) for key, choice in chosen.items()}


def _trace_value(key: str, values: list[str]) -> Any:
    """The value as in JSON: None for no values, a list only for settings that are lists."""
    if not values:
        return None
    return values if key in _TRACE_LISTS or len(values) > 1 else values[0]


# Each call except the two of inference: the method of Service, the restricted API group.
CALLS: Final[Mapping[str, tuple[Any, str]]] = {
    "ServerLive": (Service.live, "health"),
    "ServerReady": (Service.ready, "health"),
    "ModelReady": (Service.model_ready, "health"),
    "ServerMetadata": (Service.metadata, "metadata"),
    "ModelMetadata": (Service.model_metadata, "metadata"),
    "ModelConfig": (Service.config, "model-config"),
    "ModelStatistics": (Service.statistics, "statistics"),
    "RepositoryIndex": (Service.index, "model-repository"),
    "RepositoryModelLoad": (Service.load, "model-repository"),
    "RepositoryModelUnload": (Service.unload, "model-repository"),
    "SystemSharedMemoryStatus": (Service.memory_status, "shared-memory"),
    "SystemSharedMemoryRegister": (Service.memory_register, "shared-memory"),
    "SystemSharedMemoryUnregister": (Service.memory_unregister, "shared-memory"),
    "CudaSharedMemoryStatus": (Service.cuda_status, "shared-memory"),
    "CudaSharedMemoryRegister": (Service.cuda_register, "shared-memory"),
    "CudaSharedMemoryUnregister": (Service.cuda_unregister, "shared-memory"),
    "TraceSetting": (Service.trace, "trace"),
    "LogSettings": (Service.log, "logging"),
}
INFER_CALL: Final = "ModelInfer"
STREAM_CALL: Final = "ModelStreamInfer"
HEALTH_CALLS: Final = ("Check", "Watch")
GROUP: Final[Mapping[str, str]] = {
    **{name: group for name, (_, group) in CALLS.items()},
    **dict.fromkeys((INFER_CALL, STREAM_CALL), "inference"),
    **dict.fromkeys(HEALTH_CALLS, "health"),
}
