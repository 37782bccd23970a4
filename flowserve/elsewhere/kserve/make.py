"""Makes the backend of remote models, if grpcio is installed. Called by the registry."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from flowserve.errors import Unsupported

if TYPE_CHECKING:
    from flowserve.elsewhere.kserve.backend import RemoteBackend


def make_backend() -> RemoteBackend:
    """The backend. Raises Unsupported, with the command that helps, without grpcio."""
    if find_spec("grpc") is None:
        raise Unsupported("models on other servers need grpcio, which is not installed: pip install 'flowserve[grpc]'")
    from flowserve.elsewhere.kserve.backend import RemoteBackend

    return RemoteBackend()
