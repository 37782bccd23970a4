"""Options of the gRPC server, and whether it is available.

Decides the defaults, which are tritonserver's, and the name of the header with the key of a restricted group. Does not
import grpcio, so that a server without it can report that. Callers: `server`, `cli`.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from flowserve.runtime.protocol import Restriction

NOT_INSTALLED: Final = "grpcio is not installed; `pip install 'flowserve[grpc]'` brings it"
KEY_PREFIX: Final = "triton-grpc-protocol-"  # of the header that holds a restricted group's key
MESSAGE_BYTES: Final = 64 << 20  # as for HTTP bodies
MESSAGE_BYTES_MAX: Final = 2**31 - 1  # the limit of gRPC's own clients


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """`max_message_bytes` limits the messages of clients, after decompression: grpcio counts while it decompresses.
    Responses are not limited. `max_calls`: calls at once; None: any number. `bytes_elements` limits the elements of all
    BYTES inputs of a request; None: the default of `memory.raw`. `channel` are options passed to grpcio by their own
    names. `certificate`: the files of the server's certificate and key, and of the authority of clients' certificates;
    None: no TLS. `restrictions` have the header names that clients send. Headers whose names match `forward_pattern`
    become parameters of inference requests.
    """

    max_message_bytes: int = MESSAGE_BYTES
    max_calls: int | None = None
    bytes_elements: int | None = None
    channel: tuple[tuple[str, int], ...] = ()
    certificate: tuple[Path, Path, Path | None] | None = None
    restrictions: tuple[Restriction, ...] = ()
    forward_pattern: re.Pattern[str] | None = None


def is_installed() -> bool:
    """Whether grpcio is installed."""
    return importlib.util.find_spec("grpc") is not None
