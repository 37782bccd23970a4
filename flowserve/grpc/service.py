"""The calls of GRPCInferenceService and of gRPC's health service, except for the inference itself.

Decides each call's response, which has the same contents as HTTP's, its restricted API group, and which headers are
forwarded as request parameters (a stream's headers apply to each of its requests). Runs in grpcio's loop, on the
engine's thread. Does not know how inference works (`inference`, `stream`). Caller: `server`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from flowserve.errors import Invalid, NotFound, Unavailable
from flowserve.grpc import service_pb2 as pb
from flowserve.grpc.decode import DecodedRequest, ReceivedMessage
from flowserve.grpc.health_pb2 import HealthCheckRequest, HealthCheckResponse
from flowserve.grpc.inference import EngineAccess
from flowserve.grpc.stream import InferStream
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.log_settings import LogSettings
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.loading.control import Control
from flowserve.runtime.model_calls.repository_calls import allowed, one_of_several, override, unload_dependents
from flowserve.runtime.protocol.metadata import model_metadata, server_metadata
from flowserve.runtime.protocol.request_parameters import Forwarding

SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"
HEALTH_POLL_S: Final = 0.25
ERROR_HEADER: Final = "triton_grpc_error"
TRACEPARENT: Final = "traceparent"
_TRACE_LISTS: Final = frozenset({"trace_level"})


class Service:
    """`control` None: the engine was not loaded from a repository. `forwarding` None: no headers are forwarded."""

    def __init__(
        self,
        engine: Engine,
        control: Control | None,
        memory: ClientMemory,
        log: LogSettings,
        access: EngineAccess,
        forwarding: Forwarding | None,
    ) -> None:
        self._engine = engine
        self._control = control
        self._memory = memory
        self._log = log
        self._access = access
        self._forwarding = forwarding

    # ------------------------------------------------------------------ inference

    async def infer(self, request: ReceivedMessage, context: Any) -> bytes:
        decoded = self._decoder(context)(request)
        traced = _trace_context(context) if self._engine.traces.is_on else ""
        return b"".join(await self._access.infer(request.target, decoded, traced))

    async def stream(self, context: Any, stopping: asyncio.Event) -> None:
        headers = dict(context.invocation_metadata() or ())
        ends_on_error = headers.get(ERROR_HEADER) in ("true", "1")
        # The trace context is read even if tracing is off, because it may be turned on during the stream.
        traced = _trace_context(context)
        stream = InferStream(self._access, self._decoder(context), traced, ends_on_error=ends_on_error)
        await stream.run(context, stopping)

    def _decoder(self, context: Any) -> Callable[[ReceivedMessage], DecodedRequest]:
        """Returns the request of one of the call's messages, forwarded headers included. Raises Invalid."""
        forwarding = self._forwarding
        if forwarding is None:
            return ReceivedMessage.valid
        # Headers whose names end in -bin have bytes as values.
        headers = [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]

        def with_headers(message: ReceivedMessage) -> DecodedRequest:
            decoded = message.valid()
            forwarding.add(decoded.request, headers)
            return decoded

        return with_headers

    # ------------------------------------------------------------------ health, metadata, statistics

    async def live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._engine.deployments.is_live)

    async def ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._engine.deployments.is_ready)

    async def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        try:
            is_ready = not self._engine.deployments.outage(self._engine.deployments.find(request.name, request.version))
        except (NotFound, Unavailable):
            is_ready = False
        return pb.ModelReadyResponse(ready=is_ready)

    async def metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return ParseDict(server_metadata(), pb.ServerMetadataResponse())

    async def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        found = model_metadata(self._engine.deployments.find(request.name, request.version), request.version)
        return ParseDict(found, pb.ModelMetadataResponse())

    async def config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        deployment = self._engine.deployments.find(request.name, request.version)
        return ParseDict({"config": deployment.config.json}, pb.ModelConfigResponse())

    async def statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        rows = self._engine.deployments.statistics(request.name, request.version)
        # flowserve's additional fields are not in Triton's message.
        return ParseDict({"model_stats": rows}, pb.ModelStatisticsResponse(), ignore_unknown_fields=True)

    # ------------------------------------------------------------------ the repository

    async def index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        _refuse_repository(request.repository_name)
        control, engine = self._control, self._engine
        if control is None:
            rows = engine.deployments.index(ready_only=request.ready)
        else:
            rows = await self._access.run_in_trio(lambda: control.index(ready_only=request.ready))
        return ParseDict({"models": rows}, pb.RepositoryIndexResponse())

    async def load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        _refuse_repository(request.repository_name)
        control, given = allowed(self._control), override(_values(request.parameters))
        await self._access.run_in_trio(lambda: control.load(request.model_name, given))
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        _refuse_repository(request.repository_name)
        control, dependents = allowed(self._control), unload_dependents(_values(request.parameters))
        await self._access.run_in_trio(lambda: control.unload(request.model_name, dependents=dependents))
        return pb.RepositoryModelUnloadResponse()

    # ------------------------------------------------------------------ clients' shared memory

    async def memory_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        rows = self._memory.status(request.name)
        return ParseDict({"regions": {row["name"]: row for row in rows}}, pb.SystemSharedMemoryStatusResponse())

    async def memory_register(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        self._memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def memory_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._memory.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        rows = self._memory.status_cuda(request.name)
        return ParseDict({"regions": {row["name"]: row for row in rows}}, pb.CudaSharedMemoryStatusResponse())

    async def cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest) -> pb.CudaSharedMemoryRegisterResponse:
        self._memory.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    async def cuda_unregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        self._memory.unregister_cuda(request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    # ------------------------------------------------------------------ settings

    async def trace(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        wanted = {key: _trace_value(key, list(value.value)) for key, value in request.settings.items()}
        if request.model_name and request.model_name not in self._engine.deployments.entries:
            raise Invalid(f"Request for unknown model : {request.model_name} has no trace settings")
        self._engine.traces.change(wanted, request.model_name)
        response = pb.TraceSettingResponse()
        for key, value in self._engine.traces.as_json(request.model_name).items():
            response.settings[key].value.extend(value if isinstance(value, list) else [value])
        return response

    async def log(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        self._log.change(_values(request.settings))
        response = pb.LogSettingsResponse()
        for key, value in self._log.as_json().items():
            kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
            setattr(response.settings[key], kind, value)
        return response


class HealthService:
    """gRPC's own health service, for probes and load balancers. `is_ready` is the engine's."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

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
            try:
                async with asyncio.timeout(HEALTH_POLL_S):
                    await stopping.wait()
            except TimeoutError:
                pass

    def _status(self) -> HealthCheckResponse.ServingStatus:
        return HealthCheckResponse.SERVING if self._is_ready() else HealthCheckResponse.NOT_SERVING


def _trace_context(context: Any) -> str:
    """The trace context of a call, "" for none."""
    return str(dict(context.invocation_metadata() or ()).get(TRACEPARENT, ""))


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


# Each call except the two of inference: the class of the request, the method of Service, the restricted API group.
CALLS: Final[Mapping[str, tuple[type[Message], Any, str]]] = {
    "ServerLive": (pb.ServerLiveRequest, Service.live, "health"),
    "ServerReady": (pb.ServerReadyRequest, Service.ready, "health"),
    "ModelReady": (pb.ModelReadyRequest, Service.model_ready, "health"),
    "ServerMetadata": (pb.ServerMetadataRequest, Service.metadata, "metadata"),
    "ModelMetadata": (pb.ModelMetadataRequest, Service.model_metadata, "metadata"),
    "ModelConfig": (pb.ModelConfigRequest, Service.config, "model-config"),
    "ModelStatistics": (pb.ModelStatisticsRequest, Service.statistics, "statistics"),
    "RepositoryIndex": (pb.RepositoryIndexRequest, Service.index, "model-repository"),
    "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, Service.load, "model-repository"),
    "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, Service.unload, "model-repository"),
    "SystemSharedMemoryStatus": (pb.SystemSharedMemoryStatusRequest, Service.memory_status, "shared-memory"),
    "SystemSharedMemoryRegister": (pb.SystemSharedMemoryRegisterRequest, Service.memory_register, "shared-memory"),
    "SystemSharedMemoryUnregister": (
        pb.SystemSharedMemoryUnregisterRequest,
        Service.memory_unregister,
        "shared-memory",
    ),
    "CudaSharedMemoryStatus": (pb.CudaSharedMemoryStatusRequest, Service.cuda_status, "shared-memory"),
    "CudaSharedMemoryRegister": (pb.CudaSharedMemoryRegisterRequest, Service.cuda_register, "shared-memory"),
    "CudaSharedMemoryUnregister": (pb.CudaSharedMemoryUnregisterRequest, Service.cuda_unregister, "shared-memory"),
    "TraceSetting": (pb.TraceSettingRequest, Service.trace, "trace"),
    "LogSettings": (pb.LogSettingsRequest, Service.log, "logging"),
}
INFER_CALL: Final = "ModelInfer"
STREAM_CALL: Final = "ModelStreamInfer"
HEALTH_CALLS: Final = ("Check", "Watch")
GROUP: Final[Mapping[str, str]] = {
    **{name: group for name, (_, _, group) in CALLS.items()},
    **dict.fromkeys((INFER_CALL, STREAM_CALL), "inference"),
    **dict.fromkeys(HEALTH_CALLS, "health"),
}
