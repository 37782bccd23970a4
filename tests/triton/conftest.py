"""Expectations that hold for flowserve and for Triton: `--against-triton` checks them on the original.

`TRITONSERVER=LAUNCHER pytest tests/triton --against-triton` starts the real server wherever a test asks for one;
without the option the same tests run against flowserve. `tox -e triton` does the former.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.triton_like import like_triton, why_no_triton


@pytest.fixture(scope="session")
def on_triton(request: pytest.FixtureRequest) -> bool:
    """Whether the tests run against the real server, for the few expectations that differ, each with its reason."""
    against = bool(request.config.getoption("--against-triton"))
    if against and (reason := why_no_triton()):
        pytest.skip(reason)
    return against


@pytest.fixture(scope="module")
def triton_like(on_triton: bool) -> Iterator[Callable[..., str]]:
    """`triton_like(repository, "--option=value")` starts a server, which ends with the module; its base URL.

    Options are those that tritonserver and flowserve share, each as one word. Both serve HTTP only unless options say
    otherwise: `--allow-grpc=true`, `--grpc-port=N` with `free_port()` of tests.support.triton_like.
    """
    with ExitStack() as stack:

        def start(repository: Path, *options: str) -> str:
            return stack.enter_context(like_triton(repository, *options, against_triton=on_triton))

        yield start
