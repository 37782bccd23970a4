"""Start one server on a copy of a repository, with options under which a model that fails stops no other.

Decides the options, both servers' addresses, and that a server which does not start gives its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowserve.testing.serve import DidNotServe
from tests.support.triton_like import free_port, like_triton

OPTIONS = ("--exit-on-error=false", "--strict-readiness=false", "--allow-grpc=true", "--exit-timeout-secs=3")
SHOWN_OF_A_LOG = 600


@dataclass(frozen=True, slots=True)
class Addresses:
    http: str
    grpc: str


class DidNotStart(Exception):
    """The server ended, or did not listen in time; the text is the end of its log."""


@contextmanager
def served(repository: Path, *, by_triton: bool) -> Iterator[Addresses]:
    """The addresses of a server of `repository` until the block ends. Raises DidNotStart."""
    grpc_port = free_port()
    server = like_triton(repository, *OPTIONS, f"--grpc-port={grpc_port}", against_triton=by_triton)
    try:
        base_url = server.__enter__()
    except (DidNotServe, RuntimeError) as error:
        raise DidNotStart(re.sub(r"\s+", " ", str(error))[-SHOWN_OF_A_LOG:]) from error
    try:
        yield Addresses(base_url, f"127.0.0.1:{grpc_port}")
    finally:
        server.__exit__(None, None, None)
