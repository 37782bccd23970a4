"""The calls of GRPCInferenceService: which asks the engine what.

Decided here: what each call answers, from the same records as HTTP's answers. What is not there says so by name. What
an inference is, calls.py and stream.py know; everything here runs in grpcio's loop, which is on the engine's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from flowserve.errors import Invalid, NotFound, Unavailable
from flowserve.grpc import service_pb2 as pb
from flowserve.grpc.calls import Calls
from flowserve.grpc.reader import Incoming
from flowserve.grpc.stream import Stream, Whole
from flowserve.memory.client_memory import ClientMemory
from flowserve.observe.log_settings import LogSettings
from flowserve.runtime.control import Control
from flowserve.runtime.engine import Engine
from flowserve.runtime.metadata import model_metadata, server_metadata
from flowserve.runtime.repository_calls import allowed, one_of_several, override, unload_dependents

SERVICE: Final = "inference.GRPCInferenceService"
ERROR_HEADER: Final = "triton_grpc_error"
TRACEPARENT: Final = "traceparent"
_TRACE_LISTS: Final = frozenset({"trace_level"})


class Service:
    """`control` None: an engine that was not loaded from a repository."""

    def __init__(
        self, engine: Engine, control: Control | None, memory: ClientMemory, log: LogSettings, calls: Calls
    ) -> None:
        self._engine = engine
        self._control = control
        self._memory = memory
        self._log = log
        self._calls = calls

    # ------------------------------------------------------------------ inference

    async def infer(self, request: Incoming, context: Any) -> bytes:
        asked = self._whole(context)(request)
        traced = _trace_context(context) if self._engine.traces.is_on else ""
        return b"".join(await self._calls.infer(request.target, asked, traced))

    async def stream(self, context: Any, stopping: asyncio.Event) -> None:
        headers = dict(context.invocation_metadata() or ())
        ends_on_error = headers.get(ERROR_HEADER) in ("true", "1")
        # Also where nobody traces: that may change while the stream goes on.
        stream = Stream(self._calls, self._whole(context), _trace_context(context), ends_on_error=ends_on_error)
        await stream.run(context, stopping)

    def _whole(self, context: Any) -> Whole:
        """What is asked by one call's messages, all told."""
        return Incoming.right

    # ------------------------------------------------------------------ health, metadata, statistics

    async def is_ready(self) -> bool:
        return self._engine.is_ready

    async def live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._engine.is_live)

    async def ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=await self.is_ready())

    async def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        try:
            is_ready = not self._engine.outage(self._engine.find(request.name, request.version))
        except (NotFound, Unavailable):
            is_ready = False
        return pb.ModelReadyResponse(ready=is_ready)

    async def metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return ParseDict(server_metadata(), pb.ServerMetadataResponse())

    async def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        told = model_metadata(self._engine.find(request.name, request.version), request.version)
        return ParseDict(told, pb.ModelMetadataResponse())

    async def config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        deployment = self._engine.find(request.name, request.version)
        return ParseDict({"config": deployment.config.json}, pb.ModelConfigResponse())

    async def statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        rows = self._engine.statistics(request.name, request.version)
        # What is ours alone has no field in Triton's message.
        return ParseDict({"model_stats": rows}, pb.ModelStatisticsResponse(), ignore_unknown_fields=True)

    # ------------------------------------------------------------------ the repository

    async def index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        _refuse_repository(request.repository_name)
        control, engine = self._control, self._engine
        if control is None:
            rows = engine.index(ready_only=request.ready)
        else:
            rows = await self._calls.carry_out(lambda: control.index(ready_only=request.ready))
        return ParseDict({"models": rows}, pb.RepositoryIndexResponse())

    async def load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        _refuse_repository(request.repository_name)
        control, brought = allowed(self._control), override(_values(request.parameters))
        await self._calls.carry_out(lambda: control.load(request.model_name, brought))
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        _refuse_repository(request.repository_name)
        control, dependents = allowed(self._control), unload_dependents(_values(request.parameters))
        await self._calls.carry_out(lambda: control.unload(request.model_name, dependents=dependents))
        return pb.RepositoryModelUnloadResponse()

    # ------------------------------------------------------------------ clients' memory

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
        asked = {key: _trace_value(key, list(value.value)) for key, value in request.settings.items()}
        if request.model_name and request.model_name not in self._engine.entries:
            raise Invalid(f"Request for unknown model : {request.model_name} has no trace settings")
        self._engine.traces.change(asked, request.model_name)
        answer = pb.TraceSettingResponse()
        for key, value in self._engine.traces.as_json(request.model_name).items():
            answer.settings[key].value.extend(value if isinstance(value, list) else [value])
        return answer

    async def log(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        self._log.change(_values(request.settings))
        answer = pb.LogSettingsResponse()
        for key, value in self._log.as_json().items():
            kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
            setattr(answer.settings[key], kind, value)
        return answer


def _trace_context(context: Any) -> str:
    """In which the caller of one call traces it."""
    return str(dict(context.invocation_metadata() or ()).get(TRACEPARENT, ""))


def _refuse_repository(name: str) -> None:
    if name:
        raise one_of_several()


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What each of a message's parameters holds; None where that is nothing."""
    chosen = {key: value.WhichOneof("parameter_choice") for key, value in parameters.items()}
    return {key: choice and getattr(parameters[key], choice) for key, choice in chosen.items()}


def _trace_value(key: str, values: list[str]) -> Any:
    """As JSON has it: nothing is null, and only lists are lists."""
    if not values:
        return None
    return values if key in _TRACE_LISTS or len(values) > 1 else values[0]


# Each call but the two for inference by its name: the request's class, and the method of Service that answers.
CALLS: Final[Mapping[str, tuple[type[Message], Any]]] = {
    "ServerLive": (pb.ServerLiveRequest, Service.live),
    "ServerReady": (pb.ServerReadyRequest, Service.ready),
    "ModelReady": (pb.ModelReadyRequest, Service.model_ready),
    "ServerMetadata": (pb.ServerMetadataRequest, Service.metadata),
    "ModelMetadata": (pb.ModelMetadataRequest, Service.model_metadata),
    "ModelConfig": (pb.ModelConfigRequest, Service.config),
    "ModelStatistics": (pb.ModelStatisticsRequest, Service.statistics),
    "RepositoryIndex": (pb.RepositoryIndexRequest, Service.index),
    "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, Service.load),
    "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, Service.unload),
    "SystemSharedMemoryStatus": (pb.SystemSharedMemoryStatusRequest, Service.memory_status),
    "SystemSharedMemoryRegister": (pb.SystemSharedMemoryRegisterRequest, Service.memory_register),
    "SystemSharedMemoryUnregister": (pb.SystemSharedMemoryUnregisterRequest, Service.memory_unregister),
    "CudaSharedMemoryStatus": (pb.CudaSharedMemoryStatusRequest, Service.cuda_status),
    "CudaSharedMemoryRegister": (pb.CudaSharedMemoryRegisterRequest, Service.cuda_register),
    "CudaSharedMemoryUnregister": (pb.CudaSharedMemoryUnregisterRequest, Service.cuda_unregister),
    "TraceSetting": (pb.TraceSettingRequest, Service.trace),
    "LogSettings": (pb.LogSettingsRequest, Service.log),
}
INFER_CALL: Final = "ModelInfer"
STREAM_CALL: Final = "ModelStreamInfer"
