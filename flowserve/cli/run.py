"""`flowserve run`: a repository in, a server on a port, and an exit status.

Decided here: the order of a server's life as the operator sees it. The port is taken first; then models load, while
health questions are already answered (live, not ready); then the table and one last line that says where; then
requests, until a signal; then the drain. What each of these is, other rooms decide.

Standard output carries the progress, the table and the line `listening on URL`; standard error carries the log and
complaints. Exit status: 0 told to stop and everything finished, 1 something failed (said on standard error).
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import trio

from flowserve.cli import logs
from flowserve.cli.gpu_options import GpuChoice
from flowserve.cli.grpc_front import open_grpc
from flowserve.cli.listen import UNIX, listen, url
from flowserve.cli.options import RunOptions
from flowserve.cli.progress import Progress, progress
from flowserve.cli.refused_options import warning_of
from flowserve.cli.shutdown import Shutdown, end_now
from flowserve.cli.trace_options import opentelemetry_settings, trace_choice
from flowserve.config.instances import OFF, Gpus
from flowserve.errors import FlowserveError
from flowserve.http.app import AppOptions, make_app, make_metrics_app
from flowserve.http.limits import Limits
from flowserve.http.server import Server
from flowserve.http.tls import tls_context
from flowserve.memory.client_memory import ClientMemory
from flowserve.memory.devices import devices
from flowserve.memory.pool import HOST, tune_malloc
from flowserve.observe.log_settings import LogSettings
from flowserve.runtime.control import Control, ControlOptions, open_control
from flowserve.runtime.engine import Engine
from flowserve.runtime.engine_options import EngineOptions
from flowserve.runtime.hosts import PYTHON_EXECUTION
from flowserve.runtime.opening import open_engine
from flowserve.runtime.request_parameters import forwarding_of
from flowserve.runtime.restriction import hides_names
from flowserve.runtime.traces import TraceOptions
from flowserve.scheduling.limiter import Available
from flowserve.temporary import sweep

if TYPE_CHECKING:
    from flowserve.grpc.server import GrpcServer

_log = logging.getLogger("flowserve.cli")

DESCRIPTORS_WANTED: Final = 65536
NAMES_MAX: Final = 10  # of instances that are busy when the server is told to stop
# Of the exit timeout: what open sequences have at most. The rest is for what they asked last, and for closing.
SEQUENCES_SHARE: Final = 0.9


def run(options: RunOptions) -> int:
    """Serve until told to stop. Returns the exit status."""
    try:
        log_settings = logs.configure(options.log)
    except OSError as error:
        return _failed(f"--log-file: '{options.log.log_file}' cannot be written: {error.strerror}")
    threading.excepthook = logs.thread_failed
    if options.without_effect:
        _log.warning("%s", warning_of(options.without_effect))
    tune_malloc()
    # A worker thread that finished computing waits this long for a busy loop to let go of the interpreter; Python's
    # own 5 ms are longer than most requests. Measured on a CNN at concurrency 8: 1.1 times the throughput.
    sys.setswitchinterval(0.0005)
    _allow_many_descriptors()
    # Beside all else: what was left may be gigabytes of small files.
    threading.Thread(target=sweep, name="sweep", daemon=True).start()
    try:
        return trio.run(_run, options, log_settings)
    except KeyboardInterrupt:  # before the handlers were in place
        return 1


def _allow_many_descriptors() -> None:
    """A connection takes one descriptor and a model in a process of its own about five; 1024, the usual limit until a
    program asks for more, are few. Where nobody allows more, what there is has to do.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(DESCRIPTORS_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _run(options: RunOptions, log_settings: LogSettings) -> int:
    for repository in options.repositories:
        if not repository.is_dir():
            what = "is not a folder" if repository.exists() else "does not exist"
            return _failed(f"model repository '{repository}' {what}")
    with Shutdown(options.exit_timeout_s, options.repositories) as shutdown:
        trace = TraceOptions(trace_choice(options.trace), opentelemetry_settings(options.trace))
        try:
            tls = tls_context(*options.http.certificate) if options.http.certificate else None
            listeners = listen(options.http.address, options.http.port)
            metrics_listeners = _metrics_listeners(options)
            grpc_server = open_grpc(options.grpc)
            trace.check()
        except FlowserveError as error:
            return _failed(str(error))
        where = url(listeners[0], options.http.address, "https" if tls else "http")
        engine_options = EngineOptions(
            python_execution=options.python_execution or PYTHON_EXECUTION,
            gpus=_gpus(options.gpu),
            strict_readiness=options.strict_readiness,
            rate_limit=tuple(Available(*given) for given in options.rate_limit_resources)
            if options.rate_limit
            else None,
            cache_bytes=options.cache_bytes,
            backend_settings=options.backend_settings,
            trace=trace,
            model_config_name=options.model_config_name,
            tells_names=not hides_names((*options.http.restrictions, *options.grpc.options.restrictions)),
            summaries=options.metrics.choice is not None and bool(options.metrics.choice.quantiles),
        )
        if options.rate_limit_resources and not options.rate_limit:
            _log.warning("--rate-limit-resource says nothing without --rate-limit execution_count")
        control_options = ControlOptions(options.model_control_mode, options.load_models, options.repository_poll_s)
        async with (
            open_engine(
                engine_options,
                exit_timeout_s=options.exit_timeout_s,
                deadline=lambda: shutdown.deadline,
                on_close=_must_be_closed,
            ) as engine,
            open_control(engine, options.repositories, control_options) as control,
        ):
            app_options = _app_options(options, log_settings)
            app = make_app(engine, app_options, control)
            server = Server(app, Limits(max_body_bytes=options.http.max_input_size), HOST, tls)
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listeners)
                metrics = Server(make_metrics_app(engine, options.metrics.choice)) if metrics_listeners else None
                if metrics is not None:
                    await nursery.start(metrics.serve, metrics_listeners)
                if grpc_server is not None:
                    await nursery.start(grpc_server.serve, engine, control, app_options.client_memory, log_settings)
                status = await _load(options, engine, control, shutdown, progress(), where)
                if status == 0:
                    await shutdown.asked.wait()
                control.stop()
                await _drain(engine, server, grpc_server, shutdown)
                if metrics is not None:
                    metrics.drain(0)
    return status


def _gpus(choice: GpuChoice) -> Gpus:
    if not choice.is_allowed:
        return OFF
    found = devices()
    found.limit(choice.pinned_pool_bytes, choice.gpu_pool_bytes)
    return found.gpus


def _metrics_listeners(options: RunOptions) -> list[socket.socket]:
    if options.metrics.port is None:
        return []
    beside = "127.0.0.1" if options.http.address.startswith(UNIX) else options.http.address
    address = options.metrics.address or beside
    listeners = listen(address, options.metrics.port, "--metrics-port", "--metrics-address")
    print(f"metrics on {url(listeners[0], address)}/metrics", flush=True)
    return listeners


def _app_options(options: RunOptions, log_settings: LogSettings) -> AppOptions:
    return AppOptions(
        max_body_bytes=options.http.max_input_size,
        client_memory=ClientMemory(is_allowed=options.allow_client_shm),
        restrictions=options.http.restrictions,
        metrics=options.metrics.choice,
        forwarding=forwarding_of(options.http.header_forward_pattern, "--http-header-forward-pattern"),
        log=log_settings,
    )


async def _load(
    options: RunOptions, engine: Engine, control: Control, shutdown: Shutdown, progress: Progress, where: str
) -> int:
    """Load everything, telling the operator. Returns 0 where the server should go on (or was told to stop)."""
    try:
        with shutdown.until_asked() as loading, progress:
            failures = await control.start(progress.report)
    except FlowserveError as error:
        return _failed(str(error))
    if loading.cancelled_caught:
        return 0
    if failures:
        _report_failures(failures, len(engine.entries))
        if options.exit_on_error:
            return _failed("not serving; --exit-on-error false serves the models that did load")
    progress.served(engine.entries, where)
    print(f"listening on {where}", flush=True)
    return 0


async def _drain(engine: Engine, server: Server, grpc_server: GrpcServer | None, shutdown: Shutdown) -> None:
    """Let what is under way finish, until the deadline; what does not finish then ends the process with status 1.

    The doors close when nothing is under way any more: until then clients of sequences come to end them, and whoever
    asks hears that the server lives and is not ready, where a closed door would look like a crash.
    """
    deadline = shutdown.deadline if shutdown.asked.is_set() else trio.current_time()
    engine.refuse_new()
    if shutdown.asked.is_set():
        now = trio.current_time()
        _log.info("stopping: %s", _under_way(engine))
        await engine.sequences_over(now + (deadline - now) * SEQUENCES_SHARE)
    server.part()
    hung = await engine.drain(deadline)
    if hung:
        end_now(1, f"not finished within the exit timeout (--exit-timeout-secs): {', '.join(hung)}")
    left_s = max(deadline - trio.current_time(), 0)
    server.drain(left_s)
    if grpc_server is not None:
        grpc_server.drain(left_s)


def _under_way(engine: Engine) -> str:
    """Who is still waited for. A model that computes for nobody may keep the server, too."""
    requests, sequences, busy = engine.dispatcher.in_flight, engine.dispatcher.open_sequences, engine.busy()
    text = f"{requests} requests under way, {sequences} sequences open"
    if not busy:
        return text
    names = ", ".join([*busy[:NAMES_MAX], *(["..."] if len(busy) > NAMES_MAX else [])])
    return f"{text}; computing{'' if requests else ' for callers who have left'}: {names}"


def _must_be_closed(hung: Sequence[str]) -> None:
    if hung:
        end_now(1, f"not closed within the exit timeout (--exit-timeout-secs): {', '.join(hung)}")


def _report_failures(failures: Mapping[str, str], total: int) -> None:
    print(f"flowserve: {len(failures)} of {total} models failed to load:", file=sys.stderr)
    for name, reason in failures.items():
        lines = [logs.escape(line) for line in reason.splitlines()]
        print(f"  {logs.escape(name)}", *lines, sep="\n    ", file=sys.stderr)


def _failed(message: str) -> int:
    print("\n".join(f"flowserve: {logs.escape(line)}" for line in message.splitlines()), file=sys.stderr, flush=True)
    return 1
