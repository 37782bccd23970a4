"""The requests that both servers get for one model, made of its metadata and configuration.

Decides their values from a fixed seed, the sizes of dimensions of -1, and the protocols. A decoupled model is asked for
a stream. A model with a batch dimension gets requests of one and of two rows. Does not send them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Json = Mapping[str, Any]

VARIABLE_SIZE = 4
JSON_ELEMENTS_MAX = 20_000
ELEMENTS_MAX = 4_000_000
TEXTS = ('{"text": "hello", "n": 1}', "a short text", "12", "Zürich")
ONLY_BINARY = {"FP16", "BF16"}


class Protocol(Enum):
    JSON = "HTTP JSON"
    BINARY = "HTTP binary"
    GENERATE = "HTTP generate"
    GENERATE_STREAM = "HTTP generate_stream"
    GRPC = "gRPC"
    STREAM = "gRPC stream"


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    data_type: str
    array: Array


@dataclass(frozen=True, slots=True)
class Question:
    """One request. `rows` is 0 for a model without a batch dimension."""

    model: str
    protocol: Protocol
    rows: int
    tensors: tuple[Tensor, ...]
    parameters: Json = field(default_factory=dict)
    classes: tuple[str, ...] = ()  # outputs of which classes are asked

    @property
    def name(self) -> str:
        rows = "" if not self.rows else ", 1 row" if self.rows == 1 else f", {self.rows} rows"
        return f"{self.protocol.value}{rows}{', classes' if self.classes else ''}"


def questions(metadata: Json, config: Json, parameters: Json | None = None) -> list[Question]:
    """All requests for a model; empty for one whose inputs are too large. `parameters`: those of a sequence, if it is
    one request of a sequence, which has one row.
    """
    model, largest = metadata["name"], int(config.get("max_batch_size", 0))
    decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
    labelled = tuple(one["name"] for one in config.get("output", ()) if one.get("label_filename"))
    made: list[Question] = []
    for rows in ((1,) if parameters else (1, 2)[:largest]) if largest else (0,):
        tensors = tuple(_tensor(one, rows) for one in metadata.get("inputs", ()))
        elements = sum(one.array.size for one in tensors)
        if elements > ELEMENTS_MAX:
            continue
        protocols = [Protocol.STREAM] if decoupled else [Protocol.BINARY, Protocol.GRPC]
        if elements <= JSON_ELEMENTS_MAX and not ONLY_BINARY & {one.data_type for one in tensors}:
            protocols.insert(0, Protocol.JSON)
            if all(one.array.size == 1 for one in tensors) and rows <= 1:
                protocols.append(Protocol.GENERATE_STREAM if decoupled else Protocol.GENERATE)
        made += [Question(model, protocol, rows, tensors, parameters or {}) for protocol in protocols]
        if labelled and Protocol.JSON in protocols and not decoupled:
            made.append(Question(model, Protocol.JSON, rows, tensors, parameters or {}, labelled))
    return made


def sequence_parameters(name: str, configs: Mapping[str, Json]) -> Json:
    """A sequence of one request, with an id of the type that the model's control takes; empty for a model without
    sequences. Those of an ensemble are those of its steps.
    """
    config = configs.get(name, {})
    for step in config.get("ensemble_scheduling", {}).get("step", ()):
        if found := sequence_parameters(step["model_name"], configs):
            return found
    if "sequence_batching" not in config:
        return {}
    inputs = config["sequence_batching"].get("control_input", ())
    texts = any(one.get("data_type") == "TYPE_STRING" for given in inputs for one in given["control"])
    return {"sequence_id": "seven" if texts else 7, "sequence_start": True, "sequence_end": True}


def _tensor(spec: Json, rows: int) -> Tensor:
    shape = [int(n) for n in spec["shape"]]
    if rows:
        shape[0] = rows
    elif shape and shape[0] == -1 and len(shape) > 1:
        shape[0] = 1  # a batch dimension of the model's own
    shape = [VARIABLE_SIZE if n < 0 else n for n in shape]
    name, data_type = spec["name"], spec["datatype"]
    if data_type == "UINT8" and spec["shape"][-1] == -1 and len(shape) - bool(rows) == 1:
        image = np.frombuffer(png(8, 6), np.uint8)
        return Tensor(name, data_type, np.stack([image] * rows) if rows else image)
    return Tensor(name, data_type, values(data_type, shape, zlib.crc32(name.encode())))


def values(data_type: str, shape: Sequence[int], seed: int) -> Array:
    """Values that depend on nothing but the arguments: numbers in [0, 1), integers in [0, 4), texts."""
    random = np.random.default_rng(seed)
    if data_type == "BYTES":
        size = int(np.prod(shape))
        texts = [TEXTS[(seed + i) % len(TEXTS)].encode() for i in range(size)]
        array = np.empty(size, object)
        array[:] = texts
        return array.reshape(shape)
    if data_type == "BOOL":
        return random.integers(0, 2, shape).astype(bool)
    if data_type.startswith(("INT", "UINT")):
        return random.integers(0, 4, shape).astype(data_type.lower())
    dtype = {"FP16": np.float16, "FP64": np.float64}.get(data_type, np.float32)
    return (random.integers(0, 256, shape) / 256).astype(dtype)  # the same in every type


def png(width: int, height: int) -> bytes:
    """A grey picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes((x * 7 + y * 13) % 256 for x in range(width)) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
