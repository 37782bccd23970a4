"""`flowserve run`: serves a repository on a port.

Decides the order of a server's life: the port is opened first; then models load, while health endpoints already answer
(live, not ready); then the table of deployments and a last line with the URL; then requests, until a signal; then the
drain. Decides also the meaning of the first and the second stop signal (SIGTERM, SIGINT, SIGHUP), and ends the process
in time even if the event loop is blocked. Does not know how the steps work: `runtime`, `http` and `grpc` do.

Decides too the errors and addresses of the ports, and when gRPC is served: all ports are opened before any model is
loaded, so that a port in use is reported within milliseconds. A requested port must be available; the default port is
served if possible, and otherwise both the log and the line in place of its address say so. grpcio is imported only by a
server that uses it. Does not know how sockets are created (`http`).

Standard output has the progress, the table and the line `listening on URL`; standard error has the log and error
messages. Exit status: 0 after a stop signal if everything finished, 1 after a failure (reported on standard error).
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, Self

import trio

from flowserve.cli import logs
from flowserve.cli.open_cluster import cluster_of
from flowserve.cli.options import (
    DEFAULT_GRPC_PORT,
    MEBIBYTE,
    backend_settings,
    grpc_options,
    http_certificate,
    input_budget,
    log_choice,
    metrics_choice,
    open_over_http,
    opentelemetry_settings,
    trace_api_max_bytes,
    trace_choice,
    warning_of,
    without_effect,
)
from flowserve.cli.progress import progress_for
from flowserve.cli.standard_output import say
from flowserve.config.types import OFF, Gpus
from flowserve.errors import FlowserveError, Invalid
from flowserve.grpc.options import NOT_INSTALLED, GrpcOptions, is_installed
from flowserve.http.api.access import ANY, AccessRules
from flowserve.http.api.app import make_app, make_metrics_app
from flowserve.http.api.infer import AppOptions, InferRoute
from flowserve.http.server.request_parser import Limits
from flowserve.http.server.server import Server, open_listeners, open_unix_listener
from flowserve.http.server.tls import tls_context
from flowserve.memory.client_memory import ClientMemory
from flowserve.memory.devices import devices
from flowserve.memory.garbage import FrozenHeap
from flowserve.memory.heap import tune_malloc
from flowserve.memory.pool import HOST
from flowserve.observe.settings import LogSettings
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

UNIX: Final = "unix:"
_WITHOUT: Final = (
    f"Clients of port {DEFAULT_GRPC_PORT} do not reach this server. With --grpc-port, a port that is not available ends"
    " the start; --allow-grpc false serves HTTP alone"
)

_PAGES_LOAD: Final = (
    "with --http-cors-origins=* and --model-control-mode=explicit, a web page of any site, opened where this server can"
    " be reached, can load models and so run code here"
)
DESCRIPTORS_WANTED: Final = 65536
BUSY_NAMES_MAX: Final = 10  # busy instances named in the log line of the drain
# Share of the exit timeout that open sequences get at most; the rest is for their last requests and for closing.
SEQUENCES_SHARE: Final = 0.9
HANG_UP: Final = getattr(signal, "SIGHUP", None)  # the terminal was closed; not on every system
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, *((HANG_UP,) if HANG_UP else ()))
LAST_RESPONSES_S: Final = 0.1  # time for the responses to requests that still run then; TLS encrypts them meanwhile
SCRAPERS_MAX: Final = 256  # connections to the metrics port
GRACE_S: Final = 0.5  # time for the event loop, after the exit timeout, to report what is still running


def run(arguments: argparse.Namespace) -> int:
    """Serve until a stop signal. Returns the exit status. `arguments` as `options.run_arguments` returns them."""
    try:
        log_settings = logs.configure(log_choice(arguments))
    except OSError as error:
        return _failed(f"--log-file: '{arguments.log_file}' cannot be written: {error.strerror}")
    threading.excepthook = logs.log_thread_exception
    if ignored := without_effect(arguments):
        _log.warning("%s", warning_of(ignored))
    if arguments.model_control_mode == "explicit" and ANY in chain(*arguments.http_cors_origins):
        _log.warning("%s", _PAGES_LOAD)
    tune_malloc()
    # A worker thread that finished computing waits this long for a busy event loop to release the interpreter lock;
    # Python's default of 5 ms is longer than most requests. Measured on a CNN at concurrency 8: 1.1 times the
    # requests/s.
    sys.setswitchinterval(0.0005)
    _allow_many_descriptors()
    # On its own thread: abandoned folders may hold gigabytes of small files.
    threading.Thread(target=remove_abandoned, name="sweep", daemon=True).start()
    try:
        return trio.run(_run, arguments, log_settings)
    except KeyboardInterrupt:  # before the signal handlers were installed
        return 1


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


async def _run(arguments: argparse.Namespace, log_settings: LogSettings) -> int:
    for repository in arguments.repositories:
        if not repository.is_dir():
            return _failed(not_a_repository(repository))
    exit_timeout_s, restrictions = arguments.exit_timeout_secs, tuple(arguments.http_restricted_api)
    metrics_shown = metrics_choice(arguments)
    delay_s = arguments.drain_delay_secs
    with (
        Shutdown(exit_timeout_s + delay_s, arguments.repositories) as shutdown,
        FrozenHeap() as heap,
        ExitStack() as cluster_scope,
    ):
        traced = arguments.trace_config
        trace = TraceOptions(trace_choice(traced), opentelemetry_settings(traced), trace_api_max_bytes(traced))
        try:
            certificate = http_certificate(arguments)
            tls = tls_context(*certificate) if certificate else None
            listeners = listen(arguments.http_address, arguments.http_port)
            metrics_listeners = _metrics_listeners(arguments)
            grpc_server = open_grpc(arguments)
            trace.check()
            # On a thread, since Ray takes seconds.
            cluster, places = await trio.to_thread.run_sync(lambda: cluster_scope.enter_context(cluster_of(arguments)))
        except FlowserveError as error:
            return _failed(str(error))
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
            app = make_app(engine, app_options, control)
            limits = Limits(max_body_bytes=arguments.http_max_input_size)
            server = Server(app, limits, HOST, tls, InferRoute(engine, app_options), budget)
            async with trio.open_nursery() as nursery:
                await nursery.start(server.serve, listeners)
                metrics: Server | None = None
                if metrics_listeners:
                    address = arguments.metrics_address or arguments.http_address
                    rules = access_rules(arguments, address, metrics_listeners)
                    scrapers = Budget(MEBIBYTE, SCRAPERS_MAX)
                    metrics = Server(make_metrics_app(engine, metrics_shown, rules, budget), budget=scrapers)
                    await nursery.start(metrics.serve, metrics_listeners)
                if grpc_server is not None:
                    await nursery.start(
                        grpc_server.serve, engine, control, app_options.client_memory, log_settings, budget
                    )
                status = await _load(arguments, engine, control, shutdown, where, heap)
                if status == 0:
                    await shutdown.asked.wait()
                    engine.deployments.is_leaving = True
                    await trio.sleep(delay_s)
                control.stop()
                await _drain(engine, server, grpc_server, shutdown)
                if metrics is not None:
                    metrics.drain(0)
    return status


def _gpus(arguments: argparse.Namespace) -> Gpus:
    if arguments.gpu == "off":
        return OFF
    found = devices()
    # The last value for a GPU wins, as on tritonserver.
    found.limit(arguments.pinned_memory_pool_byte_size, dict(arguments.cuda_memory_pool_byte_size))
    return found.gpus


def _metrics_listeners(arguments: argparse.Namespace) -> list[socket.socket]:
    if arguments.metrics_port is None:
        return []
    beside = "127.0.0.1" if arguments.http_address.startswith(UNIX) else arguments.http_address
    address = arguments.metrics_address or beside
    listeners = listen(address, arguments.metrics_port, "--metrics-port", "--metrics-address")
    say(f"metrics on {url(listeners[0], address)}/metrics")
    return listeners


async def _load(
    arguments: argparse.Namespace, engine: Engine, control: Control, shutdown: Shutdown, where: str, heap: FrozenHeap
) -> int:
    """Load all models and print the progress. Returns 0 if the server should continue (or was asked to stop)."""
    progress = progress_for(sys.stdout, is_quiet=arguments.quiet)
    try:
        with shutdown.until_asked() as loading, progress:
            failures = await control.start(progress.report)
    except FlowserveError as error:
        return _failed(str(error))
    if loading.cancelled_caught:
        return 0
    if failures:
        _report_failures(failures, len(engine.deployments.entries))
        if arguments.exit_on_error:
            return _failed("not serving; --exit-on-error false serves the models that did load")
    heap.settle()  # before the requests: it blocks
    progress.served(engine.deployments.entries, where)
    say(f"listening on {where}")
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
        server.cut()
        await trio.sleep(LAST_RESPONSES_S)
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


def _failed(message: str) -> int:
    sys.stderr.write("".join(map(logs.messages.line, message.splitlines())))
    sys.stderr.flush()
    return 1


# ---------------------------------------------------------------------------------------------- stop signals


class Shutdown:
    """A context in which the first signal sets `asked` and starts the timeout, and the second ends the process at once.
    A second SIGHUP has no effect, because a terminal that is closed may send two. SIGHUP stays ignored if it was
    (nohup).

    It uses plain signal handlers rather than trio's receiver, because they also run while a model computes on the event
    loop.
    """

    def __init__(self, exit_timeout_s: float, repositories: Sequence[Path]) -> None:
        self.asked = trio.Event()
        self.deadline = float("inf")  # on trio's clock, finite after the first signal
        self._exit_timeout_s = exit_timeout_s
        self._repositories = [one.resolve() for one in repositories]
        self._until_asked = trio.CancelScope()
        self._watchdog: threading.Timer | None = None

    def __enter__(self) -> Self:
        self._token = trio.lowlevel.current_trio_token()
        self._before = {
            number: signal.signal(number, self._handle)
            for number in SIGNALS
            if number != HANG_UP or signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._watchdog is not None:
            self._watchdog.cancel()

    @contextmanager
    def until_asked(self) -> Iterator[trio.CancelScope]:
        """A scope that the signal cancels; `cancelled_caught` is true if it did."""
        with trio.CancelScope() as scope:
            self._until_asked = scope
            if self.asked.is_set():
                scope.cancel()
            yield scope

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._watchdog is not None:
            if number == HANG_UP:
                return
            end_now(128 + number, "second stop signal: ending at once")
        self._watchdog = threading.Timer(self._exit_timeout_s + GRACE_S, self._overdue)
        self._watchdog.daemon = True
        self._watchdog.start()
        self._token.run_sync_soon(self._ask)

    def _ask(self) -> None:
        self.deadline = trio.current_time() + self._exit_timeout_s
        self.asked.set()
        self._until_asked.cancel()

    def _overdue(self) -> None:
        where = self._held_at() or "the event loop does not answer"
        end_now(1, f"not finished within the exit timeout (--exit-timeout-secs): {where}")

    def _held_at(self) -> str:
        """The innermost line of a model's own code that the event loop's thread executes, "" if there is none."""
        for frame in reversed(traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])):
            path = Path(frame.filename).resolve()
            for repository in self._repositories:
                if path.is_relative_to(repository):
                    return f"{path.relative_to(repository)}:{frame.lineno} holds the event loop in {frame.name}()"
        return ""


def end_now(status: int, message: str) -> None:
    """Write the reason to standard error and end the process, regardless of its threads."""
    # Not print(): a signal may arrive during one, and a buffered stream is not reentrant.
    os.write(2, logs.messages.line(message).encode(errors="backslashreplace"))
    os._exit(status)


# ---------------------------------------------------------------------------------------------- ports


def listen(
    address: str, port: int, option: str = "--http-port", address_option: str = "--http-address"
) -> list[socket.socket]:
    """Listening sockets for `address`. `port`, the value of `option`, may be 0: then the system picks one. An address
    unix:PATH has no port. Raises Invalid with an alternative.
    """
    if address.startswith(UNIX):
        path = address.removeprefix(UNIX)
        try:
            return [open_unix_listener(path)]
        except (OSError, ValueError) as error:
            reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
            raise Invalid(f"cannot listen on {address}: {reason}; choose another path") from error
    try:
        return open_listeners(address, port)
    except (OSError, UnicodeError) as error:
        raise Invalid(f"cannot listen on {address} port {port}: {_reason(error, option, address_option)}") from error


def access_rules(arguments: argparse.Namespace, address: str, listeners: Sequence[socket.socket]) -> AccessRules:
    """The values of Host and Origin that are served on the listeners of `address`, the option's value. Browsers cannot
    connect to a socket in the file system. An attacker in the local network can own a name that is valid only there,
    but can also connect directly to a server that listens beyond this machine; so only a loopback address excludes
    such names.
    """
    origins = tuple(chain(*arguments.http_cors_origins))
    if any(one.family == socket.AF_UNIX for one in listeners):
        return AccessRules((ANY,), origins=origins)
    own = address.lower().removesuffix(".")  # an address in it does no harm
    if arguments.http_allowed_hosts:
        return AccessRules((own, *chain(*arguments.http_allowed_hosts)), origins=origins)
    if all(ip_address(one.getsockname()[0]).is_loopback for one in listeners):
        return AccessRules((own,), origins=origins)
    return AccessRules((own, socket.gethostname().lower()), has_local_names=True, origins=origins)


def url(listener: socket.socket, address: str, scheme: str = "http") -> str:
    """The server's URL for a client on this machine."""
    if address.startswith(UNIX):
        return address
    host = f"[{address}]" if ":" in address else address
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _reason(error: OSError | UnicodeError, option: str, address_option: str) -> str:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return f"no such address; try {address_option} 127.0.0.1"
    text = (error.strerror or str(error)).lower()
    if error.errno == errno.EADDRINUSE:
        return f"{text}; stop the server that has it, or choose another {option} (0 picks a free one)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{text}; ports below 1024 are the administrator's, choose a higher {option}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{text}; this machine does not have it, try {address_option} 127.0.0.1"
    return text


def open_grpc(arguments: argparse.Namespace) -> GrpcServer | None:
    """The gRPC server with its port open, which is printed; None if gRPC is not served. Raises Invalid if a requested
    port cannot be opened.
    """
    if not arguments.allow_grpc:
        return None
    options = grpc_options(arguments)
    try:
        return _bound(arguments, options)
    except Invalid as error:
        if arguments.grpc_port is not None or arguments.grpc_address.startswith(UNIX) or options.certificate:
            raise
        if not is_installed():
            _log.info("gRPC is not served: %s", error)
            return None
        _log.warning("gRPC is not served: %s. %s", error, _WITHOUT)
        say(f"gRPC is not served: port {DEFAULT_GRPC_PORT} is not available, the log says why")
        return None


def _bound(arguments: argparse.Namespace, options: GrpcOptions) -> GrpcServer:
    if not is_installed():
        raise Invalid(NOT_INSTALLED)
    # Errors reach clients and the log; grpcio would repeat them on standard error.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from flowserve.grpc.server import GrpcServer

    if options.certificate is not None:
        tls_context(*options.certificate)  # raises a specific error for bad files; grpcio would not
    if groups := open_over_http(arguments):
        _log.warning("restricted over gRPC only, not over HTTP: %s; see --http-restricted-api", ", ".join(groups))
    address, port = arguments.grpc_address, DEFAULT_GRPC_PORT if arguments.grpc_port is None else arguments.grpc_port
    server = GrpcServer(options)
    try:
        taken = server.bind(address, port)
    except OSError as error:
        # grpcio does not report the reason; the same attempt without it does.
        for listener in listen(address, port, "--grpc-port", "--grpc-address"):
            listener.close()
        raise Invalid(f"cannot listen on {address} port {port}: {error}") from error
    say(f"gRPC on {address if address.startswith(UNIX) else f'{address}:{taken}'}")
    return server
