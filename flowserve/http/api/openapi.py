"""The HTTP surface as an OpenAPI document: /openapi.json.

Decides the requests and responses of every endpoint, as JSON Schema. The document is data and knows no
server; a test compares it with the existing routes, and another one sends requests that it allows to a server and
compares the responses with its schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flowserve.http.api.restricted import groups_of
from flowserve.observe.settings import FORMATS
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
    "log_format": {"type": "string", "enum": [*FORMATS]},
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
    "GraphStatistics": _object({"graph_stats": _list(_of("OneGraph"))}),
    "OneGraph": _object(
        {
            "name": _TEXT,
            "version": _TEXT,
            "failures": {"type": "object", "additionalProperties": _WHOLE},
            "nodes": _list(_ANY),
        },
        {"spaces": _list(_ANY), "there": _ANY},
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
    "RecentRequests": _object({"requests": _list(_of("RecentRequest"))}),
    "RecentRequest": _object(
        {
            "number": _WHOLE,
            "at_ms": _WHOLE,
            "ms": {"type": ["number", "null"]},
            "rows": {"type": ["integer", "null"]},
            "id": _TEXT,
            "error": _TEXT,
            "timing": _TEXT,
        }
    ),
    "Timeline": _object({"traceEvents": _list(_ANY)}, {"displayTimeUnit": _TEXT, "otherData": _ANY}),
    "TraceSettings": _object({"trace_file": _TEXT, **_TRACE}),
    "TraceChange": {"type": "object", "properties": _TRACE},
}

_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
_EVENTS: Final = "text/event-stream"

# Method, path, purpose, the schema of the request's body, and the response: a schema, a media type, or "" if the status
# alone responds.
_Call = tuple[str, ...]
_OF_A_MODEL: Final[tuple[_Call, ...]] = (
    ("get", "", "inputs and outputs", "", "Model"),
    ("get", "/ready", "whether the model serves", "", ""),
    ("get", "/config", "the completed configuration", "", "Config"),
    ("get", "/stats", "counts and durations", "", "Statistics"),
    ("post", "/infer", "one inference", "InferRequest", "InferResponse"),
    ("post", "/generate", "one answer", "GenerateRequest", "GenerateResponse"),
    ("post", "/generate_stream", "answers as events", "GenerateRequest", _EVENTS),
)
_OF_CLIENT_MEMORY: Final[tuple[_Call, ...]] = (
    ("get", "/status", "every region", "", "Regions"),
    ("post", "/unregister", "forget every region", "", ""),
    ("get", "/region/{name}/status", "one region", "", "Regions"),
    ("post", "/region/{name}/register", "register a region", "Region", ""),
    ("post", "/region/{name}/unregister", "forget a region", "", ""),
)
_GRAPHS: Final = "failures by reason, and batches and bytes of the nodes and edges of graphs"
_NAMELESS: Final = "refused: repositories have no names"
_SEEN: Final = "what the live page shows, about once a second, until the server ends"
_WINDOW: Final = "requests and batches of the next seconds, as Chrome's trace events"
_CALLS: Final[tuple[_Call, ...]] = (
    ("get", "/v2", "name, version, extensions", "", "Server"),
    ("get", "/v2/health/live", "whether the server lives", "", ""),
    ("get", "/v2/health/ready", "whether everything serves", "", ""),
    *((method, f"/v2/models/{{name}}{path}", *rest) for method, path, *rest in _OF_A_MODEL),
    *((method, f"/v2/models/{{name}}/versions/{{version}}{path}", *rest) for method, path, *rest in _OF_A_MODEL),
    ("get", "/v2/models/stats", "counts and durations of every model", "", "Statistics"),
    ("get", "/flowserve/stats", _GRAPHS, "", "GraphStatistics"),
    ("get", "/flowserve/models/{name}/stats", _GRAPHS, "", "GraphStatistics"),
    ("get", "/flowserve/models/{name}/versions/{version}/stats", _GRAPHS, "", "GraphStatistics"),
    ("post", "/v2/repository/index", "what the repository holds", "IndexRequest", "Index"),
    ("post", "/v2/repository/models/{name}/load", "load a model", "LoadRequest", ""),
    ("post", "/v2/repository/models/{name}/unload", "unload a model", "UnloadRequest", ""),
    ("post", "/v2/repository/{repository}/index", _NAMELESS, "", ""),
    ("post", "/v2/repository/{repository}/models/{name}/{verb}", _NAMELESS, "", ""),
    *(
        (method, f"/v2/{kind.lower()}sharedmemory{path}", text, asked and kind + asked, answer and kind + answer)
        for kind in ("System", "Cuda")
        for method, path, text, asked, answer in _OF_CLIENT_MEMORY
    ),
    ("get", "/v2/logging", "log settings", "", "LogSettings"),
    ("post", "/v2/logging", "change log settings", "LogChange", "LogSettings"),
    ("get", "/v2/trace/setting", "trace settings", "", "TraceSettings"),
    ("post", "/v2/trace/setting", "change trace settings", "TraceChange", "TraceSettings"),
    ("get", "/v2/trace/timeline", _WINDOW, "", "Timeline"),
    ("get", "/v2/models/{name}/trace/setting", "trace settings", "", "TraceSettings"),
    ("post", "/v2/models/{name}/trace/setting", "change trace settings", "TraceChange", "TraceSettings"),
    ("get", "/metrics", "Prometheus text", "", "text/plain"),
    ("get", "/openapi.json", "all endpoints, as OpenAPI 3.1", "", "Document"),
    ("get", "/", "the live page", "", "text/html"),
    ("get", "/docs", "all endpoints, as a page with forms", "", "text/html"),
    ("get", "/live/events", _SEEN, "", _EVENTS),
    ("get", "/live/graphs/{name}/versions/{version}", "a graph as the live page draws it", "", "Drawn"),
    ("get", "/live/requests/{name}/versions/{version}", "the last requests of a deployment", "", "RecentRequests"),
)
_REQUIRED: Final = frozenset({"InferRequest", "GenerateRequest", "SystemRegion", "CudaRegion"})  # bodies
_QUERIES: Final[Mapping[str, Mapping[str, Json]]] = {
    "/v2/trace/timeline": {"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 60}},
    "/live/events": {"name": _TEXT, "version": _TEXT},
    "/live/graphs/{name}/versions/{version}": {"direction": {"enum": ["", "LR", "TB"]}, "fold": _list(_TEXT)},
    "/live/requests/{name}/versions/{version}": {"after": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}},
}
_IN_PATHS: Final[Mapping[str, Json]] = {
    "name": {"type": "string", "minLength": 1},
    "version": {"type": "string", "pattern": "^[0-9]{1,19}$"},
    "repository": {"type": "string", "minLength": 1},
    "verb": {"enum": ["load", "unload"]},
}


def _tag(path: str) -> str:
    """The group of a call: that of its key, where it is restricted."""
    groups = groups_of(path)
    return next(iter(groups)) if len(groups) == 1 else "pages"


def _operation(path: str, text: str, asked: str, answer: str) -> Json:
    done: Json = {"description": "done"}
    if answer:
        is_media = "/" in answer
        schema = _TEXT if is_media else _ANY if answer == "Document" else _of(answer)
        done["content"] = {answer if is_media else _JSON: {"schema": schema}}
    responses: Json = {"200": done, "default": {"$ref": "#/components/responses/Error"}}
    operation: Json = {"summary": text, "tags": [_tag(path)], "responses": responses}
    if asked:
        operation["requestBody"] = {"content": {_JSON: {"schema": _of(asked)}}, "required": asked in _REQUIRED}
    if path in _QUERIES:
        queries = _QUERIES[path].items()
        operation["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in queries]
    if path.endswith(("/ready", "/live")):
        responses["400"] = {"description": "no"}
    if path.endswith("/infer"):
        binary: Json = {"schema": {"type": "string", "contentMediaType": _BINARY}}
        operation["description"] = "with the header Inference-Header-Content-Length, tensors follow the JSON as bytes"
        operation["requestBody"]["content"][_BINARY] = done["content"][_BINARY] = binary
    return operation


def openapi() -> Json:
    """The whole document."""
    paths: Json = {}
    for method, path, *rest in _CALLS:
        item = paths.setdefault(path, {})
        item[method] = _operation(path, *rest)
        if names := [part[1:-1] for part in path.split("/") if part.startswith("{")]:
            item["parameters"] = [{"$ref": f"#/components/parameters/{name}"} for name in names]
    error = {"description": "what went wrong", "content": {_JSON: {"schema": _of("Error")}}}
    parameters = {
        name: {"name": name, "in": "path", "required": True, "schema": schema} for name, schema in _IN_PATHS.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "flowserve",
            "version": __version__,
            "description": "KServe v2 with Triton's extensions. Failures have their reason in `error`.",
        },
        "paths": paths,
        "components": {"schemas": SCHEMAS, "responses": {"Error": error}, "parameters": parameters},
    }
