"""Serves models that run on another KServe v2 server: Triton, OpenVINO Model Server, flowserve.

Decides what the configuration of such a model says (`url`, `model_name`, `model_version`), what is taken over from the
other server's, and what the other server's errors become. Queues, batches, limits and deadlines stay here: an instance
sends one whole batch at a time and waits for its response, on a thread of its own, so `instance_group`'s count limits
the batches in flight. The instances of a model share one connection, which is reopened automatically. A server that
stops responding during a batch is detected within `SILENT_S`.

A batch is sent once. It is sent again when the connection ends, and divided when the other server refuses it as a
whole, only if the model is declared `pure`, because it may have run. Does not know graphs.
Callers: the registry; the runtime runs the instances.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import grpc

from flowserve.backends.base import ClockNs, ModelFiles, Results, Work
from flowserve.config.convert import to_config
from flowserve.config.types import Completion, InstanceGroup, ModelConfig, SourceMap
from flowserve.elsewhere.kserve.messages import Batches
from flowserve.errors import (
    Cancelled,
    FlowserveError,
    Invalid,
    ModelFailed,
    Problem,
    Problems,
    Raised,
    Unavailable,
    told,
)
from flowserve.grpc import service_pb2 as pb
from flowserve.values import BY_WIRE, TensorSpec

log = logging.getLogger("flowserve.remote")

# A server that does not respond for so long counts as lost. During a long batch it is probed by a call and not by
# HTTP/2 pings: servers end connections on which they get pings, by default after the third in five minutes.
SILENT_S: Final = 10.0
_ASKED_S: Final = 5.0  # timeout of calls while a model is loaded
_PROBE_S: Final = 2.0  # timeout of calls for readiness and statistics
_AGAIN_S: Final = 2.0  # how long a batch of a pure model waits for a connection when it is sent again
_INSTANCES: Final = 2  # so that a batch is on its way while another computes
_SCHEMES: Final = {"grpc": False, "grpcs": True}
_SERVICE: Final = "/inference.GRPCInferenceService/"
_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 5000),
)
# Errors with another code are the model's.
_ERRORS: Final[Mapping[grpc.StatusCode, type[FlowserveError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: Invalid,
    grpc.StatusCode.OUT_OF_RANGE: Invalid,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Unavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
}


@dataclass(frozen=True, slots=True)
class Target:
    """A model on another server."""

    address: str
    is_secure: bool
    name: str
    version: str

    def __str__(self) -> str:
        version = f" version {self.version}" if self.version else ""
        return f"model '{self.name}'{version} at {'grpcs' if self.is_secure else 'grpc'}://{self.address}"


def target_of(config: ModelConfig) -> Target:
    """What the configuration names. Raises Problems."""

    def problem(text: str, hint: str, key: str) -> Problems:
        place = config.source.place(f"parameters[{key}]" if key in config.parameters else "")
        return Problems([Problem(text, place, "M93", hint)])

    url = config.parameters.get("url", "")
    example = 'parameters { key: "url" value { string_value: "grpc://10.0.0.5:8001" } }'
    if not url:
        raise problem(f"model '{config.name}' runs on another server, and has no `url`", f"write {example}", "url")
    parts = urlsplit(url if "://" in url else f"grpc://{url}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in _SCHEMES or not parts.hostname or not port or parts.path.strip("/"):
        hint = "it is the gRPC port of the other server, as grpc://HOST:PORT, or grpcs://HOST:PORT with TLS"
        raise problem(f"`url` of model '{config.name}' is \"{url}\"", hint, "url")
    version = config.parameters.get("model_version", "")
    if version and not (version.isdecimal() and int(version)):
        text = f"`model_version` of model '{config.name}' is \"{version}\""
        raise problem(text, "a version is a positive number; without it the other server chooses", "model_version")
    name = config.parameters.get("model_name", "") or config.name
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Target(f"{host}:{port}", _SCHEMES[parts.scheme], name, version)


class RemoteServer:
    """The calls of one model to the other server. Used on any thread."""

    def __init__(self, target: Target) -> None:
        self.target = target
        if target.is_secure:
            self._channel = grpc.secure_channel(target.address, grpc.ssl_channel_credentials(), _OPTIONS)
        else:
            self._channel = grpc.insecure_channel(target.address, _OPTIONS)
        self._infer = self._channel.unary_unary(_SERVICE + "ModelInfer")  # of messages as bytes
        self._is_ready = self._call("ModelReady", pb.ModelReadyRequest, pb.ModelReadyResponse)
        self._probe: Any = None  # the readiness call in progress
        self._outage = ""
        self._statistics = self._call("ModelStatistics", pb.ModelStatisticsRequest, pb.ModelStatisticsResponse)
        self._count: Any = None  # the statistics call in progress
        self._counted: dict[str, Any] = {}

    def _call(self, name: str, request: Any, response: Any) -> Any:
        return self._channel.unary_unary(
            _SERVICE + name, request_serializer=request.SerializeToString, response_deserializer=response.FromString
        )

    def outage(self) -> str:
        """Why the model could not be used at the last probe, or "". Each call sends a probe, for the next call."""
        probe = self._probe
        if probe is None or probe.done():
            if probe is not None:
                self._outage = self._outage_of(probe)
            asked = pb.ModelReadyRequest(name=self.target.name, version=self.target.version)
            self._probe = self._is_ready.future(asked, timeout=_PROBE_S)
        return self._outage

    def _outage_of(self, probe: Any) -> str:
        if probe.code() is grpc.StatusCode.OK:
            return "" if probe.result().ready else f"{self.target} is not ready"
        return "" if probe.cancelled() else str(self.failure(probe))

    def statistics(self) -> Mapping[str, Any]:
        """The other server's counters of the model, as in its statistics; {} before its first response. Each call
        fetches them again, for the next call.
        """
        count = self._count
        if count is None or count.done():
            if count is not None and count.code() is grpc.StatusCode.OK:
                self._counted = _counters(count.result())
            asked = pb.ModelStatisticsRequest(name=self.target.name, version=self.target.version)
            self._count = self._statistics.future(asked, timeout=_PROBE_S)
        return self._counted

    def infer(self, message: bytes, timeout_s: float | None, *, is_pure: bool) -> bytes:
        """The response to a batch. `is_pure`: it may run twice, and is sent again if the connection ends. Raises the
        error that `failure` makes.
        """
        try:
            return self._infer_once(message, timeout_s)
        except _Disconnected as error:
            if not is_pure:
                raise Unavailable(str(error)) from None
        limit_s = _AGAIN_S if timeout_s is None else min(timeout_s, _AGAIN_S)
        with suppress(grpc.FutureTimeoutError):  # then the second attempt raises the reason
            grpc.channel_ready_future(self._channel).result(timeout=limit_s)
        try:
            return self._infer_once(message, timeout_s)
        except _Disconnected as error:
            raise Unavailable(str(error)) from None

    def _infer_once(self, message: bytes, timeout_s: float | None) -> bytes:
        call = self._infer.future(message, timeout=timeout_s)
        try:
            while True:
                try:
                    response: bytes = call.result(timeout=SILENT_S / 2)
                    self._outage, self._probe = "", None  # the result of an earlier probe is out of date
                    return response
                except grpc.FutureTimeoutError:
                    self._check_alive()
        except grpc.RpcError as error:
            call.cancel()
            failure = self.failure(error)
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._outage = f"{self.target} cannot be reached"  # other requests get this text; a probe follows
                raise _Disconnected(str(failure)) from None
            raise failure from None

    def _check_alive(self) -> None:
        asked = pb.ModelReadyRequest(name=self.target.name, version=self.target.version)
        try:
            self._is_ready(asked, timeout=SILENT_S / 2)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                raise

    def ask(self, name: str, request: Any, response: Any) -> Any:
        """The response to a call while the model is loaded. Raises the error that `failure` makes."""
        try:
            return self._call(name, request, response)(request, timeout=_ASKED_S, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Unavailable(f"{self.target} cannot be reached within {_ASKED_S:g} s") from None
            raise self.failure(error) from None

    def failure(self, error: Any) -> FlowserveError:
        """The error to raise for an error of a call."""
        code, text = error.code(), error.details() or error.code().name
        kind = _ERRORS.get(code, ModelFailed)
        if code is grpc.StatusCode.UNAVAILABLE:
            return kind(f"{self.target} cannot be reached: {text}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return kind(f"{self.target} did not answer in time")
        return kind(f"{self.target}: {text}")

    def close(self) -> None:
        for question in (self._probe, self._count):
            if question is not None:
                question.cancel()
        self._channel.close()


class _Disconnected(Exception):
    """The connection ended, or there is none: the batch may have run, or not."""


def _counters(response: Any) -> dict[str, Any]:
    """The first row of a server's statistics: counts, and the count and the sum of nanoseconds of each duration."""
    for row in response.model_stats:
        durations = {
            name: {"count": one.count, "ns": one.ns}
            for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
            for one in (getattr(row.inference_stats, name),)
        }
        return {"inference_count": row.inference_count, "execution_count": row.execution_count, **durations}
    return {}


@dataclass(frozen=True, slots=True)
class Described:
    """The model as the other server describes it: its tensors with their dims, without a batch dimension."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    is_decoupled: bool = False
    is_stateful: bool = False


def describe_model(server: RemoteServer, max_batch_size: int) -> Described:
    """The model on the other server. A server without model configurations (a Triton extension) describes tensors with
    their batch dimension, which is removed if the configuration here has a `max_batch_size`.
    """
    target = server.target
    asked = {"name": target.name, "version": target.version}
    try:
        answer = server.ask("ModelConfig", pb.ModelConfigRequest(**asked), pb.ModelConfigResponse)
    except ModelFailed:
        answer = None
    if answer is not None and answer.config.input:
        config = to_config(answer.config, SourceMap(str(target)))
        decoupled, stateful = config.decoupled, config.sequence is not None
        return Described(config.inputs, config.outputs, config.max_batch_size, decoupled, stateful)
    metadata = server.ask("ModelMetadata", pb.ModelMetadataRequest(**asked), pb.ModelMetadataResponse)
    first = 1 if max_batch_size else 0

    def specs(tensors: Any) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(one.name, BY_WIRE[one.datatype], tuple(one.shape)[first:])
            for one in tensors
            if one.datatype in BY_WIRE
        )

    return Described(specs(metadata.inputs), specs(metadata.outputs), max_batch_size)


class RemoteBackend:
    name = "remote"
    default_filename = ""
    default_instance_count = _INSTANCES

    def complete(self, config: ModelConfig, files: ModelFiles) -> Completion:
        target = target_of(config)
        server = RemoteServer(target)
        try:
            there = describe_model(server, config.max_batch_size)
        except Unavailable as error:
            if config.inputs and config.outputs:  # written by the user: nothing to fetch
                return Completion(instance_count=_INSTANCES)
            hint = "start that server first, or write `input`, `output` and `max_batch_size`"
            raise Problems([Problem(str(error), config.source.place("parameters[url]"), "M93", hint)]) from None
        finally:
            server.close()
        return Completion(
            _plain(there.inputs),
            _plain(there.outputs),
            there.max_batch_size,
            dynamic_batching=there.max_batch_size > 1,
            instance_count=_INSTANCES,
        )

    def load(self, config: ModelConfig, files: ModelFiles, options: Mapping[str, str]) -> RemoteModel:
        target = target_of(config)
        refuse = partial(Problem, place=config.source.place(""), rule="M93")
        problems = []
        if config.decoupled or config.sequence is not None:
            what = "a decoupled model" if config.decoupled else "a model of sequences"
            problems.append(refuse(f"model '{config.name}' is {what}, which cannot run on another server"))
        problems += [
            Problem(
                f"input '{spec.name}' of model '{config.name}' is ragged", config.source.place(f"input[{i}]"), "M93"
            )
            for i, spec in enumerate(config.inputs)
            if spec.ragged
        ]
        if problems:
            raise Problems(problems)
        server = RemoteServer(target)
        try:
            there = describe_model(server, config.max_batch_size)
            if there.is_decoupled or there.is_stateful:
                kind = "decoupled" if there.is_decoupled else "a model of sequences"
                problems.append(refuse(f"{target} is {kind}, and can only be called where it is"))
            if config.max_batch_size > there.max_batch_size:
                text = f"max_batch_size {config.max_batch_size} of model '{config.name}' is more than the"
                place = config.source.place("max_batch_size")
                problems.append(Problem(f"{text} {there.max_batch_size} of {target}", place, "M93"))
            if problems:
                raise Problems(problems)
            asked = pb.ModelReadyRequest(name=target.name, version=target.version)
            if not server.ask("ModelReady", asked, pb.ModelReadyResponse).ready:
                raise Unavailable(f"{target} is not ready")
        except BaseException:
            server.close()
            raise
        return RemoteModel(config, server)

    def verify(self, config: ModelConfig, files: ModelFiles) -> None:
        self.load(config, files, {}).close()


def _plain(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The tensors as requests have them: the other server applies reshapes and labels."""
    return tuple(replace(spec, reshape=None, labels="", ragged=False) for spec in specs)


class RemoteModel:
    """A model on another server, with the connection that its instances share."""

    may_run_inline = False

    def __init__(self, config: ModelConfig, server: RemoteServer) -> None:
        self._config = config
        self._server = server
        self.is_pure = config.parameters.get("pure", "") == "true"

    def instance(self, name: str, group: InstanceGroup) -> RemoteInstance:
        return RemoteInstance(self._config, self._server)

    def close(self) -> None:
        self._server.close()


class RemoteInstance:
    """Sends one batch at a time."""

    def __init__(self, config: ModelConfig, server: RemoteServer) -> None:
        self._server = server
        self._is_pure = config.parameters.get("pure", "") == "true"
        target = server.target
        self._batches = Batches(config, target.name, target.version)
        timeout = config.parameters.get("execution_timeout", "")
        self._timeout_s = float(timeout) if timeout else None

    def open(self) -> None:
        """The connection is open."""

    def outage(self) -> str:
        return self._server.outage()

    def statistics(self) -> Mapping[str, Any]:
        return self._server.statistics()

    def run(self, work: Work, clock: ClockNs) -> Results:
        message, copied = self._batches.pack(work)
        gathered_ns = clock()
        try:
            answer = self._server.infer(message, self._timeout_s, is_pure=self._is_pure)
        except FlowserveError as error:
            if len(work.rows) == 1:
                raise
            raise self._failed(error, len(work.rows)) from None
        computed_ns = clock()
        outputs = self._batches.unpack(answer, work.rows)
        return Results(outputs, gathered_ns=gathered_ns, computed_ns=computed_ns, copied=copied)

    def _failed(self, error: FlowserveError, members: int) -> FlowserveError:
        """The error of a batch of several requests, which were one for the other server: its text may have values of
        any of them.
        """
        if isinstance(error, Unavailable):
            log.warning("a batch of %d requests failed: %s", members, error)
            return Unavailable(f"{self._server.target} cannot be reached, or cannot run the batch now")
        failed = ModelFailed(f"{self._server.target}: {told(error, str(error), members)}")
        failed.raised = Raised(str(error))
        return failed

    def close(self) -> None:
        """The connection is the model's."""
