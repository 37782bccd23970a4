"""`flowserve run`: serves a repository on a port.

Decides the order of a server's life: the port is opened first; then models load, while health endpoints already answer
(live, not ready); then the table of deployments and a last line with the URL; then requests, until a signal; then the
drain. Does not know how each of these steps works: `runtime`, `http` and `grpc` do.

Standard output has the progress, the table and the line `listening on URL`; standard error has the log and error
messages. Exit status: 0 after a stop signal if everything finished, 1 after a failure (reported on standard error).
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
from flowserve.cli.listen import UNIX, listen, open_grpc, url
from flowserve.cli.options import GpuChoice, RunOptions, opentelemetry_settings, trace_choice
from flowserve.cli.progress import Progress
from flowserve.cli.refused_options import warning_of
from flowserve.cli.shutdown import Shutdown, end_now
from flowserve.config.instances import OFF, Gpus
from flowserve.errors import FlowserveError
from flowserve.http.api.app import make_app, make_metrics_app
from flowserve.http.api.infer import InferRoute
from flowserve.http.api.options import AppOptions
from flowserve.http.server.limits import Limits
from flowserve.http.server.server import Server
from flowserve.http.server.tls import tls_context
from flowserve.memory.client_memory import ClientMemory
from flowserve.memory.devices import devices
from flowserve.memory.pool import HOST, tune_malloc
from flowserve.observe.log_settings import LogSettings
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.engine.opening import open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import Control, ControlOptions, open_control
from flowserve.runtime.protocol.request_parameters import forwarding_of
from flowserve.runtime.protocol.restriction import hides_names
from flowserve.runtime.tracing.traces import TraceOptions
from flowserve.runtime.workers.factory import PYTHON_EXECUTION
from flowserve.scheduling.rate_limit.limiter import Available
from flowserve.temporary import remove_abandoned

if TYPE_CHECKING:
    from flowserve.grpc.server import GrpcServer

_log = logging.getLogger("flowserve.cli")

DESCRIPTORS_WANTED: Final = 65536
BUSY_NAMES_MAX: Final = 10  # busy instances named in the log line of the drain
# Share of the exit timeout that open sequences get at most; the rest is for their last requests and for closing.
SEQUENCES_SHARE: Final = 0.9


def run(options: RunOptions) -> int:
    """Serve until a stop signal. Returns the exit status."""
    try:
        log_settings = logs.configure(options.log)
    except OSError as error:
        return _failed(f"--log-file: '{options.log.log_file}' cannot be written: {error.strerror}")
    threading.excepthook = logs.log_thread_exception
    if options.without_effect:
        _log.warning("%s", warning_of(options.without_effect))
    tune_malloc()
    # A worker thread that finished computing waits this long for a busy event loop to release the interpreter lock;
    # Python's default of 5 ms is longer than most requests. Measured on a CNN at concurrency 8: 1.1 times the
    # requests/s.
    sys.setswitchinterval(0.0005)
    _allow_many_descriptors()
    # On its own thread: abandoned folders may hold gigabytes of small files.
    threading.Thread(target=remove_abandoned, name="sweep", daemon=True).start()
    try:
        return trio.run(_run, options, log_settings)
    except KeyboardInterrupt:  # before the signal handlers were installed
        return 1


def _progress() -> Progress:
    """Progress on standard output: coloured on a terminal, plain lines elsewhere, without importing rich."""
    if not sys.stdout.isatty():
        return Progress(sys.stdout)
    from flowserve.cli.terminal import TerminalProgress

    return TerminalProgress(sys.stdout)


def _allow_many_descriptors() -> None:
    """Raise the soft limit of open files. A connection needs one descriptor and a model in its own process about five;
    1024, the usual soft limit, is little. The hard limit stays as it is.
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
            _log.warning("--rate-limit-resource has no effect without --rate-limit execution_count")
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
            limits = Limits(max_body_bytes=options.http.max_input_size)
            server = Server(app, limits, HOST, tls, InferRoute(engine, app_options))
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listeners)
                metrics = Server(make_metrics_app(engine, options.metrics.choice)) if metrics_listeners else None
                if metrics is not None:
                    await nursery.start(metrics.serve, metrics_listeners)
                if grpc_server is not None:
                    await nursery.start(grpc_server.serve, engine, control, app_options.client_memory, log_settings)
                status = await _load(options, engine, control, shutdown, _progress(), where)
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
    """Load all models and print the progress. Returns 0 if the server should continue (or was asked to stop)."""
    try:
        with shutdown.until_asked() as loading, progress:
            failures = await control.start(progress.report)
    except FlowserveError as error:
        return _failed(str(error))
    if loading.cancelled_caught:
        return 0
    if failures:
        _report_failures(failures, len(engine.deployments.entries))
        if options.exit_on_error:
            return _failed("not serving; --exit-on-error false serves the models that did load")
    progress.served(engine.deployments.entries, where)
    print(f"listening on {where}", flush=True)
    return 0


async def _drain(engine: Engine, server: Server, grpc_server: GrpcServer | None, shutdown: Shutdown) -> None:
    """Let requests finish until the deadline; if some do not, the process ends with status 1.

    The ports close only when no request is running: until then clients can end their sequences, and health checks see a
    server that is live and not ready, whereas a closed port would look like a crash.
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
    """What the drain waits for. A model may also be busy with requests whose callers have left."""
    requests, sequences, busy = engine.scheduler.in_flight, engine.scheduler.open_sequences, engine.busy()
    text = f"{requests} requests under way, {sequences} sequences open"
    if not busy:
        return text
    names = ", ".join([*busy[:BUSY_NAMES_MAX], *(["..."] if len(busy) > BUSY_NAMES_MAX else [])])
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
