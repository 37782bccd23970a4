"""A server of a test's own repository that is either flowserve or the real tritonserver.

Decides how the real one is started through the launcher in TRITONSERVER (`python -m bench.triton FOLDER` makes it),
when it counts as started, and that it ends. Does not know the models.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from flowserve.testing.serve import STOP_S_MAX
from tests.support.forked import serving

START_S_MAX = 60.0


def why_no_triton() -> str:
    """Empty if the variable TRITONSERVER names a launcher, else the reason of a skip."""
    if not os.environ.get("TRITONSERVER"):
        return "the variable TRITONSERVER names no launcher: `python -m bench.triton FOLDER` makes one"
    return ""


def free_port() -> int:
    """A port of the loopback that was free a moment ago, for options such as `--grpc-port`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def like_triton(repository: Path, *options: str, against_triton: bool) -> Iterator[str]:
    """The base URL of a server of `repository` until the block ends. Options are those that both servers have."""
    if against_triton:
        with _real(repository, *options) as base_url:
            yield base_url
    else:
        with serving(repository, *options) as served:
            yield served.base_url


@contextmanager
def _real(repository: Path, *options: str) -> Iterator[str]:
    port = free_port()
    command = [*shlex.split(os.environ["TRITONSERVER"]), str(repository), str(port), *options]
    log_path = repository.parent / f"{repository.name}.triton.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            base_url = f"http://127.0.0.1:{port}"
            _wait_until_live(process, base_url, log_path)
            yield base_url
        finally:
            process.terminate()
            try:
                process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_live(process: subprocess.Popen[bytes], base_url: str, log_path: Path) -> None:
    """Triton listens once its models are loaded. Raises RuntimeError with its log."""
    too_late = time.monotonic() + START_S_MAX
    while process.poll() is None and time.monotonic() < too_late:
        try:
            if httpx.get(f"{base_url}/v2/health/live", verify=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise RuntimeError(f"tritonserver does not serve {log_path.stem}:\n{log_path.read_text()}")
