"""What the operator can say about the gRPC front, and what is said where there can be none.

Decided here: the figures and their defaults, which are tritonserver's. Nothing here needs grpcio, so that a server
without it can say so.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Final

NOT_INSTALLED: Final = "grpcio is not installed; `pip install 'flowserve[grpc]'` brings it"
MESSAGE_BYTES_MAX: Final = 2**31 - 1  # what HTTP/2 clients of gRPC can count


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """`max_message_bytes` bounds what a client sends in one message; answers are not bounded. `channel` are grpcio's
    own options by their names, as they are handed to it.
    """

    max_message_bytes: int = MESSAGE_BYTES_MAX
    channel: tuple[tuple[str, int], ...] = field(default=())


def is_installed() -> bool:
    """Whether there can be a gRPC front."""
    return importlib.util.find_spec("grpc") is not None
