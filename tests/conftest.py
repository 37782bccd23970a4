"""Fixtures of all folders: real servers, Hypothesis profiles, and the reason of each skip."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

from flowserve.testing.serve import Served
from tests.support.forked import serving

ROOT = Path(__file__).resolve().parent.parent

# Tests start hundreds of processes. If bytecode is not written, as in many containers, each of them compiles all of
# flowserve again, and each run rewrites the asserts of all tests again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# numpy's linear algebra starts a thread per core, which spins for 0.1 s in each of them. Only tests of speed need more.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Shells start background jobs of scripts with SIGINT ignored, which all processes started here would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Rewriting the asserts of all tests creates millions of objects, and the collected tests exist for the whole run: the
# garbage collector's repeated passes over them took a tenth of the time. `pytest_collection_finish` enables it.
gc.disable()

# `ci`, the default, uses the same examples in each run, so that results are reproducible. `dev` uses new examples in
# each run, `long` many more. Deadlines are off, because the speed of a shared machine says nothing about a property.
hypothesis.settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("dev", max_examples=50, deadline=None)
hypothesis.settings.register_profile("long", max_examples=2_000, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _why_no_gpu() -> str:
    """Empty if a CUDA device can be used. Queries the driver itself, because a library that probes the GPU may keep it
    occupied.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "needs a CUDA device: no driver on this machine"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "needs a CUDA device: the driver finds none"
    return ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz",
        type=int,
        default=1500,
        help="how many mutated requests the HTTP fuzzer sends; 100000 before a release",
    )
    parser.addoption(
        "--clients",
        type=int,
        default=250,
        help="how many clients, each with ways of its own, the HTTP server meets; 20000 before a release",
    )
    parser.addoption(
        "--cycles", type=int, default=30, help="how often the test of growth loads and unloads; 500 before a release"
    )
    parser.addoption(
        "--attack-megabytes",
        type=int,
        default=6,
        help="the size of the bodies that may not keep the server's other requests waiting; 60 before a release",
    )
    parser.addoption(
        "--against-triton",
        action="store_true",
        help="tests/triton/ runs against the real server, whose launcher the variable TRITONSERVER names",
    )
    parser.addoption(
        "--wheel",
        action="store_true",
        help="installs the wheel with each extra in an environment of its own, from a package index",
    )


@pytest.fixture(scope="session")
def cycles(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--cycles")
    return count


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`, the default: folders of tests run in parallel; a file or one test runs in this process. Tests wait for
    other processes in a third of their time, so there is one process more than cores.
    """
    if all(Path(argument).is_dir() for argument in config.args):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, 4) + 1
    return 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else ""
    for item in marked if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))
    # The other tests keep their order, but of several processes none may be left with a long file at the end.
    slow = Counter(
        item.path
        for item in items
        if _is_worker() and (item.get_closest_marker("slow") or item.get_closest_marker("server"))
    )
    items.sort(key=lambda item: (_has_background_job(item) != _is_worker(), -slow[item.path]))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 10, 10)
    gc.enable()


def _is_worker() -> bool:
    """Whether this process is one of several that share the tests (pytest-xdist)."""
    return "PYTEST_XDIST_WORKER" in os.environ


def _has_background_job(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "done_beside" in item.fixturenames


@pytest.fixture(scope="session", autouse=True)
def beside(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[ModuleType], Future[Any]]]:
    """Background jobs: `beside(root, folder)` of a module whose tests take its result from `done_beside`.

    In one process the jobs run on a thread, one after another, while the other tests run, and the tests of their
    results come last. With several processes, each runs a job when its result is needed, and runs these tests first.
    """
    with ThreadPoolExecutor(1) as pool:
        begun: dict[ModuleType, Future[Any]] = {}

        def begin(module: ModuleType) -> Future[Any]:
            if module not in begun:
                begun[module] = pool.submit(module.beside, ROOT, tmp_path_factory.mktemp("beside"))
            return begun[module]

        for item in request.session.items if not _is_worker() else ():
            if isinstance(item, pytest.Function) and _has_background_job(item):
                begin(item.module)
        yield begin
        for job in begun.values():  # only in an interrupted run
            job.cancel()


@pytest.fixture
def done_beside(request: pytest.FixtureRequest, beside: Callable[[ModuleType], Future[Any]]) -> Any:
    """The result of the module's `beside`."""
    return beside(request.module).result()


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def served_graphs() -> Iterator[Served]:
    """The example deployments, served once for the whole run. Tests must leave it as they found it."""
    with serving(ROOT / "graphs") as served:
        yield served


@pytest.fixture(scope="session")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """server.pem and client.pem with their keys, each its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    folder = tmp_path_factory.mktemp("papers")
    for name in ("server", "client"):
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        )
        extra = ["-addext", "subjectAltName=DNS:localhost", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run([*command.split(), *extra], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """`serve(repository, "--option", "value")` starts a server that ends with the test."""
    with ExitStack() as stack:

        def start(repository: Path, *options: str) -> Served:
            return stack.enter_context(serving(repository, *options))

        yield start
