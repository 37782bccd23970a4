"""Makes `service_pb2.py`, `health_pb2.py` and their type stubs from the proto files here: `python -m
flowserve.grpc.generate`.

Decided here: both stand in the descriptor pool of config/, whose `ModelConfig` the service answers with. Why not
protoc's own output, config/generate.py says. Needs grpcio-tools, which only developers have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from flowserve.config.generate import generate_from

HERE: Final = Path(__file__).parent
PROTOS: Final = ("service.proto", "health.proto")
SHARED_POOL: Final = """from google.protobuf.internal import builder

from flowserve.config.model_config_pb2 import POOL
"""


def generate() -> dict[str, str]:
    """The files by name, as they should be."""
    texts: dict[str, str] = {}
    for proto in PROTOS:
        texts |= generate_from(HERE, proto, "flowserve/grpc/generate.py", SHARED_POOL)
    return texts


def main() -> None:
    for name, text in generate().items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
