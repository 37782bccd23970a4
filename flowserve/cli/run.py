"""`flowserve run`: serves a repository on a port.

Decides the order of a server's life: the port is opened first; then models load, while health endpoints already answer
(live, not ready); then the table of deployments and a last line with the URL; then requests, until a signal; then the
drain. With `--workers N` this runs in each of N processes, whose parent has the ports (serving/workers.py). Does not
know how the steps work: `runtime`, `http` and `grpc` do; nor how ports are opened and what signals mean (`serving/`).

Standard output has the progress, the table and the line `listening on URL`; standard error has the log and error
messages. Exit status: 0 after a stop signal if everything finished, 1 after a failure (reported on standard error).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from flowserve.cli import logs
from flowserve.cli.open_cluster import cluster_of
from flowserve.cli.options import (
    MEBIBYTE,
    backend_settings,
    grpc_options,
    http_certificate,
    input_budget,
    log_choice,
    metrics_choice,
    opentelemetry_settings,
    trace_api_max_bytes,
    trace_choice,
    warning_of,
    without_effect,
)
from flowserve.cli.serving.ports import (
    access_rules,
    allow_many_descriptors,
    bind_grpc,
    grpc_server,
    listen,
    open_grpc,
    open_metrics,
    url,
)
from flowserve.cli.serving.progress import progress_for
from flowserve.cli.serving.shutdown import Shutdown, end_now
from flowserve.cli.standard_output import say
from flowserve.config.types import OFF, Gpus
from flowserve.errors import FlowserveError, Invalid
from flowserve.http.api.access import ANY
from flowserve.http.api.app import Exposition, make_app, make_metrics_app
from flowserve.http.api.infer import AppOptions, InferRoute
from flowserve.http.server.request_parser import Limits
from flowserve.http.server.server import Server, open_unix_listener
from flowserve.http.server.tls import tls_context
from flowserve.memory.client_memory import ClientMemory
from flowserve.memory.devices import devices
from flowserve.memory.garbage import FrozenHeap
from flowserve.memory.heap import tune_malloc
from flowserve.memory.pool import HOST
from flowserve.observe.settings import EVERYTHING, LogSettings
from flowserve.replicas.figures import changes_of, reports_of
from flowserve.replicas.replica import HTTP, METRICS_PORT, Adopt, Replica, ReplicaPlace
from flowserve.repository.layout import not_a_repository
from flowserve.runtime.budget import Budget
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import Control, ControlOptions, open_control
from flowserve.runtime.protocol import ElementLimits, Forwarding, hides_names
from flowserve.runtime.tracing.traces import TraceOptions
from flowserve.runtime.workers.factory import PYTHON_EXECUTION
from flowserve.scheduling.rate_limit.limiter import Available
from flowserve.temporary import remove_abandoned
from flowserve.version import __version__

if TYPE_CHECKING:
    from flowserve.grpc.server import GrpcServer

_log = logging.getLogger("flowserve.cli")

_PAGES_LOAD: Final = (
    "with --http-cors-origins=* and --model-control-mode=explicit, a web page of any site, opened where this server can"
    " be reached, can load models and so run code here"
)
BUSY_NAMES_MAX: Final = 10  # busy instances named in the log line of the drain
# Share of the exit timeout that open sequences get at most; the rest is for their last requests and for closing.
SEQUENCES_SHARE: Final = 0.9
LAST_RESPONSES_S: Final = 0.1  # time for the responses to requests that still run then; TLS encrypts them meanwhile
SCRAPERS_MAX: Final = 256  # connections to the metrics port


def run(arguments: argparse.Namespace) -> int:
    """Serve until a stop signal. Returns the exit status. `arguments` as `options.run_arguments` returns them."""
    replica = Replica(ReplicaPlace.from_text(arguments.replica)) if arguments.replica else None
    if replica is not None and replica.place.number:  # the first one reports the loads of all
        arguments.quiet = True
    try:
        log_settings = logs.configure(log_choice(arguments), None if replica is None else replica.place.number + 1)
    except OSError as error:
        return logs.failed(f"--log-file: '{arguments.log_file}' cannot be written: {error.strerror}")
    threading.excepthook = logs.log_thread_exception
    if replica is None or not replica.place.number:
        warn(arguments)
    tune_malloc()
    # A worker thread that finished computing waits this long for a busy event loop to release the interpreter lock;
    # Python's default of 5 ms is longer than most requests. Measured on a CNN at concurrency 8: 1.1 times the
    # requests/s.
    sys.setswitchinterval(0.0005)
    allow_many_descriptors()
    # On its own thread: abandoned folders may hold gigabytes of small files.
    threading.Thread(target=remove_abandoned, name="sweep", daemon=True).start()
    try:
        return trio.run(_run, arguments, log_settings, replica)
    except KeyboardInterrupt:  # before the signal handlers were installed
        return 1


def warn(arguments: argparse.Namespace) -> None:
    """Log options and settings that the operator may not have intended."""
    if ignored := without_effect(arguments):
        _log.warning("%s", warning_of(ignored))
    if arguments.model_control_mode == "explicit" and ANY in chain(*arguments.http_cors_origins):
        _log.warning("%s", _PAGES_LOAD)


async def _run(arguments: argparse.Namespace, log_settings: LogSettings, replica: Replica | None) -> int:
    for repository in arguments.repositories:
        if not repository.is_dir():
            return logs.failed(not_a_repository(repository))
    exit_timeout_s, restrictions = arguments.exit_timeout_secs, tuple(arguments.http_restricted_api)
    metrics_shown = metrics_choice(arguments)
    delay_s = arguments.drain_delay_secs
    with (
        Shutdown(exit_timeout_s + delay_s, arguments.repositories, has_parent=replica is not None) as shutdown,
        FrozenHeap() as heap,
        ExitStack() as cluster_scope,
    ):
        traced = arguments.trace_config
        choice = trace_choice(traced)
        if replica is not None and choice.trace_file:  # each server has its own
            file = Path(choice.trace_file)
            name = f"{file.stem}-worker{replica.place.number + 1}{file.suffix}"
            choice = replace(choice, trace_file=str(file.with_name(name)))
        trace = TraceOptions(choice, opentelemetry_settings(traced), trace_api_max_bytes(traced))
        try:
            certificate = http_certificate(arguments)
            tls = tls_context(*certificate) if certificate else None
            if replica is None:
                listeners = listen(arguments.http_address, arguments.http_port)
                metrics_listeners = open_metrics(arguments)
                over_grpc = open_grpc(arguments, bind_grpc)
            else:
                listeners, metrics_listeners = replica.place.listeners()
                over_grpc = _shared_grpc(arguments, replica)
            trace.check()
            # On a thread, since Ray takes seconds.
            cluster, places = await trio.to_thread.run_sync(lambda: cluster_scope.enter_context(cluster_of(arguments)))
        except FlowserveError as error:
            return logs.failed(str(error))
        where = url(listeners[0], arguments.http_address, "https" if tls else "http")
        _log.info("flowserve %s, process %d", __version__, os.getpid())
        resources = arguments.rate_limit_resource
        has_rate_limit = arguments.rate_limit == "execution_count"
        if resources and not has_rate_limit:
            _log.warning("--rate-limit-resource has no effect without --rate-limit execution_count")
        engine_options = EngineOptions(
            python_execution=arguments.python_execution or PYTHON_EXECUTION,
            gpus=_gpus(arguments),
            strict_readiness=arguments.strict_readiness,
            rate_limit=tuple(Available(*given) for given in resources) if has_rate_limit else None,
            cache_bytes=arguments.cache_config,
            backend_settings=backend_settings(arguments),
            trace=trace,
            model_config_name=arguments.model_config_name or "",
            server_name=arguments.id,
            answers_at_timeout=arguments.answer_at_timeout,
            strict_outputs=arguments.strict_outputs,
            tells_names=not hides_names((*restrictions, *arguments.grpc_restricted_protocol)),
            summaries=metrics_shown is not None and bool(metrics_shown.quantiles),
            cluster=cluster,
            places=places,
        )
        control_options = ControlOptions(
            arguments.model_control_mode,
            tuple(dict.fromkeys(arguments.load_model)),
            arguments.repository_poll_secs,
            arguments.mirrors,
        )
        budget = input_budget(arguments)
        pattern = arguments.http_header_forward_pattern
        app_options = AppOptions(
            max_body_bytes=arguments.http_max_input_size,
            elements=ElementLimits(arguments.max_bytes_elements, arguments.http_max_json_elements),
            client_memory=ClientMemory(is_allowed=arguments.allow_client_shm),
            restrictions=restrictions,
            access=access_rules(arguments, arguments.http_address, listeners),
            metrics=metrics_shown,
            forwarding=Forwarding(pattern, "--http-header-forward-pattern") if pattern else None,
            log=log_settings,
            budget=budget,
        )
        async with (
            open_engine(
                engine_options,
                exit_timeout_s=exit_timeout_s,
                deadline=lambda: shutdown.deadline,
                on_close=_must_be_closed,
            ) as engine,
            open_control(engine, arguments.repositories, control_options, heap.changed) as control,
        ):
            engine.group = replica
            app = make_app(engine, app_options, control)
            limits = Limits(max_body_bytes=arguments.http_max_input_size)
            changed = None if replica is None else replica.connections_changed
            server = Server(app, limits, HOST, tls, InferRoute(engine, app_options), budget, changed)
            metrics: Server | None = None
            if metrics_listeners:
                address = arguments.metrics_address or arguments.http_address
                rules = access_rules(arguments, address, metrics_listeners)
                scrapers = Budget(MEBIBYTE, SCRAPERS_MAX)
                metrics = Server(make_metrics_app(engine, metrics_shown, rules, budget), budget=scrapers)
            if replica is not None:
                for listener in (*listeners, *metrics_listeners):  # only the parent accepts from them
                    listener.close()
                listeners, metrics_listeners = [open_unix_listener(replica.socket_of(replica.place.number, "http"))], []
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listeners)
                if metrics is not None:
                    await nursery.start(metrics.serve, metrics_listeners)
                if over_grpc is not None:
                    await nursery.start(
                        over_grpc.serve, engine, control, app_options.client_memory, log_settings, budget
                    )
                adopt: dict[str, Adopt] = {HTTP: server.adopt}
                if metrics is not None:
                    adopt[METRICS_PORT] = metrics.adopt
                if replica is not None:
                    exposition = Exposition(engine, metrics_shown or EVERYTHING, budget)
                    await nursery.start(
                        replica.run,
                        engine,
                        control,
                        adopt,
                        lambda: len(server.connections),
                        reports_of(engine, exposition),
                        changes_of(engine, app_options),
                    )
                status = await _load(arguments, engine, control, shutdown, where, heap, is_alone=replica is None)
                if status == 0:
                    if replica is not None:
                        await replica.is_loaded()
                    await shutdown.asked.wait()
                    engine.deployments.is_leaving = True
                    await trio.sleep(delay_s)
                control.stop()
                await _drain(engine, server, over_grpc, shutdown, replica, adopt)
                if metrics is not None:
                    metrics.drain(0)
                if replica is not None:
                    replica.end()
    return status


def _shared_grpc(arguments: argparse.Namespace, replica: Replica) -> GrpcServer | None:
    """The gRPC server on the port that the parent chose; None if gRPC is not served. Raises Invalid."""
    address = replica.place.grpc
    if address is None:
        return None
    server = grpc_server(grpc_options(arguments))
    host, port = address
    try:
        server.bind_shared(host, port, replica.socket_of(replica.place.number, "grpc"))
    except OSError as error:
        raise Invalid(f"cannot listen on {host} port {port}: {error}") from error
    return server


def _gpus(arguments: argparse.Namespace) -> Gpus:
    if arguments.gpu == "off":
        return OFF
    found = devices()
    # The last value for a GPU wins, as on tritonserver.
    found.limit(arguments.pinned_memory_pool_byte_size, dict(arguments.cuda_memory_pool_byte_size))
    return found.gpus


async def _load(
    arguments: argparse.Namespace,
    engine: Engine,
    control: Control,
    shutdown: Shutdown,
    where: str,
    heap: FrozenHeap,
    *,
    is_alone: bool,
) -> int:
    """Load all models and print the progress. Returns 0 if the server should continue (or was asked to stop).
    `is_alone`: it is not one of several servers, whose parent says where they listen.
    """
    progress = progress_for(sys.stdout, is_quiet=arguments.quiet)
    try:
        with shutdown.until_asked() as loading, progress:
            failures = await control.start(progress.report)
    except FlowserveError as error:
        return logs.failed(str(error))
    if loading.cancelled_caught:
        return 0
    if failures:
        _report_failures(failures, len(engine.deployments.entries))
        if arguments.exit_on_error:
            return logs.failed("not serving; --exit-on-error false serves the models that did load")
    heap.settle()  # before the requests: it blocks
    progress.served(engine.deployments.entries, where)
    if is_alone:
        say(f"listening on {where}")
    return 0


async def _drain(
    engine: Engine,
    server: Server,
    over_grpc: GrpcServer | None,
    shutdown: Shutdown,
    replica: Replica | None,
    adopt: Mapping[str, Adopt],
) -> None:
    """Let requests finish until the deadline; if some do not, the process ends with status 1.

    The ports close only when no request is running: until then clients can end their sequences, and health checks see a
    server that is live and not ready, whereas a closed port would look like a crash.
    """
    deadline = shutdown.deadline if shutdown.asked.is_set() else trio.current_time()
    engine.refuse_new()
    if replica is not None:
        replica.stops()
    if shutdown.asked.is_set():
        now = trio.current_time()
        _log.info("stopping: %s", _under_way(engine))
        await engine.sequences_over(now + (deadline - now) * SEQUENCES_SHARE)
    server.part()
    hung = await engine.drain(deadline)
    if hung:
        server.cut()
        await trio.sleep(LAST_RESPONSES_S)
        end_now(1, f"not finished within the exit timeout (--exit-timeout-secs): {', '.join(hung)}")
    if replica is not None:
        await replica.leave(adopt)
    left_s = max(deadline - trio.current_time(), 0)
    server.drain(left_s)
    if over_grpc is not None:
        over_grpc.drain(left_s)


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
    """A line with their number, and below it each model with its problems; as JSON, a line for each problem."""
    write = sys.stderr.write
    if logs.messages.are_json:
        for name, reason in failures.items():
            for problem in reason.splitlines():
                write(logs.messages.line(f"failed to load {name}: {problem}", model=name))
        write(logs.messages.line(f"{len(failures)} of {total} models failed to load"))
        return
    write(logs.messages.line(f"{len(failures)} of {total} models failed to load:"))
    for name, reason in failures.items():
        write("\n    ".join([f"  {logs.escape(name)}", *map(logs.escape, reason.splitlines())]) + "\n")
