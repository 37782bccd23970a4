"""The HTTP surface as an OpenAPI document: /openapi.json.

Decides the requests and responses of every endpoint, as JSON Schema. The document is data and knows no
server; a test compares it with the existing routes, and another one sends requests that it allows to a server and
compares the responses with its schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flowserve.values import BY_WIRE
from flowserve.version import __version__

Json = dict[str, Any]

_TEXT: Final[Json] = {"type": "string"}
_BOOL: Final[Json] = {"type": "boolean"}
_WHOLE: Final[Json] = {"type": "integer", "minimum": 0}
_UINT64: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
_SCALAR: Final[Json] = {"type": ["string", "number", "boolean"]}
_ANY: Final[Json] = {"type": "object"}


def _object(required: Mapping[str, Json], optional: Mapping[str, Json] | None = None) -> Json:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _of(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_DATATYPE: Final[Json] = {"type": "string", "enum": sorted(BY_WIRE)}
_PLACE: Final[Json] = {
    "shared_memory_region": _TEXT,
    "shared_memory_offset": _UINT64,
    "shared_memory_byte_size": _UINT64,
}
_TENSOR: Final[Json] = {"name": _TEXT, "datatype": _DATATYPE, "shape": _list({"type": "integer"})}
_DURATION: Final[Json] = _object({"count": _WHOLE, "ns": _WHOLE})
_LOG: Final[Json] = {
    "log_file": _TEXT,
    "log_info": _BOOL,
    "log_warning": _BOOL,
    "log_error": _BOOL,
    "log_verbose_level": _WHOLE,
    "log_format": {"type": "string", "enum": ["default", "ISO8601"]},
}
_TRACE: Final[Json] = {
    "trace_level": _list({"type": "string", "enum": ["OFF", "TIMESTAMPS", "TENSORS"]}),
    "trace_rate": _TEXT,
    "trace_count": _TEXT,
    "log_frequency": _TEXT,
    "trace_mode": _TEXT,
}

SCHEMAS: Final[Json] = {
    "Error": _object({"error": _TEXT}),
    "Server": _object({"name": _TEXT, "version": _TEXT, "extensions": _list(_TEXT)}),
    "Model": _object(
        {
            "name": _TEXT,
            "versions": _list(_TEXT),
            "platform": _TEXT,
            "inputs": _list(_of("Tensor")),
            "outputs": _list(_of("Tensor")),
        }
    ),
    "Tensor": _object(_TENSOR),
    "Config": _object({"name": _TEXT, "max_batch_size": _WHOLE}),
    "Statistics": _object({"model_stats": _list(_of("ModelStatistics"))}),
    "ModelStatistics": _object(
        {
            "name": _TEXT,
            "version": _TEXT,
            "last_inference": _WHOLE,
            "inference_count": _WHOLE,
            "execution_count": _WHOLE,
            "inference_stats": {"type": "object", "additionalProperties": _DURATION},
            "batch_stats": _list(_ANY),
        }
    ),
    "InferRequest": _object(
        {"inputs": _list(_of("InferInput"))},
        {"id": _TEXT, "parameters": _of("InferParameters"), "outputs": _list(_of("InferRequestedOutput"))},
    ),
    "InferParameters": {
        "type": "object",
        "properties": {
            "sequence_id": {"type": ["integer", "string"], "minimum": 0, "maximum": 2**64 - 1},
            "sequence_start": _BOOL,
            "sequence_end": _BOOL,
            "priority": _UINT64,
            "timeout": {**_UINT64, "description": "microseconds"},
            "binary_data_output": _BOOL,
        },
        "additionalProperties": _SCALAR,
    },
    "InferInput": _object(
        {**_TENSOR, "shape": _list(_WHOLE)},
        {
            "parameters": {"type": "object", "properties": {"binary_data_size": _UINT64, **_PLACE}},
            "data": {"type": "array", "description": "the elements, nested or not"},
        },
    ),
    "InferRequestedOutput": _object(
        {"name": _TEXT},
        {"parameters": {"type": "object", "properties": {"binary_data": _BOOL, "classification": _UINT64, **_PLACE}}},
    ),
    "InferResponse": _object(
        {"model_name": _TEXT, "model_version": _TEXT, "outputs": _list(_of("InferOutput"))},
        {"id": _TEXT, "parameters": _ANY},
    ),
    "InferOutput": _object(_TENSOR, {"parameters": _ANY, "data": {"type": "array"}}),
    "GenerateRequest": {
        "type": "object",
        "description": "members named like inputs are tensors, the others are parameters",
    },
    "GenerateResponse": _object({"model_name": _TEXT, "model_version": _TEXT}, {"id": _TEXT}),
    "Index": _list(_object({"name": _TEXT}, {"version": _TEXT, "state": _TEXT, "reason": _TEXT})),
    "IndexRequest": {"type": "object", "properties": {"ready": _BOOL}},
    "LoadRequest": {
        "type": "object",
        "properties": {"parameters": {"type": "object", "additionalProperties": _TEXT}},
    },
    "UnloadRequest": {
        "type": "object",
        "properties": {"parameters": {"type": "object", "properties": {"unload_dependents": _BOOL}}},
    },
    "SystemRegions": _list(_object({"name": _TEXT, "key": _TEXT, "offset": _WHOLE, "byte_size": _WHOLE})),
    "SystemRegion": _object({"key": _TEXT, "byte_size": _UINT64}, {"offset": _UINT64}),
    "CudaRegions": _list(_object({"name": _TEXT, "device_id": _WHOLE, "byte_size": _WHOLE})),
    "CudaRegion": _object({"raw_handle": _object({"b64": _TEXT}), "device_id": _WHOLE, "byte_size": _UINT64}),
    "LogSettings": _object(_LOG),
    "LogChange": {"type": "object", "properties": _LOG},
    "Drawn": _object({"picture": _TEXT, "svg": _TEXT, "graph": _ANY}),
    "Timeline": _object({"traceEvents": _list(_ANY)}, {"displayTimeUnit": _TEXT, "otherData": _ANY}),
    "TraceSettings": _object({"trace_file": _TEXT, **_TRACE}),
    "TraceChange": {"type": "object", "properties": _TRACE},
}

_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
_PARAMETERS: Final[Json] = {
    "name": {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},
    "version": {
        "name": "version",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "pattern": "^[0-9]{1,19}$"},
    },
    "repository": {"name": "repository", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},
    "verb": {"name": "verb", "in": "path", "required": True, "schema": {"enum": ["load", "unload"]}},
}


def _get(summary: str, schema: str = "", media: str = _JSON) -> Json:
    """A GET request; without a `schema` its status is the result."""
    return {"summary": summary, "responses": _responses(schema, media)}


def _post(summary: str, asked: str = "", schema: str = "", media: str = _JSON, *, required: bool = False) -> Json:
    """A call whose body is an `asked`, and may be left out unless it is `required`."""
    operation = _get(summary, schema, media)
    if asked:
        operation["requestBody"] = {"content": {_JSON: {"schema": _of(asked)}}, "required": required}
    return operation


def _responses(schema: str, media: str) -> Json:
    answer: Json = {"description": "done"}
    if schema or media != _JSON:
        answer["content"] = {media: {"schema": _of(schema) if schema else _TEXT}}
    return {"200": answer, "default": {"$ref": "#/components/responses/Error"}}


def _infer() -> Json:
    operation = _post("one inference", "InferRequest", "InferResponse", required=True)
    binary: Json = {"schema": {"type": "string", "contentMediaType": _BINARY}}
    operation["description"] = "with the header Inference-Header-Content-Length, tensors follow the JSON as bytes"
    operation["requestBody"]["content"][_BINARY] = binary
    operation["responses"]["200"]["content"][_BINARY] = binary
    return operation


def _settings(what: str, change: str, schema: str) -> Json:
    return {"get": _get(f"{what} settings", schema), "post": _post(f"change {what} settings", change, schema)}


def _health(summary: str) -> Json:
    operation = _get(summary)
    operation["responses"]["400"] = {"description": "no"}
    return {"get": operation}


def _of_a_model(path: str) -> Json:
    return {
        path: {"get": _get("inputs and outputs", "Model")},
        f"{path}/ready": _health("whether the model serves"),
        f"{path}/config": {"get": _get("the completed configuration", "Config")},
        f"{path}/stats": {"get": _get("counts and durations", "Statistics")},
        f"{path}/infer": {"post": _infer()},
        f"{path}/generate": {"post": _post("one answer", "GenerateRequest", "GenerateResponse", required=True)},
        f"{path}/generate_stream": {
            "post": _post("answers as events", "GenerateRequest", "", "text/event-stream", required=True)
        },
    }


def _memory(kind: str, regions: str, region: str) -> Json:
    root = f"/v2/{kind}sharedmemory"
    return {
        f"{root}/status": {"get": _get("every region", regions)},
        f"{root}/unregister": {"post": _post("forget every region")},
        f"{root}/region/{{name}}/status": {"get": _get("one region", regions)},
        f"{root}/region/{{name}}/register": {"post": _post("register a region", region, required=True)},
        f"{root}/region/{{name}}/unregister": {"post": _post("forget a region")},
    }


def _paths() -> Json:
    repository = "/v2/repository"
    paths: Json = {
        "/v2": {"get": _get("name, version, extensions", "Server")},
        "/v2/health/live": _health("whether the server lives"),
        "/v2/health/ready": _health("whether everything serves"),
        **_of_a_model("/v2/models/{name}"),
        **_of_a_model("/v2/models/{name}/versions/{version}"),
        "/v2/models/stats": {"get": _get("counts and durations of every model", "Statistics")},
        f"{repository}/index": {"post": _post("what the repository holds", "IndexRequest", "Index")},
        f"{repository}/models/{{name}}/load": {"post": _post("load a model", "LoadRequest")},
        f"{repository}/models/{{name}}/unload": {"post": _post("unload a model", "UnloadRequest")},
        f"{repository}/{{repository}}/index": {"post": _post("refused: repositories have no names")},
        f"{repository}/{{repository}}/models/{{name}}/{{verb}}": {"post": _post("refused: repositories have no names")},
        **_memory("system", "SystemRegions", "SystemRegion"),
        **_memory("cuda", "CudaRegions", "CudaRegion"),
        "/v2/logging": _settings("log", "LogChange", "LogSettings"),
        "/v2/trace/setting": _settings("trace", "TraceChange", "TraceSettings"),
        "/v2/trace/timeline": _timeline(),
        "/v2/models/{name}/trace/setting": _settings("trace", "TraceChange", "TraceSettings"),
        "/metrics": {"get": _get("Prometheus text", "", "text/plain")},
        "/openapi.json": {"get": {"summary": "this", "responses": _described()}},
        "/": {"get": _get("the live page", "", "text/html")},
        "/live/events": {"get": _events()},
        "/live/graphs/{name}/versions/{version}": {"get": _get("a graph as the live page draws it", "Drawn")},
    }
    for path, item in paths.items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        if names:
            item["parameters"] = [{"$ref": f"#/components/parameters/{name}"} for name in names]
    return paths


def _timeline() -> Json:
    operation = _get("requests and batches of the next seconds, as Chrome's trace events", "Timeline")
    schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 60}
    operation["parameters"] = [{"name": "seconds", "in": "query", "schema": schema}]
    return {"get": operation}


def _events() -> Json:
    operation = _get("what the live page shows, about once a second, until the server ends", "", "text/event-stream")
    operation["parameters"] = [{"name": name, "in": "query", "schema": _TEXT} for name in ("name", "version")]
    return operation


def _described() -> Json:
    responses = _responses("", _JSON)
    responses["200"]["content"] = {_JSON: {"schema": _ANY}}
    return responses


def openapi() -> Json:
    """The whole document."""
    error = {"description": "what went wrong", "content": {_JSON: {"schema": _of("Error")}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "flowserve",
            "version": __version__,
            "description": "KServe v2 with Triton's extensions. Every failure is an Error.",
        },
        "paths": _paths(),
        "components": {"schemas": SCHEMAS, "responses": {"Error": error}, "parameters": _PARAMETERS},
    }
