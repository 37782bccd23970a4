"""What the operator can say about the gRPC front, and what is said where there can be none.

Decided here: the figures and their defaults, which are tritonserver's, and which header holds a restricted group's key,
Triton's too. Nothing here needs grpcio, so that a server without it can say so.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowserve.runtime.restriction import Restriction

NOT_INSTALLED: Final = "grpcio is not installed; `pip install 'flowserve[grpc]'` brings it"
KEY_PREFIX: Final = "triton-grpc-protocol-"  # of the header that holds a restricted group's key
MESSAGE_BYTES_MAX: Final = 2**31 - 1  # what HTTP/2 clients of gRPC can count


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """`max_message_bytes` bounds what a client sends in one message; answers are not bounded. `channel` are grpcio's
    own options by their names, as they are handed to it. `certificate`: the server's, its key, and the authority of
    clients' certificates; None is plain. `restrictions` have the headers' names as clients send them. Headers that fit
    `forward_pattern` go with inference requests, as parameters.
    """

    max_message_bytes: int = MESSAGE_BYTES_MAX
    channel: tuple[tuple[str, int], ...] = ()
    certificate: tuple[Path, Path, Path | None] | None = None
    restrictions: tuple[Restriction, ...] = ()
    forward_pattern: re.Pattern[str] | None = None


def is_installed() -> bool:
    """Whether there can be a gRPC front."""
    return importlib.util.find_spec("grpc") is not None
